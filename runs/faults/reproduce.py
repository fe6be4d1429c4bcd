"""Stops runs while they write, and resumes them.

    python runs/faults/reproduce.py                          # two minutes on two cores
    python runs/faults/reproduce.py --only power full --tries 30 --seed 7

A resumed run must end with the metrics of one that nothing stopped. Ways to stop a run:

    kill      SIGKILL before the nth change to a file of the run (an audit hook of Python counts)
    write     SIGXFSZ in the middle of a write, at a random byte
    power     SIGKILL before the nth change; then every file loses what was written to it after
              its last fsync: it is cut, or the end is zeros
    full      the disk of `runs` is full after a random byte: a tmpfs, so Linux alone

A run whose disk is full ends with one line and exit code 1, and leaves nothing half-written.
Processes are forked from one that has imported everything, so each takes about a second.
"""

import ctypes
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

from record import markdown, read_records  # noqa: E402

FLAGS = """--run-name a --sft-steps 2 --sft-batch-size 2 --num-updates 3 --num-prompts 2
    --group-size 2 --eval-num-tasks 2 --eval-every 2 --save-every 1 --max-tokens 10
    --max-model-len 256 --device cpu""".split()
SETTINGS = {
    "full": "--algo grpo",
    "lora": "--algo reinforce --lora-rank 2 --kl-coef 0.1",
    "ppo": "--algo ppo --num-epochs 2 --num-minibatches 2",
    "reference": "--algo grpo --kl-coef 0.1 --filter-groups 1",
}
WAYS = ("kill", "write", "power", "full")
WRITERS = ("MainThread", "writer")  # threads: the run's own, and that of core/loop/writer.py
CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
TIMEOUT = 60  # seconds for a process, which takes one or two
NEW_USER, NEW_MOUNTS, PRIVATE = 0x10000000, 0x20000, 0x44000  # of unshare and mount, in Linux


@dataclass
class Death:
    """How a process ends."""

    way: str = ""  # "": nothing stops it
    change: int = 0  # the number of the change, from 1
    size: int = 0  # bytes that a file may have, or that the disk has left


@dataclass
class Whole:
    """A run that nothing stopped."""

    folder: Path
    flags: list[str]
    metrics: list[dict[str, Any]]
    changes: int


@dataclass
class Faults:
    """Makes tries below `folder`."""

    folder: Path
    wholes: dict[str, Whole] = field(default_factory=dict)

    def __post_init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self.context: Any = multiprocessing.get_context("forkserver")
        modules = ["train", "core.report.page", "core.report.curves", "peft"]
        self.context.set_forkserver_preload(modules)

    def try_once(self, way: str, setting: str, rng: random.Random) -> str:
        """Stops a run up to three times and resumes it to its end; "" or what went wrong."""
        if setting not in self.wholes:
            self.wholes[setting] = self.run_whole(setting)
        whole = self.wholes[setting]
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            for death in [*(draw(way, whole, rng) for _ in range(rng.randint(1, 3))), Death()]:
                if failure := self.stopped(folder, whole, death, rng):
                    return f"{death}: {failure}"
            if metrics_of(folder) != whole.metrics:
                return "other metrics"
            left = list(folder.glob("runs/a/**/.part*"))
            return f"left {left}" if left else ""
        finally:
            shutil.rmtree(folder)

    def run_whole(self, setting: str) -> Whole:
        folder = self.folder / setting
        folder.mkdir()
        flags = [*FLAGS, *SETTINGS[setting].split()]
        if (code := self.run(folder, flags, Death())) != 0:
            raise RuntimeError(f"a run that nothing stops ended with {code}: {output_of(folder)}")
        changes = len((folder / "changes").read_text().splitlines())
        return Whole(folder, flags, metrics_of(folder), changes)

    def stopped(self, folder: Path, whole: Whole, death: Death, rng: random.Random) -> str:
        """Starts or resumes the run of `folder`, and stops it; "" or what went wrong."""
        args = ["--resume", "runs/a"] if (folder / "runs/a").exists() else whole.flags
        code = self.run(folder, args, death)
        if (folder / "after").exists():  # what was on the small disk
            shutil.rmtree(folder / "runs")
            (folder / "after").rename(folder / "runs")
        text = output_of(folder)
        if code is None or "Traceback" in text:
            return f"exit code {code}: {text[-500:]!r}"
        allowed = {0}
        if death.way == "full":
            allowed = {0, 1}
            if code == 1 and (text.count("\n") != 1 or "fix this, then run" not in text):
                return f"not one line: {text!r}"
            if left := list(folder.glob("runs/**/.part*")):
                return f"left {left}"
        elif death.way:
            allowed = {0, -signal.SIGKILL, -signal.SIGXFSZ}
        if code not in allowed:
            return f"exit code {code}: {text[-500:]!r}"
        if death.way == "power":
            cut_power(folder, rng)
        return ""

    def run(self, folder: Path, args: list[str], death: Death) -> int | None:
        """Runs `train.py ARGS` in a new process; returns its exit code, None if it hangs."""
        (folder / "changes").unlink(missing_ok=True)
        (folder / "errors.txt").unlink(missing_ok=True)
        child = self.context.Process(target=train_in_child, args=(args, str(folder), death))
        child.start()
        child.join(TIMEOUT)
        if child.is_alive():
            child.kill()
            child.join()
            return None
        return child.exitcode


def draw(way: str, whole: Whole, rng: random.Random) -> Death:
    """A moment at which a run is stopped."""
    size = int(10 ** rng.uniform(0, 5.3))
    if way == "full":
        size = int(rng.random() * size_of(whole.folder / "runs"))
    return Death(way, rng.randint(1, whole.changes), size)


def train_in_child(args: list[str], folder: str, death: Death) -> None:
    """Runs the command in this process, and ends it as `death` says."""
    os.chdir(folder)
    sys.stdout = open("output.txt", "a", buffering=1)  # noqa: SIM115
    sys.stderr = open("errors.txt", "a", buffering=1)  # noqa: SIM115
    if death.way == "full":
        mount_small_disk(death.size)
    watch(death)
    import train
    from core.terminal import interrupt

    interrupt.set_hooks()
    try:
        code = train.execute(args)
    finally:
        if death.way == "full":  # the disk vanishes with this process
            shutil.rmtree("kept")
            shutil.copytree("runs", "after", symlinks=True)
    sys.exit(code)


def watch(death: Death) -> None:
    """Notes what this process changes in the run and flushes, and ends it as `death` says."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    changes, synced = os.open("changes", flags), os.open("synced", flags)
    count, fsync = 0, os.fsync
    if death.way == "write":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it

    def note(event: str, arguments: Any) -> None:
        nonlocal count
        if event not in CHANGES or threading.current_thread().name not in WRITERS:
            return
        path = str(arguments[0])
        in_run = path.startswith("runs") or "/runs/" in path
        if not in_run or (event == "open" and not writes(arguments)):
            return
        count += 1
        os.write(changes, f"{event} {path}\n".encode())
        if count == death.change and death.way in ("kill", "power"):
            os.kill(os.getpid(), signal.SIGKILL)
        if count == death.change and death.way == "write":
            resource.setrlimit(resource.RLIMIT_FSIZE, (death.size, death.size))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        os.write(synced, f"{status.st_ino} {status.st_size}\n".encode())

    os.fsync = noted_fsync
    sys.addaudithook(note)


def writes(arguments: Any) -> bool:
    """Whether a call of open() may change a file."""
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def mount_small_disk(num_bytes: int) -> None:
    """Lets this process see a disk at `runs` that has its content and `num_bytes` more."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), name)

    call("unshare", NEW_USER | NEW_MOUNTS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    call("mount", b"none", b"/", None, PRIVATE, None)
    Path("runs").mkdir(exist_ok=True)
    Path("runs").rename("kept")
    Path("runs").mkdir()
    room = size_of(Path("kept")) + num_bytes + 100_000
    call("mount", b"none", b"runs", b"tmpfs", 0, f"size={room}".encode())
    shutil.copytree("kept", "runs", symlinks=True, dirs_exist_ok=True)


def size_of(folder: Path) -> int:
    """The bytes that the files of a folder take, in pages of 4 KB."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*"))


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
            with path.open("r+b") as file:
                if rng.random() < 0.5:  # some file systems keep the size and lose the content
                    file.seek(end)
                    file.write(bytes(status.st_size - end))
                else:
                    file.truncate(end)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl without times."""
    records = read_records(folder / "runs/a/metrics.jsonl")
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in records]


def output_of(folder: Path) -> str:
    """What the last process printed of errors."""
    return (folder / "errors.txt").read_text() if (folder / "errors.txt").exists() else ""


def main(only: list[str], tries: int, seed: int) -> int:
    """Makes the tries in turn and prints a table; returns 1 if one failed."""
    print(f"seed {seed}", flush=True)
    made = {way: [0, 0] for way in only}
    with tempfile.TemporaryDirectory(prefix="picorl-faults-") as name:
        faults = Faults(Path(name).resolve())
        for number in range(tries):
            way, rng = only[number % len(only)], random.Random(f"{seed} {number}")
            setting = rng.choice([*SETTINGS])
            failure = faults.try_once(way, setting, rng)
            made[way][0] += 1
            if failure:
                made[way][1] += 1
                print(f"{way}, {setting}: {failure}", flush=True)
    failures = sum(failed for _, failed in made.values())
    rows = [[way, *map(str, counts)] for way, counts in (made | {"all": [tries, failures]}).items()]
    print("\n".join(markdown("way | tries | failures", rows)))
    return int(failures > 0)


if __name__ == "__main__":
    import argparse

    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--tries", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    sys.exit(main(**vars(parser.parse_args())))
