"""Processes of agent programs and remote environments: each is ended together with its children.

    process = start(files, variables, ["node", "agent.mjs"])    # files: stdin, stdout, stderr
    process.wait()                                              # its exit code
    process.kill()

On Linux and macOS a small server forks a keeper for each process. The keeper starts it, and ends
its children, also those that left its group (Linux). It does so as soon as the run asks for that or
has ended, however that was. An agent program in Python is forked with its libraries imported, but
not its file (worker.py). Windows has no fork: there each process is a fresh one.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

from environments.base import EnvFailure
from environments.plumbing import worker

FORKS = hasattr(os, "fork")
LOCK = threading.Lock()
MAX_OUTPUT = 100_000  # bytes of what a process wrote that are read, from the end
PR_SET_CHILD_SUBREAPER = 36  # of Linux


class Forked:
    """A process whose keeper has the other end of the channel, and kills it if that is closed."""

    def __init__(self, channel: socket.socket):
        self.channel = channel

    def wait(self) -> int:
        """Waits until it and its children have ended; returns its exit code."""
        with suppress(OSError):
            return int(self.channel.recv(16) or -9)
        return -9

    def kill(self) -> None:
        with suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)


class Fresh(subprocess.Popen[bytes]):
    """A process without a keeper."""

    def kill(self) -> None:
        command = ["taskkill", "/F", "/T", "/PID", str(self.pid)]  # with its children
        subprocess.run(command, capture_output=True)


def start(
    files: Sequence[IO[bytes]], variables: dict[str, str], arguments: Sequence[str],
    libraries: tuple[str, ...] = (),
) -> Forked | Fresh:  # fmt: skip
    """Starts a command; with `libraries`, an episode of an agent program that needs them, whose
    `arguments` are those of worker.main. `variables`: of its environment, beside ours. Raises
    EnvFailure."""
    variables = os.environ | variables
    if not FORKS:
        command = interpreter("environments.plumbing.worker:main", *arguments)
        group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # Ctrl-C is for the run alone
        try:
            return Fresh(
                command if libraries else arguments, stdin=files[0], stdout=files[1],
                stderr=files[2], env=variables, creationflags=group,
            )  # fmt: skip
        except OSError as error:
            raise EnvFailure(f"can't start {arguments[0]!r}: {error.strerror}") from None
    ours, theirs = socket.socketpair()
    try:
        with theirs, LOCK:
            numbers = [*(file.fileno() for file in files), theirs.fileno()]
            socket.send_fds(_server(libraries), [b"."], numbers)
        job = os.getcwd(), variables, arguments, bool(libraries)
        ours.sendall(json.dumps(job).encode() + b"\n")
    except OSError:
        raise EnvFailure("the process that starts the others has ended") from None
    return Forked(ours)


def interpreter(function: str, *arguments: str) -> list[str]:
    """The command line that calls `module:function` in this Python, with the same modules."""
    module, _, name = function.partition(":")
    code = ("import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
            f"from {module} import {name}; {name}(*sys.argv[1:])")  # fmt: skip
    return [sys.executable, "-c", code, json.dumps(sys.path), *arguments]


def last_lines(file: IO[bytes]) -> list[str]:
    """The lines in the end of a file, without those that are empty."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_OUTPUT))
    lines = file.read().decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


@cache
def _server(libraries: tuple[str, ...]) -> socket.socket:
    """The server that has imported these libraries."""
    ours, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen(
            interpreter(f"{__name__}:serve", str(theirs.fileno()), *libraries),
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip
    return ours


# In the server


def serve(number: str, *libraries: str) -> None:
    """Forks a keeper for each message of the run, until that has ended. With the message come
    stdin, stdout and stderr of the process, and the keeper's end of its channel."""
    run = socket.socket(fileno=int(number))
    for name in libraries:
        with suppress(BaseException):
            importlib.import_module(name)
    if libraries:
        worker.warm_up()
    gc.freeze()  # the processes share what is there
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # of keepers, for which nobody waits
    while True:
        message, files, *_ = socket.recv_fds(run, 1, 4)
        if not message:
            return
        if not os.fork():
            run.close()
            with suppress(OSError, ValueError):  # the run has closed the channel already
                keep(*files)
            os._exit(0)
        for file in files:
            os.close(file)


def keep(stdin: int, stdout: int, stderr: int, number: int) -> None:
    """Starts a process, and ends it and its children."""
    channel = socket.socket(fileno=number)
    folder, variables, arguments, is_program = json.loads(channel.makefile().readline())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with suppress(OSError, AttributeError):  # on Linux: whose parent has ended is its child
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not (pid := os.fork()):
        channel.close()
        for place, file in enumerate((stdin, stdout, stderr)):
            os.dup2(file, place)
            os.close(file)
        begin(folder, variables, arguments, is_program)
    threading.Thread(target=kill_once_closed, args=(channel, pid), daemon=True).start()
    status = os.waitpid(pid, 0)[1]
    kill(pid)
    with suppress(OSError):
        strays = Path(f"/proc/self/task/{os.getpid()}/children")
        while pids := strays.read_text().split():
            os.kill(int(pids[0]), signal.SIGKILL)
            os.waitpid(int(pids[0]), 0)
    channel.sendall(b"%d" % os.waitstatus_to_exitcode(status))


def begin(folder: str, variables: dict[str, str], arguments: list[str], is_program: bool) -> None:
    """What the new process does. Never returns."""
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        if is_program:
            worker.main(*arguments)
        os.execvp(arguments[0], arguments)
    except OSError as error:
        os.write(2, f"can't start it: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def kill_once_closed(channel: socket.socket, pid: int) -> None:
    with suppress(OSError):
        channel.recv(1)
    kill(pid)


def kill(pid: int) -> None:
    """Kills a process and its group, if it has that yet."""
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)
