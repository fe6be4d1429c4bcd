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

from core.types import Rollout, UsageError

METRICS, ROLLOUTS, OLD_ROLLOUTS = "metrics.jsonl", "rollouts.jsonl", "rollouts.old.jsonl"
ROLLOUTS_BYTES = 50_000_000  # size at which rollouts.jsonl is rotated

Record = dict[str, Any]  # one line of metrics.jsonl or rollouts.jsonl


class RunLog:
    """Appends to metrics.jsonl and rollouts.jsonl, and sends each update to the tracker `track`.

    `config` holds the settings that the tracker stores; `track` has the values of --track. Raises
    UsageError if wandb or trackio does not start.
    """

    def __init__(self, run_dir: Path, config: Record, track: str = "none") -> None:
        self.run_dir = run_dir
        self.tracker: Any = None
        if track == "tensorboard":
            self.tracker = _TensorBoard(run_dir / "tensorboard")
        elif track != "none":  # wandb or trackio
            try:
                module = importlib.import_module(track)
                self.tracker = module.init(project="picorl", name=run_dir.name, config=config)
            except Exception as error:  # no login, no network, ..
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise UsageError(f"--track {track}: {reason}") from error
        self.metrics_file = (run_dir / METRICS).open("a")
        self.rollouts_file = (run_dir / ROLLOUTS).open("a")

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
            scalars = {k: v for k, v in record.items() if k not in ("update", "warnings")}
            self.tracker.log(scalars, step=record["update"])

    def log_rollouts(self, kind: str, update: int, rollouts: list[Rollout]) -> None:
        """Appends `rollouts` to rollouts.jsonl. `kind` is "train" or "eval"."""
        if self.rollouts_file.tell() > ROLLOUTS_BYTES:
            self.rollouts_file.close()
            os.replace(self.run_dir / ROLLOUTS, self.run_dir / OLD_ROLLOUTS)
            self.rollouts_file = (self.run_dir / ROLLOUTS).open("a")
        for r in rollouts:
            row = {
                "update": update,
                "kind": kind,
                "env": r.env,
                "agent": r.agent,
                "seed": r.seed,
                "group_id": r.group_id,
                "return": r.episode_return,
                "rewards": [turn.reward for turn in r.turns],
                "tokens": r.num_tokens,
                "hit_token_limit": any(turn.finish_reason == "length" for turn in r.turns),
                "episode_truncated": r.episode_truncated,
                "error": r.error,
                "info": r.info,
                "messages": r.messages,
            }
            if r.opponents:
                row["opponents"] = r.opponents
            if r.token_traces:
                row["token_traces"] = r.token_traces
            _append(self.rollouts_file, row)


def rewind(run_dir: Path, progress: dict[str, int]) -> None:
    """Drops all records after a checkpoint; `progress` has its last "sft_step" and "update"."""
    for name in (METRICS, ROLLOUTS, OLD_ROLLOUTS):
        if not (run_dir / name).exists():
            continue
        part = run_dir / f".part-{name}"
        with part.open("w") as file:
            for record in iter_records(run_dir / name):
                counter = "sft_step" if "sft_step" in record else "update"
                if record[counter] <= progress[counter]:
                    file.write(json.dumps(record) + "\n")
        os.replace(part, run_dir / name)


def read_records(path: Path) -> list[Record]:
    """Returns the objects of a .jsonl file, as `iter_records` yields them."""
    return list(iter_records(path))


def iter_records(path: Path) -> Iterator[Record]:
    """Yields the objects of a .jsonl file up to the first line that is not one, such as a last
    line cut short by a crash. Yields nothing if the file does not exist."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                return
            if not isinstance(record, dict):
                return
            yield record


class _TensorBoard:
    """TensorBoard with the methods of a run of wandb or trackio."""

    def __init__(self, log_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(log_dir))

    def log(self, scalars: Record, step: int) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


def _append(file: TextIO, record: Record) -> None:
    # JSON has no NaN and no infinity: write null
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v
              for k, v in record.items()}  # fmt: skip
    file.write(json.dumps(finite) + "\n")
    file.flush()
