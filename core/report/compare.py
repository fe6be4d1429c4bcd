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

from core.run import cli

if __name__ == "__main__":
    cli.need_temporary_folder("core.report.compare")

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from core.report import board as boards
from core.report.curves import draw_comparison
from core.report.page import write_page
from core.report.summary import (
    TARGET_ACCURACY,
    accuracy_by_tokens,
    algorithm_title,
    minutes,
    sampled_tokens,
    tokens_to_target,
)
from core.results import accuracy_of, before_after
from core.run.folder import read_settings
from core.run.log import METRICS, Record, read_records
from core.types import UsageError
from environments.plumbing.registry import EnvSpec
from environments.plumbing.text import printable

HEADERS = ["rank", "run", "algorithm", "environment", "held-out accuracy [95%], before -> after",
           "sampled tokens", f"tokens to accuracy {TARGET_ACCURACY:g}", "minutes"]  # fmt: skip
TIES = "Equal ranks: the 95% interval of the difference to the first of them includes 0."
TEXTS = 5  # the first columns; the others are numbers


def compare(
    runs: tyro.conf.Positional[tuple[Path, ...]], board: bool = False, budget: int = 0
) -> None:
    """Compare runs: print a table, and write compare.png and compare.html beside the first run.

    Args:
        runs: folders of runs, such as runs/a runs/b
        board: only print a table: accuracy at the same number of sampled tokens, and which ranks
            are ties; folders that are not runs are left out, so runs/* will do
        budget: of --board, in sampled tokens; 0: the --max-sampled-tokens of most runs
    """
    if not runs:
        raise UsageError(
            "name the folders of the runs: python -m core.report.compare runs/a runs/b"
        )
    if budget < 0 or (budget and not board):
        raise UsageError(f"--budget {budget}: a number of tokens, with --board")
    runs = tuple(dict.fromkeys(itertools.chain(*map(matching, runs))))
    if board:
        print_board(runs, budget)
        return
    configs = [read_config(run) for run in runs]
    records = [read_records(run / METRICS) for run in runs]
    table = Table(box=None, header_style="bold")
    for i, header in enumerate(HEADERS):
        table.add_column(header, overflow="fold", justify="left" if i < TEXTS else "right")
    rows = table_rows(list(zip(runs, configs, records, strict=True)))
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    folder = runs[0].resolve().parent
    write_page(folder / "compare.html", list(zip(runs, configs, strict=True)))
    draw_comparison(folder / "compare.png", [
        (run.name, rows) for run, rows in zip(runs, records, strict=True)
    ])  # fmt: skip
    if (console := Console()).width < 100:  # a table of so many columns would fold every cell
        for cells in rows:
            console.print(Text(printable(narrow(cells))))
    else:
        console.print(table)
    print(TIES)
    if any(config.get("eval_every") != 1 for config in configs):
        print("Tokens are counted up to an evaluation: for an exact rank, run with --eval-every 1.")
    print(f"by tokens: {folder / 'compare.png'}   side by side: {folder / 'compare.html'}")


def print_board(folders: tuple[Path, ...], budget: int) -> None:
    """Prints the board of the folders that are runs."""
    runs = []
    for folder in folders:
        with suppress(UsageError):
            runs.append((folder, read_config(folder), read_records(folder / METRICS)))
    title, rows, lines = boards.board(runs, budget)
    console, table = Console(), Table(box=None, header_style="bold", pad_edge=False)
    for i, header in enumerate(boards.HEADERS):
        table.add_column(header, overflow="fold", justify="left" if i < 4 else "right")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(Text(printable(title), style="bold"))
    console.print(table)
    print(TIES)
    for line in lines:
        console.print(Text(printable(line)))
    if others := len(folders) - len(runs):
        print(f"{others} of the folders are not runs.")


def matching(run: Path) -> list[Path]:
    """The runs that a pattern such as runs/* stands for, which PowerShell does not expand."""
    if run.exists():
        return [run]
    found = map(Path, sorted(glob.glob(str(run))))
    return [folder for folder in found if (folder / "config.yaml").exists()] or [run]


def read_config(run_dir: Path) -> dict[str, Any]:
    """Returns the settings in config.yaml of a run.

    Raises UsageError if the folder has no config.yaml or no metrics.jsonl, or if config.yaml lacks
    the settings that every run has.
    """
    path = run_dir / "config.yaml"
    for file in (path, run_dir / METRICS):
        if not file.is_file():
            raise UsageError(f"{run_dir}: not the folder of a run (it has no {file.name})")
    config = read_settings(path)
    if {"algo", "env", "model_id", "seed"} - config.keys():
        raise UsageError(f"{path}: not the settings of a run")
    return {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}


def table_rows(runs: list[tuple[Path, dict[str, Any], list[Record]]]) -> list[list[str]]:
    """Returns one row of the table, as in HEADERS, per run and environment that it evaluated.

    `runs`: folder, settings and metrics of each. Within an environment, runs are ranked by the
    tokens that they sampled until the target accuracy; those that did not reach it follow, without
    a rank, by their final accuracy. Runs that cannot be told apart share a rank, as on the board:
    a run has a rank of its own if the first of the rank above was better after as many tokens.
    """
    found: list[tuple[str, float, float, list[Record], list[str]]] = []
    for run_dir, config, records in runs:
        envs = " ".join(EnvSpec(env).short for env in config["env"])
        for env, first, last in before_after(records) or [(envs, {}, {})]:
            tokens, final = tokens_to_target(env, records), last.get(f"eval/{env}/accuracy", -1.0)
            row = [
                run_dir.name, algorithm_title(config), env,
                f"{accuracy_of(env, first)} -> {accuracy_of(env, last)}" if first
                else "not evaluated",
                f"{sampled_tokens(records):,}", "not reached" if tokens is None else f"{tokens:,}",
                f"{minutes(records):.1f}",
            ]  # fmt: skip
            found.append((env, math.inf if tokens is None else tokens, final, records, row))
    rows = []
    for env in dict.fromkeys(env for env, *_ in found):
        entries = sorted((entry[1:] for entry in found if entry[0] == env),
                         key=lambda entry: (entry[0], -entry[1]))  # fmt: skip
        rank, (best, _, of_best, _) = 1, entries[0]
        for place, (needed, _, records, row) in enumerate(entries, 1):
            if math.isinf(needed):
                rows.append(["-", *row])
                continue
            one, other = (evaluation_at(env, its, best) for its in (of_best, records))
            if boards.is_better(one, other, env):
                rank, best, of_best = place, needed, records
            rows.append([str(rank), *row])
    return rows


def evaluation_at(env: str, records: list[Record], tokens: float) -> Record:
    """The first evaluation after so many sampled tokens, or else the last."""
    evaluations = [record for record in records if f"eval/{env}/accuracy" in record]
    points = zip(accuracy_by_tokens(env, records), evaluations, strict=True)
    return next((record for (at, _), record in points if at >= tokens), evaluations[-1])


def narrow(row: list[str]) -> str:
    """A row of the table as lines for a narrow screen."""
    rank, run, algorithm, env, accuracy, tokens, needed, time = row
    return (f"{rank}  {run}: {algorithm} on {env}\n   {accuracy}\n   {tokens} tokens sampled, "
            f"accuracy {TARGET_ACCURACY:g}: {needed}, {time} min")  # fmt: skip


def main(args: list[str]) -> int:
    """Runs the command; returns the exit code, 2 after invalid input, 1 if the disk fails."""
    prog = "python -m core.report.compare"
    return cli.run(lambda given: tyro.cli(compare, args=given, prog=prog) or 0, args,
                   lambda given: given, "core.report.compare")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
