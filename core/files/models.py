"""Finds and loads the models of a run: tiny and smollm2, and the models of other runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from core import distributed
from core.config import SMOLLM2, TINY, Config, needs
from core.files.atomic import published
from core.files.checkpoint import ADAPTERS
from core.loading import load_policy
from core.policy import Policy
from core.settings import read_settings
from core.tasks import is_raw
from core.tiny import PRETRAINED, write_tiny


def load_run_policy(cfg: Config, folder: Path, has_trained: bool) -> Policy:
    """The policy of the run in `folder`, with its weights from before training."""
    # with --sampler openai the server has the model; tiny's tokenizer counts the tokens here
    model_id = "tiny" if cfg.sampler == "openai" else cfg.model_id
    value_head = "value_head" in needs(cfg)
    plain = all(map(is_raw, (*cfg.env, *cfg.eval_env)))  # no chat template is needed

    def load() -> Policy:
        model_folder = folder_of_model(model_id, folder / "base", cfg.seed, has_trained)
        return load_policy(cfg, model_folder, value_head=value_head, plain=plain)

    return distributed.rank_0_first(load)


def load_exported(cfg: Config, folder: Path, flag: str) -> Policy:
    """The model of a finished run, or of a model's folder, with the settings of `cfg`; it cannot be
    trained. Raises UsageError, which names `flag`, if `folder` has no model."""
    is_run = (folder / "config.yaml").exists()
    model = folder / "model" if is_run else folder
    if not is_run or not (model / ADAPTERS).exists():
        return load_policy(frozen_settings(cfg), str(model), flag=flag)
    saved: dict[str, Any] = {"model_id": Config.model_id, "quantize": "none"}
    saved |= read_settings(folder / "config.yaml")
    base = base_model(folder, saved["model_id"])
    quantized = replace(frozen_settings(cfg), quantize=saved["quantize"])
    return load_policy(quantized, base, adapters=str(model), flag=flag)


def base_model(run: Path, model_id: str) -> str:
    """The folder or id of a run's model before training; for tiny the run's own copy."""
    return str(run / "base") if model_id in TINY else folder_of_model(model_id)


def frozen_settings(cfg: Config) -> Config:
    """The settings for a model that is not trained: without adapters, and not quantized."""
    return replace(cfg, lora_rank=0, quantize="none")


def settings_beside(cfg: Config, policy: Policy) -> Config:
    """As `frozen_settings`, for a model on the policy's device and with its dtype."""
    dtype: Any = str(policy.dtype).removeprefix("torch.")
    return replace(frozen_settings(cfg), device=str(policy.device), dtype=dtype)


def folder_of_model(
    model_id: str, tiny_folder: Path | None = None, seed: int = 0, has_trained: bool = False
) -> str:
    """The folder of tiny, tiny-random or smollm2, written if need be; another id as it is.

    `tiny_folder`: a run's own copy of tiny or of tiny-random, whose weights `seed` determines. If
    the run `has_trained`, an existing copy is kept.
    """
    if model_id == SMOLLM2:
        from core.files.smollm2 import smollm2_folder

        return str(smollm2_folder())
    if model_id not in TINY:
        return model_id
    if tiny_folder is None:
        return str(PRETRAINED) if model_id == "tiny" else model_id
    if distributed.rank() == 0 and not (has_trained and tiny_folder.exists()):
        with published(tiny_folder) as part:
            write_tiny(model_id, part, seed)
    return str(tiny_folder)
