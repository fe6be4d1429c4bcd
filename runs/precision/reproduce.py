"""Precision and importance weights on tasks that the policy can just solve.

    python runs/precision/reproduce.py             # six runs, one after another: ten minutes
    python runs/precision/reproduce.py --draw      # only the table and the picture

The sanity test of arXiv:2510.26788: train on a fixed set of tasks that the policy solves in 20% to
80% of its tries. No task is too hard, so a sound method ends above 95% on these tasks.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402
from figures import figure, panel  # noqa: E402

import train  # noqa: E402
from core.model import load_policy  # noqa: E402
from core.report.curves import BLUE, GREEN, ORANGE  # noqa: E402
from core.rollouts import RolloutCollector  # noqa: E402
from core.run_log import read_records  # noqa: E402
from core.sampler import SamplingParams, TorchSampler  # noqa: E402
from core.tasks import Task  # noqa: E402
from environments.registry import register  # noqa: E402
from environments.reverse import Reverse  # noqa: E402

NUM_TASKS, TRIES = 64, 16
COLORS = {"float32": BLUE, "bfloat16": ORANGE, "float16": GREEN}
RUNS = {
    f"{dtype}-{name}": f"--dtype {dtype} --tis-cap {cap}"
    for dtype in COLORS
    for name, cap in (("corrected", 2), ("uncorrected", 0))
}
SHARED = "--env sanity --num-updates 60 --eval-num-tasks 0 --lr 1e-4 --device cpu"


@register("sanity")
class Sanity(Reverse):
    """`reverse` with one word, on the seeds in tasks.txt."""

    def __init__(self) -> None:
        super().__init__(turns=1)
        self.seeds = [int(seed) for seed in (HERE / "tasks.txt").read_text().split()]

    def reset(self, seed: int) -> list:
        return super().reset(self.seeds[seed % len(self.seeds)])


def main() -> None:
    if sys.argv[1:2] == ["train.py"]:  # a child process of record.make_run
        sys.exit(train.run_command(sys.argv[2:]))
    for name in record.chosen_runs(__doc__, HERE, RUNS):
        if not (HERE / "tasks.txt").exists():
            choose_tasks()
        record.make_run(HERE, name, f"{SHARED} {RUNS[name]}", script=f"{__file__} train.py")
    draw()
    record.write_table(HERE, [*table(), "", record.recorded_with(HERE)])


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


def table() -> list[str]:
    """One row per run, as Markdown."""
    rows = [
        "| weights | importance weights | correct in training, first 5 updates | last 5 updates | "
        "largest gap of a token, nats | mean gap, nats |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in RUNS:
        dtype, corrected = name.split("-")
        updates = [r for r in read_records(HERE / f"{name}.jsonl") if r.get("update", 0) > 0]
        first, last = (
            sum(r["reward/correct"] for r in part) / len(part)
            for part in (updates[:5], updates[-5:])
        )
        gap = max(r["gap/logprob_max"] for r in updates)
        mean = sum(r["gap/logprob_mean"] for r in updates) / len(updates)
        weights = "capped at 2" if corrected == "corrected" else "none"
        rows.append(f"| {dtype} | {weights} | {first:.2f} | {last:.2f} | {gap:.1e} | {mean:.1e} |")
    return rows


def draw() -> None:
    """The fraction of correct rollouts in training, and the gap, by update."""
    panels = {"reward/correct": "Correct in training", "gap/logprob_mean": "Mean gap, nats"}
    title = "Tasks that the policy solves in 20% to 80% of its tries"
    with figure(HERE / "curves.png", title, 1, 2, (11, 4)) as axes:
        for axis, (metric, name) in zip(axes, panels.items(), strict=True):
            for run in RUNS:
                dtype, corrected = run.split("-")
                weights = "weights capped at 2" if corrected == "corrected" else "no weights"
                records = [r for r in read_records(HERE / f"{run}.jsonl") if metric in r]
                axis.plot(
                    [r["update"] for r in records], [r[metric] for r in records],
                    color=COLORS[dtype], linestyle="-" if corrected == "corrected" else ":",
                    label=f"{dtype}, {weights}",
                )  # fmt: skip
            panel(axis, name, "update")
        axes[0].axhline(0.95, color="0.5", linestyle="--", linewidth=1)
        axes[0].set_ylim(0, 1.03)
        axes[1].set_yscale("log")
        axes[0].legend(frameon=False, loc="lower right", fontsize=9)


if __name__ == "__main__":
    main()
