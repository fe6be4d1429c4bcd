"""Kills runs while they write, cuts the power, sends signals; then resumes them.

    python runs/faults/reproduce.py --only kills --tries 50

A resumed run must end with the metrics of one that was not stopped. Ways to stop a run:

    kill      SIGKILL before the nth change to a file of the run (an audit hook of Python counts)
    write     SIGXFSZ in the middle of a write, at a random byte
    time      SIGKILL at a random time
    power     SIGKILL before the nth change; then every file loses what was written to it after
              its last fsync: it is cut, or the end is zeros
    signal    SIGINT, SIGTERM or SIGHUP at a random time: the run saves and ends

Processes are forked from one that has imported everything, so each takes about a second.
"""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

Case = tuple[str, Callable[[], str]]  # a name, and what returns "" or says in a line what failed
FLAGS = """--run-name a --sft-steps 2 --sft-batch-size 2 --num-updates 3 --num-prompts 2
    --group-size 2 --eval-num-tasks 2 --eval-every 2 --save-every 1 --max-tokens 10
    --max-model-len 256 --device cpu""".split()
SETTINGS = {
    "full": "--algo grpo --sft-best 2",
    "lora": "--algo reinforce --lora-rank 2 --kl-coef 0.1",
    "ppo": "--algo ppo --num-epochs 2 --num-minibatches 2",
    "reference": "--algo grpo --kl-coef 0.1 --filter-groups 1",
}
WAYS = ("kill", "write", "time", "power", "power", "signal")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
TIMEOUT = 30  # seconds for one process, which takes one or two
LIMIT = 4 * TIMEOUT  # of a try


@dataclass
class Death:
    """How a process ends."""

    way: str = ""  # "": it is not stopped
    change: int = 0  # the number of the change, from 1
    size: int = 0  # bytes that a file may have, for "write"
    seconds: float = 0.0
    signal: int = 0


@dataclass
class Whole:
    """A run that was not stopped."""

    metrics: list[dict[str, Any]]
    changes: int
    seconds: float
    flags: list[str] = field(default_factory=list)


def cases(rng: random.Random) -> Iterator[Case]:
    """Tries without end."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "core.report.page", "core.report.curves", "peft"])
    wholes: dict[str, Whole] = {}
    with tempfile.TemporaryDirectory(prefix="picorl-kills-") as name:
        for number in range(sys.maxsize):
            setting = rng.choice(list(SETTINGS))
            if setting not in wholes:
                wholes[setting] = run_whole(context, Path(name, setting), setting)
            whole, folder = wholes[setting], Path(name, f"try{number}")
            deaths = [draw(rng, whole) for _ in range(rng.randint(1, 3))]
            seed = rng.random()
            title = f"{setting}: {', '.join(death.way for death in deaths)}"
            yield title, lambda f=folder, w=whole, d=deaths, s=seed: stopped(context, f, w, d, s)


def run_whole(context: Any, folder: Path, setting: str) -> Whole:
    """Makes a run in `folder` that nothing stops."""
    folder.mkdir()
    flags = [*FLAGS, *SETTINGS[setting].split()]
    started = time.monotonic()
    code = run(context, folder, flags, Death())
    seconds = time.monotonic() - started
    if code != 0:
        raise RuntimeError(f"a run that nothing stops ended with {code}: {output_of(folder)}")
    changes = len((folder / "changes").read_text().splitlines())
    return Whole(metrics_of(folder), changes, seconds, flags)


def draw(rng: random.Random, whole: Whole) -> Death:
    """A way to stop a run."""
    return Death(
        rng.choice(WAYS), rng.randint(1, whole.changes), int(10 ** rng.uniform(0, 5.3)),
        rng.uniform(0.05, 1.2 * whole.seconds), rng.choice(SIGNALS),
    )  # fmt: skip


def stopped(context: Any, folder: Path, whole: Whole, deaths: list[Death], seed: float) -> str:
    """Stops a run in each of these ways and resumes it to its end; "" if it is as the whole."""
    folder.mkdir()
    rng = random.Random(seed)
    try:
        for death in [*deaths, Death()]:
            started = (folder / "runs/a").exists()
            saved = list(folder.glob("runs/a/checkpoint/0*"))
            args = ["--resume", "runs/a"] if started else whole.flags
            code = run(context, folder, args, death)
            if code is None:
                return f"{death}: hangs"
            text = output_of(folder)
            if "Traceback" in text:
                return f"{death}: {text[-500:]!r}"
            if code == 2 and started and not saved:  # so early that nothing can be resumed
                shutil.rmtree(folder / "runs")
                run(context, folder, whole.flags, Death())
                break
            ended = {0, 130, -signal.SIGKILL, -signal.SIGXFSZ, *(128 + s for s in SIGNALS)}
            ended |= {-s for s in SIGNALS}  # before the run has begun
            if code not in (ended if death.way else {0}):
                return f"{death}: exit code {code}: {text[-500:]!r}"
            if death.way == "power":
                cut_power(folder, rng)
        if metrics_of(folder) != whole.metrics:
            return f"{deaths}: other metrics"
        # runs/.part-*, of a start that was killed, are removed by a start an hour later
        parts = list(folder.glob("runs/a/**/.part*"))
        return f"{deaths}: left {parts}" if parts else ""
    finally:
        shutil.rmtree(folder)


def run(context: Any, folder: Path, args: list[str], death: Death) -> int | None:
    """Runs `train.py ARGS` in a new process; returns its exit code, None if it hangs."""
    (folder / "changes").unlink(missing_ok=True)
    child = context.Process(target=train_in_child, args=(args, str(folder), death))
    child.start()
    if death.way in ("time", "signal"):
        child.join(death.seconds)
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL if death.way == "time" else death.signal)
    child.join(TIMEOUT)
    if child.is_alive():
        child.kill()
        child.join()
        return None
    return child.exitcode


def train_in_child(args: list[str], folder: str, death: Death) -> None:
    """Runs the command in this process, and ends it as `death` says."""
    # a shell ignores SIGINT in background jobs, and nohup SIGHUP; a process inherits that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(folder)
    sys.stdout = sys.stderr = open("output.txt", "a", buffering=1)  # noqa: SIM115
    changes = os.open("changes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    synced = os.open("synced", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    count = 0

    def note(change: str) -> None:
        nonlocal count
        count += 1
        os.write(changes, f"{change}\n".encode())
        if count == death.change and death.way in ("kill", "power"):
            os.kill(os.getpid(), signal.SIGKILL)
        if count == death.change and death.way == "write":
            end_in_a_write(death.size)

    fsync = os.fsync

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        os.write(synced, f"{status.st_ino} {status.st_size}\n".encode())

    os.fsync = noted_fsync
    import train
    from core import interrupt

    interrupt.set_hooks()
    watch_changes(note)
    sys.exit(train.run_command(args))


def watch_changes(note: Callable[[str], None]) -> None:
    """Calls `note` before each change to a file of a run by the main thread of this process."""

    def watch(event: str, arguments: Any) -> None:
        if event not in CHANGES or threading.current_thread() is not threading.main_thread():
            return
        path = str(arguments[0])
        in_run = path.startswith("runs") or "/runs/" in path
        if in_run and (event != "open" or writes(arguments)):
            note(f"{event} {path}")

    sys.addaudithook(watch)


def end_in_a_write(size: int) -> None:
    """Lets the kernel end this process while it writes the first file that exceeds `size` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def writes(arguments: Any) -> bool:
    """Whether a call of open() may change a file."""
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def cut_power(folder: Path, rng: random.Random) -> None:
    """Takes from each file what was written to it after its last fsync, or zeros it."""
    synced: dict[int, int] = {}
    for line in (folder / "synced").read_text().splitlines():
        inode, size = map(int, line.split())
        synced[inode] = size
    for path in (folder / "runs").rglob("*"):
        if path.is_file():
            status = path.stat()
            kept = min(synced.get(status.st_ino, 0), status.st_size)
            end = rng.choice([kept, rng.randint(kept, status.st_size), status.st_size])
            zeros = rng.random() < 0.5  # some file systems keep the size and lose the content
            with path.open("r+b") as file:
                if zeros and kept < status.st_size:
                    file.seek(end)
                    file.write(bytes(status.st_size - end))
                else:
                    file.truncate(end)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl without times."""
    lines = (folder / "runs/a/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in records]


def output_of(folder: Path) -> str:
    """What the processes printed."""
    return (folder / "output.txt").read_text() if (folder / "output.txt").exists() else ""
