"""The server that starts processes on Linux and macOS: it forks a keeper for each.

The keeper starts its process. As soon as the run asks for that, or has ended in any way, the keeper
kills the process and its children, on Linux also those that left its group. An agent program in
Python is forked after its libraries are imported, and imports its own file (worker.py).
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

from environments.plumbing import worker

if not hasattr(os, "fork"):
    raise ImportError("this system has no fork: processes.py starts a fresh process there")

PR_SET_CHILD_SUBREAPER = 36  # of Linux


def serve(number: str, *libraries: str) -> None:
    """Forks a keeper for each message of the run, until the run ends. With the message come the
    process's stdin, stdout and stderr, and the keeper's end of its channel."""
    run = socket.socket(fileno=int(number))
    for name in libraries:
        with suppress(BaseException):
            importlib.import_module(name)
    if libraries:
        with suppress(Exception):
            worker.warm_up()
    gc.freeze()  # the forked processes share the memory of what is imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
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
    with suppress(OSError, AttributeError):  # Linux: descendants become its children if orphaned
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        channel.close()
        for place, file in enumerate((stdin, stdout, stderr)):
            os.dup2(file, place)
            os.close(file)
        execute(folder, variables, arguments, is_program)
    threading.Thread(target=kill_once_closed, args=(channel, pid), daemon=True).start()
    status = os.waitpid(pid, 0)[1]
    kill(pid)
    with suppress(OSError):
        strays = Path(f"/proc/self/task/{os.getpid()}/children")
        while pids := strays.read_text().split():
            os.kill(int(pids[0]), signal.SIGKILL)
            os.waitpid(int(pids[0]), 0)
    channel.sendall(b"%d" % os.waitstatus_to_exitcode(status))


def execute(folder: str, variables: dict[str, str], arguments: list[str], is_program: bool) -> None:
    """Turns the new process into the command or the program. Never returns."""
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
    for send in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)
