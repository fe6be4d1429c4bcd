"""The seconds that a checkpoint costs training, written while it waits and while it goes on.

    python runs/benchmarks/saving.py                 # 16 minutes on two cores; needs smollm2
    python runs/benchmarks/saving.py --rounds 1 --no-write

All weights of `smollm2` are trained on sums; a checkpoint has 1.6 GB. Each child process is a run
of train.py, timed from the end of update 3 to the end of update 7. It saves after update 4, or
never ("none"). What a checkpoint costs is the difference to the run of the same round that never
saves. "waits" writes as picoRL did before: training waits until the checkpoint is on the disk.
"""

import os
import tempfile
from functools import partial
from time import perf_counter
from typing import Any

import tyro
from pairs import ROOT, Rounds, alternate, in_child, of, publish, run_child, spread
from record import markdown

FIRST, LAST = 3, 7  # the updates between whose ends the time is taken


def main(args: Rounds) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # inherited by the children
    ways = ("none", "waits", "goes on")
    sides = {way: partial(in_child, __file__, "train", way=way) for way in ways}
    publish("saving", [{"sides": alternate(sides, args.rounds, "seconds")}], table, args.write)


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per way, as Markdown."""
    sides = cases[0]["sides"]
    base = of(sides["none"], "seconds")
    rows = [["(no checkpoint)", spread(base, ".1f"), ""]]
    for way in ("waits", "goes on"):
        times = of(sides[way], "seconds")
        more = [a - b for a, b in zip(times, base, strict=True)]
        rows.append([way, spread(times, ".1f"), spread(more, ".1f")])
    head = "while a checkpoint is written, training | four updates, s | more than without, s"
    return markdown(head, rows)


def train(way: str) -> dict[str, Any]:
    """The seconds from the end of update FIRST to the end of update LAST."""
    from core.loop.run import Run
    from core.run import checkpoint, cli
    from train import main as train_main

    ends: dict[int, float] = {}
    finish = Run.finish_update

    def finish_update(run: Run, update: int, *args: Any) -> None:
        finish(run, update, *args)
        if update == FIRST:
            run.outputs.writer.wait()  # for the checkpoint of update 1
        thread = run.outputs.writer.thread
        assert update != LAST or thread is None or not thread.is_alive()
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

if __name__ == "__main__" and not run_child(PARTS):
    main(tyro.cli(Rounds, description=__doc__))
