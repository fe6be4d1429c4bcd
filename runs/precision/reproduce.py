"""Precision of trainer and sampler on tasks that the policy can just solve.

    python runs/precision/reproduce.py                    # 18 runs, one after another: 45 minutes
    python runs/precision/reproduce.py --draw             # only the table and the picture
    python runs/precision/reproduce.py float32-none-seed0 # one run

The sanity test of arXiv:2510.26788: train on a fixed set of tasks that the policy solves in 20% to
80% of its tries. No task is too hard, so a sound method ends above 95% on these tasks.
"""

import statistics
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402
import torch  # noqa: E402
from figures import figure, panel, seed_band  # noqa: E402

import core.run  # noqa: E402
import train  # noqa: E402
from core.model import Policy, load_policy  # noqa: E402
from core.report.curves import BLUE, GREEN, ORANGE, PURPLE, RED  # noqa: E402
from core.rollouts import RolloutCollector  # noqa: E402
from core.run_log import read_records  # noqa: E402
from core.sampler import Sampler, SamplingParams, TorchSampler  # noqa: E402
from core.tasks import Task  # noqa: E402
from environments.registry import register  # noqa: E402
from environments.reverse import Reverse  # noqa: E402

NUM_TASKS, TRIES, LAST = 64, 16, 5  # tasks; tries of each to choose them; updates that a mean is of
SHARED = "--env sanity --num-updates 30 --eval-num-tasks 0 --lr 1e-4 --device cpu"
WEIGHTS = {"none": "--tis-cap 0", "capped": "--tis-cap 2"}  # importance weights


class Precision(NamedTuple):
    trainer: str  # --dtype
    sampler: str  # float8, int4: its matrices are rounded to it; otherwise the trainer's --dtype
    seeds: tuple[int, ...]
    color: str


PRECISIONS = {
    "float32": Precision("float32", "float32", (0, 1), BLUE),
    # 16 bits take six to eight times the time of float32 on a CPU, so there is one seed
    "float16": Precision("float16", "float16", (0,), GREEN),
    "bfloat16": Precision("bfloat16", "bfloat16", (0,), ORANGE),
    "float8_sampler": Precision("float32", "float8", (0, 1), PURPLE),
    "int4_sampler": Precision("float32", "int4", (0, 1, 2), RED),
}
RUNS = {
    f"{precision}-{weights}-seed{seed}": (precision, weights, seed)
    for precision in PRECISIONS
    for weights in WEIGHTS
    for seed in PRECISIONS[precision].seeds
}


@register("sanity")
class Sanity(Reverse):
    """`reverse` with one word, on the seeds in tasks.txt."""

    def __init__(self) -> None:
        super().__init__(turns=1)
        self.seeds = [int(seed) for seed in (HERE / "tasks.txt").read_text().split()]

    def reset(self, seed: int) -> list:
        return super().reset(self.seeds[seed % len(self.seeds)])


class RoundedSampler(TorchSampler):
    """Samples with all matrices rounded to `kind`; outside of `with sampler:` they are exact."""

    def __init__(self, policy: Policy, kind: str) -> None:
        super().__init__(policy)
        self.kind = kind
        self.exact: list[tuple[torch.Tensor, torch.Tensor]] = []  # weight, its value in training

    @torch.no_grad()
    def __enter__(self) -> Sampler:
        for weight in self.policy.causal_lm.parameters():
            if weight.dim() == 2:
                self.exact.append((weight, weight.clone()))
                weight.copy_(rounded(weight, self.kind))
        return self

    @torch.no_grad()
    def __exit__(self, *exc_info: object) -> None:
        for weight, value in self.exact:
            weight.copy_(value)
        self.exact = []


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The nearest values of float8 (e4m3) or int4 (-7 to 7), with a scale for each row.

    >>> rounded(torch.tensor([[0.7, 0.26, -0.04]]), "int4")
    tensor([[0.7000, 0.3000, 0.0000]])
    """
    float8 = torch.float8_e4m3fn
    largest = torch.finfo(float8).max if kind == "float8" else 7.0
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
    scaled = weight / scale
    return scale * (scaled.to(float8).to(weight.dtype) if kind == "float8" else scaled.round())


def main() -> None:
    if sys.argv[1:2] == ["train.py"]:  # a child process of record.make_run
        sys.exit(train_with(*sys.argv[2:]))
    for name in record.chosen_runs(__doc__, HERE, RUNS):
        if not (HERE / "tasks.txt").exists():
            choose_tasks()
        precision, weights, seed = RUNS[name]
        dtype = PRECISIONS[precision].trainer
        flags = f"{SHARED} --dtype {dtype} {WEIGHTS[weights]} --seed {seed}"
        record.make_run(HERE, name, flags, script=f"{__file__} train.py {precision}")
    draw()
    record.write_table(HERE, [*table(), "", record.recorded_with(HERE)])


def train_with(precision: str, *flags: str) -> int:
    """`python train.py FLAGS` with the sampler of `precision`. Returns the exit code."""
    kind = PRECISIONS[precision].sampler
    if kind in ("float8", "int4"):
        core.run.make_sampler = lambda name, policy, *_, **__: RoundedSampler(policy, kind)
    return train.run_command(list(flags))


def choose_tasks() -> None:
    """Writes the first training seeds whose task tiny solves in 20% to 80% of its tries."""
    policy = load_policy("tiny", device="cpu", tiny_folder=HERE / "tiny")
    collector, chosen = RolloutCollector(policy, max_turns=1), list[int]()
    seeds = iter(range(100_000))
    while len(chosen) < NUM_TASKS:
        batch = [next(seeds) for _ in range(16)]
        tasks = [Task("reverse:turns=1", seed, seed) for seed in batch for _ in range(TRIES)]
        params = SamplingParams(max_tokens=64, seed=batch[0])
        rollouts = collector.collect(tasks, TorchSampler(policy), params)
        for seed in batch:
            right = sum(bool(r.info["correct"]) for r in rollouts if r.seed == seed)
            chosen += [seed] if 0.2 <= right / TRIES <= 0.8 else []
    (HERE / "tasks.txt").write_text("\n".join(map(str, chosen[:NUM_TASKS])) + "\n")


def updates(precision: str, weights: str, seed: int) -> list[dict]:
    """The metrics of each update of a run; none if it is not recorded."""
    file = HERE / f"{precision}-{weights}-seed{seed}.jsonl"
    return [r for r in read_records(file) if r["update"] > 0] if file.exists() else []


def table() -> list[str]:
    """One row per precision and kind of weights, as Markdown; means over the seeds."""
    rows = [
        "| trainer | sampler | importance weights | seeds | correct, first 5 updates | "
        "last 5 updates, by seed | gap of a token, nats: mean | largest |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, precision in PRECISIONS.items():
        for weights in WEIGHTS:
            runs = [run for seed in precision.seeds if (run := updates(name, weights, seed))]
            if not runs:
                continue
            first = statistics.fmean(r["reward/correct"] for run in runs for r in run[:LAST])
            last = [statistics.fmean(r["reward/correct"] for r in run[-LAST:]) for run in runs]
            gap = statistics.fmean(r["gap/logprob_mean"] for run in runs for r in run)
            largest = max(r["gap/logprob_max"] for run in runs for r in run)
            rows.append(
                f"| {precision.trainer} | {precision.sampler} | {weights} | {len(runs)} | "
                f"{first:.2f} | {', '.join(f'{x:.3f}' for x in last)} | {gap:.1e} | {largest:.1e} |"
            )
    return rows


def draw() -> None:
    """The fraction of correct rollouts in training, and the gap, by update."""
    panels = {"reward/correct": "Correct in training", "gap/logprob_mean": "Mean gap, nats"}
    title = "Tasks that the policy solves in 20% to 80% of its tries"
    with figure(HERE / "curves.png", title, 1, 2, (12, 4.5)) as axes:
        for axis, (metric, heading) in zip(axes, panels.items(), strict=True):
            for name, precision in PRECISIONS.items():
                for weights, style in (("none", ":"), ("capped", "-")):
                    runs = [run for s in precision.seeds if (run := updates(name, weights, s))]
                    curves = [[(r["update"], r[metric]) for r in run] for run in runs]
                    if curves:
                        seed_band(axis, curves, color=precision.color, linestyle=style,
                                  label=f"{name.replace('_', ' ')}, {weights}")  # fmt: skip
            panel(axis, heading, "update")
        axes[0].axhline(0.95, color="0.5", linestyle="--", linewidth=1)
        axes[0].set_ylim(0, 1.03)
        axes[1].set_yscale("log")
        axes[0].legend(frameon=False, loc="lower right", fontsize=8)


if __name__ == "__main__":
    main()
