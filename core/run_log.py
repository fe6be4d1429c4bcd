"""What a run leaves in `runs/<name>/`, written as it goes: readable at any moment, never rewritten.

    python -m core.run_log runs/a runs/b     # compares runs, as a table and as a page

config.yaml     every setting; `python train.py --config <it> --run-name other` runs it again
metrics.jsonl   one object a warm-start report ("sft_step") or an update ("update")
rollouts.jsonl  one object a rollout: what was asked, written and paid; the last 50 to 100 MB, the
                older half in rollouts.old.jsonl
curves.png      the picture
report.html     the microscope: curves, tasks, every rollout and its tokens; opens offline
README.md       command, result, where the rest is
checkpoint/     to --resume from
model/          the trained policy, for from_pretrained
"""

import importlib
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from core import diagnostics
from core.metrics import before_after, describe
from core.types import Rollout, UsageError

ROLLOUTS, OLD_ROLLOUTS = "rollouts.jsonl", "rollouts.old.jsonl"
ROLLOUTS_BYTES = 50_000_000  # of each of the two


class Journal:
    """The open journal of a run; `with Journal(...) as journal:`."""

    def __init__(self, run: Path, config: dict[str, Any], track: str = "none"):
        self.run, self.config = run, config
        self.tracker = _open_tracker(track, run, config)
        self.metrics_file: TextIO = (run / "metrics.jsonl").open("a")
        self.rollouts_file: TextIO = (run / ROLLOUTS).open("a")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for file in (self.metrics_file, self.rollouts_file):
            with suppress(OSError):  # each line was flushed; one that couldn't be has been told of
                file.close()
        if self.tracker is not None:
            self.tracker.close()

    def log(self, record: dict[str, Any]) -> None:
        """Append one object to metrics.jsonl, and tell the tracker if there is one."""
        _append(self.metrics_file, record)
        if self.tracker is not None and "update" in record:
            self.tracker.log(record)

    def log_rollouts(self, kind: str, update: int, rollouts: Iterable[Rollout]) -> None:
        """Append rollouts; `kind` is "train" or "eval"."""
        if self.rollouts_file.tell() > ROLLOUTS_BYTES:
            self.rollouts_file.close()
            os.replace(self.run / ROLLOUTS, self.run / OLD_ROLLOUTS)
            self.rollouts_file = (self.run / ROLLOUTS).open("a")
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
            if r.token_traces:
                row["token_traces"] = r.token_traces
            _append(self.rollouts_file, row)


def rewind(run: Path, progress: dict[str, int]) -> None:
    """Cut the journal back to a checkpoint: drop the records of what is about to be done again."""

    def keep(record: dict[str, Any]) -> bool:
        if "sft_step" in record:
            return record["sft_step"] <= progress["sft_step"]
        return record["update"] <= progress["update"]

    for name in ("metrics.jsonl", ROLLOUTS, OLD_ROLLOUTS):
        if (run / name).exists():
            kept = [record for record in read_records(run / name) if keep(record)]
            part = run / f".part-{name}"
            with part.open("w") as file:
                for record in kept:
                    file.write(json.dumps(record) + "\n")
            os.replace(part, run / name)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, up to a line that isn't one: the last, cut short by a crash."""
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict):
            break
        records.append(record)
    return records


def write_pages(run: Path, config: dict[str, Any]) -> None:
    """Write what people look at, from the journal: curves.png, README.md and compare.html."""
    from core.report.compare import write_report
    from core.report.curves import draw_curves  # matplotlib is slow to import

    records = read_records(run / "metrics.jsonl")
    updates = [r for r in records if "update" in r]
    seconds = sum(v for r in records for k, v in r.items() if _is_seconds(k))
    results = [
        f"| {env} | {describe(env, first)} | {describe(env, last)} |"
        for env, first, last in before_after(records)
    ]
    lines = [
        f"# {run.name}",
        "",
        f"`{config['algo']}` on `{' '.join(config['env'])}`, model `{config['model_id']}`, "
        f"seed {config['seed']}: {config['sft_steps']} warm-start steps, "
        f"{max(0, len(updates) - 1)} updates, {seconds / 60:.1f} min "
        f"(torch {torch.__version__}, {torch.get_num_threads()} threads).",
        "",
        "| held-out tasks | before RL [95%] | after RL [95%] |",
        "| --- | --- | --- |",
        *results,
        "",
        "![curves](curves.png)",
        "",
        "Again, under another name:",
        "",
        f"    python train.py --config {run / 'config.yaml'} --run-name again",
        "",
        "`metrics.jsonl` and `rollouts.jsonl` hold every update; `model/` loads with "
        "`from_pretrained`.",
        "",
    ]
    if updates:
        title = f"{config['algo']} on {' '.join(config['env'])} · {config['model_id']}"
        draw_curves(run / "curves.png", records, f"{title} · seed {config['seed']}")
    (run / "README.md").write_text("\n".join(lines))
    write_report(run, config)


def summary(run: Path, config: dict[str, Any]) -> list[str]:
    """The last lines of a run: before and after, where the files are, what to try next."""
    lines = []
    records = read_records(run / "metrics.jsonl")
    for env, first, last in before_after(records):
        lines.append(f"{env}, held-out accuracy [95%]: {describe(env, first)} before RL -> "
                     f"{describe(env, last)} after {last['update']} updates")  # fmt: skip
    for name, at, line in diagnostics.collect(records):
        lines.append(f"warning at update {', '.join(map(str, at))}: {name}: {line}")
    other = "ppo" if config["algo"] != "ppo" else "reinforce"
    lines.append(f"curves: {run / 'curves.png'}   every rollout and token: {run / 'report.html'}")
    of = ["--model-id", config["model_id"]] if config["model_id"] != "tiny" else []
    of += ["--env", *config["env"], "--algo", other, "--seed", str(config["seed"])]
    lines.append(f"next: python train.py {shlex.join(of)}")
    return lines


def main(args: list[str]) -> int:
    """What `python -m core.run_log ARGS` does; bad input is one line and exit code 2."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from core.report import compare

    runs = [Path(arg) for arg in args]
    try:
        if not runs or args[0].startswith("-"):
            raise UsageError("which runs? python -m core.run_log runs/a runs/b")
        rows = compare.compare(runs)
        page = compare.write_comparison(runs, runs[0].resolve().parent / "compare.html")
    except UsageError as error:
        print(f"core.run_log: {error}", file=sys.stderr)
        return 2
    table = Table(box=None, header_style="bold")
    for title in ("run", "algo", "env", "held-out accuracy [95%], before -> after"):
        table.add_column(title, overflow="fold")
    for title in ("tokens sampled", "until accuracy 0.9", "minutes"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
    print(f"side by side: {page}")
    return 0


def _is_seconds(key: str) -> bool:
    return key.startswith("time/") and key.endswith("_s")


def _append(file: TextIO, record: dict[str, Any]) -> None:
    # JSON knows no NaN or infinity
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v
             for k, v in record.items()}  # fmt: skip
    file.write(json.dumps(plain) + "\n")
    file.flush()


class _Tracker:
    """One of the outside trackers, reduced to log and close."""

    def __init__(self, log: Any, close: Any):
        self.log_scalars, self.close = log, close

    def log(self, record: dict[str, Any]) -> None:
        scalars = {k: v for k, v in record.items() if k not in ("update", "warnings")}
        self.log_scalars(scalars, record["update"])


def _open_tracker(name: str, run: Path, config: dict[str, Any]) -> _Tracker | None:
    if name == "none":
        return None
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run / "tensorboard"))

        def add(scalars: dict[str, float], step: int) -> None:
            for key, value in scalars.items():
                writer.add_scalar(key, value, step)

        return _Tracker(add, writer.close)
    tracker: Any = importlib.import_module(name)
    sink = tracker.init(project="picorl", name=run.name, config=config)
    return _Tracker(lambda scalars, step: sink.log(scalars, step=step), sink.finish)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
