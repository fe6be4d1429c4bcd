"""The models of a run that are no plain folder and no Hub id: tiny, smollm2, and those of runs."""

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
    """The policy of the run in `folder`, with the weights from before RL."""
    # with --sampler openai the server has the model; tiny's tokenizer counts the tokens here
    model_id = "tiny" if cfg.sampler == "openai" else cfg.model_id
    return distributed.rank_0_first(lambda: load_policy(
        cfg, folder_of_model(model_id, folder / "base", cfg.seed, has_trained),
        value_head="value_head" in needs(cfg), plain=all(map(is_raw, (*cfg.env, *cfg.eval_env))),
    ))  # fmt: skip


def load_exported(cfg: Config, folder: Path, flag: str) -> Policy:
    """The model of a finished run, or of a model's folder, with the settings of `cfg`; no training.

    Raises UsageError, which names `flag`, if it has none.
    """
    is_run = (folder / "config.yaml").exists()
    model, plain = folder / "model" if is_run else folder, untrained(cfg)
    if not is_run or not (model / ADAPTERS).exists():
        return load_policy(plain, str(model), flag=flag)
    trained: dict[str, Any] = {"model_id": Config.model_id, "quantize": "none"}
    trained |= read_settings(folder / "config.yaml")
    base = base_model(folder, trained["model_id"])
    quantized = replace(plain, quantize=trained["quantize"])
    return load_policy(quantized, base, adapters=str(model), flag=flag)


def base_model(run: Path, model_id: str) -> str:
    """The model before training; of tiny, the copy in the run."""
    return str(run / "base") if model_id in TINY else folder_of_model(model_id)


def untrained(cfg: Config) -> Config:
    """The settings for another model than the policy: no adapters to train, and no 4 bits."""
    return replace(cfg, lora_rank=0, quantize="none")


def folder_of_model(
    model_id: str, tiny_folder: Path | None = None, seed: int = 0, has_trained: bool = False
) -> str:
    """The folder of tiny, tiny-random and smollm2, which it writes if need be; any other id.

    `tiny_folder`: a run's own copy of tiny, and of tiny-random, whose weights `seed` determines;
    one that `has_trained` from them keeps these.
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
