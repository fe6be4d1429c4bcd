"""Starts processes by forking, where the system can: of agent programs (worker.py), and commands.

It has imported the libraries that a program's file names, but not the file. It ends a process
with its children as soon as the run asks for that, and all of them when the run has ended, however
that was.
"""

import ast
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sysconfig
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from environments.base import UsageError
from environments.plumbing.installed import import_library
from environments.plumbing.registry import find_file
from environments.plumbing.worker import main

if not hasattr(os, "fork"):
    raise ImportError("this system has no fork: workers.py starts a fresh interpreter there")

Json = dict[str, Any]
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux


def serve(file: int, program: str) -> None:
    """Starts processes for the run, until that has ended.

    A message of the run comes with four files: stdin, stdout and stderr of the process, and a
    channel. The exit code is written to the channel; if the run closes it, the process is killed.
    """
    run = socket.socket(fileno=file)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    preload(program)
    gc.freeze()  # the processes share what is there
    channels: dict[int, socket.socket] = {}  # by the id of the process
    ended, noted = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(noted, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(noted, warn_on_full_buffer=False)
    while True:
        ready = wait([run, ended, *channels.values()])
        for pid, channel in channels.items():
            if channel in ready:
                kill(pid)
        if ended in ready:
            with suppress(BlockingIOError):
                os.read(ended, 4096)
            reap(channels)
        if run in ready:
            message, files = b"", list[int]()
            while not message.endswith(b"\n"):
                part, more = b"", list[int]()
                with suppress(ConnectionError):  # a run that was killed left bytes unread
                    part, more, *_ = socket.recv_fds(run, 65536, 4)
                if not part:
                    for pid in channels:
                        kill(pid)
                    kill_strays()
                    return
                message, files = message + part, files + more
            if not (pid := os.fork()):
                for inherited in (run, *channels.values()):
                    inherited.close()
                signal.set_wakeup_fd(-1)
                for file in (ended, noted, files.pop()):
                    os.close(file)
                begin(json.loads(message), files)
            *own, channel_file = files
            for file in own:
                os.close(file)
            channels[pid] = socket.socket(fileno=channel_file)
            with suppress(ConnectionError):
                run.sendall(b"\n")


def begin(options: Json, files: list[int]) -> None:
    """What a new process does. Never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.update(options["variables"])
        os.chdir(options["folder"])
        if arguments := options["arguments"]:
            os.execvp(arguments[0], arguments)
        main(options["run"], options["zero_on"])
    except OSError as error:
        os.write(2, f"can't start it: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def reap(channels: dict[int, socket.socket]) -> None:
    """Ends the children of the processes that have ended, and tells the run."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            if channel := channels.pop(pid, None):
                kill(pid)
                with channel, suppress(OSError):
                    channel.sendall(b"%d" % os.waitstatus_to_exitcode(status))
    if not channels:
        kill_strays()


def kill(pid: int) -> None:
    """Kills a process and its group, if it has that yet."""
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def kill_strays() -> None:
    """Linux: kills what has left its group. Its parents have ended, so it is a child of ours."""
    with suppress(OSError):
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while pids := children.read_text().split():
            for pid in map(int, pids):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # on Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def preload(program: str) -> None:
    """Imports the libraries that a program's file names, in its functions too."""
    if not program:
        return
    names, source = ["openai"], program.rpartition(":")[0]
    with suppress(OSError, SyntaxError, ValueError, UsageError):
        for node in ast.walk(ast.parse(find_file(source).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.append(node.module)
    for name in filter(is_installed, names):
        with suppress(BaseException):
            importlib.import_module(name)
    with suppress(Exception):
        warm_up()


def warm_up() -> None:
    """Asks nobody, once: pydantic builds the types of requests and answers when they are first
    used, which takes longer than an episode of a small model."""
    openai = import_library("openai", "openai")
    http = openai.DefaultHttpxClient(verify=False, trust_env=False)
    client = openai.OpenAI(
        base_url="http://127.0.0.1:0", api_key="-", max_retries=0, http_client=http
    )
    function: Json = {"name": "f", "parameters": {}}
    asked: Json = {"model": "m", "tools": [{"type": "function", "function": function} | function]}
    with suppress(openai.APIConnectionError):
        client.chat.completions.create(messages=[{"role": "user", "content": ""}], **asked)
    with suppress(openai.APIConnectionError):
        client.responses.create(input=[{"role": "user", "content": ""}], **asked)
    call = {"name": "f", "arguments": "{}"}
    message = {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    openai.types.chat.ChatCompletion.construct(choices=choices, usage={}).to_dict()
    output = [{"type": "message", "content": [{"type": "output_text"}]}, {"type": "function_call"}]
    openai.types.responses.Response.construct(output=output, usage={}, tools=[]).to_dict()


def is_installed(name: str) -> bool:
    """Whether a module is of a library, not a file of the user."""
    with suppress(ValueError, ImportError):
        spec = find_spec(name.partition(".")[0])
        return spec is not None and (spec.origin or "").startswith(INSTALLED)
    return False
