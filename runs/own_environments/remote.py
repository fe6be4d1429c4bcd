"""Processes, memory and seconds of an evaluation of 256 tasks in remote environments.

    python runs/own_environments/remote.py          # --env-instances 8 and 32

Runs `train.py --num-updates 0` on remote:env=letter_counting and reads /proc ten times a second:
the most processes at one time beside the run itself, and the most memory of all of them together.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

import record  # noqa: E402

FLAGS = "--env remote:env=letter_counting --num-updates 0 --eval-num-tasks 256".split()
INSTANCES = (8, 32)
RESULTS = HERE / "remote.json"


def main() -> None:
    rows = {instances: measure(instances) for instances in INSTANCES}
    record.write_atomically(RESULTS, json.dumps({"commit": record.commit(), "rows": rows}))
    record.write_table(HERE, [*table(), "", f"At commit {record.commit()} on {record.machine()}."],
                       "remote")  # fmt: skip


def measure(instances: int) -> dict[str, float]:
    """Returns the most processes and their memory (MB, shared pages counted once per process),
    and the seconds of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(record.ROOT / "train.py"), *FLAGS]
        started = time.monotonic()
        run = subprocess.Popen([*command, "--env-instances", str(instances)], cwd=folder)
        most, memory = 0, 0.0
        while run.poll() is None:
            children = descendants(run.pid)
            most, memory = max(most, len(children)), max(memory, sum(map(resident_mb, children)))
            time.sleep(0.1)
        assert run.returncode == 0
        return {
            "processes": most,
            "mb": round(memory),
            "seconds": round(time.monotonic() - started),
        }


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:  # the thread has ended
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def resident_mb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:  # the process has ended
        return 0.0
    return pages * 4096 / 1e6


def table() -> list[str]:
    lines = ["| `--env-instances` | processes | their memory, MB | seconds of the command |",
             "| --- | --- | --- | --- |"]  # fmt: skip
    for instances, row in json.loads(RESULTS.read_text())["rows"].items():
        lines.append(f"| {instances} | {row['processes']} | {row['mb']} | {row['seconds']} |")
    return lines


if __name__ == "__main__":
    main()
