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
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from core.types import UsageError

TORCH_WRITERS = ("inline_container", "PytorchStreamWriter", "iostream error")  # in its messages
RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # of safetensors and tokenizers
SEAL = "state.json"  # of a sealed folder
PART = ".part-"  # begins the name of everything that is not complete yet
FILES = set(  # ends, or names, of files of runs and models
    ".json .jsonl .yaml .md .png .html .py .safetensors .pt .txt .jinja .model .lock".split()
)
FOLDERS = {"checkpoint", "reference", "base", "opponents", "model", "tensorboard"}  # of a run


def check_folder(folder: Path) -> None:
    """Raises UsageError if the folder of a run or a model has what no run or model writes.

    That is a pipe, socket or device, which could be read for ever, also behind a link; and a folder
    with the name of a file, or a file with that of a folder. Accepts every other folder, and none.
    """
    if not any(os.path.exists(folder / name) for name in ("config.yaml", "config.json")):
        return
    for path in folder.rglob("*"):
        try:
            mode = path.stat().st_mode
        except OSError:  # a link that leads nowhere, or a file that is just being replaced
            continue
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            problem = "a pipe, socket or device"
        elif stat.S_ISDIR(mode) and (path.suffix in FILES or path.name in FILES):
            problem = "a folder instead of a file"
        elif not stat.S_ISDIR(mode) and path.parent == folder and path.name in FOLDERS:
            problem = "a file instead of a folder"
        else:
            continue
        raise UsageError(f"{path} is {problem}: remove it")


@contextmanager
def published(path: Path, num_bytes: int = 1 << 20) -> Iterator[Path]:
    """Yields a path to write to, whose file or folder then replaces `path` as a whole.

    What was written is flushed to the disk before it gets its name, and has the mode that the umask
    asks for. If anything fails, nothing is left and `path` is unchanged. Raises OSError for a write
    that failed in a library; `num_bytes` is the size of what is written.
    """
    part = path.with_name(f"{PART}{path.name}")
    remove(part)  # left by a killed process
    try:
        with disk_errors(path.parent, num_bytes):
            yield part
        is_folder = part.is_dir()
        for file in [*part.rglob("*"), part]:
            if file.is_file():
                file.chmod(0o666 & ~_umask())  # safetensors makes files that only the user reads
            flush(file)
        if is_folder:
            _replace_folder(path, part)
        else:
            os.replace(part, path)
        flush(path.parent)
    except BaseException as error:
        if isinstance(error, OSError):  # that of a write has no name, that of a copy two
            error.filename = error.filename2 or error.filename or str(path)
        with suppress(OSError):  # the first error says more
            remove(part)
        raise


@contextmanager
def sealed(path: Path, facts: dict[str, Any], num_bytes: int = 1 << 20) -> Iterator[Path]:
    """As `published`, for a new folder with state.json: `facts`, and the checksums of all files."""
    with published(path, num_bytes) as part:
        part.mkdir(parents=True)
        yield part
        files = sorted(file for file in part.iterdir() if file.is_file())
        state = facts | {"sha256": {file.name: _sha256(file) for file in files}}
        state["whole"] = _json_sha256(state)
        (part / SEAL).write_text(json.dumps(state, indent=1) + "\n")


def unseal(folder: Path) -> tuple[dict[str, Any], str]:
    """The facts of a sealed folder, and what is wrong with it; "": nothing."""
    try:
        if not all(file.is_file() or file.is_dir() for file in folder.iterdir()):
            raise OSError("it has a pipe or device")  # to read it could take for ever
        state = json.loads((folder / SEAL).read_text())
        sums = state["sha256"]
        damaged = [name for name in sums if _sha256(folder / Path(name).name) != sums[name]]
        # a library that loads the folder would read other files too; hidden ones are the system's
        damaged += sorted({path.name for path in folder.glob("[!.]*")} - {SEAL, *sums})
        if state.pop("whole") != _json_sha256(state):
            damaged.append(SEAL)
        del state["sha256"]
        return state, f"is damaged ({', '.join(damaged)})" if damaged else ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {}, f"cannot be read ({error})"


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yields a new folder for temporary files, in `parent` or in that of the system.

    It stays if it cannot be removed; tempfile.TemporaryDirectory would call itself without end.
    """
    folder = tempfile.mkdtemp(prefix=PART if parent else None, dir=parent)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def disk_errors(folder: Path, num_bytes: int = 1 << 20) -> Iterator[None]:
    """Raises OSError for a write that torch, safetensors or tokenizers failed.

    The latter two have the error number in their message; torch hides it. Writing `num_bytes`, the
    size of torch's file, to `folder` finds it again; if that succeeds, the number is EIO.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError):
            raise
        if match := RUST_ERROR.search(str(error)):
            number = int(match[1])
            raise OSError(number, os.strerror(number), str(folder)) from error
        if not (isinstance(error, RuntimeError) and any(n in str(error) for n in TORCH_WRITERS)):
            raise
        if folder.exists():
            try:
                with tempfile.TemporaryFile(dir=folder) as probe:
                    for _ in range(0, num_bytes, 1 << 20):
                        probe.write(bytes(1 << 20))
            except OSError as found:
                found.filename = str(folder)
                raise
        reason = (str(error).strip() or "writing failed").splitlines()[0][:200]
        raise OSError(errno.EIO, reason, str(folder)) from error


def flush(path: Path) -> None:
    """Writes a file, or the entries of a folder, from the system's cache to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def _replace_folder(path: Path, part: Path) -> None:
    """Renames the folder `part` to `path`; if that fails, what was there is there again."""
    old = path.with_name(f"{PART}old-{path.name}")
    remove(old)
    if path.exists() or path.is_symlink():
        os.rename(path, old)
    try:
        os.rename(part, path)
    except OSError:
        if old.exists() or old.is_symlink():
            os.rename(old, path)
        raise
    remove(old)


def _json_sha256(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
