"""Compares runs: prints a table and writes `compare.html`, one page with the reports of all runs.

python -m core.report.compare runs/a runs/b
"""

import sys
from pathlib import Path
from typing import Any

import tyro
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from core.metrics import before_after, describe
from core.report.page import write_page
from core.report.summary import TARGET_ACCURACY, minutes, sampled_tokens, tokens_to_target
from core.run_log import METRICS, read_records
from core.types import UsageError

HEADERS = ["run", "algorithm", "environment", "held-out accuracy [95%], before -> after",
           "sampled tokens", f"tokens to accuracy {TARGET_ACCURACY:g}", "minutes"]  # fmt: skip


def compare(runs: tyro.conf.Positional[tuple[Path, ...]]) -> None:
    """Compare runs: print a table and write compare.html beside the first run.

    Args:
        runs: folders of runs, such as runs/a runs/b
    """
    if not runs:
        raise UsageError(
            "name the folders of the runs: python -m core.report.compare runs/a runs/b"
        )
    configs = [read_config(run) for run in runs]
    table = Table(box=None, header_style="bold")
    for i, header in enumerate(HEADERS):
        table.add_column(header, overflow="fold", justify="left" if i < 4 else "right")
    for run, config in zip(runs, configs, strict=True):
        for row in table_rows(run, config):
            table.add_row(*map(escape, row))
    path = runs[0].resolve().parent / "compare.html"
    write_page(path, list(zip(runs, configs, strict=True)))
    Console().print(table)
    print(f"side by side: {path}")


def read_config(run_dir: Path) -> dict[str, Any]:
    """Returns the settings in config.yaml of a run.

    Raises UsageError if the folder has no config.yaml or no metrics.jsonl, or if config.yaml lacks
    the settings that every run has.
    """
    path = run_dir / "config.yaml"
    for file in (path, run_dir / METRICS):
        if not file.is_file():
            raise UsageError(f"{run_dir}: not the folder of a run (it has no {file.name})")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UsageError(f"{path}: not valid YAML") from None
    if not isinstance(config, dict) or {"algo", "env", "model_id", "seed"} - config.keys():
        raise UsageError(f"{path}: not the settings of a run")
    return config


def table_rows(run_dir: Path, config: dict[str, Any]) -> list[list[str]]:
    """Returns one row of the table, as in HEADERS, per environment that the run evaluated."""
    records = read_records(run_dir / METRICS)
    rows = []
    for env, first, last in before_after(records) or [(" ".join(config["env"]), {}, {})]:
        accuracy = f"{describe(env, first)} -> {describe(env, last)}" if first else "not evaluated"
        tokens = tokens_to_target(env, records)
        rows.append([
            run_dir.name, str(config["algo"]), env, accuracy, f"{sampled_tokens(records):,}",
            "not reached" if tokens is None else f"{tokens:,}", f"{minutes(records):.1f}",
        ])  # fmt: skip
    return rows


def main(args: list[str]) -> int:
    """Runs the command; returns the exit code, 2 after invalid input."""
    try:
        tyro.cli(compare, args=args, prog="python -m core.report.compare")
    except UsageError as error:
        print(f"core.report.compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
