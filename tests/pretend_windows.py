"""Lets a Python process on Linux believe that it runs on Windows, as far as this project can tell.

    python tests/pretend_windows.py train.py --num-updates 2     # as `python train.py ..`
    python tests/pretend_windows.py -m environments play snake

`environment(folder)` returns the variables of such a process. It and every Python that it starts
load this file first, through a sitecustomize.py in `folder`.

For the files of this project only (PyTorch and others need their Linux):
- modules, functions and constants that Windows does not have are missing: LACKING, OF_SIGNAL, OF_OS
- `os.name`, `sys.platform`, `os.linesep` are those of Windows
- folders cannot be opened; only a file opened to write can be fsynced
- `preexec_fn` raises
- a text file that is opened without an encoding raises EncodingWarning
For all code of the process:
- text files without an encoding are cp1252, as are stdin, stdout and stderr, and write CRLF
- a file that this process has open or mapped cannot be removed or replaced, nor its folder renamed
- `os.rename` replaces nothing, `os.replace` no folder; names with <>:"|?* are invalid

Not pretended: backslashes in paths, drives, names without case, signals and the console, the tree
of processes, files that another process has open, how the libraries do on Windows.
"""

import builtins
import errno
import io
import locale
import os
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
OURS = tuple(str(ROOT / name) for name in ("core/", "environments/", "algorithms/",
                                           "train.py", "scratch.py"))  # fmt: skip
LACKING = {"fcntl", "resource", "termios", "pwd", "grp", "readline", "tty", "pty", "curses",
           "syslog", "posix"}  # fmt: skip
OF_SIGNAL = set(
    """
    SIGABRT SIGBREAK SIGFPE SIGILL SIGINT SIGSEGV SIGTERM SIG_DFL SIG_IGN signal getsignal
    raise_signal default_int_handler strsignal valid_signals set_wakeup_fd Signals Handlers
""".split()
)  # all that `signal` has there
OF_OS = set(
    """
    fork forkpty setsid getsid killpg getpgid setpgid setpgrp getpgrp getuid geteuid getgid getegid
    getgroups setuid setgid chown lchown fchown fchmod chroot mkfifo mknod nice getpriority waitid
    wait wait3 wait4 WNOHANG WUNTRACED WNOWAIT WEXITED P_PID P_PGID P_ALL O_NOFOLLOW O_DIRECTORY
    O_CLOEXEC O_NONBLOCK O_SYNC O_DSYNC sched_getaffinity sched_setaffinity sched_yield pread pwrite
    preadv pwritev readv writev sysconf confstr statvfs fstatvfs uname getloadavg set_blocking
    get_blocking openpty ttyname ctermid posix_spawn sendfile sync fdatasync lockf posix_fallocate
    memfd_create pipe2 getxattr listxattr register_at_fork tcgetpgrp EX_OK
""".split()
)
INVALID = set('<>:"|?*')
real = types.SimpleNamespace(
    open=io.open, os_open=os.open, fsync=os.fsync, replace=os.replace, rename=os.rename,
    unlink=os.unlink, mkdir=os.mkdir, import_=builtins.__import__, popen=subprocess.Popen,
)  # fmt: skip


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
    locale.getpreferredencoding = lambda do_setlocale=True: "cp1252"
    locale.getencoding = lambda: "cp1252"
    builtins.open = io.open = open_file
    os.replace, os.rename, os.mkdir = replace, rename, mkdir
    os.unlink = os.remove = unlink
    builtins.__import__ = import_


# --- for this project's files only ---------------------------------------------------------------


class Pretended(types.ModuleType):
    """A module with other attributes: `changes`, without `lacking`. Assignments go through."""

    def __init__(self, module, lacking=(), **changes):
        own = object.__getattribute__(self, "__dict__")
        own.update(_module=module, _lacking=lacking, _changes=changes)

    def __getattribute__(self, name):
        own = object.__getattribute__(self, "__dict__")
        if name in own["_changes"]:
            return own["_changes"][name]
        if name in own["_lacking"]:
            raise AttributeError(f"module {own['_module'].__name__!r} has no attribute {name!r}")
        return getattr(own["_module"], name)

    def __setattr__(self, name, value):
        setattr(object.__getattribute__(self, "__dict__")["_module"], name, value)


def import_(name, globals=None, locals=None, fromlist=(), level=0):
    """As `import`, which asks this function: our files get other modules than the libraries."""
    if level or not str((globals or {}).get("__file__", "")).startswith(OURS):
        return real.import_(name, globals, locals, fromlist, level)
    if name.partition(".")[0] in LACKING:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = real.import_(name, globals, locals, fromlist, level)
    return PRETENDED.get(name, module)


def os_open(path, flags, *args, **options):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return real.os_open(path, flags, *args, **options)


def fsync(handle):
    number = handle if isinstance(handle, int) else handle.fileno()
    with real.open(f"/proc/self/fdinfo/{number}", encoding="utf-8") as facts:
        flags = int(facts.read().split()[3], 8)
    if flags & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    real.fsync(handle)


class Popen(real.popen):
    def __init__(self, *args, preexec_fn=None, pass_fds=(), process_group=None, **options):
        assert not (preexec_fn or pass_fds or process_group), "not on Windows"
        super().__init__(*args, **options)


def run(command, **options):
    if command[0] != "taskkill":
        return subprocess.run(command, **options)
    os.killpg(int(command[-1]), signal.SIGKILL)
    return subprocess.CompletedProcess(command, 0)


PRETENDED = {
    "os": Pretended(os, OF_OS, name="nt", linesep="\r\n", open=os_open, fsync=fsync),
    "sys": Pretended(sys, platform="win32"),
    "signal": Pretended(signal, {name for name in dir(signal) if name not in OF_SIGNAL}),
    "subprocess": Pretended(subprocess, Popen=Popen, run=run, CREATE_NEW_PROCESS_GROUP=0),
}  # fmt: skip


# --- for all code --------------------------------------------------------------------------------


def open_file(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *others,
              **options):  # fmt: skip
    if isinstance(file, (str, os.PathLike)) and set(mode) & set("wax"):
        check_name(file)
    if "b" not in mode:
        encoding = io.text_encoding(encoding, 3)  # warns as `open` would, and names its caller
        encoding = "cp1252" if encoding == "locale" else encoding
        if newline is None and set(mode) & set("wax"):
            newline = "\r\n"
    return real.open(file, mode, buffering, encoding, errors, newline, *others, **options)


def check_name(path) -> None:
    name = os.path.basename(os.fsdecode(path).rstrip("/"))
    if set(name) & INVALID or (name not in (".", "..") and name.endswith((".", " "))):
        raise OSError(errno.EINVAL, "The filename, directory name or volume label syntax is "
                      "incorrect", os.fsdecode(path))  # fmt: skip


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
        raise PermissionError(errno.EACCES, "The process cannot access the file because it is being"
                              " used by another process", path)  # fmt: skip


def unlink(path, *, dir_fd=None):
    check_closed(path, dir_fd)
    real.unlink(path, dir_fd=dir_fd)


def replace(source, target, **options):
    check_name(target)
    check_closed(source, inside=True)
    check_closed(target)
    if os.path.isdir(target):
        raise PermissionError(errno.EACCES, "Access is denied", str(source), None, str(target))
    real.replace(source, target, **options)


def rename(source, target, **options):
    check_name(target)
    check_closed(source, inside=True)
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists",
                              str(source), None, str(target))  # fmt: skip
    real.rename(source, target, **options)


def mkdir(path, *args, **options):
    check_name(path)
    real.mkdir(path, *args, **options)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=environment(Path(folder))).returncode)
