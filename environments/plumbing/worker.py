"""The process of one episode of an agent program: it reads the task, writes what came of it, ends.

    python -m environments.plumbing.worker FILE.py:function [EXCEPTION ..] < task.json

The last line of its output is {"result": ..} or {"error": {"kind": .., "text": .., "place": ..}}.
What the function prints goes to stderr. OPENAI_BASE_URL and OPENAI_API_KEY are those of the episode
before the user's file is imported, so a client that the file makes has them.

Where the system can fork, `serve` starts these processes: it has imported the libraries that the
file names, but not the file. It ends a process with its children as soon as the run asks for that,
and all of them when the run has ended, however that was.
"""

import ast
import asyncio
import ctypes
import gc
import importlib
import inspect
import json
import os
import random
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from environments.base import EnvFailure, UsageError
from environments.plumbing.installed import import_library
from environments.plumbing.registry import describe_error, find_file, import_attribute, place_of

Json = dict[str, Any]
# What connection errors derive from: requests and Python, httpx, aiohttp, openai and litellm
CONNECTION = {"ConnectionError", "TransportError", "ClientConnectionError", "APIConnectionError"}
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
MOST = 1_000_000  # characters of a result
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux


# One episode


def main(run: str, zero_on: list[str]) -> None:
    """Plays the episode whose task is on stdin. Never returns."""
    output, me = os.dup(1), os.getpid()
    os.dup2(2, 1)
    found = play(run, zero_on, json.loads(sys.stdin.buffer.read()))
    if os.getpid() == me:  # else it is a fork that the function has made
        with open(output, "w", encoding="utf-8", newline="\n") as file:
            file.write(f"\n{json.dumps(found)}\n")
    os._exit(0)  # threads that go on end here


def play(run: str, zero_on: list[str], given: Json) -> Json:
    """What came of the episode; without a task, whether there could be one."""
    try:
        function = import_attribute(run)
        if not callable(function):
            raise UsageError(f"run={run}: it is no function")
        kinds = tuple(map(exception, zero_on))
        if "client" in inspect.signature(function).parameters:
            import_library("openai", "openai")
    except BaseException as error:
        return {"wrong": str(error) if isinstance(error, UsageError) else describe_error(error)}
    if "task" not in given:
        return {}
    random.seed(given["seed"])
    if "numpy" in sys.modules:  # a fork has the state of its parent
        sys.modules["numpy"].random.seed(given["seed"] % 2**32)
    try:
        text = json.dumps(call(function, given["task"]), default=as_number)
        if len(text) > MOST:
            raise ValueError(f"the program returned {len(text):,} characters")
        return {"result": json.loads(text)}
    except BaseException as error:  # SystemExit too
        return {"error": described(error, kinds)}


def call(function: Callable[..., Any], task: Json) -> Any:
    """The result of the function, which gets those of the four arguments that it wants."""
    names = inspect.signature(function).parameters
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    given: Json = {"task": task, "base_url": url, "api_key": key}
    first = next(iter(names), "task")  # the task, whatever its name
    if first not in (*given, "client"):
        given[first] = task
    if "client" in names:
        openai = import_library("openai", "openai")
        http = openai.DefaultHttpxClient(verify=False, trust_env=False)  # quick to make
        given["client"] = openai.OpenAI(base_url=url, api_key=key, http_client=http)
    result = function(**{name: value for name, value in given.items() if name in names})
    # Not asyncio.run: it would wait for what goes on after the end
    return asyncio.Runner().run(awaited(result)) if inspect.isawaitable(result) else result


async def awaited(result: Any) -> Any:
    return await result


def as_number(value: Any) -> float:
    """A number of numpy or torch."""
    if hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"the program returned {value!r:.60}, not a number or a dict with `reward`")


def described(error: BaseException, zero_on: tuple[type[BaseException], ...]) -> Json:
    """What an exception says. `kind`: infrastructure (it failed), zero_on, status (a server has
    refused) or own (it is the program's)."""
    causes, place = causes_of(error), place_of(error)
    found = {"kind": "own", "text": describe_error(error), "place": place}
    for cause in causes:
        if isinstance(cause, EnvFailure):
            return found | {"kind": "infrastructure", "text": str(cause)}
    if any(isinstance(cause, zero_on) for cause in causes):
        return found | {"kind": "zero_on"}
    for cause in causes:
        kinds = {kind.__name__ for kind in type(cause).__mro__}
        if isinstance(cause, TimeoutError) or kinds & CONNECTION or status_failed(cause):
            name = f"{type(cause).__module__}.{type(cause).__qualname__}".removeprefix("builtins.")
            text = f"{type(cause).__name__}: {cause}"[:300] + place
            text += f"; if the policy's answers cause it: zero_on={name}"
            return found | {"kind": "status", "text": text}
    return found


def exception(name: str) -> type[BaseException]:
    """The exception `module.Name`, or Python's `Name`. Raises UsageError if there is none."""
    module, _, bare = name.rpartition(".")
    kind: Any = None
    with suppress(UsageError):
        kind = import_attribute(f"{module or 'builtins'}:{bare}")
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        raise UsageError(f"zero_on={name}: that is no exception; write where it is, such as "
                         "zero_on=httpx.ConnectError")  # fmt: skip
    return kind


def causes_of(error: BaseException) -> list[BaseException]:
    """The exception, those of its group, and those that it was raised from. One that was handled
    before it excuses nothing: `__context__` is set without a word of the program."""
    found = [error]
    for one in found:  # which grows
        group = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        more = [one.__cause__, *group]
        found += [cause for cause in more if cause is not None and cause not in found]
    return found


def status_failed(error: BaseException) -> bool:
    """Whether an exception has the status of a server that failed, or refuses the program."""
    for place in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            status = getattr(place, name, None)
            if isinstance(status, int) and (status in (401, 403, 429) or 500 <= status < 600):
                return True
    return False


# The server that forks


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
    asked, function = {"role": "user", "content": ""}, {"name": "f", "parameters": {}}
    with suppress(openai.APIConnectionError):
        tools = [{"type": "function", "function": function}]
        client.chat.completions.create(model="m", messages=[asked], tools=tools)
    with suppress(openai.APIConnectionError):
        client.responses.create(model="m", input=[asked], tools=[{"type": "function"} | function])
    call = {"name": "f", "arguments": "{}"}
    message = {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    openai.types.chat.ChatCompletion.construct(choices=choices, usage={}).to_dict()
    text = {"type": "output_text", "text": "", "annotations": []}
    output = [{"type": "message", "content": [text]}, {"type": "function_call"} | call]
    openai.types.responses.Response.construct(
        output=output, usage={}, tools=[], tool_choice="auto", metadata={}
    ).to_dict()


def is_installed(name: str) -> bool:
    """Whether a module is of a library, not a file of the user."""
    with suppress(ValueError, ImportError):
        spec = find_spec(name.partition(".")[0])
        return spec is not None and (spec.origin or "").startswith(INSTALLED)
    return False


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
