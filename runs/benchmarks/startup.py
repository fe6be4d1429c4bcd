"""How long a user waits for `--help`, for the first update and for the whole default run.

    python runs/benchmarks/startup.py  # 6 minutes on two cores
    python runs/benchmarks/startup.py --rounds 1 --no-write

Runs `python train.py` in a fresh process and an empty folder, timed from its start until
metrics.jsonl has the first update, and until the process ends.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro
from pairs import ROOT, Rounds, publish, spread, verdict
from record import markdown, read_records

TRAIN = ROOT / "train.py"
GOALS = {"`--help`": 1.5, "first update": 6.0, "whole run": 20.0}  # seconds, at most


def main(args: Rounds) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # inherited by the children
    waits: dict[str, list[float]] = {name: [] for name in GOALS}
    for turn in range(args.rounds):
        waits["`--help`"].append(seconds_of_help())
        for name, seconds in default_run().items():
            waits[name].append(seconds)
        latest = {name: round(seconds[-1], 1) for name, seconds in waits.items()}
        print(f"round {turn + 1} of {args.rounds}: {latest}", flush=True)
    publish("startup", [{"waits": waits}], table, args.write)


def seconds_of_help() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, TRAIN, "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def default_run() -> dict[str, float]:
    """Returns the seconds until update 1 is in metrics.jsonl, and until the run has ended.

    Raises RuntimeError if the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "runs/a/metrics.jsonl")
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, TRAIN, "--run-name", "a"], cwd=folder, stdout=subprocess.DEVNULL
        )
        while process.poll() is None and all(r.get("update") != 1 for r in read_records(metrics)):
            time.sleep(0.02)
        first = time.perf_counter() - started
        if process.wait():
            raise RuntimeError(f"train.py ended with {process.returncode}")
        return {"first update": first, "whole run": time.perf_counter() - started}


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per wait, as Markdown."""
    waits = cases[0]["waits"].items()
    return markdown("wait for | s | goal, s", [
        [name, spread(seconds, ".1f"), verdict(statistics.median(seconds), GOALS[name])]
        for name, seconds in waits
    ])  # fmt: skip


if __name__ == "__main__":
    main(tyro.cli(Rounds, description=__doc__))
