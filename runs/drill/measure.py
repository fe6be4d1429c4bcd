"""What each fault of the drill does to a run: its last update and its accuracies.

    python runs/drill/measure.py            # twenty minutes on two cores; what runs.jsonl lacks

Every fault alone on one seed, and the loop without any on five. Writes the table of README.md.
"""

import contextlib
import io
import json
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import record  # noqa: E402
import torch  # noqa: E402
from rich.progress import track  # noqa: E402

from core.workshop.drill import RUNS, as_module, measured, with_faults  # noqa: E402
from core.workshop.drill_faults import FAULTS  # noqa: E402

NUMBERS = ["accuracy", "reward", "length", "kl", "clipped", "gradient"]


def measure(name: str, seed: int) -> str:
    """One run as a line of JSON: its last update, and the accuracies before and after it."""
    torch.set_num_threads(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        before, after = as_module(with_faults([name] if name in FAULTS else [])).train(seed)
    last = [line for line in printed.getvalue().splitlines() if line.startswith("update")][-1]
    numbers = dict(pair.split() for pair in last.split("  ") if pair.count(" ") == 1)
    numbers = {key: float(number) for key, number in numbers.items() if key != "update"}
    return json.dumps({"fault": name, "seed": seed, "before": before, "accuracy": after} | numbers)


def main() -> None:
    RUNS.touch()
    known = map(json.loads, RUNS.read_text(encoding="utf-8").splitlines())
    done = {(run["fault"], run["seed"]) for run in known}
    jobs = [*((name, 0) for name in FAULTS), *(("none", seed) for seed in range(5))]
    jobs = [job for job in jobs if job not in done]
    with (
        ProcessPoolExecutor(os.cpu_count()) as pool,
        open(RUNS, "a", encoding="utf-8", newline="\n") as file,
    ):
        lines = pool.map(measure, *zip(*jobs, strict=True)) if jobs else []
        for line in track(lines, "runs", total=len(jobs)):
            print(line, file=file, flush=True)
    rows = []
    for name in ("none", *FAULTS):
        numbers = {key: statistics.median(run[key] for run in measured(name)) for key in NUMBERS}
        fault = FAULTS.get(name)
        wrong = f"{fault.cause} ({fault.source})" if fault else "nothing"
        rows.append([f"`{name}`", wrong, *(f"{number:.2g}" for number in numbers.values())])
    head = " | ".join(["fault", "what is wrong (reported in)", *NUMBERS])
    record.write_table(HERE, record.markdown(head, rows), "of faults")


if __name__ == "__main__":
    main()
