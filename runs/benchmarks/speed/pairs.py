"""Measuring in pairs: fresh processes that take turns, medians with their spread, and a page.

Each script has PARTS, functions that run in a child process of their own; `in_child` starts one and
brings back what it returned. What was measured goes to <script>-<machine>.json beside this file;
the tables of all machines to between the script's marks in the README.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path += [str(ROOT / "runs"), str(ROOT)]

from record import machine  # noqa: E402

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
ANSWER = "answer: "
PACKAGES = ("torch", "transformers", "trl", "vllm", "peft")


def in_child(script: str, part: str, **settings: Any) -> dict[str, Any]:
    """PARTS[part](**settings) of the script, in a fresh process.

    Raises RuntimeError with the end of its stderr when it fails.
    """
    command = [sys.executable, script, "--child", json.dumps({"part": part, **settings})]
    done = subprocess.run(command, capture_output=True, text=True)
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if done.returncode or not answers:
        raise RuntimeError(f"{part} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(answers[-1].removeprefix(ANSWER))


def play_part(parts: dict[str, Callable[..., dict[str, Any]]]) -> bool:
    """In a child: do what its parent asked, answer, and return True. False in a parent."""
    if sys.argv[1:2] != ["--child"]:
        return False
    settings = json.loads(sys.argv[2])
    print(ANSWER + json.dumps(parts[settings.pop("part")](**settings)), flush=True)
    return True


def in_turn(
    contestants: dict[str, Callable[[], dict[str, Any]]], rounds: int, figure: str
) -> dict[str, list[dict[str, Any]]]:
    """Every contestant's answers of so many rounds, A B A B ..; prints each one's `figure`."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    for turn in range(rounds):
        for name, play in contestants.items():
            found[name].append(play())
            value = found[name][-1][figure]
            print(f"  round {turn + 1} of {rounds}: {name:12} {figure} {value:.4g}", flush=True)
    return found


def spread(values: list[float], form: str = ".2f") -> str:
    """Median, and the least and the most.

    >>> spread([3.0, 1.0, 2.0])
    '2.00 [1.00, 3.00]'
    """
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Ours / theirs of each pair: both ran under the same load."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def verdict(ratio: float, goal: float, at_most: bool = True) -> str:
    """'at most 0.6: met', or 'missed'."""
    met = ratio <= goal if at_most else ratio >= goal
    return f"{'at most' if at_most else 'at least'} {goal:g}: {'met' if met else 'missed'}"


def publish(
    name: str, cases: list[dict[str, Any]], table: Callable[[list], list[str]], write: bool
) -> None:
    """Print the table; with `write`, keep the cases as JSON and put all machines' tables on the
    page. `table` makes Markdown lines of cases."""
    where, slug = described()
    result = {
        "machine": where,
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "threads": threads(),
        "versions": versions(),
        "cases": cases,
    }
    print("\n".join(["", *table(cases)]), flush=True)
    if not write:
        return
    target = HERE / f"{name}-{slug}.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    lines: list[str] = []
    for file in sorted(HERE.glob(f"{name}-*.json")):
        kept = json.loads(file.read_text())
        used = ", ".join(f"{package} {number}" for package, number in kept["versions"].items())
        lines += [f"{kept['machine']}, {kept['threads']} thread(s): `{kept['command']}`; {used}.",
                  "", *table(kept["cases"]), ""]  # fmt: skip
    write_table(HERE / "README.md", name, lines[:-1])
    print(f"\nwritten to {target.name} and the README beside it")


def write_table(page: Path, name: str, lines: list[str]) -> None:
    """Put the lines between the script's marks. Raises ValueError where there are none."""
    begin, end = f"<!-- table of {name} -->\n", f"<!-- end of table of {name} -->"
    head, found, rest = page.read_text().partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page.name} has no marks for {name}")
    page.write_text(head + begin + "\n".join(lines) + "\n" + end + tail)


def described() -> tuple[str, str]:
    """What this machine is, for a heading and for a file's name."""
    import torch

    if not torch.cuda.is_available():
        return machine(), "cpu"
    name = torch.cuda.get_device_name()
    return f"{name}, {time.strftime('%Y-%m-%d')}", name.lower().replace(" ", "_")


def threads() -> int:
    import torch

    return torch.get_num_threads()


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
