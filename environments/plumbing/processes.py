"""Programs in processes of their own, such as servers and agents; their children end with them.

The process group has the pid of the program. Once that is reaped, it may be the pid of somebody
else's: so `kill` signals only what is not, and `has_ended` does not reap where the system can tell
without.
"""

import os
import signal
import subprocess
from contextlib import suppress
from typing import IO, Any

from environments.base import EnvFailure

MAX_OUTPUT = 100_000  # bytes of what a program wrote that are read, from the end


def start(arguments: list[str], **options: Any) -> subprocess.Popen:
    """Starts a program, without a shell, with `options` of Popen. Raises EnvFailure."""
    try:
        return subprocess.Popen(
            arguments, start_new_session=True,  # a process group of its own
            # on Windows: Ctrl-C is for the run alone
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0), **options,
        )  # fmt: skip
    except OSError as error:
        raise EnvFailure(f"can't start {arguments[0]!r}: {error.strerror}") from None


def wait(process: subprocess.Popen) -> int:
    """Waits until the program ends, kills its children and returns its exit code."""
    if hasattr(os, "waitid"):
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        kill(process)
    return process.wait()


def has_ended(process: subprocess.Popen) -> bool:
    """Whether the program has ended."""
    if hasattr(os, "waitid"):
        with suppress(ChildProcessError):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, process.pid, options) is not None
    return process.poll() is not None


def kill(process: subprocess.Popen) -> None:
    """Kills the program and its children, closes its pipes and waits for it."""
    with suppress(ProcessLookupError, PermissionError), process:
        if process.returncode is None and hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        elif process.returncode is None:
            with suppress(OSError):  # Windows: with its children
                command = ["taskkill", "/F", "/T", "/PID", str(process.pid)]
                subprocess.run(command, capture_output=True)
            process.kill()


def last_lines(file: IO[bytes]) -> list[str]:
    """The lines in the end of a file, without those that are empty."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_OUTPUT))
    lines = file.read().decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]
