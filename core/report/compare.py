"""Compares runs: which one needs the fewest sampled tokens?

    python -m core.report.compare runs/a runs/b
    python -m core.report.compare --board "runs/*"    # the contest of a room

Prints a line for each run, the one with the fewest tokens first. Writes `compare.html`, one page
with the reports of all runs, beside the first run.
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
    logs: dict[Path, Run] = {}
    for folder in itertools.chain.from_iterable(map(expand_pattern, runs)):
        if is_run(folder):
            settings = read_settings(folder / "config.yaml")
            logs[folder] = settings, read_records(folder / METRICS)
        elif not board:
            raise UsageError(f"{folder}: not the folder of a run (it has no {METRICS})")
    for line in lines(logs, board):
        print(printable(line))
    if not board:
        page = next(iter(logs)).resolve().parent / "compare.html"
        write_page(page, [(folder, config) for folder, (config, _) in logs.items()])
        print("Tokens are counted up to an evaluation: --eval-every 1 gives an exact order.")
        print(f"side by side: {page}")


def is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file()


def expand_pattern(pattern: Path) -> list[Path]:
    """The runs that match, such as runs/*, which PowerShell does not expand; else `pattern`."""
    return [*filter(is_run, map(Path, sorted(glob.glob(str(pattern)))))] or [pattern]


def lines(runs: dict[Path, Run], board: bool = False) -> list[str]:
    """The environments, and below each a line for every run with evaluations of it.

    Runs are ordered by the tokens that they sampled until the target accuracy; those that did not
    reach it follow, by their final accuracy. On a `board` only accuracy counts, among runs with the
    same budget of tokens. Raises UsageError if there is nothing to show.
    """
    rows: list[tuple[str, float, float, str]] = []  # title, tokens, -accuracy, line
    for folder, (config, records) in runs.items():
        budget = config["max_sampled_tokens"]
        evaluations = results.before_after(records)
        if board:
            evaluations = evaluations[:1] if budget else []
        for env, first, last in evaluations:
            tokens = results.tokens_to_target(env, records)
            reached = "not reached" if tokens is None else f"after {tokens:,} tokens"
            cost = f"{results.sampled_tokens(records):,} tokens, {results.minutes(records):.1f} min"
            run = f"{folder}: {algorithm_title(config)} from {config['model_id']}"
            change = f"{accuracy_of(env, first)} -> {accuracy_of(env, last)}"
            line = f"  {change}  {run}; {results.TARGET_ACCURACY} {reached}; {cost}"
            title, order = env, math.inf if tokens is None else tokens
            if board:
                title += f", {config['eval_num_tasks']} held-out tasks, {budget:,} sampled tokens"
                order = 0
            rows.append((title, order, -last[f"eval/{env}/accuracy"], line))
    if not rows:
        condition = " and a budget, --max-sampled-tokens" * board
        raise UsageError(f"name runs with an evaluation{condition}, such as runs/a runs/b")
    texts: list[str] = []
    for title, group in itertools.groupby(sorted(rows), key=lambda row: row[0]):
        texts += [title, *(line for *_, line in group)]
    return texts


def main(args: list[str]) -> int:
    def run(words: list[str]) -> int:
        tyro.cli(compare, args=words, prog="python -m core.report.compare")
        return 0

    return cli.execute(run, args, lambda words: words, "core.report.compare")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
