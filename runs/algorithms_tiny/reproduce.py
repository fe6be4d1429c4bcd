"""Every algorithm and option on the default task, three seeds each, on one budget of tokens.

    python runs/algorithms_tiny/reproduce.py              # all runs, one after another: an hour
    python runs/algorithms_tiny/reproduce.py --missing    # those that aren't here yet
    python runs/algorithms_tiny/reproduce.py --draw       # only the table and the picture again

The runs of a seed begin at the same policy: the default warm start, made once and loaded by each.
"""

import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent.parent)]

import matplotlib.pyplot as plt  # noqa: E402
from record import machine, record, warm_policy, write_table  # noqa: E402

from core.report.curves import BLUE, GRID, INK, STYLE  # noqa: E402
from core.run_log import read_records  # noqa: E402

SEEDS = (0, 1, 2)
BUDGET = 60_000  # sampled tokens
ENV = "eval/letter_counting"
ONE_STEP = {
    "reinforce": "--algo reinforce",
    "reinforce, leave one out (RLOO)": "--algo reinforce --reinforce.baseline leave_one_out",
    "reinforce, normalised (REINFORCE++)": "--algo reinforce --reinforce.normalize",
    "dapo": "--grpo.loss-type dapo",
    "grpo": "--grpo.loss-type grpo",
    "dr_grpo": "--grpo.loss-type dr_grpo",
    "gspo": "--grpo.loss-type gspo",
    "cispo": "--grpo.loss-type cispo",
    "ppo": "--algo ppo",
    "dapo, --kl-coef 0.05": "--kl-coef 0.05",
    "dapo, --filter-groups 2": "--filter-groups 2",
    "dapo, --entropy-coef 0.01": "--entropy-coef 0.01",
    "dapo, --sft-best 32": "--sft-best 32",
}
FOUR_STEPS = {  # where the clips have something to clip
    "reinforce, 4 steps": "--algo reinforce --num-minibatches 4",
    "dapo, 4 steps": "--grpo.loss-type dapo --num-minibatches 4",
    "gspo, 4 steps": "--grpo.loss-type gspo --num-minibatches 4",
    "cispo, 4 steps": "--grpo.loss-type cispo --num-minibatches 4",
    "ppo, 4 steps": "--algo ppo --num-minibatches 4",
}
ALL = ONE_STEP | FOUR_STEPS


def file_of(name: str, seed: int) -> Path:
    plain = "".join(c if c.isalnum() else "_" for c in name).strip("_")
    return HERE / f"{plain}-seed{seed}.jsonl"


def play(name: str, seed: int) -> None:
    """One run from the policy that the default warm start of this seed makes."""
    flags = f"--model-id {warm_policy(HERE, seed)} --lr 1e-4 --max-tokens 64 "
    flags += "--max-tokens-per-micro-batch 2048 "
    flags += f"--num-updates 42 --eval-every 3 --seed {seed} {ALL[name]}"
    record(HERE, file_of(name, seed).stem, flags)


def curve(name: str, seed: int) -> list[tuple[int, float]]:
    """(tokens sampled so far, held-out accuracy) of each evaluation within the budget."""
    tokens, points = 0, []
    for one in read_records(file_of(name, seed)):
        tokens += int(one.get("tokens/sampled", 0))
        if f"{ENV}/accuracy" in one and tokens <= BUDGET:
            points.append((tokens, one[f"{ENV}/accuracy"]))
    return points


def table() -> list[str]:
    lines = [
        "| | accuracy before | at the budget: mean [least, most] | tokens to 0.90 | "
        "tokens a completion | seconds learning |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in ALL:
        curves = [curve(name, seed) for seed in SEEDS]
        before = [points[0][1] for points in curves]
        after = [points[-1][1] for points in curves]
        there = [next((t for t, a in points if a >= 0.9), None) for points in curves]
        passed = [f"{t / 1000:.0f}k" if t is not None else "never" for t in there]
        records = [read_records(file_of(name, seed)) for seed in SEEDS]
        length = statistics.fmean(r[-1]["length/mean"] for r in records)
        seconds = statistics.fmean(sum(x.get("time/train_s", 0) for x in r) for r in records)
        lines.append(
            f"| {name} | {statistics.fmean(before):.2f} | {statistics.fmean(after):.3f} "
            f"[{min(after):.3f}, {max(after):.3f}] | {', '.join(passed)} | {length:.1f} | "
            f"{seconds:.0f} |"
        )
    return [*lines, "", f"Machine: {machine()}."]


def draw() -> None:
    """A panel for each, before the grey of the default: mean of the seeds, band least to most."""
    with plt.rc_context(STYLE):
        rows = -(-len(ALL) // 6)
        figure, axes = plt.subplots(rows, 6, figsize=(16, 2.7 * rows), layout="constrained",
                                    sharex=True, sharey=True)  # fmt: skip
        title = f"Held-out accuracy against sampled tokens, {len(SEEDS)} seeds, the same start"
        figure.suptitle(title, fontsize=15, fontweight="bold", x=0.01, ha="left")
        for axis, name in zip(axes.flat, ALL, strict=False):
            for shown, color, alpha in (("dapo", GRID, 1.0), (name, BLUE, 0.2)):
                curves = [curve(shown, seed) for seed in SEEDS]
                steps = min(len(points) for points in curves)
                at = [statistics.fmean(c[i][0] for c in curves) / 1000 for i in range(steps)]
                values = [[c[i][1] for c in curves] for i in range(steps)]
                low, high = [min(v) for v in values], [max(v) for v in values]
                line = "#9a9aa8" if color == GRID else color
                axis.fill_between(at, low, high, color=color, alpha=alpha, linewidth=0)
                axis.plot(at, [statistics.fmean(v) for v in values], color=line, linewidth=1.8)
            axis.set_title(name, fontsize=9, loc="left", color=INK)
            axis.set_ylim(0, 1.05)
        for axis in axes.flat[len(ALL) :]:
            axis.set_visible(False)
        axes.flat[0].set_xlim(0, 40)
        figure.supxlabel("thousand sampled tokens", fontsize=11)
        figure.savefig(HERE / "curves.png", dpi=100)
        plt.close(figure)


def main() -> None:
    seeds = [int(a) for a in sys.argv[1:] if a.isdigit()] or SEEDS  # some seeds: in parallel
    if "--draw" not in sys.argv:
        for seed in seeds:
            for name in ALL:
                play(name, seed)
    if all(file_of(name, seed).exists() for name in ALL for seed in SEEDS):
        draw()
        write_table(HERE, table())


if __name__ == "__main__":
    main()
