"""`smollm2` on tasks that it solves now and then: held-out accuracy before and after RL, on a CPU.

python runs/smollm2/reproduce.py                     # every run, one after another: hours
python runs/smollm2/reproduce.py --missing           # those that are not recorded yet
python runs/smollm2/reproduce.py --draw              # only the tables and the picture
python runs/smollm2/reproduce.py sums-lora-seed0     # one run
"""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402
from figures import figure, panel  # noqa: E402

from core.metrics import before_after, mcnemar, wilson  # noqa: E402
from core.report.curves import BLUE, ORANGE  # noqa: E402
from core.run_log import read_records  # noqa: E402

TRAIN, CONTROL = "runs/smollm2/all_answers.py", "runs/smollm2/random_rewards.py"
SHARED = (
    "--model-id smollm2 --temperature 0.7 --num-prompts 8 --group-size 8 --microscope 0 "
    "--eval-every 0 --eval-num-tasks 128"
)
LETTERS = "--env letter_counting --max-tokens 64 --max-turns 1 --eval-samples 2"
ECHO = "--env reverse_echo:turns=3 --max-tokens 24 --max-turns 3 --eval-samples 2"
TASKS = {
    "sums": "--env math_qa:level=1,style=plain --max-tokens 16 --max-turns 1 --eval-samples 8 "
    "--num-updates 30",
    "sums_below_100": "--env math_qa:level=2,style=plain --max-tokens 16 --max-turns 1 "
    "--eval-samples 2 --num-updates 30",
    "letters": f"{LETTERS} --num-updates 20 --sft-steps 50 --sft-batch-size 8 --sft-lr 1e-3 "
    "--sft-hasty 0.3",
    "echo": f"{ECHO} --num-updates 10 --sft-steps 2 --sft-batch-size 8 --sft-lr 1e-3 --sft-hasty 0",
}
TITLES = {
    "sums": "no warm start", "sums_below_100": "no warm start",
    "echo": "three turns, after 2 supervised steps", "letters": "after 50 supervised steps",
}  # fmt: skip
LORA, FULL = "--lora-rank 16 --lr", "--lr 1e-5"
METHODS = {  # task: methods
    "sums": {"lora": f"{LORA} 1e-4", "full": FULL},
    "sums_below_100": {"lora": f"{LORA} 1e-4"},
    "letters": {"lora": f"{LORA} 2e-4"},
    "echo": {"lora": f"{LORA} 1e-4"},
}  # fmt: skip
RUNS = {  # name: (script, flags)
    f"{task}-{method}-seed{seed}": (TRAIN, f"{flags} {tuned} --seed {seed}")
    for task, flags in TASKS.items()
    for method, tuned in METHODS[task].items()
    for seed in ((0,) if task == "letters" else (0, 1))
}
RUNS["sums-random-seed0"] = (CONTROL, f"{TASKS['sums']} {METHODS['sums']['lora']} --seed 0")


def main() -> None:
    for name in record.chosen_runs(__doc__, HERE, RUNS):
        script, flags = RUNS[name]
        rollouts = HERE / f".part-{name}.jsonl"
        record.make_run(HERE, name, f"{SHARED} {flags}", script, {"rollouts.jsonl": rollouts})
        rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
        answers = [short(row) for row in rows if row["kind"] == "eval"]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in answers)
        (HERE / f"{name}.answers.jsonl").write_text(lines)
        rollouts.unlink()
    draw()
    record.write_table(HERE, [*table(), "", record.recorded_with(HERE)])
    record.write_table(HERE, answers_table(), "answers")


def short(rollout: dict[str, Any]) -> dict[str, Any]:
    """What the tables need of a rollout in rollouts.jsonl."""
    said = {role: [m["content"] for m in rollout["messages"] if m["role"] == role]
            for role in ("user", "assistant")}  # fmt: skip
    return {
        "update": rollout["update"], "asked": said["user"], "said": said["assistant"],
        "correct": rollout["info"].get("correct", False),
        "lenient": rollout["info"].get("lenient"),
    }  # fmt: skip


def recorded() -> list[str]:
    return [name for name in RUNS if (HERE / f"{name}.jsonl").exists()]


def evaluations(name: str) -> list[dict[str, dict[str, Any]]]:
    """The greedy answers before and after RL, by opening question: each counts once."""
    lines = (HERE / f"{name}.answers.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    last = max(answer["update"] for answer in answers)
    return [{a["asked"][0]: a for a in answers if a["update"] == u} for u in (0, last)]


def accuracy(answers: dict[str, dict[str, Any]], key: str = "correct") -> str:
    right = sum(answer[key] for answer in answers.values())
    low, high = wilson(right, len(answers))
    return f"{right / len(answers):.2f} [{low:.2f}, {high:.2f}]"


def table() -> list[str]:
    """One row per recorded run, as Markdown."""
    rows = [
        f"All runs: `python train.py {SHARED}` and the flags of the row; sums-random-seed0: "
        f"`python {CONTROL}` with the same flags.",
        "",
        "| run | questions | before RL [95%] | after RL [95%] | p | lenient | pass@1, pass@k | "
        "minutes | flags |",
        "|" + " --- |" * 9,
    ]
    for name in recorded():
        flags = RUNS[name][1]
        before, after = evaluations(name)
        solved = [{q for q, a in answers.items() if a["correct"]} for answers in (before, after)]
        ((env, first, last),) = before_after(read_records(HERE / f"{name}.jsonl"))
        lenient = [share(answers, "lenient") for answers in (before, after)]
        cells = [
            name, str(len(before)), accuracy(before), accuracy(after), f"{mcnemar(*solved):.1g}",
            arrow(*lenient), arrow(passes(env, first), passes(env, last)),
            f"{record.read_seconds(HERE)[name] / 60:.0f}", f"`{flags}`",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def arrow(before: str, after: str) -> str:
    return f"{before} → {after}" if before else ""


def share(answers: dict[str, dict[str, Any]], key: str) -> str:
    """The fraction of the answers with `key`; "" if the environment does not report it."""
    values = [answer[key] for answer in answers.values()]
    return "" if None in values else f"{sum(values) / len(values):.2f}"


def passes(env: str, metrics: dict[str, Any]) -> str:
    """With --eval-samples 8; otherwise ""."""
    values = [metrics.get(f"eval/{env}/pass_at_{k}") for k in ("1", "k")]
    return ", ".join(f"{value:.2f}" for value in values if value is not None)


def answers_table() -> list[str]:
    """The first held-out questions of the first seed of each task: answers before and after."""
    rows = ["| run | asked | before RL | after RL |", "| --- | --- | --- | --- |"]
    for name in (name for name in recorded() if name.endswith("seed0")):
        before, after = evaluations(name)
        for question in list(before)[:4]:
            cells = (name, question, text(before[question]), text(after[question]))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def text(answer: dict[str, Any]) -> str:
    return " / ".join(f"`{' '.join(t.replace('`', ' ').split())}`" for t in answer["said"])


def draw() -> None:
    """One panel per task: the share of right samples in training, and the held-out accuracy."""
    title = "smollm2: right answers in training (lines; dashed: seed 1) and held-out (dots, 95%)"
    with figure(HERE / "curves.png", title, 2, 2, (13, 7.5)) as axes:
        for axis, (task, says) in zip(axes, TITLES.items(), strict=True):
            names = [n for n in recorded() if n.startswith(f"{task}-")]
            for number, name in enumerate(names):
                draw_run(axis, name, shift=0.3 * (number - (len(names) - 1) / 2))
            axis.set_ylim(-0.03, 1.03)
            axis.xaxis.get_major_locator().set_params(integer=True)
            panel(axis, f"{task}: {says}", "update")
        axes[0].legend(loc="upper left", frameon=False)


def draw_run(axis: Any, name: str, shift: float) -> None:
    """A run's line, and its two evaluations, `shift` updates aside so that none hides another."""
    records = [m for m in read_records(HERE / f"{name}.jsonl") if "reward/correct" in m]
    method = name.split("-")[1]
    label, color = {
        "lora": ("LoRA", BLUE), "full": ("all weights", ORANGE), "random": ("coin flips", "gray"),
    }[method]  # fmt: skip
    updates = [m["update"] for m in records]
    style = "--" if name.endswith("seed1") else "-"
    label = "_" if name.endswith("seed1") else label
    right = [m["reward/correct"] for m in records]
    axis.plot(updates, right, style, color=color, alpha=0.5, linewidth=1.3, label=label)
    for update, answers in zip((0, updates[-1]), evaluations(name), strict=True):
        number = sum(answer["correct"] for answer in answers.values())
        middle, (low, high) = number / len(answers), wilson(number, len(answers))
        error = [[middle - low], [high - middle]]
        axis.errorbar(update + shift, middle, error, color=color, marker="o", capsize=3)


if __name__ == "__main__":
    main()
