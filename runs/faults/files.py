"""Damages the files of a recorded run, and calls what reads them.

    python runs/faults/reproduce.py --only files --tries 400

A failure is a traceback, more than 30 seconds, or another result without a word about damage.
`cases` makes a run of three updates in a temporary folder, and then yields tries without end, until
the generator is closed.
"""

import contextlib
import io
import itertools
import json
import os
import random
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import train  # noqa: E402
from core import chat, league, run_log  # noqa: E402
from core.checkpoint import find_checkpoint, load_checkpoint  # noqa: E402
from core.files import sealed, unseal  # noqa: E402
from core.model import load_policy  # noqa: E402
from core.optimizer import make_optimizer  # noqa: E402
from core.report import compare, write_pages  # noqa: E402
from core.types import UsageError  # noqa: E402

Case = tuple[str, Callable[[], str]]  # a name, and what returns "" or says in a line what failed
FLAGS = """--run-name a --sft-steps 2 --sft-batch-size 2 --num-updates 3 --num-prompts 2
    --group-size 2 --eval-num-tasks 2 --eval-every 1 --save-every 1 --max-tokens 10
    --kl-coef 0.1 --max-model-len 256 --device cpu""".split()
FOREIGN: list[str] = [  # JSON values
    "null", '"x"', "[]", "{}", "true", "-1", "1e308", "1e999", "NaN", "-Infinity", "0.5",
    "1" + "0" * 400, "9" * 6000, "[" * 60 + "]" * 60, "[" * 50_000, '"\\ud800"', '"$x_$ {} %s"',
    str(2**63), '"' + "A" * 100_000 + '"', "[1]", '[{"role": 1}]', '{"player": {}}', "1e-320",
]  # fmt: skip


def cases(rng: random.Random) -> Iterator[Case]:
    """Tries without end, in turn of each kind."""
    with tempfile.TemporaryDirectory(prefix="picorl-faults-") as folder:
        run = record(Path(folder))
        whole = RunUnderTest(run)
        kinds = 3 * [whole.report, whole.report, whole.rewind, whole.loaded, whole.optimizer]
        kinds += [whole.no_file, whole.resume]  # the last takes the longest
        for number, kind in enumerate(itertools.cycle(kinds)):
            yield kind(random.Random(rng.random()), run.parent / f"try{number}")


def record(folder: Path) -> Path:
    """Makes a run in `folder`; returns the run's folder."""
    with contextlib.chdir(folder), quiet():
        code = train.run_command(FLAGS)
    assert code == 0
    run = folder / "runs/a"
    player = {"name": "a", "elo": 1.0, "low": 0.0, "high": 2.0, "won": 1, "drawn": 0, "lost": 0}
    table = {"env": "e", "games": 1, "prior": 1.0, "players": [player]}
    (run / "league.json").write_text(json.dumps(table))
    return run


class RunUnderTest:
    """A recorded run, and what an undamaged copy of it gives."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.policy = load_policy(str(run / "base"), device="cpu", max_length=256)
        self.optimizer_ = make_optimizer(self.policy, 1e-3)
        self.progress = find_checkpoint(run).progress
        self.settings = compare.read_config(run)
        self.table = self.compare(self.run)[1]
        again = shutil.copytree(run, run.parent / "again")
        assert self.resumed(again)[0] == 0
        self.metrics = without_times(again / run_log.METRICS)
        shutil.rmtree(again)

    def report(self, rng: random.Random, folder: Path) -> Case:
        """The comparison, with the pages of the runs."""
        name = rng.choice(["metrics.jsonl"] * 4 + ["rollouts.jsonl"] * 3 + ["config.yaml"] * 2
                          + ["league.json"])  # fmt: skip
        what, damaged = damage((self.run / name).read_bytes(), name, rng)

        draw = rng.random() < 0.2  # takes the longest

        def call() -> str:
            with copied(self.run, folder, name, damaged) as run, contextlib.ExitStack() as stack:
                for place in () if draw else ("curves.draw_curves", "compare.draw_comparison"):
                    stack.enter_context(patch(f"core.report.{place}"))
                if name != "config.yaml":
                    write_pages(run, self.settings)
                code, out, err = self.compare(run)
                if code not in (0, 2) or (code == 2 and err.count("\n") != 1):
                    return f"exit code {code}: {err[-300:]!r}"
                same = (out == self.table) or "damaged" in out or code == 2
                return "" if same or name == "config.yaml" else "another table without a word"

        return f"report {name} {what}", call

    def rewind(self, rng: random.Random, folder: Path) -> Case:
        """What --resume does with the log."""
        name = rng.choice([run_log.METRICS, run_log.METRICS, run_log.ROLLOUTS])
        what, damaged = damage((self.run / name).read_bytes(), name, rng)

        def call() -> str:
            with copied(self.run, folder, name, damaged, "metrics.jsonl", "rollouts.jsonl") as run:
                try:
                    said = run_log.rewind(run, self.progress)
                except UsageError as error:
                    return "" if "\n" not in str(error) else "more than one line"
                changed = [
                    log for log in (run_log.METRICS, run_log.ROLLOUTS)
                    if (run / log).read_bytes() != (self.run / log).read_bytes()
                    and f"{log} is damaged" not in said
                ]  # fmt: skip
                return f"another {changed[0]} without a word" if changed else ""

        return f"rewind {name} {what}", call

    def loaded(self, rng: random.Random, folder: Path) -> Case:
        """A checkpoint with a damaged file."""
        newest = find_checkpoint(self.run).folder
        assert newest
        name = rng.choice(["weights.safetensors", "optimizer.pt", "state.json"])
        what, damaged = damage((newest / name).read_bytes(), name, rng)

        def call() -> str:
            file = f"checkpoint/{newest.name}/{name}"
            with copied(self.run, folder, file, damaged, "config.yaml", "checkpoint") as run:
                found = find_checkpoint(run)
                if len(found.remarks) == 1 and found.folder and found.folder.name != newest.name:
                    return ""
                same = found.progress == self.progress and damaged == (newest / name).read_bytes()
                return "" if same else "a damaged checkpoint was taken"

        return f"checkpoint {name} {what}", call

    def optimizer(self, rng: random.Random, folder: Path) -> Case:
        """A checkpoint whose optimizer.pt has another content and the right checksum."""
        newest = find_checkpoint(self.run).folder
        assert newest
        state = torch.load(newest / "optimizer.pt", weights_only=True)
        what = change_state(state, rng)

        def call() -> str:
            with copied(self.run, folder, "", b"", "config.yaml", "checkpoint") as run:
                saved = run / "checkpoint" / newest.name
                weights = (saved / "weights.safetensors").read_bytes()
                with sealed(saved, unseal(saved)[0]) as part:  # the right checksums
                    (part / "weights.safetensors").write_bytes(weights)
                    torch.save(state, part / "optimizer.pt")
                try:
                    load_checkpoint(saved, self.policy, self.optimizer_)
                except UsageError as error:
                    return "" if "\n" not in str(error) else "more than one line"
                return "another state was loaded"

        return f"optimizer {what}", call

    def resume(self, rng: random.Random, folder: Path) -> Case:
        """The whole command --resume with one more update."""
        files = [p for p in sorted(self.run.rglob("*")) if p.is_file() and "model" not in p.parts]
        path = rng.choice(files)
        name = str(path.relative_to(self.run))
        what, damaged = damage(path.read_bytes(), name, rng)

        def call() -> str:
            with copied(self.run, folder, name, damaged) as run:
                code, _, err = self.resumed(run)
                if code not in (0, 1, 2) or (code and err.count("\n") != 1):
                    return f"exit code {code}: {err[-300:]!r}"
                if code or name == "config.yaml":
                    return ""
                found = without_times(run / run_log.METRICS)
                said = "damaged_log" in found[-1].pop("warnings", {})
                if said and "rollouts" not in name:
                    return "the log was called damaged"
                return "" if found == self.metrics else "other metrics without a word"

        return f"resume {name} {what}", call

    def no_file(self, rng: random.Random, folder: Path) -> Case:
        """A pipe, socket, device or folder in the place of a file; the commands that open it."""
        files = [p for p in sorted(self.run.rglob("*")) if p.is_file()]
        name = str(rng.choice(files).relative_to(self.run))
        kind = rng.choice([*NO_FILES])
        command = rng.choice(["resumed", "compare", "chat", "league"])

        def call() -> str:
            with copied(self.run, folder, "", b"") as run:
                replace_file(run / name, kind)
                code, _, err = getattr(self, command)(run)
                said = code == 2 and err.count("\n") == 1 and str(run) in err
                return "" if said else f"exit code {code}: {err[-300:]!r}"

        return f"{command} with a {kind} as {name}", call

    def chat(self, run: Path) -> tuple[int, str, str]:
        with patch("sys.stdin", io.StringIO("hello\n")):
            return printed(lambda: chat.run(chat.main, [str(run)]))

    def league(self, run: Path) -> tuple[int, str, str]:
        return printed(lambda: league.run([str(run), "guess", "--games", "1"]))

    def compare(self, run: Path) -> tuple[int, str, str]:
        code, out, err = printed(lambda: compare.main([str(run)]))
        text = re.sub(r"\S*compare\.\S+", "", out).replace(run.name, "a")
        return code, " ".join(text.split()), err

    def resumed(self, run: Path) -> tuple[int, str, str]:
        return printed(lambda: train.run_command(["--resume", str(run), "--num-updates", "4"]))


def printed(command: Callable[[], int]) -> tuple[int, str, str]:
    """The exit code of a command, and what it printed to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = command()
        except SystemExit as exit_:  # raised by tyro
            return 2, out.getvalue(), "tyro\n" if exit_.code == 2 else repr(exit_)
    return code, out.getvalue(), err.getvalue()


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo, "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir,
}  # fmt: skip


def replace_file(path: Path, kind: str) -> None:
    """Puts something else, one of NO_FILES, in the place of a file."""
    path.unlink()
    NO_FILES[kind](path)


def change_state(state: dict[str, Any], rng: random.Random) -> str:
    """Changes something in the state of an optimizer; says what."""
    moments = state["adamw"]["state"]
    key = rng.choice(list(moments))
    name = rng.choice(list(moments[key]))
    tensor = moments[key][name]
    changes: dict[str, Callable[[], Any]] = {
        "shape": lambda: moments[key].update({name: torch.zeros(rng.randint(2, 9), 3)}),
        "empty": lambda: moments[key].update({name: torch.zeros(0)}),
        "dtype": lambda: moments[key].update({name: tensor.double()}),
        "NaN": lambda: moments[key].update({name: torch.full_like(tensor, torch.nan)}),
        "infinity": lambda: moments[key].update({name: torch.full_like(tensor, torch.inf)}),
        "text": lambda: moments[key].update({name: "x"}),
        "missing moment": lambda: moments[key].pop(name),
        "missing parameter": lambda: moments.pop(key),
        "other key": lambda: moments.update({"x": moments.pop(key)}),
        "no groups": lambda: state["adamw"].update(param_groups=[]),
        "another group": lambda: state["adamw"]["param_groups"].append({"params": [0]}),
        "params": lambda: state["adamw"]["param_groups"][0].update(params=[0]),
        "masters": lambda: state.update(masters=[torch.zeros(3)]),
        "scale": lambda: state.update(scale=rng.choice([[], ["x", 0], [torch.nan, 0], None])),
        "no adamw": lambda: state.pop("adamw"),
        "list": lambda: state.update(adamw=[]),
    }
    what = rng.choice(list(changes))
    changes[what]()
    return f"{what} ({name} of {key})"


def damage(data: bytes, name: str, rng: random.Random) -> tuple[str, bytes]:
    """What was done, and the damaged bytes."""
    ways = [flip, cut, truncate, zero, garble]
    if name.endswith((".jsonl", ".yaml")):
        ways += [lines_twice, lines_swapped, lines_lost]
    if name.endswith((".jsonl", ".json", ".yaml")):
        ways += [foreign] * 4
    way = rng.choice(ways)
    return way.__name__, way(data, rng)


def flip(data: bytes, rng: random.Random) -> bytes:
    """Flips one to three bits."""
    changed = bytearray(data or b"\0")
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    """Takes up to 2,000 bytes out."""
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randint(1, 2000) :]


def truncate(data: bytes, rng: random.Random) -> bytes:
    """Cuts the end off."""
    return data[: rng.randrange(len(data) + 1)]


def zero(data: bytes, rng: random.Random) -> bytes:
    """Sets a block to zeros."""
    size = rng.choice([1, 64, 512, 4096])
    start = rng.randrange(len(data) // size + 1) * size
    block = data[start : start + size]
    return data[:start] + bytes(len(block)) + data[start + size :]


def garble(data: bytes, rng: random.Random) -> bytes:
    """Sets a block to random bytes."""
    start = rng.randrange(len(data) + 1)
    block = data[start : start + rng.choice([1, 8, 100, 4096])]
    return data[:start] + rng.randbytes(len(block)) + data[start + len(block) :]


def lines_twice(data: bytes, rng: random.Random) -> bytes:
    """Writes a line a second time, anywhere."""
    lines = data.splitlines(keepends=True)
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return b"".join(lines)


def lines_swapped(data: bytes, rng: random.Random) -> bytes:
    """Exchanges two lines."""
    lines = data.splitlines(keepends=True)
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return b"".join(lines)


def lines_lost(data: bytes, rng: random.Random) -> bytes:
    """Leaves a line out."""
    lines = data.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def foreign(data: bytes, rng: random.Random) -> bytes:
    """Gives a value, or a name, of one line a foreign value; or the whole line."""
    lines = data.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    line, value = lines[number], rng.choice(FOREIGN).encode()
    found = list(re.finditer(rb'(?<=: )("(?:[^"\\]|\\.)*"|[^,{}\[\]\s]+)', line))
    if not found or rng.random() < 0.1:
        lines[number] = value + b"\n"
    else:
        place = rng.choice(found)
        lines[number] = line[: place.start()] + value + line[place.end() :]
    return b"".join(lines)


@contextlib.contextmanager
def copied(run: Path, folder: Path, name: str, content: bytes, *only: str) -> Iterator[Path]:
    """A copy of `run`, or of those of its files, in which the file `name` has another content."""
    folder.mkdir()
    copy = folder / "a"
    try:
        if not only:
            shutil.copytree(run, copy)
        for part in only:
            copy.mkdir(exist_ok=True)
            if (run / part).is_dir():
                shutil.copytree(run / part, copy / part)
            else:
                shutil.copy(run / part, copy / part)
        if name:
            (copy / name).write_bytes(content)
        yield copy
    finally:
        shutil.rmtree(folder)


def without_times(file: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl without what differs between equal runs."""
    records = run_log.read_metrics(file)
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in records]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides what is printed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
