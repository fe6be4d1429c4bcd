"""`tiny` learns to call a calculator: held-out results before and after GRPO.

python runs/tools_tiny/reproduce.py                # both runs
python runs/tools_tiny/reproduce.py --missing      # those that are not recorded
python runs/tools_tiny/reproduce.py --draw         # only the tables and the picture
"""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402
from figures import band, figure, panel  # noqa: E402

from core.metrics import before_after  # noqa: E402
from core.report.curves import BLUE, ORANGE  # noqa: E402
from core.run_log import read_records  # noqa: E402

ENV = "calculator:digits=2"
COMMAND = (
    f"--env {ENV} --sft-steps 260 --sft-batch-size 8 --sft-hasty 0.5 --max-tokens 96 "
    "--max-turns 3 --num-updates 12 --num-prompts 8 --lr 3e-4 --eval-every 4 "
    "--eval-num-tasks 128 --eval-samples 2"
)
SEEDS = (0, 1)
RUNS = {f"calculator-seed{seed}": seed for seed in SEEDS}
NUM_EXAMPLES = 3


def main() -> None:
    for run in record.chosen_runs(__doc__, HERE, RUNS):
        kept = HERE / f".{run}-rollouts.jsonl"
        flags = f"{COMMAND} --seed {RUNS[run]}"
        record.make_run(HERE, run, flags, keep={"rollouts.jsonl": kept})
        (HERE / f"{run}-examples.txt").write_text("\n".join(examples(kept)) + "\n")
        kept.unlink()
    draw()
    record.write_table(HERE, [*table(), "", record.recorded_with(HERE)])
    shown = (HERE / "calculator-seed0-examples.txt").read_text().splitlines()
    record.write_table(HERE, [f"    {line}" for line in shown], "examples")


def recorded() -> list[str]:
    """The names of the runs that are recorded."""
    return [run for run in RUNS if (HERE / f"{run}.jsonl").exists()]


def examples(file: Path) -> list[str]:
    """The first held-out episodes of the first and the last evaluation, as text."""
    rollouts = [json.loads(line) for line in file.read_text().splitlines()]
    evaluated = [r for r in rollouts if r["kind"] == "eval"]
    first, last = evaluated[0]["update"], evaluated[-1]["update"]
    lines = []
    for when, update in (("before RL", first), ("after RL", last)):
        chosen = [r for r in evaluated if r["update"] == update][:NUM_EXAMPLES]
        for rollout in chosen:
            lines += [f"{when}:"]
            lines += [f"    {m['role']}: {m['content']}" for m in rollout["messages"]]
    return lines


def table() -> list[str]:
    """One row per run, as Markdown."""
    rows = ["| held-out tasks | seed | before RL | after RL |", "| --- | --- | --- | --- |"]
    for run in recorded():
        records, seed = read_records(HERE / f"{run}.jsonl"), RUNS[run]
        ((env, first, last),) = before_after(records)
        trained = [m for m in records if "info/tool_calls" in m]
        calls = [f"{trained[i]['info/tool_calls']:.2f}" for i in (0, -1)]
        measured = {
            "accuracy, greedy [95%]": [interval(m, env) for m in (first, last)],
            "accuracy, sampled": [f"{m[f'eval/{env}/pass_at_1']:.2f}" for m in (first, last)],
            "episodes with a call, greedy": [
                f"{m[f'eval/{env}/called']:.2f}" for m in (first, last)
            ],
            "calls per training episode, first and last update": calls,
        }
        for name, (before, after) in measured.items():
            rows.append(f"| {name} | {seed} | {before} | {after} |")
    seconds = record.read_seconds(HERE)
    times = ", ".join(f"{seconds[run]} s (seed {RUNS[run]})" for run in recorded())
    return [*rows, "", f"`python train.py {COMMAND}` and `--seed`; wall time {times}."]


def interval(metrics: dict[str, Any], env: str) -> str:
    """The accuracy of an evaluation with its 95% interval."""
    middle, low, high = (metrics[f"eval/{env}/{key}"] for key in ("accuracy", "ci_low", "ci_high"))
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def draw() -> None:
    """Accuracy, greedy and sampled, and calls by update."""
    title = "tiny learns to call a calculator: held-out tasks"
    with figure(HERE / "curves.png", title, 1, 3, (13, 3.6)) as axes:
        for run, color in zip(recorded(), (BLUE, ORANGE), strict=False):
            records, seed = read_records(HERE / f"{run}.jsonl"), RUNS[run]
            evaluated = [m for m in records if f"eval/{ENV}/accuracy" in m]
            x = [m["update"] for m in evaluated]
            keys = ("accuracy", "ci_low", "ci_high")
            values = ([m[f"eval/{ENV}/{key}"] for m in evaluated] for key in keys)
            band(axes[0], x, *values, color, marker="o", markersize=4)
            sampled = [m[f"eval/{ENV}/pass_at_1"] for m in evaluated]
            axes[1].plot(x, sampled, color=color, marker="o", markersize=4)
            updates = [m for m in records if "info/tool_calls" in m]
            calls = [m["info/tool_calls"] for m in updates]
            axes[2].plot([m["update"] for m in updates], calls, color=color, label=f"seed {seed}")
        for axis in axes:
            axis.set_ylim(-0.03, 1.05)
        axes[2].legend()
        panel(axes[0], "accuracy, greedy, 95% interval", "update")
        panel(axes[1], "accuracy, sampled", "update")
        panel(axes[2], "calls per episode in training", "update")


if __name__ == "__main__":
    main()
