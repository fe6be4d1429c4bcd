"""Atomic checkpoints and exact resume, and the export of the finished model.

    <run>/checkpoint/000800-000021/      800 warm-start steps done, then updates 0 to 20
        weights.safetensors              every trainable parameter
        optimizer.pt                     moments, and float32 masters where there are any
        state.json                       progress, the settings that may not change, and checksums:
                                         of the other two, and of all this

A folder is written under another name, flushed to disk and then renamed, so a checkpoint is there
whole or not at all. The two newest are kept; one whose checksums don't fit is passed over. Random
numbers need no saving: each update derives its own from the seed and its number.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from core.config import FREE_ON_RESUME
from core.model import Policy
from core.optimizer import MasterAdamW
from core.run_dir import disk_errors
from core.types import UsageError

KEEP = 2  # checkpoints
FILES = ("weights.safetensors", "optimizer.pt")


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from: its folder, what was done by then, and lines to show."""

    folder: Path | None
    progress: dict[str, Any]  # update -1: not even evaluated
    remarks: list[str]  # about newer checkpoints that were passed over


START = {"sft_step": 0, "update": -1, "skipped_in_a_row": 0, "level": 0, "best": []}
NEW_RUN = Found(None, START, [])


def save_checkpoint(
    run: Path, policy: Policy, optimizer: MasterAdamW, progress: dict[str, Any]
) -> Path:
    """Write a checkpoint of the run at `progress` ({"sft_step": .., "update": .., ..}).

    Raises OSError if it can't be written; then those before it are as they were.
    """
    root = run / "checkpoint"
    target = root / f"{progress['sft_step']:06d}-{progress['update'] + 1:06d}"
    part = root / f".part-{target.name}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        _write(part, policy, optimizer)
        state: dict[str, Any] = {"progress": progress, "settings": _settings(run)}
        state["sha256"] = {name: _sha256(part / name) for name in FILES}
        state["whole"] = _digest(state)
        (part / "state.json").write_text(json.dumps(state, indent=1) + "\n")
        for path in [*part.iterdir(), part]:
            _flush(path)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)  # room, perhaps for what tells of it
        raise
    if target.exists():  # the same point of the same run, but perhaps a damaged file of it
        shutil.rmtree(target)
    os.rename(part, target)
    _flush(root)
    for old in sorted(_candidates(root))[:-KEEP]:
        shutil.rmtree(old)
    return target


def find_checkpoint(run: Path) -> Found:
    """The newest whole checkpoint of a run; its beginning, if it was ended before its first one.

    Raises UsageError if the folder is no run, or if none of its checkpoints will do.
    """
    if not (run / "config.yaml").exists():
        raise UsageError(f"--resume {run}: not a run folder (it has no config.yaml)")
    candidates = sorted(_candidates(run / "checkpoint"), reverse=True)
    if not candidates:
        return Found(None, NEW_RUN.progress, [f"{run} has no checkpoint yet: from the beginning"])
    remarks: list[str] = []
    for folder in candidates:
        progress, fault = _read_state(folder, _settings(run))
        if not fault:
            return Found(folder, progress, remarks)
        remarks.append(f"{folder} {fault}: using an older one")
    raise UsageError(
        f"--resume {run}: no whole checkpoint of its settings in it; start again under a new name"
    )


def load_checkpoint(folder: Path, policy: Policy, optimizer: MasterAdamW | None = None) -> None:
    """Put a checkpoint's weights into the policy and, if given, its state into the optimiser.

    Raises UsageError if the model is another one than was saved.
    """
    saved, trainable = load_file(folder / FILES[0]), policy.trainable()
    shapes = {n: (tuple(p.shape), p.dtype) for n, p in trainable.items()}
    if {n: (tuple(t.shape), t.dtype) for n, t in saved.items()} != shapes:
        raise UsageError(f"--resume: the model in {folder} differs from the one configured")
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(saved[name])
    if optimizer is not None:
        state = torch.load(folder / FILES[1], map_location=policy.device, weights_only=True)
        optimizer.load_state_dict(state)


def export_model(run: Path, policy: Policy) -> Path:
    """Write `<run>/model/`, for plain AutoModelForCausalLM or, with LoRA, PeftModel."""
    part, target = run / ".part-model", run / "model"
    shutil.rmtree(part, ignore_errors=True)
    policy.model.save_pretrained(part)
    policy.tokenizer.save_pretrained(part)
    shutil.rmtree(target, ignore_errors=True)
    os.rename(part, target)
    return target


def _write(part: Path, policy: Policy, optimizer: MasterAdamW) -> None:
    tensors = {n: p.detach().cpu().contiguous() for n, p in policy.trainable().items()}
    with disk_errors(part):
        save_file(tensors, part / FILES[0])
        torch.save(optimizer.state_dict(), part / FILES[1])


def _read_state(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What was done by this checkpoint, and what is wrong with it, if anything is."""
    try:
        state = json.loads((folder / "state.json").read_text())
        told = state.pop("whole")
        damaged = ["state.json"] if told != _digest(state) else []
        damaged += [n for n in FILES if _sha256(folder / n) != state["sha256"][n]]
        if damaged:
            return {}, f"is damaged ({', '.join(damaged)})"
        shared = settings.keys() & state["settings"].keys()  # another version may have others
        if any(state["settings"][key] != settings[key] for key in shared):
            return {}, "is of other settings than config.yaml has"
        return state["progress"], ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"can't be read ({error})"


def _settings(run: Path) -> dict[str, Any]:
    """The settings that a resumed run has to share."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    return {k: v for k, v in settings.items() if k not in FREE_ON_RESUME}


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _candidates(root: Path) -> list[Path]:
    return [p for p in root.glob("*-*") if p.is_dir() and not p.name.startswith(".")]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
