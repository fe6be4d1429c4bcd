"""Damages, kills, cuts off and deceives runs in many ways, and counts what picoRL does about it.

    python runs/faults/reproduce.py                           # all; about ten minutes on two cores
    python runs/faults/reproduce.py --only files kills --tries 20 --seed 7 --no-write

Each area is a file of this folder with a function `cases`. A try fails if it ends in a traceback,
takes more than 30 seconds, prints more than one line for invalid input, or gives another result
without a word. The random seed is printed; with the same seed the tries are the same. The results
are saved in results.json and as a table in README.md.
"""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]

import tyro  # noqa: E402
from record import commit, machine, write_table  # noqa: E402

LIMIT = 30  # seconds for one try
ANSWER = "answer: "
AREAS: dict[str, tuple[int, str]] = {  # file -> tries, and what they are
    "kills": (60, "runs stopped up to three times by kills in a write, lost power and signals"),
    "disks": (150, "disks that are full, over a quota, read-only or broken, in runs and commands"),
    "terminal": (200, "control sequences and markup in texts that reach the terminal"),
    "trust": (150, "settings and answers from files and servers that try to run code"),
}


@dataclass
class Args:
    """What to try."""

    only: tuple[str, ...] = tuple(AREAS)  # areas
    tries: int = 0  # of each area; 0: as in the table
    seed: int = field(default_factory=lambda: random.SystemRandom().randrange(10**6))
    write: bool = True  # save results.json and the table in README.md


class TookTooLong(BaseException):
    """Not an Exception, which the code under test might catch."""


def main(args: Args) -> int:
    """Makes all tries, two areas at a time; returns 1 if one failed."""
    if unknown := set(args.only) - set(AREAS):
        print(f"unknown area {unknown.pop()}; choose from {', '.join(AREAS)}", file=sys.stderr)
        return 2
    print(f"seed {args.seed}", flush=True)
    with ThreadPoolExecutor(2) as pool:
        futures = {
            area: pool.submit(in_child, area, args.tries or AREAS[area][0], args.seed)
            for area in args.only
        }
        results = {area: future.result() for area, future in futures.items()}
    print("\n".join(table(results)))
    if args.write:
        saved = {"seed": args.seed, "machine": machine(), "commit": commit(), "areas": results}
        (HERE / "results.json").write_text(json.dumps(saved, indent=1) + "\n")
        command = f"`python runs/faults/reproduce.py --seed {args.seed}`"
        above = f"{command} at commit {saved['commit']} on {saved['machine']}."
        write_table(HERE, [above, "", *table(results)])
    return int(any(result["failures"] for result in results.values()))


def in_child(area: str, tries: int, seed: int) -> dict[str, Any]:
    """The result of `make_tries` in a process of its own, whose output is shown."""
    command = [sys.executable, __file__, "--child", area, str(tries), str(seed)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout
    result = None
    for line in child.stdout:
        if line.startswith(ANSWER):
            result = json.loads(line.removeprefix(ANSWER))
        else:
            print(f"{area}: {line}", end="", flush=True)
    if child.wait() or result is None:
        raise RuntimeError(f"the process of {area} ended with {child.returncode}")
    return result


def make_tries(area: str, tries: int, seed: int) -> dict[str, Any]:
    """Makes `tries` of an area; returns their number, the failures and the longest time."""
    module = importlib.import_module(area)
    limit = getattr(module, "LIMIT", LIMIT)  # kills: of one process, several in a try
    failures, longest, started = [], 0.0, time.monotonic()
    made = 0
    for name, call in islice(module.cases(random.Random(f"{seed} {area}")), tries):
        begun = time.monotonic()
        failure = try_once(call, limit)
        longest = max(longest, time.monotonic() - begun)
        made += 1
        if failure:
            failures.append(f"{name}: {failure}"[:1000])
            print(failures[-1], flush=True)
        if made % 50 == 0:
            print(f"{made} of {tries} tries, {len(failures)} failures", flush=True)
    seconds = time.monotonic() - started
    return {"tries": made, "failures": failures, "longest_s": longest, "seconds": seconds}


def try_once(call: Callable[[], str], limit: float) -> str:
    """What `call` returns; a line for an exception, or if it takes more than `limit` seconds."""

    def too_long(*_: object) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return call()
    except TookTooLong:
        return f"no end after {limit} seconds"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return f"{type(error).__name__} at {place}: {str(error)[:200]!r}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """One row per area, and their sum, as Markdown."""
    lines = [
        "| area | what | tries | failures | longest try, s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for area, result in results.items():
        failures = len(result["failures"])
        lines.append(f"| [{area}]({area}.py) | {AREAS[area][1]} | {result['tries']} | {failures} | "
                     f"{result['longest_s']:.1f} |")  # fmt: skip
    tries = sum(result["tries"] for result in results.values())
    failures = sum(len(result["failures"]) for result in results.values())
    return [*lines, f"| all | | {tries:,} | {failures} | |"]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        made = make_tries(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        print(ANSWER + json.dumps(made), flush=True)
    else:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
