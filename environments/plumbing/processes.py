"""Processes of agent programs and remote environments: each is ended together with its children.

    process = start(files, variables, ["node", "agent.mjs"])    # files: stdin, stdout, stderr
    process.wait()                                              # its exit code
    process.kill()

On Linux and macOS a small server forks a keeper for each process (keeper.py). Windows has no fork:
there each process is a fresh one.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import IO, Any

from environments.base import EnvFailure

LOCK = threading.Lock()
MAX_OUTPUT = 100_000  # bytes of what a process wrote that are read, from the end


class Forked:
    """A process with a keeper, which kills it when this end of their channel is closed."""

    def __init__(self, channel: socket.socket):
        self.channel = channel

    def wait(self) -> int:
        """Waits until the process and its children have ended; returns its exit code."""
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
    files: Sequence[IO[bytes]],
    variables: dict[str, str],
    arguments: Sequence[str],
    libraries: tuple[str, ...] = (),
) -> Forked | Fresh:
    """Starts a command; with `libraries`, an episode of an agent program that needs them, whose
    `arguments` are those of worker.main. `variables`: added to those of this process. Raises
    EnvFailure."""
    variables = os.environ | variables
    if not hasattr(os, "fork"):
        if libraries:
            arguments = interpreter("environments.plumbing.worker:main", *arguments)
        group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # Ctrl-C is for the run alone
        try:
            streams: Any = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
            return Fresh(arguments, **streams, env=variables, creationflags=group)
        except OSError as error:
            raise EnvFailure(f"can't start {arguments[0]!r}: {error.strerror}") from None
    ours, theirs = socket.socketpair()
    try:
        with theirs, LOCK:
            handles = [*(file.fileno() for file in files), theirs.fileno()]
            socket.send_fds(_server(libraries), [b"."], handles)
        job = os.getcwd(), variables, arguments, bool(libraries)
        ours.sendall(json.dumps(job).encode() + b"\n")
    except OSError:
        raise EnvFailure("the process that starts the others has ended") from None
    return Forked(ours)


def interpreter(function: str, *arguments: str) -> list[str]:
    """The command line that calls `module:function` in this Python, with the same modules."""
    module, name = function.split(":")
    code = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    code += f"from {module} import {name}; {name}(*sys.argv[1:])"
    return [sys.executable, "-c", code, json.dumps(sys.path), *arguments]


def last_lines(file: IO[bytes]) -> list[str]:
    """The lines in the end of a file, without those that are empty."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_OUTPUT))
    lines = file.read().decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


@cache
def _server(libraries: tuple[str, ...]) -> socket.socket:
    """Starts the server that imports these libraries; returns the socket for messages to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        command = interpreter("environments.plumbing.keeper:serve", str(number), *libraries)
        null = subprocess.DEVNULL
        subprocess.Popen(command, stdin=null, pass_fds=[number], start_new_session=True)
    return ours
