"""The default policy on seven environments and mixtures: a table of before, after and minutes.

python runs/environments_tiny/reproduce.py              # all runs, one after another: an hour
python runs/environments_tiny/reproduce.py --missing    # those that aren't here yet
python runs/environments_tiny/reproduce.py --draw       # only the table and the picture again
python runs/environments_tiny/reproduce.py reverse      # those named
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent.parent)]

import matplotlib.pyplot as plt  # noqa: E402
from record import machine, read_seconds, record, write_table  # noqa: E402

from core.metrics import before_after  # noqa: E402
from core.report.curves import BLUE, STYLE  # noqa: E402
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
PAID = {"cartpole": "return", "blackjack": "return"}  # where the return says more than a share


def file_of(name: str) -> Path:
    return HERE / f"{name}.jsonl"


def shown(name: str, record: dict, env: str) -> tuple[float, float, float]:
    """Value and 95% interval of an evaluation."""
    if PAID.get(name):
        return tuple(record[f"eval/{env}/return_{k}"] for k in ("mean", "low", "high"))
    return tuple(record[f"eval/{env}/{k}"] for k in ("accuracy", "ci_low", "ci_high"))


def table() -> list[str]:
    rows = [
        "| environment | measured | before RL [95%] | after RL [95%] | minutes | command |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, flags in RUNS.items():
        if not file_of(name).exists():
            rows.append(f"| {name} | | | | | not recorded yet: `python train.py {flags}` |")
            continue
        minutes = f"{read_seconds(HERE)[name] / 60:.1f}"
        command = f"`python train.py {flags}`"
        for env, first, last in before_after(read_records(file_of(name))):
            before, after = (
                "{:.2f} [{:.2f}, {:.2f}]".format(*shown(name, one, env)) for one in (first, last)
            )
            what = "mean return" if PAID.get(name) else "share correct"
            rows.append(f"| `{env}` | {what} | {before} | {after} | {minutes} | {command} |")
            minutes, command = "", "(the same run)"
    return [*rows, "", f"Machine: {machine()}."]


def draw() -> None:
    """Held-out value over the updates, a panel for each environment."""
    recorded = [name for name in RUNS if file_of(name).exists()]
    found = [(n, env) for n in recorded for env, _, _ in before_after(read_records(file_of(n)))]
    rows = -(-len(found) // 3)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(rows, 3, figsize=(12, 2.9 * rows), layout="constrained")
        title = "From 0.8 million random weights, on a laptop's CPU: held-out tasks, 95% interval"
        figure.suptitle(title, fontsize=15, fontweight="bold", x=0.01, ha="left")
        for axis in axes.flat[len(found) :]:
            axis.set_visible(False)
        for axis, (name, env) in zip(axes.flat, found, strict=False):
            records = read_records(file_of(name))
            records = [r for r in records if f"eval/{env}/accuracy" in r]
            at = [r["update"] for r in records]
            values, low, high = zip(*(shown(name, r, env) for r in records), strict=True)
            axis.fill_between(at, low, high, color=BLUE, alpha=0.18, linewidth=0)
            axis.plot(at, values, color=BLUE, marker="o", markersize=4)
            kind = "mean return" if PAID.get(name) else "share correct"
            mixed = ", mixed" if name == "mixed" else ""
            short = env.replace("gymnasium:id=", "").split(",")[0]
            axis.set_title(f"{short}{mixed}: {kind}", loc="left", fontsize=11, fontweight="bold")
            if not PAID.get(name):
                axis.set_ylim(-0.03, 1.05)
            axis.set_xlabel("update")
        figure.savefig(HERE / "curves.png", dpi=100)
        plt.close(figure)


def main() -> None:
    named = [name for name in RUNS if name in sys.argv[1:]] or list(RUNS)
    for name in named:
        if "--draw" not in sys.argv:
            record(HERE, name, RUNS[name])
    draw()
    write_table(HERE, table())


if __name__ == "__main__":
    main()
