"""2,000 updates of the tiny policy: memory, time per update and file sizes as the run goes on.

    python runs/benchmarks/soak.py         # half an hour on one core
    python runs/benchmarks/soak.py --draw  # only the table and the picture

Every 20 updates the script records the resident memory of the process (from /proc), the time since
the last record, and the sizes of the files of the run. Exit code 1 if memory, time or files grew
beyond their bounds.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from pairs import ROOT

sys.path += [str(ROOT / "runs")]

from figures import figure, panel
from record import markdown, read_records, recorded_with, write_recorded, write_table

from core.report.curves import BLUE
from core.run.log import ROLLOUTS_BYTES

RESULTS = Path(__file__).resolve().parent / "soak"

UPDATES, EVERY, WARM_UP = 2000, 20, 200
FLAGS = f"--run-name soak-run --num-updates {UPDATES} --num-prompts 8 --eval-every 100 --lr 2e-5"
MAX_GROWTH_MB = 1.0  # of resident memory in 100 updates
MAX_SLOWDOWN = 0.10  # of an update: last quarter of the run against the second
SAMPLES = RESULTS / "samples.jsonl"
Sample = dict[str, Any]


def main() -> int:
    if "--draw" not in sys.argv:
        train_and_sample()
        write_recorded(RESULTS)
    samples = read_records(SAMPLES)
    results = judge(samples)
    draw(samples, results)
    write_table(RESULTS, table(samples, results))
    return int(any(holds == "no" for *_, holds in results))


def train_and_sample() -> None:
    """Runs train.py and writes a sample every `EVERY` updates."""
    process = subprocess.Popen([sys.executable, "train.py", *FLAGS.split()], cwd=ROOT)
    run, sampled = ROOT / "runs" / "soak-run", 0
    with SAMPLES.open("w") as file:
        while process.poll() is None:
            time.sleep(0.2)
            updates = count_updates(run / "metrics.jsonl")
            if updates >= sampled + EVERY:
                sampled = updates - updates % EVERY
                sample = {"update": updates, "at_s": time.time(), **measure(process.pid, run)}
                file.write(json.dumps(sample) + "\n")
                file.flush()
    if process.returncode:
        sys.exit(f"train.py ended with exit code {process.returncode}")


def count_updates(metrics: Path) -> int:
    return metrics.read_bytes().count(b'{"update"') if metrics.exists() else 0


def measure(pid: int, run: Path) -> Sample:
    """Returns the resident memory, threads and open files of a process, and file sizes in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    sizes = {
        path.name: sum(p.stat().st_size for p in [path, *path.rglob("*")] if p.is_file()) / 1e6
        for path in run.iterdir()
    }
    return {
        "rss_mb": int(fields["VmRSS"].split()[0]) / 1000,
        "threads": int(fields["Threads"]),
        "open_files": len(os.listdir(f"/proc/{pid}/fd")),
        "files_mb": sizes,
    }


def judge(samples: list[Sample]) -> list[list[str]]:
    """Returns a row for memory, time and files: what, how much, its bound, and if it holds."""
    late = [sample for sample in samples if sample["update"] >= WARM_UP]
    updates = np.array([sample["update"] for sample in late])
    slope = 100 * np.polyfit(updates, [sample["rss_mb"] for sample in late], 1)[0]
    times = seconds_per_update(samples)
    quarters = [times[len(times) * q // 4 : len(times) * (q + 1) // 4] for q in range(4)]
    second, last = np.median(quarters[1]), np.median(quarters[3])
    rollouts = max(
        sum(mb for name, mb in sample["files_mb"].items() if name.startswith("rollouts"))
        for sample in samples
    )
    max_rollouts = 2 * ROLLOUTS_BYTES / 1e6 * 1.1
    return [
        [f"growth of resident memory after update {WARM_UP}", f"{slope:+.2f} MB per 100 updates",
         f"< {MAX_GROWTH_MB:g} MB", yes_or_no(slope < MAX_GROWTH_MB)],
        ["time of an update: last quarter against second quarter",
         f"{last:.2f} s against {second:.2f} s ({last / second - 1:+.0%})",
         f"< {MAX_SLOWDOWN:+.0%}", yes_or_no(last < (1 + MAX_SLOWDOWN) * second)],
        ["largest size of rollouts.jsonl and rollouts.old.jsonl together", f"{rollouts:.0f} MB",
         f"< {max_rollouts:.0f} MB", yes_or_no(rollouts < max_rollouts)],
    ]  # fmt: skip


def yes_or_no(holds: Any) -> str:
    return "yes" if holds else "no"


def seconds_per_update(samples: list[Sample]) -> list[float]:
    """Returns the mean time of an update between two samples, with evaluations and checkpoints."""
    pairs = itertools.pairwise(samples)
    return [(b["at_s"] - a["at_s"]) / (b["update"] - a["update"]) for a, b in pairs]


def table(samples: list[Sample], results: list[list[str]]) -> list[str]:
    first = next(sample for sample in samples if sample["update"] >= WARM_UP)
    last = samples[-1]
    minutes = (last["at_s"] - samples[0]["at_s"]) / 60
    rows = [
        *results,
        [f"resident memory at update {first['update']} and at update {last['update']}",
         f"{first['rss_mb']:.0f} MB, {last['rss_mb']:.0f} MB", "", ""],
        ["threads and open files at these updates", f"{first['threads']} and "
         f"{first['open_files']}; {last['threads']} and {last['open_files']}", "", ""],
        ["metrics.jsonl; checkpoints", f"{last['files_mb']['metrics.jsonl']:.1f} MB; "
         f"{last['files_mb']['checkpoint']:.1f} MB", "", ""],
    ]  # fmt: skip
    took = f"`python train.py {FLAGS}` took {minutes:.0f} minutes. {recorded_with(RESULTS)}"
    return [*markdown(" | measured | bound | holds", rows), "", took]


def draw(samples: list[Sample], results: list[list[str]]) -> None:
    """Memory, time and file sizes by update."""
    updates = [sample["update"] for sample in samples]
    title = f"{updates[-1]:,} updates: memory, time and files"
    with figure(RESULTS / "soak.png", title, 1, 3, (12, 3.4)) as (memory, seconds, files):
        memory.plot(updates, [sample["rss_mb"] for sample in samples], color=BLUE)
        panel(memory, "resident memory, MB", "update")
        seconds.plot(updates[1:], seconds_per_update(samples), color=BLUE)
        panel(seconds, "seconds per update", "update")
        for name, style in (("rollouts.jsonl", "-"), ("rollouts.old.jsonl", ":")):
            sizes = [sample["files_mb"].get(name, 0) for sample in samples]
            files.plot(updates, sizes, style, color=BLUE, label=name)
        panel(files, "files, MB", "update")
        files.legend(frameon=False, loc="upper left", ncols=2, fontsize=9)
        for axis, (_, text, *_) in zip((memory, seconds, files), results, strict=True):
            axis.set_ylim(0, 80 if axis is files else None)
            axis.annotate(text, (0.98, 0.04), xycoords="axes fraction", ha="right", fontsize=9)


if __name__ == "__main__":
    sys.exit(main())
