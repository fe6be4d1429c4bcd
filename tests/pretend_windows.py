"""Lets a Python process pretend that it runs on Windows, as far as files and texts go.

    python tests/pretend_windows.py train.py --num-updates 2     # as `python train.py ..`
    python tests/pretend_windows.py -m environments play snake

`environment(folder)` returns the variables of such a process. It and every Python that it starts
load this file first, through a sitecustomize.py in `folder`. Then
- a text file that this project opens without an encoding raises EncodingWarning
- stdin, stdout and stderr are cp1252; they, and text files without a `newline`, write CRLF
- a file that this process has open cannot be removed or replaced, nor its folder renamed
- `os.rename` replaces nothing, `os.replace` no folder; names with <>:"|?* are invalid

Functions and modules that Windows lacks are there: test_portable.py looks for their names. Not
pretended: backslashes in paths, drives, names without case, signals and the console, processes.
"""

import builtins
import errno
import io
import os
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
INVALID = set('<>:"|?*')
real = types.SimpleNamespace(
    open=io.open, replace=os.replace, rename=os.rename, unlink=os.unlink, mkdir=os.mkdir
)


def environment(folder: Path) -> dict[str, str]:
    """The variables of a process that pretends; writes a sitecustomize.py into `folder`."""
    text = "import pretend_windows\npretend_windows.start()\n"
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    paths = [str(folder), str(ROOT / "tests"), str(ROOT)]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONIOENCODING": "cp1252",
           "PYTHONWARNDEFAULTENCODING": "1", "PYTHONUTF8": "0"}  # fmt: skip
    return os.environ | own


def start() -> None:
    """Pretends from now on."""
    warnings.filterwarnings("ignore", category=EncodingWarning)
    ours = r"(core|environments|algorithms|train|scratch|__main__)(\.|$)"
    warnings.filterwarnings("error", category=EncodingWarning, module=ours)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(newline="\r\n")
    builtins.open = io.open = open_file
    os.replace, os.rename, os.mkdir = replace, rename, mkdir
    os.unlink = os.remove = unlink


def open_file(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *others,
              **options):  # fmt: skip
    writes = bool(set(mode) & set("wax"))
    if writes and isinstance(file, (str, os.PathLike)):
        check_name(file)
    if "b" not in mode:
        encoding = io.text_encoding(encoding, 3)  # warns as `open` would, and names its caller
        newline = "\r\n" if newline is None and writes else newline
    return real.open(file, mode, buffering, encoding, errors, newline, *others, **options)


def check_name(path) -> None:
    name = os.path.basename(os.fsdecode(path).rstrip("/"))
    if set(name) & INVALID or (name not in (".", "..") and name.endswith((".", " "))):
        raise OSError(errno.EINVAL, "The filename is incorrect", os.fsdecode(path))


def check_closed(path, handle=None, inside=False) -> None:
    """Raises PermissionError if this process has `path` open, or a file in it if `inside`."""
    if handle is not None:
        path = os.path.join(os.readlink(f"/proc/self/fd/{handle}"), path)
    path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    opened = []
    with os.scandir("/proc/self/fd") as entries:
        for entry in entries:
            try:
                opened.append(os.readlink(entry.path))
            except FileNotFoundError:  # that of the loop itself
                continue
    with real.open("/proc/self/maps", encoding="utf-8") as maps:
        opened += [line.rstrip("\n").split(maxsplit=5)[5] for line in maps if "/" in line]
    # an open folder: how shutil walks through a tree on Linux
    files = [name for name in opened if not os.path.isdir(name)]
    if path in files or (inside and any(name.startswith(f"{path}/") for name in files)):
        raise PermissionError(errno.EACCES, "The file is being used by another process", path)


def unlink(path, *, dir_fd=None):
    check_closed(path, dir_fd)
    real.unlink(path, dir_fd=dir_fd)


def replace(source, target, **options):
    check_name(target)
    check_closed(source, inside=True)
    check_closed(target)
    if os.path.isdir(target):
        raise PermissionError(errno.EACCES, "Access is denied", str(target))
    real.replace(source, target, **options)


def rename(source, target, **options):
    check_name(target)
    check_closed(source, inside=True)
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "Cannot create an existing file", str(target))
    real.rename(source, target, **options)


def mkdir(path, *args, **options):
    check_name(path)
    real.mkdir(path, *args, **options)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=environment(Path(folder))).returncode)
