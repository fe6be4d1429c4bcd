"""2,000 updates on the tiny policy: memory, time and files, as they go.

python runs/benchmarks/soak/soak.py  # half an hour on one core
python runs/benchmarks/soak/soak.py --draw  # only the table and the picture again

Once in twenty updates the process is looked at from outside: resident memory (from /proc), the time
since the last look, what the run's folder holds. Exit code 1 if memory or time grew, or a file
grew without bound.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path += [str(ROOT / "runs"), str(ROOT)]

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from record import machine, write_table  # noqa: E402

from core.report.curves import BLUE, STYLE  # noqa: E402
from core.run_log import ROLLOUTS_BYTES  # noqa: E402

UPDATES, EVERY, WARM_UP = 2000, 20, 200
FLAGS = f"--run-name soak-run --num-updates {UPDATES} --num-prompts 8 --eval-every 100 --lr 2e-5"
MOST_MB = 1.0  # that memory may grow in 100 updates
MOST_SHARE = 0.10  # by which the last quarter's updates may take longer than the second's
LOOKS = HERE / "looks.jsonl"


def main() -> int:
    if "--draw" not in sys.argv:
        soak()
    looks = [json.loads(line) for line in LOOKS.read_text().splitlines()]
    found = judge(looks)
    draw(looks, found)
    write_table(HERE, table(looks, found))
    return 0 if all(row["holds"] for row in found.values()) else 1


def soak() -> None:
    """Run it, and look at it now and then."""
    process = subprocess.Popen([sys.executable, "train.py", *FLAGS.split()], cwd=ROOT)
    run, done = ROOT / "runs" / "soak-run", 0
    with LOOKS.open("w") as file:
        while process.poll() is None:
            time.sleep(0.2)
            updates = count(run / "metrics.jsonl")
            if updates >= done + EVERY:
                done = updates - updates % EVERY
                look = {"update": updates, "at_s": time.time(), **look_at(process.pid, run)}
                file.write(json.dumps(look) + "\n")
                file.flush()
    if process.returncode:
        sys.exit(f"train.py ended with {process.returncode}")


def count(path: Path) -> int:
    """Updates in a metrics.jsonl so far."""
    return path.read_bytes().count(b'{"update"') if path.exists() else 0


def look_at(pid: int, run: Path) -> dict[str, float]:
    """Resident memory of a process and bytes of a folder's parts, in MB; threads, open files."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    parts = {
        path.name: sum(p.stat().st_size for p in [path, *path.rglob("*")] if p.is_file()) / 1e6
        for path in run.iterdir()
    }
    return {
        "rss_mb": int(fields["VmRSS"].split()[0]) / 1000,
        "threads": int(fields["Threads"]),
        "open_files": len(os.listdir(f"/proc/{pid}/fd")),
        "files_mb": parts,
    }


def judge(looks: list[dict]) -> dict[str, dict]:
    """Memory, time and files, each with its figure and whether it holds."""
    late = [look for look in looks if look["update"] >= WARM_UP]
    at = np.array([look["update"] for look in late])
    slope, _ = np.polyfit(at, [look["rss_mb"] for look in late], 1)
    took = seconds_each(looks)
    second, last = (np.median(took[len(took) * q // 4 : len(took) * (q + 1) // 4]) for q in (1, 3))
    rollouts = [
        sum(mb for name, mb in look["files_mb"].items() if name.startswith("rollouts"))
        for look in looks
    ]
    bound = 2 * ROLLOUTS_BYTES / 1e6 * 1.1
    return {
        "memory": {
            "what": f"resident memory, slope after update {WARM_UP}",
            "figure": f"{100 * slope:+.2f} MB in 100 updates",
            "bound": f"< {MOST_MB:g} MB",
            "holds": bool(100 * slope < MOST_MB),
        },
        "time": {
            "what": "time of an update, last quarter against second",
            "figure": f"{last:.2f} s against {second:.2f} s ({last / second - 1:+.0%})",
            "bound": f"< {MOST_SHARE:+.0%}",
            "holds": bool(last < (1 + MOST_SHARE) * second),
        },
        "files": {
            "what": "rollouts.jsonl and its older half, at most",
            "figure": f"{max(rollouts):.0f} MB",
            "bound": f"< {bound:.0f} MB",
            "holds": bool(max(rollouts) < bound),
        },
    }


def seconds_each(looks: list[dict]) -> list[float]:
    """Seconds of an update, between one look and the next, evaluations and checkpoints included."""
    pairs = itertools.pairwise(looks)
    return [(b["at_s"] - a["at_s"]) / (b["update"] - a["update"]) for a, b in pairs]


def table(looks: list[dict], found: dict[str, dict]) -> list[str]:
    first, last = (next(x for x in looks if x["update"] >= WARM_UP), looks[-1])
    rows = ["| | measured | bound | holds |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {r['what']} | {r['figure']} | {r['bound']} | {'yes' if r['holds'] else '**no**'} |"
        for r in found.values()
    ]
    rows += [
        f"| resident memory at update {first['update']} and at {last['update']} | "
        f"{first['rss_mb']:.0f} MB, {last['rss_mb']:.0f} MB | | |",
        f"| threads, open files, at the same | {first['threads']}, {first['open_files']}; "
        f"{last['threads']}, {last['open_files']} | | |",
        f"| metrics.jsonl, checkpoints | {last['files_mb']['metrics.jsonl']:.1f} MB, "
        f"{last['files_mb']['checkpoint']:.1f} MB | | |",
        "",
        f"`python train.py {FLAGS}`, in {(looks[-1]['at_s'] - looks[0]['at_s']) / 60:.0f} minutes. "
        f"Machine: {machine()}.",
    ]
    return rows


def draw(looks: list[dict], found: dict[str, dict]) -> None:
    """Memory, time and files over the updates."""
    at = [look["update"] for look in looks]
    names = {"rollouts.jsonl": "rollouts.jsonl", "rollouts.old.jsonl": "its older half"}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
        memory, seconds, files = axes
        title = f"{looks[-1]['update']:,} updates: what a process holds, takes and leaves"
        figure.suptitle(title, fontsize=15, fontweight="bold", x=0.01, ha="left")
        memory.plot(at, [look["rss_mb"] for look in looks], color=BLUE)
        memory.set_ylim(0)
        memory.set_title("resident memory, MB", loc="left", fontsize=11, fontweight="bold")
        seconds.plot(at[1:], seconds_each(looks), color=BLUE)
        seconds.set_ylim(0)
        seconds.set_title("seconds an update", loc="left", fontsize=11, fontweight="bold")
        for (name, label), style in zip(names.items(), ("-", ":"), strict=True):
            sizes = [look["files_mb"].get(name, 0) for look in looks]
            files.plot(at, sizes, style, color=BLUE, label=label)
        files.set_title("files, MB", loc="left", fontsize=11, fontweight="bold")
        files.set_ylim(0, 80)
        files.legend(frameon=False, loc="upper left", ncols=2)
        for axis, name in zip((memory, seconds, files), found, strict=True):
            axis.set_xlabel("update")
            axis.annotate(found[name]["figure"], (0.98, 0.04), xycoords="axes fraction", ha="right")
        figure.savefig(HERE / "soak.png", dpi=100)
        plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
