"""What the warm start made of the tiny policy, kept for the next run that asks for the same.

    ~/.cache/picorl/<recipe>/      or $PICORL_CACHE/<recipe>/
        weights.safetensors        every trainable parameter after the last step
        metrics.jsonl              what the journal said on the way

A recipe is all that decides the weights: settings, our own source, the versions of all packages,
the device, and how many threads and ranks add up its sums. A run that reuses one is, to the bit,
the run that would have made it.
"""

import hashlib
import json
import os
import platform
import shutil
import tempfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from core import distributed
from core.model import Policy
from core.run_log import read_records

SETTINGS = """seed lora_rank lora_alpha sft_steps sft_batch_size sft_hasty sft_lr max_turns
    max_grad_norm max_model_len max_tokens_per_micro_batch thinking""".split()
ELSEWHERE = ("remote", "openenv", "data=", "live=")  # in a spec: it's played by what isn't ours
ROOT = Path(__file__).parent.parent


def reuse(cfg: Any, run: Any, envs: list[str]) -> bool:
    """Put the weights of the same recipe into the run's policy, if there are any: the warm start is
    done. `cfg` is train.Config, `run` core.run.Run."""
    folder = folder_of(cfg, run.policy, envs)
    there = folder is not None and folder.exists()
    if folder is None or run.progress["sft_step"] > 0 or not all(distributed.all_gather([there])):
        return False
    try:
        saved = load_file(folder / "weights.safetensors")
        records = read_records(folder / "metrics.jsonl")
    except (OSError, ValueError, SafetensorError) as error:
        run.display.say(f"warm start: {folder} can't be read ({error}); made anew")
        shutil.rmtree(folder, ignore_errors=True)
        return False
    with torch.no_grad():
        for name, parameter in run.policy.trainable().items():
            parameter.copy_(saved[name])
    for record in records:
        run.log.log(record)
    run.progress["sft_step"] = cfg.sft_steps
    run.display.say(f"warm start: reused, the recipe is that of {folder}; --no-cache makes it anew")
    return True


def keep(cfg: Any, run: Any, envs: list[str]) -> None:
    """Keep the policy, straight after its warm start, for `reuse`."""
    folder = folder_of(cfg, run.policy, envs)
    if folder is None or folder.exists() or distributed.rank() > 0:
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
    except OSError as error:
        run.display.say(f"warm start: not kept for other runs ({error})")
        return
    tensors = {n: p.detach().cpu().contiguous() for n, p in run.policy.trainable().items()}
    records = [r for r in read_records(run.folder / "metrics.jsonl") if "sft_step" in r]
    try:
        save_file(tensors, part / "weights.safetensors")
        with (part / "metrics.jsonl").open("w") as file:
            for record in records:
                untimed = {k: v for k, v in record.items() if not k.startswith("time/")}
                file.write(json.dumps(untimed) + "\n")
        os.rename(part, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        if not folder.exists():  # or another run was faster
            run.display.say(f"warm start: not kept for other runs ({error})")


def folder_of(cfg: Any, policy: Policy, envs: list[str]) -> Path | None:
    """Where the policy of this recipe is, or would be; None: not to be cached."""
    elsewhere = any(word in spec for spec in envs for word in ELSEWHERE)
    if not cfg.cache or cfg.model_id != "tiny" or elsewhere:
        return None
    recipe = {
        "settings": {name: getattr(cfg, name) for name in SETTINGS},
        "envs": envs,
        "policy": [str(policy.dtype), policy.value_head is not None],
        "machine": [str(policy.device), platform.machine(), torch.get_num_threads()],
        "ranks": distributed.num_ranks(),
        "packages": sorted(f"{d.name} {d.version}" for d in distributions()),
        "source": [
            hashlib.sha256(file.read_bytes()).hexdigest()
            for room in ("algorithms", "core", "environments")
            for file in [ROOT / "train.py", *sorted((ROOT / room).rglob("*.*"))]
        ],
    }
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()
    home = os.environ.get("PICORL_CACHE") or Path.home() / ".cache" / "picorl"
    return Path(home) / digest[:32]
