"""Compares runs: which one needs the fewest sampled tokens?

    python -m core.report.compare runs/a runs/b
    python -m core.report.compare --board "runs/*"    # the runs of a room: core/report/board.py

Prints a table with the best run first. Beside the first run, writes `compare.png`, the held-out
accuracy by sampled tokens, and `compare.html`, one page with the reports of all runs.
"""

import glob
import itertools
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from core.faults import UsageError
from core.files.run_log import METRICS, read_records
from core.report import board as boards
from core.report.page import write_page
from core.report.summary import (
    TARGET_ACCURACY,
    algorithm_title,
    minutes,
    names_of,
    sampled_tokens,
    tokens_to_target,
)
from core.results import Record, accuracies_of, before_after
from core.settings import read_settings
from core.terminal import cli
from environments.plumbing.registry import short_names
from environments.plumbing.text import printable

HEADERS = ["run", "algorithm", "environment", "held-out accuracy [95%], before -> after",
           "sampled tokens", f"tokens to accuracy {TARGET_ACCURACY:g}", "minutes"]  # fmt: skip
TEXTS = 4  # the first columns; the others are numbers


def compare(runs: tyro.conf.Positional[tuple[Path, ...]], board: bool = False) -> None:
    """Compare runs: print a table, and write compare.png and compare.html beside the first run.

    Args:
        runs: folders of runs, such as runs/a runs/b
        board: only print a table: accuracy at the same number of sampled tokens; folders that
            are not runs are left out, so runs/* will do
    """
    if not runs:
        raise UsageError(
            "name the folders of the runs: python -m core.report.compare runs/a runs/b"
        )
    runs = tuple(dict.fromkeys(itertools.chain(*map(matching, runs))))
    if board:
        print_board(runs)
        return
    from core.report.curves import draw_comparison  # imports matplotlib, which takes a second

    configs = [read_config(run) for run in runs]
    records = [read_records(run / METRICS) for run in runs]
    rows = table_rows(list(zip(runs, configs, records, strict=True)))
    folder = runs[0].resolve().parent
    write_page(folder / "compare.html", list(zip(runs, configs, strict=True)))
    draw_comparison(folder / "compare.png", [
        (name, rows) for name, rows in zip(names_of([*runs]), records, strict=True)
    ])  # fmt: skip
    if (console := Console()).width < 100:  # a table of so many columns would fold every cell
        for cells in rows:
            console.print(Text(printable(narrow(cells))))
    else:
        print_table(console, HEADERS, rows)
    if any(config.get("eval_every") != 1 for config in configs):
        print("Tokens are counted up to an evaluation: for an exact order use --eval-every 1.")
    print(f"by tokens: {folder / 'compare.png'}   side by side: {folder / 'compare.html'}")


def print_board(folders: tuple[Path, ...]) -> None:
    """Prints the board of the folders that are runs."""
    runs = []
    for folder in folders:
        with suppress(UsageError):
            runs.append((folder, read_config(folder), read_records(folder / METRICS)))
    console = Console()
    for title, rows in boards.boards(runs):
        console.print(Text(printable(title), style="bold"))
        print_table(console, boards.HEADERS, rows)
    if others := len(folders) - len(runs):
        print(f"{others} of the folders are not runs.")


def print_table(console: Console, headers: list[str], rows: list[list[str]]) -> None:
    """Prints the rows; the first columns are texts, the others numbers."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(header, overflow="fold", justify="left" if i < TEXTS else "right")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table)


def matching(run: Path) -> list[Path]:
    """The runs that a pattern such as runs/* stands for, which PowerShell does not expand."""
    if run.exists():
        return [run if run.name.strip(".") else run.resolve()]  # "." has no name to show
    found = map(Path, sorted(glob.glob(str(run))))
    return [folder for folder in found if (folder / "config.yaml").exists()] or [run]


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the settings in config.yaml of a run.

    Raises UsageError if the folder is not that of a run.
    """
    if not (folder / METRICS).is_file():
        raise UsageError(f"{folder}: not the folder of a run (it has no {METRICS})")
    return read_settings(folder / "config.yaml")


def table_rows(runs: list[tuple[Path, dict[str, Any], list[Record]]]) -> list[list[str]]:
    """Returns one row of the table, as in HEADERS, per run and environment that it evaluated.

    `runs`: folder, settings and metrics of each. Within an environment, runs are ordered by the
    tokens that they sampled until the target accuracy; those that did not reach it follow, by their
    final accuracy.
    """
    found: list[tuple[str, float, float, list[str]]] = []
    names = names_of([folder for folder, *_ in runs])
    for name, (_, config, records) in zip(names, runs, strict=True):
        trained = short_names(config["env"])
        for env, first, last in before_after(records) or [(trained, {}, {})]:
            tokens, final = tokens_to_target(env, records), last.get(f"eval/{env}/accuracy", -1.0)
            row = [
                name, algorithm_title(config), env,
                " -> ".join(accuracies_of(env, first, last)) if first
                else "not evaluated",
                f"{sampled_tokens(records):,}", "not reached" if tokens is None else f"{tokens:,}",
                f"{minutes(records):.1f}",
            ]  # fmt: skip
            found.append((env, math.inf if tokens is None else tokens, -final, row))
    envs = list(dict.fromkeys(env for env, *_ in found))
    found.sort(key=lambda entry: (envs.index(entry[0]), *entry[1:3]))
    return [row for *_, row in found]


def narrow(row: list[str]) -> str:
    """A row of the table as lines for a narrow screen."""
    run, algorithm, env, accuracy, tokens, needed, time = row
    return (f"{run}: {algorithm} on {env}\n   {accuracy}\n   {tokens} tokens sampled, "
            f"accuracy {TARGET_ACCURACY:g}: {needed}, {time} min")  # fmt: skip


def main(args: list[str]) -> int:
    """Runs the command; returns the exit code, 2 after invalid input, 1 if the disk fails."""
    prog = "python -m core.report.compare"
    return cli.execute(lambda given: tyro.cli(compare, args=given, prog=prog) or 0, args,
                   lambda given: given, "core.report.compare")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
