"""A run's folder: its config.yaml, and its lock.

A new folder is complete, with its config.yaml, as soon as it exists: it is written under another
name and then renamed. If invalid input ends a run before its first record, a new folder is removed
again, and a resumed run has its config.yaml of before.
"""

import itertools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import filelock
import yaml

from core.algorithm import name_of
from core.chat_template import TODAY
from core.config import MAX_NAME_BYTES, RUNS, SMOLLM2, TINY, Config, parse_template_options
from core.faults import UsageError
from core.files.atomic import PART, published, remove
from core.settings import config_to_dict, read_file
from environments.plumbing.registry import EnvSpec


def begin(cfg: Config) -> tuple[Config, Path]:
    """Creates the folder of a new run, or finds that of a resumed run; returns settings and folder.

    If the chat template shows a date, it is that of the run's start, also after a resume. Raises
    UsageError for a name that is taken.
    """
    folder = Path(cfg.resume)
    has_date = TODAY in parse_template_options(cfg.template_options)
    if not has_date and cfg.model_id not in (*TINY, SMOLLM2) and cfg.sampler != "openai":
        options = ",".join(filter(None, [cfg.template_options, f"{TODAY}={date.today()}"]))
        cfg = replace(cfg, template_options=options)
    if not cfg.resume:
        names = [env.name.rpartition(":")[2] for env in cfg.env]  # of module:Class, Class
        stem = f"{name_of(cfg.algo)}-{'+'.join(names)}"[:MAX_NAME_BYTES]
        folder = create_run(cfg.run_name, stem, config_to_dict(cfg))
    return cfg, folder


def start_command(envs: Iterable[str | EnvSpec], *flags: str) -> str:
    """The command that starts train.py with `flags`, for a run on `envs`; a call of `train.execute`
    if only a Python program has one of them."""
    if any(EnvSpec.read(env).only_in_python for env in envs):
        return f"train.execute({[*flags]})"
    script = sys.argv[0] if Path(sys.argv[0]).name == "train.py" else "train.py"
    several = os.environ.get("WORLD_SIZE", "1") != "1" and "TORCHELASTIC_RUN_ID" in os.environ
    launcher = ["torchrun", ".."] if several else ["python"]
    return quoted([*launcher, script, *flags])


def quoted(words: list[str]) -> str:
    """A command for the shell of this system."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def create_run(name: str, stem: str, settings: dict[str, Any]) -> Path:
    """Creates runs/<name>, or the first free runs/<stem>-<number>, with its config.yaml.

    Raises UsageError for a name that is taken or not plain, and for settings that config.yaml
    cannot store.
    """
    plain = Path(name).name == name.strip() and not name.startswith(".") and name.isprintable()
    if not plain or len(name.encode()) > MAX_NAME_BYTES:
        limit = MAX_NAME_BYTES
        raise UsageError(f"--run-name {name!a} is not a plain folder name of at most {limit} bytes")
    part = RUNS / f"{PART}{os.getpid()}"
    try:
        remove(part)
        part.mkdir(parents=True)
    except (FileExistsError, NotADirectoryError):  # such as a link to a disk that is not there
        raise UsageError(f"{RUNS} is no folder; remove it") from None
    try:
        write_config(part, settings)
        read_file(part / "config.yaml")  # raises UsageError if it cannot be read back
        while True:
            run = RUNS / name if name else next_folder(stem)
            if name and run.exists():
                raise UsageError(f"--run-name {name}: {run} exists; use another, or --resume it")
            try:
                return part.rename(run)
            except OSError:
                if not run.exists():  # another process has made it
                    raise
    except BaseException:
        remove(part)
        raise


def next_folder(stem: str) -> Path:
    """The first of runs/<stem>-1, runs/<stem>-2, .. that does not exist."""
    folders = (RUNS / f"{stem}-{number}" for number in itertools.count(1))
    return next(folder for folder in folders if not folder.exists())


@contextmanager
def lock_run(run: Path, new: bool) -> Iterator[None]:
    """Holds the lock of the folder `run`.

    Raises UsageError if another process holds the lock. If a UsageError ends the run before its
    next record, removes the folder of a `new` one, and restores the config.yaml of another.
    """
    metrics = run / "metrics.jsonl"
    try:  # the operating system releases the lock if this process dies; the file stays
        lock = filelock.FileLock(run / ".lock").acquire(timeout=0)
    except filelock.Timeout:
        advice = "wait until it ends, or use another --run-name"
        raise UsageError(f"{run} is in use by another process: {advice}") from None
    old_config = (run / "config.yaml").read_bytes()
    old_size = _size(metrics)
    try:
        with lock:
            for part in (*run.glob(f"{PART}*"), *run.glob(f"*/{PART}*")):
                remove(part)  # left by a killed process
            yield
    except UsageError:
        if _size(metrics) > old_size:  # it is smaller if a resume has dropped records
            raise
        if new:
            shutil.rmtree(run, ignore_errors=True)
            with suppress(OSError):  # runs/ contains other runs
                run.parent.rmdir()
        else:
            with published(run / "config.yaml") as part:
                part.write_bytes(old_config)
        raise


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def write_config(run: Path, settings: dict[str, Any]) -> None:
    """Replace config.yaml atomically."""
    with published(run / "config.yaml") as part:
        part.write_bytes(yaml.safe_dump(settings, sort_keys=False).encode())
