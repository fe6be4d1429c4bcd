"""Processes of agent programs, on the side of the run: one for each episode (worker.py).

    workers = of("agent.py:run", zero_on)            # of("") for commands
    process = workers.start(files, variables, arguments)
    process.wait()                                   # its exit code; its children have ended too
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
from contextlib import suppress
from functools import cache
from typing import IO, Any

from environments.base import EnvFailure
from environments.plumbing import processes

FORKS = hasattr(os, "fork")
LOCK = threading.Lock()
CODE = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from environments.plumbing "
MAIN = CODE + "import worker; worker.main(sys.argv[1], sys.argv[2:])"
SERVE = CODE + "import forks; forks.serve(int(sys.argv[1]), sys.argv[2])"


class Forked:
    """A process that the server has forked."""

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
        self.process = processes.start(arguments, **options)

    def wait(self) -> int:
        return processes.wait(self.process)

    def kill(self) -> None:
        processes.kill(self.process)


class Workers:
    """Starts the processes of one program."""

    def __init__(self, run: str, zero_on: tuple[str, ...]):
        self.run, self.zero_on, self.lock = run, zero_on, threading.Lock()
        if FORKS:
            self.server, theirs = socket.socketpair()
            with theirs:
                subprocess.Popen(
                    interpreter(SERVE, str(theirs.fileno()), run), stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()], start_new_session=True,
                )  # fmt: skip

    def start(
        self, files: list[IO[bytes]], variables: dict[str, str], arguments: list[str]
    ) -> Forked | Fresh:  # fmt: skip
        """Starts a command, or the program if there are no `arguments`. Raises EnvFailure.

        `files`: its stdin, stdout and stderr.
        """
        stdin, stdout, stderr = files
        if not FORKS:
            return Fresh(
                arguments or interpreter(MAIN, self.run, *self.zero_on), stdin=stdin,
                stdout=stdout, stderr=stderr, env=os.environ | variables,
            )  # fmt: skip
        options = {"run": self.run, "zero_on": self.zero_on, "variables": variables,
                   "arguments": arguments, "folder": os.getcwd()}  # fmt: skip
        ours, theirs = socket.socketpair()
        numbers = [*(file.fileno() for file in files), theirs.fileno()]
        with theirs, self.lock:
            try:
                socket.send_fds(self.server, [json.dumps(options).encode() + b"\n"], numbers)
                if not self.server.recv(1):
                    raise BrokenPipeError
            except OSError:
                raise EnvFailure("the process that starts the agents has ended") from None
        return Forked(ours)


def of(run: str, zero_on: tuple[str, ...] = ()) -> Workers:
    """The processes of a program; "": of commands. Environments are built in several threads."""
    with LOCK:
        return _workers(run, zero_on)


@cache
def _workers(run: str, zero_on: tuple[str, ...]) -> Workers:
    return Workers(run, zero_on)


def interpreter(code: str, *arguments: str) -> list[str]:
    """A command line of this Python, which finds the same modules."""
    return [sys.executable, "-c", code, json.dumps(sys.path), *arguments]
