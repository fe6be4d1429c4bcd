"""The default run on a quiet machine, and beside as many busy programs as it has cores.

    python runs/benchmarks/busy.py                   # 8 minutes on two cores
    python runs/benchmarks/busy.py --rounds 1 --no-write
    python runs/benchmarks/busy.py --preload FILE    # LLVM's or Intel's OpenMP; writes nothing

Four updates of `python train.py` in a fresh process, with the setting of core/__init__.py for how
long OpenMP's threads wait in a loop, and with the library's own. Both take turns. A busy program
is an endless loop of Python. `--preload` replaces GNU's library, which Linux has, by that of macOS
(libomp.so of LLVM) or Windows (libiomp5.so of Intel).
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import tyro
from pairs import ROOT, Rounds, alternate, of, publish, spread, verdict
from record import markdown

# GNU's default of about 3 ms, LLVM's and Intel's of 200 ms
LIBRARY = {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}
SETTINGS = {"short loop": {}, "the library's": LIBRARY}
GOAL = 1.7  # of the quiet time, at most


@dataclass
class Args(Rounds):
    """What to measure."""

    preload: str = ""  # the file of another OpenMP library


def main(args: Args) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # inherited by the children
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", *LIBRARY):
        os.environ.pop(name, None)
    sides = {f"{name}, {'busy' if busy else 'quiet'}": partial(train, setting, busy, args.preload)
             for busy in (False, True) for name, setting in SETTINGS.items()}  # fmt: skip
    results = alternate(sides, args.rounds, "seconds")
    publish("busy", [{"sides": results}], table, args.write and not args.preload)


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per setting, as Markdown."""
    rows = []
    for name in SETTINGS:
        quiet, busy = (of(cases[0]["sides"][f"{name}, {load}"], "seconds")
                       for load in ("quiet", "busy"))  # fmt: skip
        ratio = statistics.median(busy) / statistics.median(quiet)
        goal = verdict(ratio, GOAL) if name == "short loop" else ""
        rows.append([name, spread(quiet, ".1f"), spread(busy, ".1f"), f"{ratio:.2f}", goal])
    head = "threads wait for | quiet, s | beside busy programs, s | busy / quiet | goal"
    return markdown(head, rows)


def train(setting: dict[str, str], busy: bool, preload: str) -> dict[str, Any]:
    """The seconds of a run. Raises RuntimeError if it fails."""
    variables = os.environ | setting | ({"LD_PRELOAD": preload} if preload else {})
    command = [sys.executable, str(ROOT / "train.py"), "--num-updates", "4", "--run-name", "a"]
    loop = [sys.executable, "-c", "while True: pass"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for _ in range((os.cpu_count() or 1) if busy else 0):
            stack.callback(subprocess.Popen(loop).kill)
        started = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"train.py ended with {done.returncode}")
    return {"seconds": seconds}


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
