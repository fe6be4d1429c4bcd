"""Where the seconds of a training step go, by phase and kind of work.

    python runs/benchmarks/step_profile.py       # two minutes; writes speed/README.md

The step of vs_trl.py on one thread, five times after one that is not measured. torch.profiler gives
the time in each operator; the rest is Python, and the profiler itself. The machine must be quiet.
"""

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
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
    "log-probs": ("aten::_log_softmax", "aten::log_softmax", "aten::gather", "aten::logsumexp"),
    "optimizer": ("aten::_fused_adam", "aten::_foreach", "aten::linalg_vector_norm", "Optimizer"),
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


def kind_of(operator: str) -> str:
    return next(kind for kind, begins in KINDS.items() if operator.startswith(begins))


class Meter:
    """Profiles the phases of steps one after another; `steps` has a row of seconds for each."""

    def __init__(self) -> None:
        self.steps: list[Sums] = []
        self.now = Sums(float)

    def begin(self) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU])
        self.started = time.perf_counter()
        self.profile.__enter__()

    def end(self, phase: str) -> None:
        spent = time.perf_counter() - self.started
        self.profile.__exit__(None, None, None)
        inside = 0.0
        for event in self.profile.key_averages():
            seconds = event.self_cpu_time_total / 1e6
            self.now[f"{phase}: {kind_of(event.key)}"] += seconds
            inside += seconds
        self.now[f"{phase}: Python and the profiler"] += spent - inside

    def end_step(self) -> None:
        self.steps.append(self.now)
        self.now = Sums(float)


def measure(folder: str, prompt_tokens: int) -> Meter:
    from core.loop import play
    from core.loop.run import Run

    meter = Meter()
    collect, log = play.collect, Run.log

    def sample(*args: Any) -> Any:
        meter.begin()
        found = collect(*args)
        meter.end("sampling")
        meter.begin()
        return found

    def end_step(run: Run, update: int, *rest: Any) -> bool:
        stop = log(run, update, *rest)
        if update > 0:
            meter.end("training")
            meter.end_step()
        return stop

    play.collect, Run.log = sample, end_step
    try:
        picorl: Callable[..., Any] = vs_trl.picorl
        picorl(folder, False, 2048, 0, WORK["num_prompts"], WORK["group_size"], prompt_tokens,
               WORK["max_tokens"], STEPS)  # fmt: skip
    finally:
        play.collect, Run.log = collect, log
    return meter


def main() -> None:
    torch.set_num_threads(1)
    columns = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, SHAPES["4M"])
        for prompt_tokens in PROMPT_TOKENS:
            steps = measure(folder, prompt_tokens).steps[1:]
            assert len(steps) == STEPS, len(steps)
            columns.append({key: statistics.median(step[key] for step in steps)
                            for key in steps[0]})  # fmt: skip
    rows = []
    for phase in ("sampling", "training"):
        for kind in (*KINDS, "Python and the profiler"):
            found = [column.get(f"{phase}: {kind}", 0.0) for column in columns]
            rows.append([phase, kind, *(f"{seconds:.2f}" for seconds in found)])
    rows.append(["**both**", "", *(f"**{sum(column.values()):.2f}**" for column in columns)])
    head = " | ".join(["phase", "work", *(f"prompts of {n} tokens, s" for n in PROMPT_TOKENS)])
    write_table(HERE / "speed", markdown(head, rows), "step_profile")


if __name__ == "__main__":
    main()
