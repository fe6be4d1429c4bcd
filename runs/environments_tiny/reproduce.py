"""The default policy on other environments: held-out results before and after RL.

python runs/environments_tiny/reproduce.py              # seven runs, one after another: an hour
python runs/environments_tiny/reproduce.py --draw       # only the table and the picture
python runs/environments_tiny/reproduce.py reverse      # one run
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402
from figures import band, figure, panel  # noqa: E402

from core.metrics import before_after  # noqa: E402
from core.report.curves import BLUE  # noqa: E402
from core.run_log import read_records  # noqa: E402

RUNS = {
    "reverse": "--env reverse --sft-steps 450 --num-updates 30",
    "tic_tac_toe": "--env tic_tac_toe:opponent=random --sft-steps 300 --sft-batch-size 16 "
    "--num-updates 20 --num-prompts 8 --max-turns 6",
    "cartpole": "--env gymnasium:id=CartPole-v1,repeat=3,max_steps=90,memory=false "
    "--max-turns 30 --max-tokens 8 --sft-steps 200 --sft-batch-size 2 --sft-hasty 0.8 "
    "--num-updates 24 --num-prompts 8 --lr 3e-4 --credit turn --gamma 0.8 --eval-num-tasks 64 "
    "--eval-every 8",
    "blackjack": "--env gymnasium:id=Blackjack-v1 --max-tokens 8 --sft-steps 250 --sft-hasty 0.75 "
    "--num-updates 60 --lr 5e-5 --entropy-coef 0.02 --eval-num-tasks 2048 --eval-every 20",
    "math_qa": "--env math_qa:level=1 --sft-steps 450 --num-updates 70",
    "wikipedia_maze": "--env wikipedia_maze:n_hops=2,max_visits=2,brief=true --max-tokens 112 "
    "--max-turns 6 --sft-steps 1050 --sft-batch-size 16 --num-updates 24 --temperature 0.7 "
    "--lr 1.5e-4 --eval-every 8",
    "mixed": "--env letter_counting reverse:turns=1 math_qa:level=1 --sft-steps 800 "
    "--num-updates 40",
}
RETURNS = ("cartpole", "blackjack")  # measured by the mean return; the others by accuracy


def main() -> None:
    for name in record.chosen_runs(__doc__, HERE, RUNS):
        record.make_run(HERE, name, RUNS[name])
    draw()
    record.write_table(HERE, [*table(), "", record.recorded_with(HERE)])


def measured(name: str) -> str:
    return "mean return" if name in RETURNS else "accuracy"


def value(name: str, env: str, metrics: dict[str, Any]) -> tuple[float, float, float]:
    """Returns the held-out value of one evaluation and its 95% interval."""
    keys = ("return_mean", "return_low", "return_high")
    keys = keys if name in RETURNS else ("accuracy", "ci_low", "ci_high")
    middle, low, high = (metrics[f"eval/{env}/{key}"] for key in keys)
    return middle, low, high


def table() -> list[str]:
    """One row per environment, as Markdown."""
    rows = [
        "| environment | measured | before RL [95%] | after RL [95%] | minutes | command |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, flags in RUNS.items():
        cells = f"{record.read_seconds(HERE)[name] / 60:.1f} | `python train.py {flags}`"
        for env, first, last in before_after(read_records(HERE / f"{name}.jsonl")):
            results = [value(name, env, metrics) for metrics in (first, last)]
            before, after = (f"{m:.2f} [{low:.2f}, {high:.2f}]" for m, low, high in results)
            rows.append(f"| `{env}` | {measured(name)} | {before} | {after} | {cells} |")
            cells = " | (the same run)"
    return rows


def draw() -> None:
    """One panel per environment: the held-out value by update, with its 95% interval."""
    runs = {name: read_records(HERE / f"{name}.jsonl") for name in RUNS}
    shown = [(name, env) for name in RUNS for env, _, _ in before_after(runs[name])]
    title = "The 0.84M-parameter policy on other environments: held-out tasks, 95% interval"
    rows = -(-len(shown) // 3)
    with figure(HERE / "curves.png", title, rows, 3, (12, 2.9 * rows)) as axes:
        for axis, (name, env) in zip(axes, shown, strict=True):
            evaluated = [m for m in runs[name] if f"eval/{env}/accuracy" in m]
            middle, low, high = zip(*(value(name, env, m) for m in evaluated), strict=True)
            band(axis, [m["update"] for m in evaluated], middle, low, high, BLUE, marker="o",
                 markersize=4)  # fmt: skip
            short = env.removeprefix("gymnasium:id=").split(",")[0]
            mixed = " (mixed run)" if name == "mixed" else ""
            panel(axis, f"{short}{mixed}: {measured(name)}", "update")
            if name not in RETURNS:
                axis.set_ylim(-0.03, 1.05)


if __name__ == "__main__":
    main()
