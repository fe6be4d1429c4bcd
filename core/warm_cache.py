"""A cache of the warm start of the tiny model, for the next run with the same recipe.

    ~/.cache/picorl/<recipe>/      or $PICORL_CACHE/<recipe>/
        weights.safetensors        every trainable parameter after the last SFT step
        metrics.jsonl              the records of the warm start

The recipe is a hash of everything that decides the weights: the settings, our own source code, the
versions of all packages, the device, and how many threads and ranks add up the sums. So a run that
reuses a warm start equals, bit for bit, the run without the cache.
"""

import hashlib
import json
import os
import platform
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from core import distributed
from core.config import Config
from core.model import Policy
from core.run import Run
from core.run_log import read_records

SETTINGS = """seed lora_rank lora_alpha sft_steps sft_batch_size sft_hasty sft_lr max_turns
    max_grad_norm max_model_len max_tokens_per_micro_batch thinking""".split()
FOREIGN = ("remote", "openenv", "data=", "live=")  # in a spec: the recipe cannot see what it plays
ROOT = Path(__file__).parent.parent


def reuse(cfg: Config, run: Run, envs: list[str]) -> bool:
    """Loads the cached warm start of this recipe into the policy. Returns whether there was one."""
    folder = folder_of(cfg, run.policy, envs)
    exists = folder is not None and folder.exists()
    if folder is None or run.progress["sft_step"] > 0 or not all(distributed.all_gather([exists])):
        return False
    try:
        saved = load_file(folder / "weights.safetensors")
        records = read_records(folder / "metrics.jsonl")
    except (OSError, ValueError, SafetensorError) as error:
        run.say(f"warm start: {folder} cannot be read ({error}); training it again")
        shutil.rmtree(folder, ignore_errors=True)
        return False
    with torch.no_grad():
        for name, parameter in run.policy.trainable().items():
            parameter.copy_(saved[name])
    for record in records:
        run.run_log.log(record)
    run.progress["sft_step"] = cfg.sft_steps
    run.say(f"warm start: loaded from {folder} (same settings); --no-cache trains it again")
    return True


def keep(cfg: Config, run: Run, envs: list[str]) -> None:
    """Writes the policy to the cache, directly after its warm start."""
    folder = folder_of(cfg, run.policy, envs)
    if folder is None or folder.exists() or distributed.rank() > 0:
        return
    part = folder.with_name(f".part-{folder.name}-{os.getpid()}")
    tensors = {n: p.detach().cpu().contiguous() for n, p in run.policy.trainable().items()}
    records = [r for r in read_records(run.folder / "metrics.jsonl") if "sft_step" in r]
    untimed = [{k: v for k, v in r.items() if not k.startswith("time/")} for r in records]
    try:
        part.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part / "weights.safetensors")
        lines = "".join(json.dumps(record) + "\n" for record in untimed)
        (part / "metrics.jsonl").write_text(lines)
        os.rename(part, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        if not folder.exists():  # another run may have written the same recipe meanwhile
            run.say(f"warm start: not cached ({error})")


def folder_of(cfg: Config, policy: Policy, envs: list[str]) -> Path | None:
    """The folder of this recipe, whether it exists or not; None if it cannot be cached."""
    is_foreign = any(word in spec for spec in envs for word in FOREIGN)
    if not cfg.cache or cfg.model_id != "tiny" or is_foreign:
        return None
    packages = (ROOT / name for name in ("algorithms", "core", "environments"))
    source = [ROOT / "train.py", *(f for package in packages for f in sorted(package.rglob("*.*")))]
    recipe = {
        "settings": {name: getattr(cfg, name) for name in SETTINGS},
        "envs": envs,
        "policy": [str(policy.dtype), policy.value_head is not None],
        "machine": [str(policy.device), platform.machine(), torch.get_num_threads()],
        "ranks": distributed.num_ranks(),
        # folders named after each installed package and its version
        "packages": sorted(f.name for path in sys.path for f in Path(path).glob("*.dist-info")),
        "source": [hashlib.sha256(file.read_bytes()).hexdigest() for file in source],
    }
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()
    home = os.environ.get("PICORL_CACHE") or Path.home() / ".cache" / "picorl"
    return Path(home) / digest[:32]
