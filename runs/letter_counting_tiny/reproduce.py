"""The default run with each algorithm and three seeds: metrics, table and picture of this folder.

    python runs/letter_counting_tiny/reproduce.py            # all nine runs, about half an hour
    python runs/letter_counting_tiny/reproduce.py --draw     # only the table and the picture again

Each run is the plain command `python train.py --algo A --seed S`, timed from its start to its end.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from core.curves import draw_seeds  # noqa: E402
from core.journal import read_records  # noqa: E402
from core.metrics import before_after, describe  # noqa: E402

ALGORITHMS, SEEDS = ("grpo", "reinforce", "ppo"), (0, 1, 2)


def run(algo: str, seed: int) -> None:
    """Train once; keep the metrics and the wall time here, and drop the rest."""
    name = f"letter_counting_tiny-{algo}-{seed}"
    folder = ROOT / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "train.py", "--algo", algo, "--seed", str(seed), "--run-name", name]
    started = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True)
    seconds = time.monotonic() - started
    shutil.copy(folder / "metrics.jsonl", HERE / f"{algo}-seed{seed}.jsonl")
    times = read_times() | {f"{algo}-seed{seed}": round(seconds)}
    (HERE / "seconds.json").write_text(json.dumps(times, indent=1) + "\n")
    if (algo, seed) == ("grpo", 0):
        shutil.copy(folder / "curves.png", HERE / "curves.png")
    shutil.rmtree(folder)


def read_times() -> dict[str, int]:
    file = HERE / "seconds.json"
    return json.loads(file.read_text()) if file.exists() else {}


def table() -> list[str]:
    """One row a run: held-out accuracy before and after, when it passed 0.9, how long it took."""
    rows = [
        "| algorithm | seed | before RL [95%] | after RL [95%] | first evaluation at 0.90 | "
        "completion length | wall time |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for algo in ALGORITHMS:
        for seed in SEEDS:
            records = read_records(HERE / f"{algo}-seed{seed}.jsonl")
            ((env, first, last),) = before_after(records)
            passed = next(
                (r["update"] for r in records if r.get(f"eval/{env}/accuracy", 0) >= 0.9), "never"
            )
            lengths = [r["length/mean"] for r in records if "length/mean" in r]
            rows.append(
                f"| {algo} | {seed} | {describe(env, first)} | {describe(env, last)} | "
                f"update {passed} | {lengths[0]:.1f} → {lengths[-1]:.1f} tokens | "
                f"{read_times()[f'{algo}-seed{seed}']} s |"
            )
    return rows


def main() -> None:
    if "--draw" not in sys.argv:
        for algo in ALGORITHMS:
            for seed in SEEDS:
                run(algo, seed)
    runs = {a: [read_records(HERE / f"{a}-seed{s}.jsonl") for s in SEEDS] for a in ALGORITHMS}
    draw_seeds(HERE / "seeds.png", runs, "The default task, three algorithms, three seeds")
    text = (HERE / "README.md").read_text()
    begin, end = "<!-- table -->\n", "<!-- end of table -->"
    head, tail = text.split(begin)[0], text.split(end)[1]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, no GPU, {time.strftime('%Y-%m-%d')}"
    body = "\n".join([*table(), "", f"Machine: {machine}.", ""])
    (HERE / "README.md").write_text(head + begin + body + end + tail)


if __name__ == "__main__":
    main()
