"""Shared by the reproduce.py scripts: run train.py, keep the metrics, write tables into a README.

python runs/<folder>/reproduce.py              # make every run of the folder again
python runs/<folder>/reproduce.py --missing    # make the runs that have no metrics file yet
python runs/<folder>/reproduce.py --draw       # write the table and the picture; make no run
python runs/<folder>/reproduce.py NAME ...     # make the runs with these names
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def chosen_runs(description: str | None, folder: Path, names: Iterable[str]) -> list[str]:
    """Returns the names of the runs that the command line asks for, out of `names`."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=style)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--missing", action="store_true", help="skip runs that are recorded")
    parser.add_argument("--draw", action="store_true", help="only write the table and the picture")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"no such run: {', '.join(sorted(unknown))}")
    chosen = [] if args.draw else args.names or list(names)
    return [n for n in chosen if not (args.missing and (folder / f"{n}.jsonl").exists())]


def make_run(
    folder: Path,
    name: str,
    flags: str,
    script: str = "train.py",
    keep: dict[str, Path] | None = None,
) -> None:
    """Run `python SCRIPT FLAGS` and keep its metrics in folder/NAME.jsonl.

    The wall time goes to folder/seconds.json, the machine and the version to folder/recorded.txt.
    `keep` maps files of the run's folder to the places they are copied to.
    """
    run, seconds = train(flags, f"{folder.name}-{name}", script)
    shutil.copy(run / "metrics.jsonl", folder / f"{name}.jsonl")
    for source, target in (keep or {}).items():
        shutil.copy(run / source, target)
    shutil.rmtree(run)
    write_atomically(
        folder / "seconds.json", json.dumps(read_seconds(folder) | {name: seconds}, indent=1)
    )
    write_recorded(folder)


def train(flags: str, run_name: str, script: str = "train.py") -> tuple[Path, int]:
    """Runs train.py. Returns the run's folder and the seconds."""
    run = ROOT / "runs" / run_name
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, *script.split(), *flags.split()]
    started = time.monotonic()
    subprocess.run([*command, "--run-name", run_name], cwd=ROOT, check=True)
    return run, round(time.monotonic() - started)


def read_seconds(folder: Path) -> dict[str, int]:
    """Returns the wall time of each run of a folder."""
    file = folder / "seconds.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write_recorded(folder: Path) -> None:
    """Writes folder/recorded.txt: with which version and on what machine the runs were made."""
    line = f"Recorded with picoRL at commit {commit()} on {machine()}; torch {version('torch')}."
    write_atomically(folder / "recorded.txt", line)


def recorded_with(folder: Path) -> str:
    """Returns the sentence in folder/recorded.txt."""
    return (folder / "recorded.txt").read_text().strip()


def machine() -> str:
    """Returns the machine and the date, for a README."""
    date = time.strftime("%Y-%m-%d")
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), no GPU, {date}"


def commit() -> str:
    """Returns the short hash of the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def write_table(folder: Path, lines: list[str], name: str = "") -> None:
    """Replace the lines between the marks `<!-- table NAME -->` and `<!-- end of table NAME -->`.

    Raises ValueError if folder/README.md does not have both marks.
    """
    page, mark = folder / "README.md", f"table {name}".strip()
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    head, found, rest = page.read_text().partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no marks for: {mark}")
    page.write_text(head + begin + "\n".join(lines) + "\n" + end + tail)


def write_atomically(file: Path, text: str) -> None:
    """Write a file that other processes may be writing at the same moment."""
    part = file.with_name(f".part-{os.getpid()}-{file.name}")
    part.write_text(text + "\n")
    os.replace(part, file)
