"""train.py, which also writes every greedy answer of its evaluations to answers.jsonl.

    python runs/smollm2/answers.py task --config runs/smollm2/sums.yaml
    python runs/smollm2/answers.py coin ..     # coin flips for rewards in training: the control
    python runs/smollm2/answers.py table       # the tables and the picture of the recorded runs

The sums of an evaluation repeat: 256 seeds ask 67 different questions. The tables count each task
once, so they need all answers, where rollouts.jsonl usually has the first eight of an evaluation.
Some models gain from random rewards (arXiv:2506.10947); then a gain does not show that the task was
learned. `info["correct"]`, and so the held-out accuracy, stays that of the task.
"""

import itertools
import json
import random
import sys
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402

import train  # noqa: E402
from core.loop import evaluator  # noqa: E402
from core.metrics import mcnemar, wilson  # noqa: E402
from core.run import cli  # noqa: E402
from environments.base import Step  # noqa: E402
from environments.plumbing.registry import EnvSpec  # noqa: E402

COIN = random.Random(0)  # shared by all episodes: each reward is a flip of its own


def main(how: str, flags: list[str]) -> int:
    evaluator.LOGGED_ROLLOUTS = 10**6
    if how == "coin":
        for env in cli.parse(flags).env:
            flip_rewards(EnvSpec(env).constructor)
    code = train.run_command(flags)
    run = record.ROOT / "runs" / flags[flags.index("--run-name") + 1]
    rows = record.read_records(run / "rollouts.jsonl")
    answers = [short(row) for row in rows if row["kind"] == "eval"]
    ends = {min(a["update"] for a in answers), max(a["update"] for a in answers)}
    lines = [json.dumps(a, ensure_ascii=False) + "\n" for a in answers if a["update"] in ends]
    (run / "answers.jsonl").write_text("".join(dict.fromkeys(lines)), encoding="utf-8")
    return code


def flip_rewards(env_class: Any) -> None:
    """Makes every reward of the class 0 or 1 at random."""
    step = env_class.step

    def step_with_random_reward(self: Any, response: str) -> Step:
        return replace(step(self, response), reward=float(COIN.random() < 0.5))

    env_class.step = step_with_random_reward


def short(rollout: dict[str, Any]) -> dict[str, Any]:
    """What the tables need of a rollout in rollouts.jsonl."""
    said = {role: [m["content"] for m in rollout["messages"] if m["role"] == role]
            for role in ("user", "assistant")}  # fmt: skip
    return {
        "update": rollout["update"], "asked": said["user"], "said": said["assistant"],
        "correct": rollout["info"].get("correct", False),
        "lenient": rollout["info"].get("lenient"),
    }  # fmt: skip


def evaluations(answers: list[dict[str, Any]]) -> list[dict[Hashable, dict[str, Any]]]:
    """The greedy answers before and after RL, by task: each task counts once.

    As in core.metrics.distinct_tasks, equal questions are one task, unless the episodes of some
    go on differently: then each episode is a task.
    """
    last = max(answer["update"] for answer in answers)
    before, after = ([a for a in answers if a["update"] == u] for u in (0, last))
    pairs = zip(before, after, strict=True)
    whole = [tuple(max(first["asked"], second["asked"], key=len)) for first, second in pairs]
    openings = [asked[0] for asked in whole]
    same = len(set(whole)) == len(set(openings))
    tasks = openings if same else range(len(whole))
    return [dict(zip(tasks, episodes, strict=True)) for episodes in (before, after)]


def read_answers(run: record.Run) -> list[dict[str, Any]]:
    return record.read_records(HERE / f"{run.stem}.answers.jsonl")


def write_tables() -> None:
    runs = [run for run in map(record.Run.read, record.read_page(HERE)[1]) if run.records]
    record.write_table(HERE, [*table(runs), "", record.recorded_with(HERE)])
    record.write_table(HERE, answers_table(runs), "answers")
    draw([run for run in runs if run.name == "sums"])


def table(runs: list[record.Run]) -> list[str]:
    """One row per recorded run, as Markdown."""
    rows = []
    for run in runs:
        before, after = evaluations(read_answers(run))
        solved = [{t for t, a in answers.items() if a["correct"]} for answers in (before, after)]
        lenient = [share(answers, "lenient") for answers in (before, after)]
        rows.append([
            run.stem, str(len(before)), accuracy(before), accuracy(after),
            f"{mcnemar(*solved):.1g}", arrow(*lenient),
            f"{record.read_seconds(HERE)[run.stem] / 60:.0f}",
        ])  # fmt: skip
    head = "run | tasks | before RL [95%] | after RL [95%] | p | lenient | minutes"
    return record.markdown(head, rows)


def accuracy(answers: dict[str, dict[str, Any]], key: str = "correct") -> str:
    right = sum(answer[key] for answer in answers.values())
    low, high = wilson(right, len(answers))
    return f"{right / len(answers):.2f} [{low:.2f}, {high:.2f}]"


def arrow(before: str, after: str) -> str:
    return f"{before} → {after}" if before else ""


def share(answers: dict[str, dict[str, Any]], key: str) -> str:
    """The fraction of the answers with `key`; "" if the environment does not report it."""
    values = [answer[key] for answer in answers.values()]
    return "" if None in values else f"{sum(values) / len(values):.2f}"


def draw(runs: list[record.Run]) -> None:
    """The held-out accuracy of each seed over the minutes since the command."""
    from figures import figure, panel

    from core.report.curves import BLUE, GREEN, ORANGE, PURPLE, RED

    title = "smollm2 learns sums on two CPU cores"
    with figure(HERE / "curves.png", title, 1, 1, (7.5, 4.2)) as axes:
        for run, color in zip(runs, (BLUE, ORANGE, GREEN, PURPLE, RED), strict=True):
            minutes, accuracies = minutes_and_accuracy(run)
            axes[0].plot(minutes, accuracies, marker="o", color=color, label=f"seed {run.seed}")
        panel(axes[0], "held-out accuracy, greedy", "minutes since the command")
        axes[0].set_ylim(0, 1)
        axes[0].set_xlim(0)
        axes[0].legend(frameon=False, loc="lower right")


def minutes_and_accuracy(run: record.Run) -> tuple[list[float], list[float]]:
    """Of each evaluation. What no update counts, mostly the start, is before the first one."""
    parts = [f"time/{part}_s" for part in ("sft", "rollout", "train", "eval")]
    times = [sum(r.get(part, 0.0) for part in parts) for r in run.records]
    start = record.read_seconds(HERE)[run.stem] - sum(times)
    ends = [start + t for t in itertools.accumulate(times)]
    shown = [(t / 60, r[key]) for t, r in zip(ends, run.records, strict=True)
             if (key := f"eval/{run.envs[0]}/accuracy") in r]  # fmt: skip
    minutes, accuracies = zip(*shown, strict=True)
    return [*minutes], [*accuracies]


def answers_table(runs: list[record.Run]) -> list[str]:
    """The first held-out tasks of the first seed of each run: answers before and after."""
    rows = []
    for run in (run for run in runs if run.seed == 0):
        before, after = evaluations(read_answers(run))
        for task in list(before)[:4]:
            asked = before[task]["asked"][0]
            cells = (run.stem, asked, text(before[task]), text(after[task]))
            rows.append([cell.replace("|", "\\|") for cell in cells])
    return record.markdown("run | asked | before RL | after RL", rows)


def text(answer: dict[str, Any]) -> str:
    return " / ".join(f"`{' '.join(t.replace('`', ' ').split())}`" for t in answer["said"])


if __name__ == "__main__":
    how, *flags = sys.argv[1:] or [""]
    if how not in ("task", "coin", "table"):
        sys.exit(__doc__)
    sys.exit(write_tables() if how == "table" else main(how, flags))
