"""Compares runs: which one needs the fewest sampled tokens?

    python -m core.report.compare runs/a runs/b
    python -m core.report.compare --board "runs/*"    # the contest of a room

Prints a line for each run, that with the fewest tokens first. Beside the first run, writes
`compare.html`, one page with the reports of all runs.
"""

import glob
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import tyro

from core import results
from core.faults import UsageError
from core.files.run_log import METRICS, read_records
from core.report.page import write_page
from core.report.summary import algorithm_title
from core.results import Record, accuracy_of
from core.settings import read_settings
from core.terminal import cli
from environments.plumbing.text import printable

Run = tuple[dict[str, Any], list[Record]]  # settings and metrics


def compare(runs: tyro.conf.Positional[tuple[Path, ...]], board: bool = False) -> None:
    """Compare runs: print a line for each, and write compare.html.

    Args:
        runs: folders of runs, such as runs/a runs/b
        board: only print the runs with a budget, --max-sampled-tokens, by their accuracy; folders
            that are not runs are left out, so runs/* will do
    """
    found: dict[Path, Run] = {}
    for folder in (folder for run in runs for folder in matching(run)):
        if is_run(folder):
            settings = read_settings(folder / "config.yaml")
            found[folder] = settings, read_records(folder / METRICS)
        elif not board:
            raise UsageError(f"{folder}: not the folder of a run (it has no {METRICS})")
    for line in lines(found, board):
        print(printable(line))
    if not board:
        page = next(iter(found)).resolve().parent / "compare.html"
        write_page(page, [(folder, config) for folder, (config, _) in found.items()])
        print("Tokens are counted up to an evaluation: --eval-every 1 gives an exact order.")
        print(f"side by side: {page}")


def is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file()


def matching(run: Path) -> list[Path]:
    """The runs that a pattern such as runs/* stands for, which PowerShell does not expand."""
    return [*filter(is_run, map(Path, sorted(glob.glob(str(run)))))] or [run]


def lines(runs: dict[Path, Run], board: bool = False) -> list[str]:
    """The environments, and below each a line for every run that it evaluated.

    Runs are ordered by the tokens that they sampled until the target accuracy; those that did not
    reach it follow, by their final accuracy. On a `board` only accuracy counts, among runs with the
    same budget of tokens; where intervals overlap, the order may be chance. Raises UsageError if
    there is nothing to show.
    """
    rows: list[tuple[str, float, float, str]] = []
    for folder, (config, records) in runs.items():
        budget, tasks = config["max_sampled_tokens"], config["eval_num_tasks"]
        evaluated = results.before_after(records)
        for title, first, last in evaluated[:1] if board and budget else evaluated * (not board):
            needed, final = results.tokens_to_target(title, records), last[f"eval/{title}/accuracy"]
            reached = "not reached" if needed is None else f"after {needed:,} tokens"
            cost = f"{results.sampled_tokens(records):,} tokens, {results.minutes(records):.1f} min"
            how = f"{folder}: {algorithm_title(config)} from {config['model_id']}"
            change = f"{accuracy_of(title, first)} -> {accuracy_of(title, last)}"
            line = f"  {change}  {how}; {results.TARGET_ACCURACY} {reached}; {cost}"
            if board:
                title, needed = f"{title}, {tasks} held-out tasks, {budget:,} sampled tokens", 0
            rows.append((title, math.inf if needed is None else needed, -final, line))
    if not rows:
        budget = " and a budget, --max-sampled-tokens" * board
        raise UsageError(f"name runs with an evaluation{budget}, such as runs/a runs/b")
    boards = itertools.groupby(sorted(rows), key=lambda row: row[0])
    return [line for title, some in boards for line in (title, *(row[-1] for row in some))]


def main(args: list[str]) -> int:
    """Runs the command; returns the exit code, 2 after invalid input, 1 if the disk fails."""
    prog = "python -m core.report.compare"
    return cli.execute(lambda given: tyro.cli(compare, args=given, prog=prog) or 0, args,
                   lambda given: given, "core.report.compare")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
