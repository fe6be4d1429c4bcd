"""The default run with three algorithms and five seeds: the metrics, table and picture here.

    python runs/letter_counting_tiny/reproduce.py                # all fifteen runs: 20 minutes
    python runs/letter_counting_tiny/reproduce.py --draw         # only the table and the picture
    python runs/letter_counting_tiny/reproduce.py grpo-seed0     # one run

Each run is the plain command `python train.py --algo A --seed S`, timed from its start to its end.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402
from figures import figure, panel, seed_band  # noqa: E402

from core.metrics import before_after, describe  # noqa: E402
from core.report.curves import BLUE, GREEN, ORANGE  # noqa: E402
from core.run_log import read_records  # noqa: E402

ALGORITHMS = {  # name: look of its curve
    "grpo": {"color": BLUE, "linestyle": "-"},
    "reinforce": {"color": ORANGE, "linestyle": "--"},
    "ppo": {"color": GREEN, "linestyle": ":"},
}
SEEDS = range(5)
RUNS = {f"{algo}-seed{seed}": (algo, seed) for algo in ALGORITHMS for seed in SEEDS}
PANELS = {
    "eval/letter_counting/accuracy": "Held-out accuracy (greedy)",
    "reward/correct": "Correct rollouts in training (sampled)",
    "length/mean": "Tokens per completion",
    "info/worked": "Share of worked answers in training",
}


def main() -> None:
    for name in record.chosen_runs(__doc__, HERE, RUNS):
        algo, seed = RUNS[name]
        keep = {"curves.png": HERE} if name == "grpo-seed0" else {}
        record.make_run(HERE, name, f"--algo {algo} --seed {seed}", keep=keep)
    draw()
    record.write_table(HERE, [*table(), "", record.recorded_with(HERE)])


def table() -> list[str]:
    """One row per run, as Markdown."""
    rows = [
        "| algorithm | seed | accuracy before RL [95%] | accuracy after RL [95%] | first "
        "evaluation at 0.90 | tokens per completion | wall time |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, (algo, seed) in RUNS.items():
        records = read_records(HERE / f"{name}.jsonl")
        ((env, first, last),) = before_after(records)
        reached = (r["update"] for r in records if r.get(f"eval/{env}/accuracy", 0) >= 0.9)
        lengths = [r["length/mean"] for r in records if "length/mean" in r]
        rows.append(
            f"| {algo} | {seed} | {describe(env, first)} | {describe(env, last)} | "
            f"update {next(reached, 'never')} | {lengths[0]:.1f} → {lengths[-1]:.1f} | "
            f"{record.read_seconds(HERE)[name]} s |"
        )
    return rows


def draw() -> None:
    """For each algorithm the mean of the seeds, and a band from the lowest to the highest."""
    title = "The default task: three algorithms, five seeds each"
    with figure(HERE / "seeds.png", title, 2, 2, (11, 7)) as axes:
        for axis, (metric, name) in zip(axes, PANELS.items(), strict=True):
            panel(axis, name, "update")
            for algo, look in ALGORITHMS.items():
                runs = [read_records(HERE / f"{algo}-seed{seed}.jsonl") for seed in SEEDS]
                points = [[(m["update"], m[metric]) for m in run if metric in m] for run in runs]
                seed_band(axis, points, label=algo, linewidth=1.8, **look)
            if metric != "length/mean":
                axis.set_ylim(-0.03, 1.05)
        axes[0].legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    main()
