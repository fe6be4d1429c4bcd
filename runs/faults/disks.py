"""Runs and commands on disks that are full, over a quota, without inodes, read-only or broken.

    python runs/faults/reproduce.py --only disks --tries 50

disks.c lets the calls that change files below one folder fail, from a random one on: a short write
and then ENOSPC or EDQUOT, EIO in write, fsync, rename, open, close or unlink, EROFS in all. It is
loaded with LD_PRELOAD, so it needs no rights, and reaches torch, safetensors and Python alike; it
needs Linux and a C compiler, `cc`. The folder is `runs`, TMPDIR, HOME or the cache.

A process whose disk failed must end with one line and exit code 1 (2 if the user chose the folder),
leave its newest checkpoint complete and nothing half-written. Then the disk works again, and the
command that the line names must end the run with the metrics of one whose disk never failed.
"""

import contextlib
import ctypes
import errno
import faulthandler
import io
import multiprocessing
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kills
import torch

from core import run_dir, run_log
from core.checkpoint import export_model, save_checkpoint
from core.files import PART, published, unseal
from core.report import compare, write_pages

Case = tuple[str, Callable[[], str]]  # a name, and what returns "" or says in a line what failed
ROOT, LIMIT = kills.ROOT, kills.LIMIT
GAME = "--algo grpo --env tic_tac_toe:opponent=older:1 --max-turns 3"
SETTINGS = {**kills.SETTINGS, "game": GAME}
ERRORS = {"write": "ENOSPC EDQUOT EIO", "sync": "EIO ENOSPC EDQUOT", "rename": "EIO ENOSPC EDQUOT",
          "open": "EIO EACCES", "create": "ENOSPC EDQUOT EIO", "remove": "EIO EACCES",
          "close": "EIO EDQUOT", "change": "EROFS", "space": "ENOSPC EDQUOT"}  # fmt: skip
CALLS = "write sync rename create open remove close change space".split()  # as in disks.c
STEPS = ("checkpoint", "export", "pages", "rewind", "config", "compare")
KINDS = ("space", "space", "change", *ERRORS)
# what a command changes in the run, or beside it
WRITTEN = {
    "train": {"config.yaml", "metrics.jsonl", "rollouts.jsonl", "README.md", "curves.png",
              "report.html", "checkpoint", "model", "opponents"},
    "compare": {"compare.html", "compare.png"},
    "league": {"league.json", "report.html"},
    "chat": set(),
}  # fmt: skip
ADVICE = re.compile(r"fix this, then run |set (TMPDIR|XDG_CACHE_HOME)")
FIXED = re.compile(r"fix this, then run (the same command|python \S*train\.py (.*))$")


def cases(rng: random.Random) -> Iterator[Case]:
    """Tries without end; none, and a line, where there is no C compiler."""
    if sys.platform != "linux" or not shutil.which("cc"):
        print("skipped: it needs Linux and a C compiler, `cc`", flush=True)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="picorl-disks-") as name:
        disks = Disks(Path(name).resolve())
        for number in range(sys.maxsize):
            kind = rng.choice([disks.run] * 2 + [disks.command] * 2 + [disks.step] * 4)
            yield kind(random.Random(rng.random()), disks.folder / f"try{number}")


class Disks:
    """Runs whose disks never failed, and the server that forks processes whose disks do."""

    def __init__(self, folder: Path) -> None:
        self.folder, library = folder, folder / "disks.so"
        source = str(ROOT / "runs/faults/disks.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self.context: Any = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["train", "core.report.page", "core.report.curves", "core.report.compare",
             "core.chat", "core.league", "peft", "disks"]
        )  # fmt: skip
        self.library = str(library)
        # of the server, which the first process starts
        os.environ |= {"LD_PRELOAD": self.library, "PICORL_DISKS_SERVER": str(folder)}
        starting = self.context.Process(target=int)  # may take longer than a try may
        starting.start()
        starting.join()
        self.worker: Any = None  # the connection to the process of `make_steps`
        self.runs: dict[str, tuple[Path, Any, set[str], dict[str, int]]] = {}

    def whole(self, setting: str) -> tuple[Path, Any, set[str], dict[str, int]]:
        """The folder of a run whose disk never failed, its metrics, files, and calls."""
        if setting not in self.runs:
            folder = self.folder / setting
            counted = "space 999999999 1 28 runs"  # never fails
            code, err = self.process(folder, "train", flags_of(setting), counted)
            if code != 0:
                raise RuntimeError(f"a run whose disk never fails ended with {code}: {err}")
            counts = map(int, (folder / "calls").read_text().split())
            calls = dict(zip(CALLS, counts, strict=True))
            self.runs[setting] = folder, kills.metrics_of(folder), files_of(folder), calls
        return self.runs[setting]

    def run(self, rng: random.Random, folder: Path) -> Case:
        """A run whose disk fails, up to twice; and its end on a disk that works."""
        setting = rng.choice(list(SETTINGS))
        calls = self.whole(setting)[3]
        faults = [draw(rng, "train", calls) for _ in range(rng.choice([1, 1, 1, 2]))]
        fresh = rng.random() < 0.03  # takes the longest

        def call() -> str:
            _, metrics, files, _ = self.runs[setting]
            args, kept = flags_of(setting), False
            for fault in [*faults, ""]:
                code, err = self.process(folder, "train", args, fault, fresh)
                if problem := judge(code, err, fault, folder):
                    return f"{fault}: {problem}"
                # where nothing can be removed, a later start does it: of runs/.part-* in an hour
                kept = kept or fault.startswith(("change", "remove"))
                if not kept and (left := left_in(folder)):
                    return f"{fault}: {left}"
                if (found := FIXED.search(err)) and found[2]:
                    args = shlex.split(found[2])
                elif (folder / "runs/a").exists():
                    args = ["--resume", "runs/a"]
            if kills.metrics_of(folder) != metrics:
                return "other metrics"
            missing = files - files_of(folder)
            return f"without {missing}" if missing else left_in(folder / "runs/a")

        return f"run {setting}: {', '.join(faults)}", lambda: tidied(folder, call)

    def command(self, rng: random.Random, folder: Path) -> Case:
        """A command on a finished run, whose disk fails; and again on a disk that works."""
        name = rng.choice(["train", "compare", "league", "chat", "cache"])
        setting = "game" if name == "league" else rng.choice(list(SETTINGS))
        source = self.whole(setting)[0]
        fault = draw(rng, name)
        args = {
            "train": ["--resume", "runs/a", "--num-updates", "4"],
            "compare": ["runs/a"],
            "league": ["runs/a", "--games", "1"],
            "chat": ["runs/a", "--max-tokens", "5"],
            "cache": [],
        }[name]

        def call() -> str:
            shutil.copytree(source / "runs", folder / "runs")
            before = contents(folder / "runs")
            code, err = self.process(folder, name, args, fault)
            if problem := judge(code, err, fault, folder):
                return problem
            after = contents(folder / "runs")
            if name == "chat" and code and changed(before, after):
                return f"changed {changed(before, after)}"
            if lost := {file for file in before if file.startswith("a/model/")} - after.keys():
                return f"lost {lost}"
            if not fault.startswith(("change", "remove")) and (left := left_in(folder)):
                return left
            code, err = self.process(folder, name, args, "")
            if code:
                return f"on a disk that works exit code {code}: {err[-300:]!r}"
            # what could not be removed, and lies beside the runs, stays
            other = {n for n in changed(before, contents(folder / "runs")) if PART not in n}
            if name != "cache" and other - WRITTEN[name]:
                return f"changed {other}"
            return left_in(folder / "runs/a")

        return f"{name} {setting}: {fault}", lambda: tidied(folder, call)

    def step(self, rng: random.Random, folder: Path) -> Case:
        """One step of a run that writes, in a process that makes many of them."""
        if self.worker is None:
            source = self.whole("full")[0]
            self.worker, there = multiprocessing.Pipe()
            self.process_of_steps = self.context.Process(
                target=make_steps, args=(there, str(source / "runs/a"), str(self.folder / "steps"))
            )
            self.process_of_steps.daemon = True
            self.process_of_steps.start()
        name, draws = rng.choice(STEPS), rng.random() < 0.2
        kind = rng.choice(KINDS)
        number = getattr(errno, rng.choice(ERRORS[kind].split()))
        most = 10**7 if kind == "space" else 100 if kind == "write" else 20
        nth, count = int(most ** rng.random()), rng.choice([0, 0, 1, 2])
        count = 0 if kind in ("space", "change") else count
        fault = f"{kind} {nth} {count} {number}"

        def call() -> str:
            self.worker.send((name, fault, draws))
            return self.worker.recv() if self.worker.poll(kills.TIMEOUT) else "hangs"

        return f"{name}: {fault}", call

    def process(
        self, folder: Path, name: str, args: list[str], fault: str, fresh: bool = False
    ) -> tuple[int | None, str]:
        """The exit code (None: it hangs) of a command whose disk fails, and what stderr had."""
        for part in ("tmp", "home", "cache"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        environment = {
            "TMPDIR": str(folder / "tmp"), "HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(folder / "cache"), "PICORL_DISK": placed(fault, folder),
        }  # fmt: skip
        if fresh:
            code = in_new_process(folder, args, environment | {"LD_PRELOAD": self.library})
        else:
            child = self.context.Process(target=command_in_child,
                                         args=(str(folder), name, args, environment))  # fmt: skip
            child.start()
            for variable in ("LD_PRELOAD", "PICORL_DISKS_SERVER"):
                os.environ.pop(variable, None)
            child.join(kills.TIMEOUT)
            if child.is_alive():
                child.kill()
                child.join()
                return None, (folder / "err").read_text()
            code = child.exitcode
        return code, (folder / "err").read_text()


def in_new_process(folder: Path, args: list[str], environment: dict[str, str]) -> int | None:
    """Runs `python train.py ARGS`; returns its exit code, None if it hangs."""
    command = [sys.executable, str(ROOT / "train.py"), *args]
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        try:
            return subprocess.run(command, cwd=folder, env=os.environ | environment, stdout=out,
                                  stderr=err, timeout=kills.TIMEOUT).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return None


def command_in_child(folder: str, name: str, args: list[str], environment: dict[str, str]) -> None:
    """Runs a command in this process, on a disk that fails as PICORL_DISK says."""
    os.chdir(folder)
    sys.stdout = open("out", "w", buffering=1)  # noqa: SIM115
    sys.stderr = open("err", "w", buffering=1)  # noqa: SIM115
    sys.stdin = io.StringIO("How many r in cherry?\n")
    faulthandler.dump_traceback_later(kills.TIMEOUT - 2, file=sys.stderr)
    os.environ.update(environment)
    tempfile.tempdir = None  # asked for again, with this TMPDIR
    import train
    from core import chat, league
    from core.report import curves

    if not folder.endswith(("0", "5")):  # the drawing takes the longest
        curves.draw_curves = compare.draw_comparison = draw_nothing
    set_fault(environment["PICORL_DISK"])
    try:
        if name == "train":
            code = train.run_command(args)
        elif name == "compare":
            code = compare.main(args)
        elif name == "league":
            code = league.run(args)
        elif name == "chat":
            code = chat.run(chat.main, args)
        else:
            code = convert()
    finally:
        calls = (ctypes.c_long * len(CALLS)).in_dll(ctypes.CDLL(None), "picorl_calls")
        text = " ".join(map(str, calls))
        set_fault("")
        Path("calls").write_text(text)
    sys.exit(code)


def make_steps(requests: Any, source: str, folder: str) -> None:
    """Makes each step that is asked for in a copy of a run, twice; answers what was wrong."""
    from core.checkpoint import find_checkpoint
    from core.model import load_policy
    from core.optimizer import make_optimizer
    from core.report import curves

    draw = curves.draw_curves, compare.draw_comparison
    run = Path(folder, "a")
    policy = load_policy(f"{source}/base", device="cpu", max_length=256)
    optimizer = make_optimizer(policy, 1e-3)
    progress = find_checkpoint(Path(source)).progress
    while True:
        try:
            name, fault, draws = requests.recv()
        except EOFError:  # the last try was made
            return
        both = draw if draws else (draw_nothing, draw_nothing)
        curves.draw_curves, compare.draw_comparison = both
        shutil.copytree(source, run)
        try:
            requests.send(one_step(name, fault, run, policy, optimizer, progress))
        except Exception as error:
            requests.send(f"{type(error).__name__}: {error}")
        finally:
            set_fault("")
            shutil.rmtree(folder)


def one_step(name: str, fault: str, run: Path, policy: Any, optimizer: Any, progress: Any) -> str:
    """Makes a step whose disk fails, and again; returns what is wrong, "" for nothing."""
    steps: dict[str, Callable[[], Any]] = {
        "checkpoint": lambda: save_checkpoint(run, policy, optimizer, again),
        "export": lambda: export_model(run, policy),
        "pages": lambda: write_pages(run, compare.read_config(run)),
        "rewind": lambda: run_log.rewind(run, progress),
        "config": lambda: run_dir.write_config(run, compare.read_config(run)),
        "compare": lambda: compare.compare((run,)),
    }
    again = progress | {"update": progress["update"] + 1}
    before = contents(run.parent)
    set_fault(f"{fault} {run.parent}")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            steps[name]()
    except OSError as error:
        if error.errno not in run_dir.DISK_ERRORS or not error.filename:
            return f"{error!r} of {error.filename}"
    set_fault("")
    after = contents(run.parent)
    kept = fault.startswith(("change", "remove"))  # nothing, or not all, can be removed
    if not kept and (left := left_in(run)):
        return left
    if lost := {file for file in before.keys() - after.keys() if "/checkpoint/" not in file}:
        return f"lost {lost}"
    newest = max(run.glob("checkpoint/0*"))
    if fault_found := unseal(newest)[1]:
        return f"{newest.name} {fault_found}"
    with contextlib.redirect_stdout(io.StringIO()):
        steps[name]()
    return left_in(run) if not kept else ""


def set_fault(fault: str) -> None:
    """Lets calls of this process fail as `fault` says; "": none."""
    os.environ["PICORL_DISK"] = fault
    ctypes.CDLL(None).picorl_disk()


def draw_nothing(path: Path, *_: object) -> None:
    """Writes a file as the curves are written."""
    with published(path) as part:
        part.write_bytes(bytes(50_000))


def convert() -> int:
    """What the model smollm2 does first: it writes a folder in the cache; here a small one."""
    from safetensors.torch import save_file

    from core import cli, smollm2

    def write(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        save_file({"x": torch.zeros(100_000)}, folder / "model.safetensors")

    smollm2._gguf_file, smollm2._convert = lambda: Path("small.gguf"), write  # type: ignore
    smollm2.NUM_BYTES = 400_000
    return cli.run(lambda _: int(not smollm2.smollm2_folder()), [], lambda _: None)


def draw(rng: random.Random, name: str, calls: dict[str, int] | None = None) -> str:
    """A fault as PICORL_DISK says it, with the name of a folder of the try.

    `calls`: how many of each kind a run makes whose disk never fails.
    """
    place = rng.choice(["runs"] * 8 + ["tmp", "home", "cache"])
    if name in ("cache", "chat"):
        place = rng.choice(["tmp", "home", "cache", "cache"])
    kind = rng.choice(KINDS)
    number = getattr(errno, rng.choice(ERRORS[kind].split()))
    most = 10**6 if kind == "space" else 20
    if place != "runs" or name == "cache":
        most = 10**6 if kind == "space" and name == "cache" else 6
    elif calls:
        most = calls[kind]
    nth = rng.randint(1, most) if rng.random() < 0.7 else int(most ** rng.random())
    count = 0 if kind in ("space", "change") else rng.choice([0, 0, 1, 2])
    return f"{kind} {nth} {count} {number} {place}"


def placed(fault: str, folder: Path) -> str:
    """`fault` with the path of its folder."""
    *rest, place = fault.split() or ["", ""]
    return " ".join([*rest, str(folder / place)]) if fault else ""


def judge(code: int | None, err: str, fault: str, folder: Path) -> str:
    """What is wrong with how a process ended; "": nothing."""
    if code is None:
        return f"hangs: {err[-1500:]!r}"
    lines = [line for line in err.splitlines() if not line.startswith("converting ")]
    if "Traceback" in err or (code and len(lines) != 1):
        return f"exit code {code}: {err[-700:]!r}"
    in_runs = fault.endswith(" runs")
    if code not in ((0, 1) if in_runs else (0, 1, 2) if fault else (0,)):
        return f"exit code {code}: {err[-300:]!r}"
    if code and not ADVICE.search(err):
        return f"no advice: {err[-300:]!r}"
    saved = sorted(folder.glob("runs/a/checkpoint/0*"))
    if saved:
        if unseal(saved[-1])[1]:
            return f"{saved[-1].name} {unseal(saved[-1])[1]}"
        torch.load(saved[-1] / "optimizer.pt", weights_only=True)
    return ""


def left_in(folder: Path) -> str:
    """A line about half-written files; "" if there are none."""
    left = [str(path.relative_to(folder)) for path in folder.rglob(f"{PART}*")]
    left += [str(path) for path in folder.glob("tmp/tmp*")]
    return f"left {left}" if left else ""


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file below a folder of runs."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    """The files, or folders of a run, that differ."""
    names = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
    return {name.removeprefix("a/").split("/")[0] for name in names}


def files_of(folder: Path) -> set[str]:
    """The files of the run, by their paths."""
    return {str(p.relative_to(folder)) for p in folder.glob("runs/a/**/*") if p.is_file()}


def flags_of(setting: str) -> list[str]:
    return [*kills.FLAGS, *SETTINGS[setting].split()]


def tidied(folder: Path, call: Callable[[], str]) -> str:
    """What `call` returns; `folder` is removed."""
    try:
        return call()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if server := os.environ.get("PICORL_DISKS_SERVER"):  # what each process would do again for a second
    from core.model import load_policy
    from core.report.curves import draw_curves
    from core.tiny import PRETRAINED

    load_policy(str(PRETRAINED), device="cpu")
    draw_curves(Path(server, "curves.png"), [{"update": 0}, {"update": 1}], "")
