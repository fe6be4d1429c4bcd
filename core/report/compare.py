"""Compares runs: which one needs the fewest sampled tokens?

    python -m core.report.compare runs/a runs/b
    python -m core.report.compare --board "runs/*"    # the contest of a room

Prints a line for each run, that with the fewest tokens first. Beside the first run, writes
`compare.html`, one page with the reports of all runs.
"""

import glob
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import tyro

from core.faults import UsageError
from core.files.run_log import METRICS, read_records
from core.report.page import write_page
from core.report.summary import (
    TARGET_ACCURACY,
    algorithm_title,
    minutes,
    names_of,
    sampled_tokens,
    tokens_to_target,
)
from core.results import Record, accuracy_of, before_after
from core.settings import read_settings
from core.terminal import cli
from environments.plumbing.registry import short_names
from environments.plumbing.text import printable

Run = tuple[Path, dict[str, Any], list[Record]]  # folder, settings and metrics


def compare(runs: tyro.conf.Positional[tuple[Path, ...]], board: bool = False) -> None:
    """Compare runs: print a line for each, and write compare.html.

    Args:
        runs: folders of runs, such as runs/a runs/b
        board: only print the runs with a budget, --max-sampled-tokens, by their accuracy; folders
            that are not runs are left out, so runs/* will do
    """
    if not runs:
        raise UsageError(
            "name the folders of the runs: python -m core.report.compare runs/a runs/b"
        )
    folders = list(dict.fromkeys(folder for run in runs for folder in matching(run)))
    if board:
        for line in board_lines([read_run(folder) for folder in folders if is_run(folder)]):
            print(printable(line))
        return
    found = [read_run(folder) for folder in folders]
    page = folders[0].resolve().parent / "compare.html"
    write_page(page, [(folder, config) for folder, config, _ in found])
    for line in lines(found):
        print(printable(line))
    if any(config.get("eval_every") != 1 for _, config, _ in found):
        print("Tokens are counted up to an evaluation: for an exact order use --eval-every 1.")
    print(f"side by side: {page}")


def is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file()


def matching(run: Path) -> list[Path]:
    """The runs that a pattern such as runs/* stands for, which PowerShell does not expand."""
    return [*filter(is_run, map(Path, sorted(glob.glob(str(run)))))] or [run]


def read_run(folder: Path) -> Run:
    """Raises UsageError if the folder is not that of a run."""
    if not is_run(folder):
        raise UsageError(f"{folder}: not the folder of a run (it has no {METRICS})")
    return folder, read_settings(folder / "config.yaml"), read_records(folder / METRICS)


def lines(runs: list[Run]) -> list[str]:
    """A line for each run and environment that it evaluated.

    Within an environment, runs are ordered by the tokens that they sampled until the target
    accuracy; those that did not reach it follow, by their final accuracy.
    """
    rows: list[tuple[str, float, float, str]] = []
    for name, (_, config, records) in zip(names_of([run[0] for run in runs]), runs, strict=True):
        start = f"{name}: {algorithm_title(config)} on"
        for env, first, last in before_after(records) or [(short_names(config["env"]), {}, {})]:
            needed, final = tokens_to_target(env, records), last.get(f"eval/{env}/accuracy", -1.0)
            both = [accuracy_of(env, record) for record in (first, last) if record]
            accuracy = " -> ".join(both) or "not evaluated"
            reached = f"after {needed:,} tokens" if needed is not None else "not reached"
            line = f"{start} {env}: {accuracy}; {TARGET_ACCURACY} {reached}; {cost(records)}"
            rows.append((env, math.inf if needed is None else needed, -final, line))
    return [line for *_, line in sorted(rows)]


def board_lines(runs: list[Run]) -> list[str]:
    """The runs with a budget, --max-sampled-tokens, the best accuracy first: a board for each
    environment and budget. Runs whose intervals overlap may differ by chance.

    Raises UsageError if no run has an evaluation and a budget.
    """
    boards = defaultdict[str, list[tuple[float, str]]](list)
    for name, (_, config, records) in zip(names_of([run[0] for run in runs]), runs, strict=True):
        budget, tasks = config["max_sampled_tokens"], config["eval_num_tasks"]
        for env, _, last in before_after(records)[:1] if budget else []:
            how = f"{algorithm_title(config)} from {config['model_id']}"
            line = f"  {accuracy_of(env, last)}  {name}: {how}, {cost(records)}"
            title = f"{env}, {tasks} held-out tasks, {budget:,} sampled tokens"
            boards[title].append((last[f"eval/{env}/accuracy"], line))
    if not boards:
        raise UsageError("no run has an evaluation and a budget, which --max-sampled-tokens sets")
    best_first = {title: sorted(rows, reverse=True) for title, rows in boards.items()}
    return [line for title, rows in best_first.items() for line in (title, *(r[1] for r in rows))]


def cost(records: list[Record]) -> str:
    """What a run has sampled, and how long it took."""
    return f"{sampled_tokens(records):,} tokens, {minutes(records):.1f} min"


def main(args: list[str]) -> int:
    """Runs the command; returns the exit code, 2 after invalid input, 1 if the disk fails."""
    prog = "python -m core.report.compare"
    return cli.execute(lambda given: tyro.cli(compare, args=given, prog=prog) or 0, args,
                   lambda given: given, "core.report.compare")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
