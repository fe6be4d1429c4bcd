"""Environments of one's own, from a folder outside the repository: train, stop, resume, play.

python runs/own_environments/reproduce.py           # ten runs of one to four minutes each
python runs/own_environments/reproduce.py --draw    # only the table and the picture
python runs/own_environments/reproduce.py nim-seed0    # one run

Copies environments/template.py as my_envs.py and rewards.py into a temporary folder, and writes
letters.jsonl there: 1,200 questions with their answers. Every run is stopped by Ctrl-C half way and
resumed from another folder.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402
from figures import band, figure, panel  # noqa: E402

from core.metrics import before_after  # noqa: E402
from core.report.curves import BLUE, ORANGE  # noqa: E402
from core.run_log import METRICS, read_records  # noqa: E402
from environments.letter_counting import LetterCounting  # noqa: E402

LETTERS = "rewarded:data=letters.jsonl,reward=rewards.py:accuracy rewards.py:brief"
COMMANDS = {  # the flags of each run; a list because options may contain spaces
    "parity": ["--env", "my_envs.py:Parity", *"--sft-steps 150 --num-updates 8".split()],
    "higher_lower": ["--env", "my_envs.py:HigherLower", *"--sft-steps 40 --num-updates 40 "
                     "--num-prompts 16 --lr 1e-4".split()],
    "nim": ["--env", "my_envs.py:Nim", "--eval-env", "my_envs.py:Nim:opponent=guess",
            *"--sft-steps 40 --num-updates 6 --lr 1e-4 --eval-num-tasks 64".split()],
    "letters": ["--env", f"{LETTERS},weights=1 0.3", "--num-updates", "12"],
    "letters_brief": ["--env", f"{LETTERS},weights=1 4", "--num-updates", "12"],
}  # fmt: skip
SEEDS = (0, 1)
RUNS = {f"{name}-seed{seed}": (name, seed) for name in COMMANDS for seed in SEEDS}


def main() -> None:
    for run in record.chosen_runs(__doc__, HERE, RUNS):
        name, seed = RUNS[run]
        with tempfile.TemporaryDirectory() as folder:
            started = time.monotonic()
            metrics = train_and_resume(Path(folder), [*COMMANDS[name], "--seed", str(seed)])
            shutil.copy(metrics, HERE / f"{run}.jsonl")
            seconds = record.read_seconds(HERE) | {run: round(time.monotonic() - started)}
            record.write_atomically(HERE / "seconds.json", json.dumps(seconds, indent=1))
            if seed == 0:
                (HERE / f"{name}.txt").write_text(played(Path(folder), name))
        record.write_recorded(HERE)
    draw()
    record.write_table(HERE, [*table(), "", record.recorded_with(HERE)])
    record.write_table(HERE, played_as_markdown(), "played")


def train_and_resume(folder: Path, flags: list[str]) -> Path:
    """Trains in `folder`, stops with SIGINT half way, and resumes from /. Returns the metrics."""
    shutil.copy(record.ROOT / "environments/template.py", folder / "my_envs.py")
    shutil.copy(HERE / "rewards.py", folder)
    (folder / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions()))
    run = folder / "runs/run"
    command = [sys.executable, "-m", "train", *flags, "--run-name", "run"]
    process = subprocess.Popen(command, cwd=folder, env=environment())
    half = int(flags[flags.index("--num-updates") + 1]) // 2
    while process.poll() is None and last_update(run / METRICS) < half:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130, "the run was not stopped by Ctrl-C"
    resume = [sys.executable, "-m", "train", "--resume", str(run), "--trust"]
    subprocess.run(resume, cwd="/", env=environment(), check=True)
    updates = [line["update"] for line in read_records(run / METRICS) if "update" in line]
    assert updates == list(range(2 * half + 1)), updates
    return run / METRICS


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(record.ROOT)}


def last_update(metrics: Path) -> int:
    lines = read_records(metrics) if metrics.exists() else []
    return max((line["update"] for line in lines if "update" in line), default=-1)


def questions() -> list[dict[str, object]]:
    """1,200 different questions about one letter, with the answer."""
    env, rows, seed = LetterCounting(), dict[str, dict[str, object]](), 0
    while len(rows) < 1200:
        (message,), seed = env.reset(seed), seed + 1
        if len(env.counts) == 1:
            (answer,) = env.counts.values()
            rows[message["content"]] = {"prompt": message["content"], "answer": answer}
    return list(rows.values())


def played(folder: Path, name: str) -> str:
    """One held-out episode of the trained run, from its log."""
    lines = (folder / "runs/run/rollouts.jsonl").read_text().splitlines()
    last = [row for row in map(json.loads, lines) if row["kind"] == "eval"][-1]
    return "\n".join(f"{m['role']}: {m['content']}" for m in last["messages"]) + "\n"


def played_as_markdown() -> list[str]:
    lines = []
    for name in COMMANDS:
        lines += [f"`{name}`:", "", *(f"    {x}" for x in played_text(name).splitlines()), ""]
    return lines


def played_text(name: str) -> str:
    return (HERE / f"{name}.txt").read_text()


def table() -> list[str]:
    """One row per run, as Markdown."""
    rows = [
        "| run | seed | accuracy before RL [95%] | after RL [95%] | "
        "tokens of a completion, first -> last update | seconds | command |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run, (name, seed) in RUNS.items():
        records = read_records(HERE / f"{run}.jsonl")
        env, first, last = before_after(records)[0]  # the others: each seat of nim
        results = [
            "{:.2f} [{:.2f}, {:.2f}]".format(
                *(m[f"eval/{env}/{key}"] for key in ("accuracy", "ci_low", "ci_high"))
            )
            for m in (first, last)
        ]
        updates = [r for r in records if r.get("update")]
        tokens = " -> ".join(f"{r['length/mean']:.0f}" for r in (updates[0], updates[-1]))
        flags = " ".join(f'"{f}"' if " " in f else f for f in COMMANDS[name])
        command = f"`python -m train {flags}`" if seed == 0 else "the same, `--seed 1`"
        rows.append(
            f"| {name} | {seed} | {results[0]} | {results[1]} | {tokens} | "
            f"{record.read_seconds(HERE)[run]} | {command} |"
        )
    return rows


def draw() -> None:
    """One panel per environment: held-out accuracy by update, with its 95% interval."""
    title = "Environments of one's own: held-out accuracy, 95% interval, two seeds"
    with figure(HERE / "curves.png", title, 1, len(COMMANDS), (4 * len(COMMANDS), 3.6)) as axes:
        for axis, name in zip(axes, COMMANDS, strict=True):
            for seed, color in zip(SEEDS, (BLUE, ORANGE), strict=True):
                records = read_records(HERE / f"{name}-seed{seed}.jsonl")
                env = before_after(records)[0][0]
                shown = [m for m in records if f"eval/{env}/accuracy" in m]
                columns = [[m[f"eval/{env}/{key}"] for m in shown]
                           for key in ("accuracy", "ci_low", "ci_high")]  # fmt: skip
                band(axis, [m["update"] for m in shown], *columns, color, marker="o", markersize=4)
            axis.set_ylim(-0.03, 1.05)
            panel(axis, name, "update")


if __name__ == "__main__":
    main()
