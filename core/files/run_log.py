"""Writes the metrics and rollouts of a run to `runs/<name>/`, one JSON object per line.

metrics.jsonl   one object per update ("update") and per 20 warm-start steps ("sft_step")
rollouts.jsonl  one object per rollout: messages, rewards, token traces. The file is rotated to
                rollouts.old.jsonl at 50 MB, so the last 50 to 100 MB of rollouts are kept
"""

import importlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from core.faults import UsageError
from core.files.atomic import published
from core.results import Record
from core.types import Rollout

METRICS, ROLLOUTS, OLD_ROLLOUTS = "metrics.jsonl", "rollouts.jsonl", "rollouts.old.jsonl"
ROLLOUTS_BYTES = 50_000_000  # size at which rollouts.jsonl is rotated


class RunLog:
    """Appends to metrics.jsonl and rollouts.jsonl, and sends each update to the tracker `track`.

    `config` holds the settings that the tracker stores; `track` has the values of --track. A
    resumed run continues its run of the tracker. Raises UsageError if wandb or trackio does not
    start.
    """

    def __init__(self, folder: Path, config: Record, track: str = "none") -> None:
        self.folder = folder
        self.tracker: Any = None
        if track == "tensorboard":
            logged = [record.get("update", -1) for record in iter_records(folder / METRICS)]
            self.tracker = _TensorBoard(folder / "tensorboard", max(logged, default=-1) + 1)
        elif track != "none":
            self.tracker = _start_tracker(track, folder, config)
        self.metrics_file = _open(folder / METRICS)
        self.rollouts_file = _open(folder / ROLLOUTS)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for file in (self.metrics_file, self.rollouts_file):
            with suppress(OSError):  # a full disk: the failed write has already raised
                file.close()
        if self.tracker is not None:
            self.tracker.finish()

    def log(self, record: Record) -> None:
        """Appends `record` to metrics.jsonl; sends the numbers of an update to the tracker."""
        _append(self.metrics_file, record)
        if self.tracker is not None and "update" in record:
            not_scalars = ("update", "warnings", "example/")
            scalars = {k: v for k, v in record.items() if not k.startswith(not_scalars)}
            self.tracker.log(scalars, step=record["update"])

    def log_rollouts(self, kind: str, update: int, rollouts: list[Rollout]) -> None:
        """Appends `rollouts` to rollouts.jsonl. `kind` is "train" or "eval"."""
        if self.rollouts_file.tell() > ROLLOUTS_BYTES:
            self.rollouts_file.close()
            os.replace(self.folder / ROLLOUTS, self.folder / OLD_ROLLOUTS)
            self.rollouts_file = _open(self.folder / ROLLOUTS)
        for rollout in rollouts:
            row = {
                "update": update,
                "kind": kind,
                "env": rollout.env,
                "agent": rollout.agent,
                "seed": rollout.seed,
                "group_id": rollout.group_id,
                "return": rollout.episode_return,
                "rewards": [turn.reward for turn in rollout.turns],
                "tokens": rollout.num_tokens,
                "hit_token_limit": any(turn.finish_reason == "length" for turn in rollout.turns),
                "episode_truncated": rollout.episode_truncated,
                "error": rollout.error,
                "info": rollout.info,
                "messages": rollout.messages,
            }
            _append(self.rollouts_file, row | {k: v for k, v in rollout.for_log.items() if v})


def rewind(folder: Path, progress: dict[str, Any]) -> None:
    """Drops all records after a checkpoint, whose `progress` is given."""
    for name in (METRICS, ROLLOUTS, OLD_ROLLOUTS):
        if name != METRICS and not (folder / name).exists():
            continue
        with published(folder / name) as part, _open(part) as file:
            for record in iter_records(folder / name):
                counter = "sft_step" if "sft_step" in record else "update"
                number = record.get(counter)
                if isinstance(number, int) and number <= progress[counter]:
                    file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[Record]:
    return list(iter_records(path))


def iter_records(path: Path) -> Iterator[Record]:
    """Yields the records of metrics.jsonl or rollouts.jsonl; none if the file does not exist.

    Skips lines that are not JSON objects, such as a last line that a killed run has cut short.
    """
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                with suppress(ValueError, RecursionError):
                    if isinstance(record := json.loads(line), dict):
                        yield record


def _start_tracker(track: str, folder: Path, config: Record) -> Any:
    """Starts a run of wandb or trackio, or continues the one in the file <track>.id of `folder`.

    wandb finds its runs by their ids, trackio by their names.
    """
    file = folder / f"{track}.id"
    options: Record = {"name": folder.name}
    if file.exists():
        options = {"name": file.read_text(encoding="utf-8"), "resume": "allow"}
        if track == "wandb":  # a resume may change settings, such as num_updates
            options |= {"id": options.pop("name"), "allow_val_change": True}
    try:
        tracker = importlib.import_module(track).init(project="picorl", config=config, **options)
    except Exception as error:  # no login, no network, a run that was deleted there, ..
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = f"; to start another run there, remove {file}" if file.exists() else ""
        raise UsageError(f"--track {track}: {reason}{hint}") from error
    with published(file) as part:
        part.write_text(tracker.id if track == "wandb" else tracker.name, encoding="utf-8")
    return tracker


class _TensorBoard:
    """TensorBoard with the methods of a run of wandb or trackio."""

    def __init__(self, log_dir: Path, next_step: int) -> None:
        """Hides the steps from `next_step` on, which a killed run may have logged."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(log_dir), purge_step=next_step)

    def log(self, scalars: Record, step: int) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


def _open(path: Path) -> TextIO:
    return path.open("a", encoding="utf-8", newline="\n")


def _append(file: TextIO, record: Record) -> None:
    row = dict(record)
    for name, value in record.items():
        if isinstance(value, float) and not math.isfinite(value):
            row[name] = None  # JSON has no NaN and no infinity
    file.write(json.dumps(row) + "\n")
    file.flush()
