"""`tiny` on eight environments: held-out results before and after at most two minutes of RL.

python runs/environments_tiny/reproduce.py                # sixteen runs in turn: half an hour
python runs/environments_tiny/reproduce.py --draw         # only the table and the picture
python runs/environments_tiny/reproduce.py reverse-seed0  # one run
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402
from figures import band, figure, panel  # noqa: E402

from core.metrics import before_after  # noqa: E402
from core.report.curves import BLUE, INK, ORANGE  # noqa: E402
from core.run_log import read_records  # noqa: E402

CARTPOLE = "gymnasium:id=CartPole-v1,repeat=3,max_steps=90,memory=false"
COMMANDS = {
    "reverse": "--env reverse --num-updates 16 --lr 1e-4",
    "math_qa": "--env math_qa:level=1 --num-updates 40 --lr 1e-4",
    "tic_tac_toe": "--env tic_tac_toe --num-updates 10 --lr 1e-4",
    "blackjack": "--env gymnasium:id=Blackjack-v1 --max-tokens 8 --num-updates 30 --lr 1e-4 "
    "--eval-num-tasks 1024",
    "cartpole": f"--env {CARTPOLE} --max-turns 30 --max-tokens 8 --num-updates 8 --num-prompts 8 "
    "--lr 3e-4 --credit turn --gamma 0.8 --eval-every 5 --eval-num-tasks 64",
    "wikipedia_maze": "--env wikipedia_maze:n_hops=2,brief=true --num-updates 10 --lr 1e-4",
    "iterated_game": "--env iterated_game --num-updates 12 --num-prompts 8 --lr 1e-4 "
    "--eval-num-tasks 16",
    "reward_hacking": "--env reward_hacking --num-updates 16 --num-prompts 8 --lr 3e-4 "
    "--eval-num-tasks 64",
}
SEEDS = (0, 1)
RUNS = {f"{name}-seed{seed}": (name, seed) for name in COMMANDS for seed in SEEDS}
# measured by the mean return; the others by accuracy. reward_hacking rewards the wrong thing: its
# return rises while the accuracy, the intended task, does not
RETURNS = ("cartpole", "blackjack", "reward_hacking")


def main() -> None:
    for run in record.chosen_runs(__doc__, HERE, RUNS):
        name, seed = RUNS[run]
        record.make_run(HERE, run, f"{COMMANDS[name]} --seed {seed}")
    draw()
    record.write_table(HERE, [*table(), "", record.recorded_with(HERE)])


def measured(name: str) -> str:
    return "mean return" if name in RETURNS else "accuracy"


def value(name: str, env: str, metrics: dict[str, Any]) -> tuple[float, float, float]:
    """Returns the held-out value of one evaluation and its 95% interval."""
    keys = ("return_mean", "return_low", "return_high")
    keys = keys if name in RETURNS else ("accuracy", "ci_low", "ci_high")
    middle, low, high = (metrics[f"eval/{env}/{key}"] for key in keys)
    # equal returns have no interval
    return middle, middle if low is None else low, middle if high is None else high


def table() -> list[str]:
    """One row per run, as Markdown."""
    rows = [
        "| environment | measured | seed | before RL [95%] | after RL [95%] | trivial baseline | "
        "seconds | command |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run, (name, seed) in RUNS.items():
        ((env, first, last),) = before_after(read_records(HERE / f"{run}.jsonl"))
        results = [value(name, env, metrics) for metrics in (first, last)]
        before, after = (f"{m:.2f} [{low:.2f}, {high:.2f}]" for m, low, high in results)
        trivial = last.get(f"eval/{env}/trivial") if name not in RETURNS else None
        shown = "" if trivial is None else f"{trivial:.2f}"
        command = f"`python train.py {COMMANDS[name]}`" if seed == 0 else "the same, `--seed 1`"
        rows.append(
            f"| {name} | {measured(name)} | {seed} | {before} | {after} | {shown} | "
            f"{record.read_seconds(HERE)[run]} | {command} |"
        )
    return rows


def draw() -> None:
    """One panel per environment: the held-out value by update, with its 95% interval."""
    title = "tiny on eight environments: held-out tasks, 95% interval, two seeds"
    with figure(HERE / "curves.png", title, 2, 4, (15, 6.4)) as axes:
        for axis, name in zip(axes, COMMANDS, strict=True):
            for seed, color in zip(SEEDS, (BLUE, ORANGE), strict=True):
                records = read_records(HERE / f"{name}-seed{seed}.jsonl")
                ((env, first, _),) = before_after(records)
                evaluated = [m for m in records if f"eval/{env}/accuracy" in m]
                middle, low, high = zip(*(value(name, env, m) for m in evaluated), strict=True)
                band(axis, [m["update"] for m in evaluated], middle, low, high, color, marker="o",
                     markersize=4)  # fmt: skip
            if name not in RETURNS:
                axis.set_ylim(-0.03, 1.05)
                if (trivial := first.get(f"eval/{env}/trivial")) is not None:
                    axis.axhline(trivial, color=INK, linewidth=1, linestyle="--")
            panel(axis, f"{name}: {measured(name)}", "update")


if __name__ == "__main__":
    main()
