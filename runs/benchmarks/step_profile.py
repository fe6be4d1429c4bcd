"""Where the seconds of a training step go, by phase and kind of work.

    python runs/benchmarks/step_profile.py       # seven minutes; writes speed/README.md

The step of vs_trl.py, of picoRL and of TRL, on one thread, five times after one that is not
measured. torch.profiler gives the time in each operator; the rest is Python, and the profiler
itself. The machine must be quiet.
"""

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import torch  # noqa: E402
import vs_trl  # noqa: E402
from record import markdown, write_table  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from workload import PROMPT_TOKENS, SHAPES, WORK, save_model  # noqa: E402

STEPS = 5
KINDS = {  # by the beginning of the operator's name, in this order
    "matrix products": ("aten::mm", "aten::addmm", "aten::linear", "aten::matmul"),
    "attention": ("aten::_scaled", "aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::softmax"),
    "norms and other element-wise": (
        "aten::mul", "aten::add", "aten::pow", "aten::mean", "aten::rsqrt", "aten::silu",
        "aten::div", "aten::neg", "aten::sum", "aten::sub", "aten::exp",
    ),
    "copies and indices": (
        "aten::copy", "aten::fill", "aten::zero", "aten::cat", "aten::index", "aten::embedding",
        "aten::clone", "aten::slice", "aten::stack", "aten::scatter",
    ),
    "other operators": ("",),
}  # fmt: skip
Sums = defaultdict[str, float]
METERS: list["Meter"] = []  # of this process


def kind_of(operator: str) -> str:
    return next(kind for kind, begins in KINDS.items() if operator.startswith(begins))


class Meter(vs_trl.StepTimer):
    """A StepTimer that profiles the phases of steps; `steps` has a row of seconds for each."""

    def __init__(self, gpu: bool) -> None:
        super().__init__(gpu)
        self.steps: list[Sums] = []
        self.now = Sums(float)
        self.profile: profile | None = None
        METERS.append(self)

    def begin(self) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU])
        self.started = time.perf_counter()
        self.profile.__enter__()

    def end(self, phase: str) -> None:
        if self.profile is None:  # before the first step
            return
        spent = time.perf_counter() - self.started
        self.profile.__exit__(None, None, None)
        inside = 0.0
        for event in self.profile.key_averages():
            seconds = event.self_cpu_time_total / 1e6
            self.now[f"{phase}: {kind_of(event.key)}"] += seconds
            inside += seconds
        self.now[f"{phase}: Python and the profiler"] += spent - inside

    def time_sampling(self, sample: Callable) -> Callable:
        def profiled(*args: Any, **kwargs: Any) -> Any:
            self.end("training")
            self.begin()
            found = sample(*args, **kwargs)
            self.end("sampling")
            self.begin()
            return found

        return super().time_sampling(profiled)

    def step_ended(self) -> None:
        super().step_ended()
        self.end("training")
        self.steps.append(self.now)
        self.now = Sums(float)
        self.begin()


def measure(folder: str, side: str, prompt_tokens: int) -> dict[str, float]:
    """The medians of STEPS steps of a side of vs_trl.py, by phase and kind of work."""
    torch.set_num_threads(1)
    vs_trl.StepTimer = Meter
    size = dict(vs_trl.SIDES[side])
    run: Callable[..., Any] = vs_trl.PARTS[size.pop("part")]
    run(folder=folder, gpu=False, lora_rank=0, prompt_tokens=prompt_tokens, steps=STEPS, **WORK,
        **size)  # fmt: skip
    [meter] = METERS
    steps = meter.steps[1:]
    assert len(steps) == STEPS, len(steps)
    kinds = {kind for step in steps for kind in step}
    return {kind: statistics.median(step[kind] for step in steps) for kind in kinds}


def main() -> None:
    columns: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, SHAPES["4M"])
        for tokens in PROMPT_TOKENS:
            for side in vs_trl.SIDES:  # a fresh process each
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    found = pool.submit(measure, folder, side, tokens).result()
                columns[f"{side}, {tokens} tokens"] = found
    rows = []
    for phase in ("sampling", "training"):
        for kind in (*KINDS, "Python and the profiler"):
            found = [column.get(f"{phase}: {kind}", 0.0) for column in columns.values()]
            rows.append([phase, kind, *(f"{seconds:.2f}" for seconds in found)])
    rows.append(["**both**", "", *(f"**{sum(c.values()):.2f}**" for c in columns.values())])
    write_table(HERE / "speed", markdown(" | ".join(["phase", "seconds of", *columns]), rows),
                "step_profile")  # fmt: skip


if __name__ == "__main__":
    main()
