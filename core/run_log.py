"""Writes the metrics and rollouts of a run to `runs/<name>/`, one JSON object per line.

metrics.jsonl   one object per update ("update") and per 20 warm-start steps ("sft_step")
rollouts.jsonl  one object per rollout: messages, rewards, token traces. The file is rotated to
                rollouts.old.jsonl at 50 MB, so the last 50 to 100 MB of rollouts are kept

Both files are flushed to the disk before a checkpoint is written. The checkpoint stores their
SHA-256, so a resumed run knows whether all records up to the checkpoint are there.
"""

import hashlib
import importlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from core.files import flush, published
from core.types import Rollout, UsageError

METRICS, ROLLOUTS, OLD_ROLLOUTS = "metrics.jsonl", "rollouts.jsonl", "rollouts.old.jsonl"
ROLLOUTS_BYTES = 50_000_000  # size at which rollouts.jsonl is rotated
EMPTY = hashlib.sha256().hexdigest()  # of a file without records

ROLLOUT_FIELDS: dict[str, Any] = {
    "kind": str, "env": str, "agent": str, "seed": int, "group_id": int, "rewards": list,
    "hit_token_limit": bool, "episode_truncated": bool, "info": dict, "messages": list,
}  # fmt: skip

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
        self.sha256 = _sha256(run_dir / METRICS)
        self.rollouts_sha256 = [_sha256(run_dir / name) for name in (OLD_ROLLOUTS, ROLLOUTS)]
        self.finished = [digest.hexdigest() for digest in self.rollouts_sha256]

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
        self.sha256.update(_append(self.metrics_file, record))
        # later rollouts are of an unfinished update, which a resumed run repeats
        self.finished = [digest.hexdigest() for digest in self.rollouts_sha256]
        if self.tracker is not None and "update" in record:
            scalars = {k: v for k, v in record.items() if k not in ("update", "warnings")}
            self.tracker.log(scalars, step=record["update"])

    def sync(self) -> Record:
        """Flushes both files to the disk. Returns what `rewind` needs in a checkpoint's progress.

        That is the SHA-256 of metrics.jsonl, and of rollouts.old.jsonl and rollouts.jsonl up to the
        last record of metrics.jsonl.
        """
        for file in (self.metrics_file, self.rollouts_file):
            os.fsync(file.fileno())
        flush(self.run_dir)
        return {"metrics_sha256": self.sha256.hexdigest(), "rollouts_sha256": self.finished}

    def log_rollouts(self, kind: str, update: int, rollouts: list[Rollout]) -> None:
        """Appends `rollouts` to rollouts.jsonl. `kind` is "train" or "eval"."""
        if self.rollouts_file.tell() > ROLLOUTS_BYTES:
            os.fsync(self.rollouts_file.fileno())
            self.rollouts_file.close()
            os.replace(self.run_dir / ROLLOUTS, self.run_dir / OLD_ROLLOUTS)
            self.rollouts_file = (self.run_dir / ROLLOUTS).open("a")
            self.rollouts_sha256 = [self.rollouts_sha256[1], hashlib.sha256()]
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
            self.rollouts_sha256[1].update(_append(self.rollouts_file, row))


def rewind(run_dir: Path, progress: dict[str, Any], accept_damage: bool = False) -> str:
    """Drops all records after a checkpoint, and every line that is not a record.

    `progress` is that of the checkpoint. Returns a line about damage; "" if there is none. If the
    records in metrics.jsonl up to the checkpoint are not those that it was saved with, raises
    UsageError and changes nothing, unless `accept_damage`.
    """
    remarks: list[str] = []
    sums = dict.fromkeys((ROLLOUTS, OLD_ROLLOUTS), EMPTY)  # of the records that are kept
    for name in (METRICS, ROLLOUTS, OLD_ROLLOUTS):
        if name != METRICS and not (run_dir / name).exists():
            continue
        sha256, faults, damage = hashlib.sha256(), Faults(), ""
        with published(run_dir / name) as part, part.open("wb") as file:
            for line in _lines_before(progress, run_dir / name, faults):
                sha256.update(line)
                file.write(line)
                damage = faults.line()  # after the last record: power was lost, nothing is missing
            damaged = bool(damage)
            if name == METRICS and "metrics_sha256" in progress:
                damaged = sha256.hexdigest() != progress["metrics_sha256"]
            if damaged and name == METRICS and not accept_damage:
                raise UsageError(
                    f"--resume {run_dir}: {METRICS} is damaged: its records up to update "
                    f"{progress['update']} are not those of the checkpoint; restore the file, or "
                    "add --trust to train on and mark the hole"
                )
        sums[name] = sha256.hexdigest()
        if damaged:
            remarks.append(f"{name} is damaged ({damage or 'records are missing'})")
    said = any(remark.startswith("rollouts") for remark in remarks)
    if "rollouts_sha256" in progress and not said:
        old, new = progress["rollouts_sha256"]
        kept = [sums[OLD_ROLLOUTS], sums[ROLLOUTS]]
        # not rotated since the checkpoint; once; twice, which dropped all records up to it
        whole = [[old, new], [new, EMPTY]] + [[EMPTY, EMPTY]] * (run_dir / OLD_ROLLOUTS).exists()
        if kept not in whole:
            remarks.append(f"{ROLLOUTS} is damaged (records are missing or differ)")
    return "; ".join(remarks)


def damage_of(run_dir: Path) -> str:
    """A line about damage of a run's metrics.jsonl; "" if there is none.

    Damage: lines that are no records, missing updates, records that differ from those with which
    the newest checkpoint was saved.
    """
    faults = Faults()
    read_metrics(run_dir / METRICS, faults)
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        newest = max(run_dir.glob("checkpoint/[0-9]*/state.json"))
        progress = json.loads(newest.read_bytes())["progress"]
        lines = _lines_before(progress, run_dir / METRICS, Faults())
        if hashlib.sha256(b"".join(lines)).hexdigest() != progress["metrics_sha256"]:
            faults["difference to the newest checkpoint"] += 1
    return f"{METRICS} is damaged ({faults.line()})" if faults else ""


class Faults(Counter[str]):
    """What a reader found in the files of a run: lines that it skipped, records that are missing.

    >>> Faults({"lines that are no records": 2}).line()
    '2 lines that are no records'
    """

    def line(self) -> str:
        return ", ".join(f"{number} {what}" for what, number in self.items())


def read_metrics(path: Path, faults: Faults | None = None) -> list[Record]:
    """Returns the records of a metrics.jsonl in their order, each once.

    Counts in `faults` the lines that it skips, and the updates that are missing.
    """
    faults = Faults() if faults is None else faults
    found: dict[tuple[bool, int], Record] = {}
    for record in iter_records(path, faults):
        if "kind" in record:
            faults["lines that are no records"] += 1
            continue
        key = ("update" in record, record["update"] if "update" in record else record["sft_step"])
        faults["repeated records"] += key in found
        found.setdefault(key, record)
    updates = [number for is_update, number in found if is_update]
    faults["missing updates"] += max(updates) - min(updates) + 1 - len(updates) if updates else 0
    for what in [what for what, number in faults.items() if not number]:
        del faults[what]
    return [found[key] for key in sorted(found)]


def read_records(path: Path) -> list[Record]:
    """Returns the records of a .jsonl file, as `iter_records` yields them."""
    return list(iter_records(path))


def iter_records(path: Path, faults: Faults | None = None) -> Iterator[Record]:
    """Yields the records of metrics.jsonl or rollouts.jsonl; none if the file does not exist.

    Skips the lines that are not records, and counts them in `faults`; a last line that was cut
    short is not counted, as a killed run leaves one. A record has all that its readers need:
    a metric is a number below 1e300 or None, an accuracy has its interval.
    """
    for _, record in _parsed_lines(path, Faults() if faults is None else faults):
        yield record


def _lines_before(progress: dict[str, Any], path: Path, faults: Faults) -> Iterator[bytes]:
    """The lines of the records up to a checkpoint."""
    for line, record in _parsed_lines(path, faults):
        counter = "sft_step" if "sft_step" in record else "update"
        if record[counter] <= progress[counter]:
            yield line


def _parsed_lines(path: Path, faults: Faults) -> Iterator[tuple[bytes, Record]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line.decode(), parse_constant=float)
                is_record = _is_rollout if "kind" in record else _is_metrics
                if not (isinstance(record, dict) and is_record(record)):
                    raise ValueError
            except (ValueError, TypeError, RecursionError):
                if line.endswith(b"\n"):
                    faults["lines that are no records"] += 1
                continue
            yield line, record


def _is_metrics(record: Record) -> bool:
    if ("update" in record) == ("sft_step" in record):
        return False
    values = dict(record)
    warnings = values.pop("warnings", None) or {}
    steps = [values.pop(name) for name in ("update", "sft_step") if name in values]
    needed = [
        name.removesuffix("accuracy") + end
        for name in values
        if name.startswith("eval/") and name.endswith("/accuracy")
        for end in ("accuracy", "ci_low", "ci_high")
    ]
    return (
        all(_is_count(step) for step in steps)
        and isinstance(warnings, dict)
        and all(isinstance(text, str) for text in warnings.values())
        and all(value is None or _is_number(value) for value in values.values())
        and all(_is_number(values.get(name)) for name in needed)
    )


def _is_rollout(record: Record) -> bool:
    turns, traces = record.get("messages", []), record.get("token_traces", [])
    opponents = record.get("opponents", {})
    return (
        all(isinstance(record.get(name), kind) for name, kind in ROLLOUT_FIELDS.items())
        and all(_is_count(record.get(name)) for name in ("update", "tokens"))
        and (record.get("return", "") is None or _is_number(record.get("return")))
        and all(isinstance(turn, dict) and isinstance(turn.get("content"), str) for turn in turns)
        and all(isinstance(turn.get("role"), str) for turn in turns)
        and _is_shallow(record["info"])
        and isinstance(opponents, dict)
        and all(isinstance(o, dict) and _is_shallow(o.get("player")) for o in opponents.values())
        and isinstance(traces, list)
        and all(isinstance(trace, dict) for trace in traces)
        and all(isinstance(column, list) for trace in traces for column in trace.values())
        and all(isinstance(text, str) for trace in traces for text in trace.get("text", []))
        and isinstance(record.get("error", ""), str)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e300  # below: NaN too


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_shallow(value: Any, levels: int = 20) -> bool:
    """Whether lists and objects are nested at most `levels` deep."""
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)):
        return True
    return levels > 0 and all(_is_shallow(item, levels - 1) for item in inner)


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


def _sha256(path: Path) -> Any:
    """The hash object of a file; of nothing if it does not exist."""
    if not path.exists():
        return hashlib.sha256()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


def _append(file: TextIO, record: Record) -> bytes:
    """Appends a line, and returns it."""
    # JSON has no NaN and no infinity: write null
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v
              for k, v in record.items()}  # fmt: skip
    line = json.dumps(finite) + "\n"
    file.write(line)
    file.flush()
    return line.encode()
