"""Processes of agent programs and remote environments, on the side of the run.

    files = stdin, stdout, stderr
    process = start(files, variables, ["node", "agent.mjs"])             # a command
    process = start(files, variables, run="agent.py:run", zero_on=())    # an episode of worker.py
    process.wait()                       # its exit code; its children have ended too
    process.kill()

A small server forks the processes (forks.py). Windows has no fork: there each is a fresh
interpreter.
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

FORKS = hasattr(os, "fork")
LOCK = threading.Lock()
MAX_OUTPUT = 100_000  # bytes of what a process wrote that are read, from the end
CODE = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from environments.plumbing "
MAIN = CODE + "import worker; worker.main(sys.argv[1], sys.argv[2:])"
SERVE = CODE + "import forks; forks.serve(int(sys.argv[1]), sys.argv[2])"


class Forked:
    """A process that the server has forked. It is killed if this object is forgotten."""

    def __init__(self, channel: socket.socket):
        self.channel = channel

    def wait(self) -> int:
        """Waits until it and its children have ended; returns its exit code."""
        text = b""
        with suppress(OSError):
            while part := self.channel.recv(16):
                text += part
        return int(text or -9)

    def kill(self) -> None:
        with suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)


class Fresh:
    """A process of a new interpreter, or of a command, without a server."""

    def __init__(self, arguments: list[str], **options: Any):
        group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # Ctrl-C is for the run alone
        try:
            self.process = subprocess.Popen(arguments, creationflags=group, **options)
        except OSError as error:
            raise EnvFailure(f"can't start {arguments[0]!r}: {error.strerror}") from None

    def wait(self) -> int:
        return self.process.wait()

    def kill(self) -> None:
        if self.process.poll() is None:  # with its children
            command = ["taskkill", "/F", "/T", "/PID", str(self.process.pid)]
            subprocess.run(command, capture_output=True)


def start(
    files: Sequence[IO[bytes]], variables: dict[str, str], arguments: Sequence[str] = (),
    run: str = "", zero_on: Sequence[str] = (),
) -> Forked | Fresh:  # fmt: skip
    """Starts a command, or else the function `run` of a program. Raises EnvFailure."""
    stdin, stdout, stderr = files
    if not FORKS:
        return Fresh(
            [*arguments] or interpreter(MAIN, run, *zero_on), stdin=stdin, stdout=stdout,
            stderr=stderr, env=os.environ | variables,
        )  # fmt: skip
    options = {"run": run, "zero_on": zero_on, "variables": variables, "arguments": arguments,
               "folder": os.getcwd()}  # fmt: skip
    ours, theirs = socket.socketpair()
    numbers = [*(file.fileno() for file in files), theirs.fileno()]
    with theirs, LOCK:
        server = _server(run)
        try:
            socket.send_fds(server, [json.dumps(options).encode() + b"\n"], numbers)
            if not server.recv(1):
                raise BrokenPipeError
        except OSError:
            raise EnvFailure("the process that starts the others has ended") from None
    return Forked(ours)


@cache
def _server(run: str) -> socket.socket:
    """The server that starts the processes of a program; "": of commands."""
    ours, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen(
            interpreter(SERVE, str(theirs.fileno()), run), stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip
    return ours


def interpreter(code: str, *arguments: str) -> list[str]:
    """A command line of this Python, which finds the same modules."""
    return [sys.executable, "-c", code, json.dumps(sys.path), *arguments]


def last_lines(file: IO[bytes]) -> list[str]:
    """The lines in the end of a file, without those that are empty."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_OUTPUT))
    lines = file.read().decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]
