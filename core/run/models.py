"""Opens the models of a run: the policy, the teacher of --kl-coef, opponents, older runs.

Of these models `Config` sets the device, the precision, the context length and the chat template.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from core import loading
from core.config import SMOLLM2, TINY, Config
from core.policy import Policy
from core.run.checkpoint import ADAPTERS, base_model
from core.run.files import sealed, unseal
from core.run.folder import read_settings
from core.tiny import PRETRAINED, write_tiny


def load_policy(
    cfg: Config,
    model_id: str,
    tiny_folder: Path | None = None,
    quantize: str = "none",
    **options: Any,
) -> Policy:
    """Loads a Hub id, a folder, "tiny", "tiny-random" or "smollm2" with the settings of `cfg`.

    `quantize` "nf4" stores the base model in 4 bits. `options` are those of loading.load_policy,
    which raises UsageError. `tiny_folder`: see `folder_of`.
    """
    if quantize == "nf4":
        from core.run.quantize import load_in_4_bits

        device = loading.pick_device(cfg.device)
        options["from_pretrained"] = partial(load_in_4_bits, device=device)
    return loading.load_policy(
        folder_of(model_id, tiny_folder, cfg.seed), device=cfg.device, dtype=cfg.dtype,
        max_length=cfg.max_model_len, seed=cfg.seed, trust_remote_code=cfg.trust,
        fp32_head=cfg.fp32_head, template_options=cfg.template_options,
        template_date=cfg.template_date, **options,
    )  # fmt: skip


def load_exported(cfg: Config, folder: Path, flag: str) -> Policy:
    """The model of a finished run, or of a model's folder, with the settings of `cfg`.

    Raises UsageError, which names `flag`, if it has none.
    """
    is_run = (folder / "config.yaml").exists()
    model = folder / "model" if is_run else folder
    if not is_run or not (model / ADAPTERS).exists():
        return load_policy(cfg, str(model), flag=flag)
    trained = {"model_id": Config.model_id, "quantize": "none"}
    trained |= read_settings(folder / "config.yaml")
    base = base_model(folder, trained["model_id"])
    return load_policy(cfg, base, quantize=trained["quantize"], adapters=str(model), flag=flag)


def folder_of(model_id: str, tiny_folder: Path | None = None, seed: int = 0) -> str:
    """The folder of tiny, tiny-random and smollm2, which it writes if need be; any other id.

    `tiny_folder`: a run's own copy of tiny, and of tiny-random, whose weights `seed` determines.
    """
    if model_id == SMOLLM2:
        from core.run.smollm2 import smollm2_folder

        return str(smollm2_folder())
    if model_id not in TINY:
        return model_id
    if tiny_folder is None:
        return str(PRETRAINED) if model_id == "tiny" else model_id
    _, fault = unseal(tiny_folder)
    if fault:
        if tiny_folder.exists():
            print(f"{tiny_folder} {fault}: making it again", file=sys.stderr)
        with sealed(tiny_folder, {}) as part:
            write_tiny(model_id, part, seed)
    return str(tiny_folder)
