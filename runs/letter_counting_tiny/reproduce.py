"""The default run with each algorithm and three seeds: metrics, table and picture of this folder.

    python runs/letter_counting_tiny/reproduce.py            # all nine runs, about half an hour
    python runs/letter_counting_tiny/reproduce.py --draw     # only the table and the picture again

Each run is the plain command `python train.py --algo A --seed S`, timed from its start to its end.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent.parent)]

from record import machine, read_seconds, record, write_table  # noqa: E402

from core.metrics import before_after, describe  # noqa: E402
from core.report.curves import draw_seeds  # noqa: E402
from core.run_log import read_records  # noqa: E402

ALGORITHMS, SEEDS = ("grpo", "reinforce", "ppo"), (0, 1, 2)


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
                f"{read_seconds(HERE)[f'{algo}-seed{seed}']} s |"
            )
    return rows


def main() -> None:
    for algo in ALGORITHMS:
        for seed in SEEDS:
            if "--draw" not in sys.argv:
                first = (algo, seed) == (ALGORITHMS[0], SEEDS[0])
                keep = {"curves.png": HERE} if first else {}
                record(HERE, f"{algo}-seed{seed}", f"--algo {algo} --seed {seed}", keep)
    runs = {a: [read_records(HERE / f"{a}-seed{s}.jsonl") for s in SEEDS] for a in ALGORITHMS}
    draw_seeds(HERE / "seeds.png", runs, "The default task, three algorithms, three seeds")
    write_table(HERE, [*table(), "", f"Machine: {machine()}."])


if __name__ == "__main__":
    main()
