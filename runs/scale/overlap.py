"""The time of an update with --overlap, beside --staleness 1, where episodes wait and where not.

    python runs/scale/overlap.py               # five pairs of each case, on the CPU: ten minutes
    python runs/scale/overlap.py --balanced    # where training takes about as long as playing
    python runs/scale/overlap.py --rounds 1 --no-write

Each side is a process of its own, in turn: A B A B .. The time of an update is `time/rollout_s` +
`time/train_s`, the mean of updates 2 and 3 of 4: the last one plays nothing ahead. One thread of
OpenMP on each side: with more, a second thread of Python waits longer for each matrix product.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE.parent), str(ROOT)]

import tyro  # noqa: E402
from record import commit, machine, markdown, spread, versions, write_table  # noqa: E402

COMMON = "--device cpu --sampler torch --num-updates 4 --eval-num-tasks 0 --save-every 0"
AGENT = f"agent:run={HERE}/slow.py:agent,data=tasks.jsonl"
CASES = {  # what waits: flags, and the goal for the ratio
    "steps of 200 ms, 8 in an episode, 32 episodes":
        (f"--env {HERE}/slow.py:Steps --num-prompts 4", 0.7),
    "tools of 1 s, 64 agents": (f"--env {AGENT} --num-prompts 8 --max-turns 2", 0.55),
    "nothing: the default run": ("", 1.05),
}  # fmt: skip
EPOCHS = {"steps of 200 ms, 8 in an episode, 32 episodes": 3, "tools of 1 s, 64 agents": 5}
BALANCED = {
    f"{case}, {epochs} epochs": (f"{CASES[case][0]} --num-epochs {epochs}", CASES[case][1])
    for case, epochs in EPOCHS.items()
}
SIDES = {"in turn": "--staleness 1", "overlapped": "--overlap"}


@dataclass
class Args:
    """What to measure."""

    balanced: bool = False  # several epochs for each rollout, so that training takes longer
    rounds: int = 5  # pairs of each case
    write: bool = True  # save the results as JSON and write the table into README.md


def main(args: Args) -> None:
    chosen, name = (BALANCED, "overlap-balanced") if args.balanced else (CASES, "overlap")
    cases: dict[str, dict[str, list[list[float]]]] = {
        case: {side: [] for side in SIDES} for case in chosen
    }
    for case, (flags, _) in chosen.items():
        for turn in range(args.rounds):
            for side, flag in SIDES.items():
                cases[case][side].append(seconds_of(f"{COMMON} {flags} {flag}"))
                print(f"{case}, pair {turn + 1}, {side}: {cases[case][side][-1]}", flush=True)
    lines = table(cases)
    print("\n".join(lines))
    if args.write:
        command = f"python runs/scale/overlap.py {' '.join(sys.argv[1:])}".strip()
        result = {"machine": machine(), "commit": commit(), "command": command,
                  "versions": versions(), "seconds": cases}  # fmt: skip
        (HERE / f"{name}-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
        made = f"`{command}` at commit {commit()} on {machine()}; torch {versions()['torch']}."
        write_table(HERE, [*lines, "", made], name)


def seconds_of(flags: str) -> list[float]:
    """What an update of one run waits for its rollouts, and what it trains."""
    with tempfile.TemporaryDirectory() as folder:
        task = {"question": "Write a word.", "seconds": 1.0}
        lines = [json.dumps(task | {"number": number}) for number in range(200)]
        Path(folder, "tasks.jsonl").write_text("\n".join(lines))
        command = [sys.executable, str(ROOT / "train.py"), *flags.split(), "--run-name", "a"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True,
                       env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
        metrics = Path(folder, "runs/a/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in metrics]
    measured = [record for record in records if record.get("update") in (2, 3)]
    return [
        statistics.mean(r[name] for r in measured) for name in ("time/rollout_s", "time/train_s")
    ]


def table(cases: dict[str, dict[str, list[list[float]]]]) -> list[str]:
    rows = []
    for case, sides in cases.items():
        goal = (CASES | BALANCED)[case][1]
        apart, over = ([sum(parts) for parts in side] for side in sides.values())
        longer = [max(parts) / sum(parts) for parts in sides["in turn"]]
        ratios = [b / a for a, b in zip(apart, over, strict=True)]  # pairs have the same load
        met = "met" if statistics.median(ratios) <= goal else "missed"
        rows.append([case, spread(apart), spread(over), spread(ratios),
                     spread(longer), f"at most {goal:g}: {met}"])  # fmt: skip
    return markdown(
        "what waits | --staleness 1, s | --overlap, s | ratio | longer part / both, "
        "the least possible | goal",
        rows,
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
