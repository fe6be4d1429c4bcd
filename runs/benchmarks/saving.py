"""The seconds that a checkpoint costs training, written while it waits and while it goes on.

    python runs/benchmarks/saving.py                 # 16 minutes on two cores; needs smollm2
    python runs/benchmarks/saving.py --rounds 1 --no-write

All weights of `smollm2` are trained on sums; a checkpoint has 1.6 GB. Each child process is a run
of train.py, timed from the end of update 3 to the end of update 7. It saves after update 4, or
never ("none"). What a checkpoint costs is the difference to the run of the same round that never
saves. "waits" writes as picoRL did before: training waits until the checkpoint is on the disk.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tyro
from pairs import ROOT, alternate, in_child, publish, run_child, spread

FIRST, LAST = 3, 7  # the updates between whose ends the time is taken


@dataclass
class Args:
    """What to measure."""

    rounds: int = 5  # runs of each kind, in turn
    write: bool = True  # save the results as JSON and write the table into README.md


def main(args: Args) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # inherited by the children
    ways = ("none", "waits", "goes on")
    sides = {way: partial(in_child, __file__, "train", way=way) for way in ways}
    publish("saving", [{"sides": alternate(sides, args.rounds, "seconds")}], table, args.write)


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per way, as Markdown."""
    sides = cases[0]["sides"]
    base = [answer["seconds"] for answer in sides["none"]]
    lines = ["| while a checkpoint is written, training | four updates, s | more than without, s |"]
    lines.append("| --- | --- | --- |")
    for way, answers in sides.items():
        times = [answer["seconds"] for answer in answers]
        more = [a - b for a, b in zip(times, base, strict=True)]
        name = "(no checkpoint)" if way == "none" else way
        lines.append(f"| {name} | {spread(times, '.1f')} | "
                     f"{'' if way == 'none' else spread(more, '.1f')} |")  # fmt: skip
    return lines


def train(way: str) -> dict[str, Any]:
    """The seconds from the end of update FIRST to the end of update LAST."""
    from core.run import checkpoint, cli
    from core.run.open import Run
    from train import main as train_main

    ends: dict[int, float] = {}
    finish = Run.finish_update

    def finish_update(run: Run, update: int, *args: Any) -> None:
        finish(run, update, *args)
        if update == FIRST:
            run.writer.wait()  # for the checkpoint of update 1
        assert update != LAST or run.writer.thread is None or not run.writer.thread.is_alive()
        ends[update] = perf_counter()

    Run.finish_update = finish_update  # type: ignore[method-assign]
    if way == "none":
        Run.save = lambda run: False  # type: ignore[method-assign]
    if way == "waits":
        checkpoint.COPY_SHARE = 0.0  # no memory for a copy
    flags = f"""--config {ROOT}/runs/smollm2/sums.yaml --lr 1e-5 --device cpu --eval-num-tasks 0
        --microscope 0 --num-updates {LAST + 1} --save-every 4"""
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)  # for runs/
        train_main(cli.parse(flags.split()))
        os.chdir(ROOT)
    return {"seconds": ends[LAST] - ends[FIRST]}


PARTS = {"train": train}

if __name__ == "__main__":
    if not run_child(PARTS):
        main(tyro.cli(Args, description=__doc__))
