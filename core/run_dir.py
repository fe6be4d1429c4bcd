"""A run's folder: there whole or not at all, and held by one process at a time.

    with lock_run_dir(Path("runs/mine"), config, new=True):   # makes it; new=False: goes on with it
        ...                                              # meanwhile a second process is refused

A new folder is made under another name, with its config.yaml, and then renamed: whoever sees it can
resume it. It is gone again if its run could not begin.
"""

import errno
import fcntl
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from core.types import CannotWrite, UsageError

DISK = {getattr(errno, name) for name in "ENOSPC EDQUOT EROFS EACCES EPERM EFBIG EIO".split()}


def new_folder(runs: Path, name: str, stem: str) -> Path:
    """The folder of a new run, not there yet: runs/<name>, or runs/<stem>-<number>."""
    if not name:
        return next(p for i in itertools.count(1) if not (p := runs / f"{stem}-{i}").exists())
    if Path(name).name != name or name.startswith("."):
        raise UsageError(f"--run-name {name!r} is not a plain folder name")
    if (runs / name).exists():
        raise UsageError(f"--run-name {name}: {runs / name} exists; take another, or --resume it")
    return runs / name


@contextmanager
def lock_run_dir(run: Path, config: dict[str, Any], new: bool) -> Iterator[None]:
    """Inside, the folder is there and nobody else's; `config` is what its config.yaml says.

    Raises UsageError if another process has it, CannotWrite if the disk takes no more.
    """
    try:
        if new:
            create_run(run, config)
        with _locked(run):
            try:
                yield
            except UsageError:
                if new and not (run / "metrics.jsonl").exists():  # nothing has begun
                    shutil.rmtree(run)
                    with suppress(OSError):  # other runs are in it
                        run.parent.rmdir()
                raise
    except (OSError, SafetensorError) as raised:
        error = raised if isinstance(raised, OSError) else write_error(raised, run)
        if error is None or error.errno not in DISK:
            raise
        hint = f"python train.py --resume {run}" if run.exists() else "the same command again"
        raise CannotWrite(
            f"{error.filename or run}: {error.strerror or error}; what was saved before is whole: "
            f"see to the disk, then {hint}"
        ) from None


def write_error(error: Exception, where: Path) -> OSError | None:
    """What the operating system said, where a library that writes files made its own words of it;
    None where it is about something else.

    >>> write_error(ValueError("I/O error: No space left (os error 28)"), Path("runs")).strerror
    'No space left on device'
    """
    told = re.search(r"os error (\d+)", str(error))
    while not where.exists():
        where = where.parent
    if not told and shutil.disk_usage(where).free > 1 << 20:
        return None
    number = int(told[1]) if told else errno.ENOSPC
    return OSError(number, os.strerror(number), str(where))


def create_run(run: Path, config: dict[str, Any]) -> None:
    """Make the folder of a new run, with its config.yaml. Raises UsageError if it is there."""
    part = run.with_name(f".part-{run.name}-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)  # of a process that had our number, and was killed
    part.mkdir(parents=True)
    write_config(part, config)
    try:
        os.rename(part, run)  # onto a folder that isn't empty it fails
    except OSError as error:
        shutil.rmtree(part)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise UsageError(f"{run} exists; take another --run-name, or --resume it") from None


def write_config(run: Path, config: dict[str, Any]) -> None:
    """Write config.yaml whole or not at all."""
    part = run / ".part-config.yaml"
    part.write_text(yaml.safe_dump(config, sort_keys=False))
    os.replace(part, run / "config.yaml")


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """The operating system's lock: it leaves no file behind, and falls with its process."""
    handle = os.open(run, os.O_RDONLY)
    try:
        with suppress(OSError):  # there are file systems without locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{run} is in use by another process: wait for its end, or take "
                                 "another --run-name") from None  # fmt: skip
        yield
    finally:
        os.close(handle)
