"""`tiny` learns Nim against older copies of itself: held-out results, and a league of the copies.

python runs/opponents_tiny/reproduce.py                # two runs in turn: about ten minutes
python runs/opponents_tiny/reproduce.py --draw         # only the table and the picture
python runs/opponents_tiny/reproduce.py nim-seed0          # one run
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402
from figures import band, figure, panel  # noqa: E402

from core.metrics import before_after, describe  # noqa: E402
from core.report.curves import BLUE, ORANGE  # noqa: E402
from core.run_log import read_records  # noqa: E402

NIM = "my_envs.py:Nim:opponent="  # a copy of environments/template.py
COMMAND = (
    f"--env {NIM}older:4 --eval-env {NIM}guess {NIM}older:4 --sft-steps 60 --num-updates 16 "
    "--num-prompts 8 --max-turns 20 --max-tokens 24 --lr 1e-4 --eval-num-tasks 128"
)
SEEDS = (0, 1)
RUNS = {f"nim-seed{seed}": seed for seed in SEEDS}
RATED = "nim-seed0"  # the run whose copies play the league
SEATS = ("", "/first", "/second")
OPPONENTS = {"guess": "a random player", "older:4": "its own start"}


def main() -> None:
    for run in record.chosen_runs(__doc__, HERE, RUNS):
        make(run, f"{COMMAND} --seed {RUNS[run]}")
    draw()
    record.write_table(HERE, [*table(), "", record.recorded_with(HERE)])
    record.write_table(HERE, league(), "league")


def make(run: str, flags: str) -> None:
    """Trains, rates the older copies of one run in a league, and keeps metrics and ratings."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copy(record.ROOT / "environments/template.py", Path(place, "my_envs.py"))
        folder, seconds = record.train(flags.replace(NIM, f"{place}/{NIM}"), f"{HERE.name}-{run}")
        if run == RATED:
            command = [sys.executable, "-m", "core.league", f"runs/{folder.name}", "--games", "64"]
            subprocess.run(command, cwd=record.ROOT, check=True)
            shutil.copy(folder / "league.json", HERE / "league.json")
    shutil.copy(folder / "metrics.jsonl", HERE / f"{run}.jsonl")
    shutil.rmtree(folder)
    times = record.read_seconds(HERE) | {run: seconds}
    record.write_atomically(HERE / "seconds.json", json.dumps(times, indent=1))
    record.write_recorded(HERE)


def table() -> list[str]:
    """One row per run, opponent and seat, as Markdown."""
    rows = [
        "| held-out games against | seat | seed | won before RL [95%] | won after RL [95%] | p |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for opponent, name in OPPONENTS.items():
        for seat in SEATS:
            for run, seed in RUNS.items():
                env = f"{NIM}{opponent}{seat}"
                found = {e: pair for e, *pair in before_after(read_records(HERE / f"{run}.jsonl"))}
                first, last = found[env]
                rows.append(
                    f"| {name} | {seat[1:] or 'both'} | {seed} | {describe(env, first)} | "
                    f"{describe(env, last)} | {last[f'eval/{env}/p_value']:.0e} |"
                )
    seconds = ", ".join(str(record.read_seconds(HERE)[run]) for run in RUNS)
    return [*rows, "", f"Seconds for training with all evaluations: {seconds}. Command: "
            f"`python train.py {COMMAND}`, and the same with `--seed 1`."]  # fmt: skip


def league() -> list[str]:
    """One row per player, as Markdown."""
    rows = ["| player | Elo [95%] | won | drawn | lost |", "| --- | --- | --- | --- | --- |"]
    for row in json.loads((HERE / "league.json").read_text())["players"]:
        name = "after update 16" if row["name"].startswith("runs/") else row["name"]
        elo = f"{row['elo']:.0f} [{row['low']:.0f}, {row['high']:.0f}]"
        rows.append(f"| {name} | {elo} | {row['won']} | {row['drawn']} | {row['lost']} |")
    return rows


def draw() -> None:
    """One panel per opponent: the held-out accuracy of each seat by update."""
    title = (
        "tiny learns Nim against older copies of itself: held-out games, 95% interval, two seeds"
    )
    with figure(HERE / "curves.png", title, 2, 2, (10, 7)) as axes:
        panels = [(opponent, seat) for opponent in OPPONENTS for seat in SEATS[1:]]
        for axis, (opponent, seat) in zip(axes, panels, strict=True):
            env = f"{NIM}{opponent}{seat}"
            for seed, color in zip(SEEDS, (BLUE, ORANGE), strict=True):
                records = [r for r in read_records(HERE / f"nim-seed{seed}.jsonl")
                           if f"eval/{env}/accuracy" in r]  # fmt: skip
                middle, low, high = (
                    [r[f"eval/{env}/{key}"] for r in records]
                    for key in ("accuracy", "ci_low", "ci_high")
                )
                updates = [r["update"] for r in records]
                band(axis, updates, middle, low, high, color, marker="o", markersize=4)
            axis.set_ylim(-0.03, 1.05)
            panel(axis, f"against {OPPONENTS[opponent]}, as {seat[1:]} player", "update")


if __name__ == "__main__":
    main()
