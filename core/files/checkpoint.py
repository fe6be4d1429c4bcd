"""Atomic checkpoints, exact resume, and the export of the trained model.

    <run>/checkpoint/000800-000021/      after 800 SFT steps and updates 0 to 20
        weights.safetensors              every trainable parameter
        optimizer.pt                     moments, and float32 master weights if there are any
        older.safetensors                with --staleness: those of the updates before
        state.json                       how far the run is

A checkpoint is written under another name and renamed, so it is complete as soon as it exists. The
two newest are kept. The first checkpoint is of the warm start or of update 1; a run that is killed
before that starts again. Random states are not saved: every update derives its seeds from --seed
and its own number.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from core import distributed
from core.faults import UsageError
from core.files.atomic import published, remove
from core.files.run_log import METRICS, iter_records
from core.optimizer import MasterAdamW
from core.policy import Policy, Weights

Older = Sequence[Weights]  # weights of the updates before, the oldest first
KEEP = 2  # checkpoints
USE_BEFORE = "delete this checkpoint to use the one before it"
WEIGHTS, OPTIMIZER, OLDER = "weights.safetensors", "optimizer.pt", "older.safetensors"
STATE = "state.json"
ADAPTERS = "adapter_model.safetensors"  # PEFT's name
# "update" is the last finished one; -1: not even evaluated
START = {"sft_step": 0, "update": -1, "sampled_tokens": 0, "skipped_in_a_row": 0, "level": 0}


def save_checkpoint(
    run: Path, policy: Policy, optimizer: MasterAdamW, progress: dict[str, Any], older: Older = ()
) -> None:
    """Writes a checkpoint of the run folder `run`, and deletes all but the newest.

    `progress` has at least "sft_step" and "update"; `older`: see core/loop/play.py. All ranks
    call it, and rank 0 writes. Raises OSError if the disk is full or read-only; earlier checkpoints
    are unchanged then.
    """
    if distributed.rank() > 0:
        return
    target = run / f"checkpoint/{progress['sft_step']:06d}-{progress['update'] + 1:06d}"
    with published(target) as part:  # replaces `target` if a run is stopped right after a save
        part.mkdir(parents=True)
        save_weights(part, policy.trainable())
        named: Weights = {}
        for number, weights in enumerate(older):
            named |= {f"{number}:{name}": weight for name, weight in weights.items()}
        if named:
            save_weights(part, named, OLDER)
        with (part / OPTIMIZER).open("wb") as file:  # Python's errors say why a write failed
            torch.save(optimizer.state_dict(), file)
        (part / STATE).write_text(json.dumps({"progress": progress}), encoding="utf-8")
    for old in _newest_first(target.parent)[KEEP:]:
        remove(old)


def find_checkpoint(run: Path) -> tuple[Path | None, dict[str, Any]]:
    """The newest checkpoint of a run and its progress; None and START if there is none yet.

    Raises UsageError if the checkpoints are lost, or if the newest cannot be read.
    """
    folders = _newest_first(run / "checkpoint")
    if not folders:
        # update 1 writes the first one
        updates = (record.get("update") for record in iter_records(run / METRICS))
        if any(update not in (None, 0, 1) for update in updates):
            advice = "restore it, or start again with another --run-name"
            raise UsageError(f"--resume {run}: its checkpoint/ is empty or missing: {advice}")
        return None, {**START}
    file = folders[0] / STATE
    try:
        return folders[0], START | json.loads(file.read_bytes())["progress"]
    except (OSError, ValueError, LookupError) as error:
        raise UsageError(f"--resume: {file} cannot be read ({error}): {USE_BEFORE}") from None


def load_checkpoint(folder: Path, policy: Policy, optimizer: MasterAdamW) -> None:
    """Copies the saved weights into the policy and the saved state into the optimizer.

    Raises UsageError as `copy_weights` does, and if the state is not one of this optimizer.
    """
    copy_weights(folder, policy.trainable())
    file = folder / OPTIMIZER
    # several ranks share the memory of a mapped file; Windows cannot replace or remove one
    mapped = distributed.num_ranks() > 1 and os.name == "posix"
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # any, as the file may contain anything
        reason = "is not a state that torch saved"
        raise UsageError(f"--resume: {file} {reason}: {USE_BEFORE}") from error
    # torch's fused step does not compare shapes, and would read beyond a tensor
    if layout_of(state) != layout_of(optimizer.state_dict()):
        raise UsageError(f"--resume: {file} is not of this optimizer: {USE_BEFORE}")
    optimizer.load_state_dict(state)


def load_older(folder: Path) -> list[Weights]:
    """The weights of the updates before, the oldest first; none without --staleness."""
    older: dict[str, Weights] = {}
    if (folder / OLDER).exists():
        for key, weight in load_file(folder / OLDER).items():
            number, _, name = key.partition(":")
            older.setdefault(number, {})[name] = weight
    return [older[number] for number in sorted(older, key=int)]


def layout_of(state: Any, dtypes: bool = True) -> Any:
    """The keys, lengths and types of a state, and the shapes and `dtypes` of its tensors."""
    if isinstance(state, Mapping):
        return {key: layout_of(value, dtypes) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [layout_of(value, dtypes) for value in state]
    if isinstance(state, Tensor):
        return (state.shape, dtypes and state.dtype)
    return type(state)


def save_weights(folder: Path, weights: Mapping[str, Tensor], file: str = WEIGHTS) -> None:
    """Writes tensors by their names to a folder, for `copy_weights`."""
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / file, {"format": "pt"})  # transformers reads no other files


def publish_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Rank 0 writes tensors to a folder; when this returns, every rank can read it."""
    if distributed.rank() == 0:
        with published(folder) as part:
            part.mkdir(parents=True)
            save_weights(part, weights)
    distributed.all_gather([0])


@torch.no_grad()
def copy_weights(folder: Path, weights: Mapping[str, Tensor], same_dtype: bool = True) -> None:
    """Copies the tensors that `save_weights` wrote to `folder` into `weights`.

    Raises UsageError if the file cannot be read, or if names, shapes or, with `same_dtype`, dtypes
    differ.
    """
    try:
        saved = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        advice = "restore it, or delete its checkpoint to use the one before"
        raise UsageError(f"{folder / WEIGHTS} cannot be read ({error}): {advice}") from None
    if layout_of(saved, same_dtype) != layout_of(weights, same_dtype):
        raise UsageError(f"the model in {folder} differs from the settings: restore what changed")
    for name, weight in weights.items():
        weight.copy_(saved[name])


def export_model(run: Path, policy: Policy) -> Path:
    """Writes `<run>/model/`: AutoModelForCausalLM or, with LoRA, PeftModel can load it."""
    target = run / "model"
    with published(target) as part:
        policy.model.save_pretrained(part)
        policy.tokenizer.save_pretrained(part)
    return target


def _newest_first(root: Path) -> list[Path]:
    names = (path for path in root.glob("*") if re.fullmatch(r"\d{6,}-\d{6,}", path.name))
    return sorted((path for path in names if path.is_dir()), reverse=True)
