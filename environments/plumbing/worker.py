"""The process of one episode of an agent program: it reads the task, plays, and ends.

The last line of its output is the result. If there is none, the last line of stderr says why, and
the exit code is 1, or EX_TEMPFAIL if that was not the policy's doing. What the function prints goes
to stderr. OPENAI_BASE_URL and OPENAI_API_KEY are set before the user's file is imported, so a
client that the file makes at its import uses them.
"""

import ast
import inspect
import json
import os
import random
import sys
import sysconfig
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

from environments.base import EnvFailure, UsageError
from environments.plumbing import event_loop
from environments.plumbing.installed import import_library
from environments.plumbing.registry import describe_error, find_file, import_attribute
from environments.plumbing.text import one_line

EX_TEMPFAIL = 75  # of sysexits.h: the infrastructure fails
# Base classes of connection errors: of requests and Python, httpx, aiohttp, openai and litellm
CONNECTION = {"ConnectionError", "TransportError", "ClientConnectionError", "APIConnectionError"}
FAILED = (401, 403, 429, *range(500, 600))  # statuses of a server that fails, or refuses to serve
STATUS_NAMES = ("status_code", "status", "code")
INSTALLED = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")


def main(run: str, *zero_on: str) -> None:
    """Plays the episode on stdin; if that is null, only imports the function. Never returns."""
    output, pid, code = os.dup(1), os.getpid(), 0
    os.dup2(2, 1)
    exceptions: tuple[type[BaseException], ...] = ()
    try:
        function = import_attribute(run)
        exceptions = tuple(map(exception_of, zero_on))
        if not callable(function):
            raise UsageError(f"run={run}: it is no function")
        result = play(function, json.loads(sys.stdin.buffer.read()))
        last_line = json.dumps(result, default=float)
    except BaseException as error:  # SystemExit too
        failure = failure_in(error, exceptions)
        output, code = 2, EX_TEMPFAIL if failure else 1
        cause = failure or error
        last_line = one_line(describe_error(cause))
    if os.getpid() == pid:  # a process that the function has forked writes nothing
        with open(output, "wb") as file:
            file.write(f"\n{last_line}\n".encode(errors="replace"))
    os._exit(code)  # threads that go on end here


def play(function: Any, episode: Any) -> Any:
    """The result of the function, called with those of the four arguments that it has. `episode`:
    its task and its seed; without one the function is not called."""
    names, arguments = inspect.signature(function).parameters, dict[str, Any]()
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    if "client" in names:
        arguments["client"] = client_of(url, key)
    if not episode:
        return 0
    task, seed = episode["task"], episode["seed"]
    random.seed(seed)
    if "numpy" in sys.modules:  # a fork has the state of its parent
        sys.modules["numpy"].random.seed(seed % 2**32)
    arguments |= {"task": task, "base_url": url, "api_key": key}
    arguments.setdefault(next(iter(names), ""), task)  # the first argument may have any name
    result = function(**{name: arguments[name] for name in names if name in arguments})
    return event_loop.wait_for(result) if inspect.isawaitable(result) else result


def client_of(url: str, key: str) -> Any:
    """A client of an address on this machine, which is quick to make: without certificates."""
    openai = import_library("openai", "openai")
    http = openai.DefaultHttpxClient(verify=False, trust_env=False)
    return openai.OpenAI(base_url=url, api_key=key, http_client=http)


def exception_of(name: str) -> type[BaseException]:
    """The exception `module.Name`, or Python's `Name`. Raises UsageError if there is none."""
    module, _, bare = name.rpartition(".")
    exception = import_attribute(f"{module or 'builtins'}:{bare}")
    if not (isinstance(exception, type) and issubclass(exception, BaseException)):
        raise UsageError(f"zero_on={name}: that is no exception, such as httpx.ConnectError")
    return exception


def failure_in(error: BaseException, zero_on: tuple[type[BaseException], ...]) -> Any:
    """The failure of infrastructure that an exception is, has in its group, or was raised from;
    None if there is none. `zero_on`: exceptions that are the policy's doing.

    An exception that was handled before (`__context__`) is no cause: Python adds it unasked.
    """
    causes = [error]
    for cause in causes:  # a list that grows in the loop
        group = cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        causes += [e for e in (cause.__cause__, *group) if e is not None and e not in causes]
    failures: list[BaseException] = [cause for cause in causes if isinstance(cause, EnvFailure)]
    if not any(isinstance(cause, zero_on) for cause in causes):
        failures += filter(is_failure, causes)
    return next(iter(failures), None)


def is_failure(error: BaseException) -> bool:
    """Whether it is a timeout, a connection error, or the status of a server that failed."""
    is_connection = any(base.__name__ in CONNECTION for base in type(error).__mro__)
    statuses = [getattr(error, name, 0) for name in STATUS_NAMES]
    statuses += [getattr(getattr(error, "response", None), name, 0) for name in STATUS_NAMES]
    has_failed = any(isinstance(status, int) and status in FAILED for status in statuses)
    return isinstance(error, TimeoutError) or is_connection or has_failed


# Called before the process is forked


@cache
def libraries_of(run: str) -> tuple[str, ...]:
    """The libraries that the file of a program imports anywhere, and openai."""
    names, source = list[str](), run.rpartition(":")[0]
    with suppress(OSError, SyntaxError, ValueError):  # the import of the file reports these
        for node in ast.walk(ast.parse(find_file(source).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.append(node.module)
    specs = [(name, find_spec(name.partition(".")[0])) for name in {*names}]
    installed = [name for name, spec in specs if spec and (spec.origin or "").startswith(INSTALLED)]
    return tuple(sorted({"openai", *installed}))


def warm_up() -> None:
    """Sends requests that fail at once, and reads answers: pydantic builds its types when they are
    first used, which takes longer than an episode of a small model."""
    types, client = import_library("openai.types"), client_of("http://127.0.0.1:0", "-")
    client, call = client.with_options(max_retries=0), {"name": "f", "arguments": "{}"}
    chat, tool = [{"role": "user", "content": ""}], {"type": "function", "function": {"name": "f"}}
    with suppress(Exception):
        client.chat.completions.create(model="m", messages=chat, tools=[tool])
    with suppress(Exception):
        client.responses.create(model="m", input=chat, tools=[tool | {"name": "f"}])
    message = {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    types.chat.ChatCompletion.construct(choices=choices, usage={}).to_dict()
    output = [{"type": "message", "content": [{"type": "output_text"}]}, {"type": "function_call"}]
    types.responses.Response.construct(output=output, usage={}, tools=[]).to_dict()
