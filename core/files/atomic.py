"""Files and folders that are complete, and on the disk, as soon as they exist.

with published(run / "config.yaml") as part:     # also for a folder, which the body makes
    part.write_text(text)
with sealed(run / "reference", {}) as part:      # a new folder, with checksums of its files
    save_file(tensors, part / "weights.safetensors")
facts, fault = unseal(run / "reference")         # fault "": every file is as it was written
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from environments.plumbing.text import one_line

SEAL = "state.json"  # of a sealed folder
PART = ".part-"  # begins the name of everything that is not complete yet


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """Yields a path to write to, whose file or folder then replaces `path` as a whole.

    What was written is flushed to the disk before it gets its name. If anything fails, nothing is
    left and `path` is unchanged. Raises OSError for a failed write, also of a library.
    """
    part = path.with_name(f"{PART}{path.name}")
    remove(part)  # left by a killed process
    try:
        yield part
        is_folder = part.is_dir()
        for inner in part.rglob("*"):
            with suppress(OSError):  # some disks have no modes
                # safetensors makes files that only the user reads
                inner.chmod(inner.stat().st_mode | part.stat().st_mode & 0o666)
            flush(inner)
        flush(part)
        old = path.with_name(f"{PART}old-{path.name}")
        remove(old)
        if is_folder and os.path.lexists(path):  # no folder replaces another that has files
            os.rename(path, old)
        os.replace(part, path)
        remove(old)
        flush(path.parent)
    except BaseException as raised:
        with suppress(OSError):  # the first error says more
            remove(part)
        error = _write_error(raised)
        if error is None:
            raise
        # that of a write has no name, that of a copy two
        error.filename = error.filename2 or error.filename or str(path)
        raise error from None


@contextmanager
def sealed(path: Path, facts: dict[str, Any]) -> Iterator[Path]:
    """As `published`, for a new folder with state.json: `facts`, and the checksums of all files."""
    with published(path) as part:
        part.mkdir(parents=True)
        yield part
        files = sorted(file for file in part.iterdir() if file.is_file())
        state = facts | {"sha256": {file.name: _sha256(file) for file in files}}
        state["whole"] = _json_sha256(state)
        (part / SEAL).write_bytes(json.dumps(state, indent=1).encode() + b"\n")


def unseal(folder: Path) -> tuple[dict[str, Any], str]:
    """The facts of a sealed folder, and what is wrong with it; "": nothing."""
    try:
        state = json.loads((folder / SEAL).read_bytes())
        sums = state["sha256"]
        damaged = [name for name in sums if _sha256(folder / Path(name).name) != sums[name]]
        if state.pop("whole") != _json_sha256(state):
            damaged.append(SEAL)
        del state["sha256"]
        return state, f"is damaged ({', '.join(damaged)})" if damaged else ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {}, f"cannot be read ({error})"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yields a new folder for temporary files.

    It stays if it cannot be removed; tempfile.TemporaryDirectory would call itself without end.
    """
    folder = tempfile.mkdtemp()
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def flush(path: Path) -> None:
    """Writes a file, or where the disk can do that the entries of a folder, from cache to disk."""
    is_folder = path.is_dir()
    # Windows opens no folder, and some network disks flush none
    with suppress(OSError) if is_folder else nullcontext():
        handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            sync(handle)
        finally:
            os.close(handle)


def sync(handle: int) -> None:
    """os.fsync; on macOS also empties the cache of the disk itself, which fsync leaves as it is."""
    with suppress(ImportError, AttributeError, OSError):  # only macOS has it, not for all disks
        import fcntl

        fcntl.fcntl(handle, fcntl.F_FULLFSYNC)  # type: ignore[attr-defined, unused-ignore]
        return
    os.fsync(handle)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        try:
            shutil.rmtree(path)
        except OSError as error:  # names the file without its folder
            error.filename = str(path)
            raise
    else:
        path.unlink(missing_ok=True)


def _write_error(error: BaseException) -> OSError | None:
    """The OSError that `error` is, or stands for; None for all other errors."""
    if isinstance(error, OSError):
        return error
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        return error.__context__  # torch.save raises an error of its own after that of the file
    if isinstance(error, SafetensorError) or type(error) is Exception:  # also of tokenizers
        return OSError(errno.EIO, one_line(error))
    return None


def _json_sha256(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
