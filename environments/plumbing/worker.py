"""The process of one episode of an agent program: it reads the task, plays, and ends.

The last line of its output is the result. If there is none, the last line of stderr says why, and
the exit code is 1, or EX_TEMPFAIL if that was not the policy's doing. What the function prints goes
to stderr. OPENAI_BASE_URL and OPENAI_API_KEY are those of the episode before the user's file is
imported, so a client that the file makes has them.
"""

import ast
import inspect
import json
import os
import random
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

from environments.base import EnvFailure, UsageError
from environments.plumbing import event_loop
from environments.plumbing.installed import import_library
from environments.plumbing.registry import describe_error, find_file, import_attribute
from environments.plumbing.text import one_line

Json = dict[str, Any]
EX_TEMPFAIL = 75  # of sysexits.h: the infrastructure fails
# What connection errors derive from: requests and Python, httpx, aiohttp, openai and litellm
CONNECTION = {"ConnectionError", "TransportError", "ClientConnectionError", "APIConnectionError"}
INSTALLED = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")


def main(run: str, *zero_on: str) -> None:
    """Plays the episode whose task is on stdin; without one, looks whether it could. Never
    returns."""
    output, me, code = os.dup(1), os.getpid(), 0
    os.dup2(2, 1)
    kinds: tuple[type[BaseException], ...] = ()
    try:
        function, kinds = import_attribute(run), tuple(map(exception, zero_on))
        if not callable(function):
            raise UsageError(f"run={run}: it is no function")
        result = play(function, json.loads(sys.stdin.buffer.read()))
        said = f"\n{json.dumps(result, default=float)}\n"
    except BaseException as error:  # SystemExit too
        cause = failure_in(error, kinds)
        output, code, shown = 2, EX_TEMPFAIL if cause else 1, cause or error
        is_text = isinstance(shown, UsageError | EnvFailure)
        said = f"\n{one_line(str(shown) if is_text else describe_error(shown))}\n"
    if os.getpid() == me:  # else it is a fork that the function has made
        with open(output, "wb") as file:
            file.write(said.encode(errors="replace"))
    os._exit(code)  # threads that go on end here


def play(function: Callable[..., Any], given: Json) -> Any:
    """The result of the function, which gets those of the four arguments that it wants."""
    names = inspect.signature(function).parameters
    openai = import_library("openai", "openai") if "client" in names else None
    if not given:
        return 0
    random.seed(given["seed"])
    if "numpy" in sys.modules:  # a fork has the state of its parent
        sys.modules["numpy"].random.seed(given["seed"] % 2**32)
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    # the first one is the task, whatever its name
    values = {next(iter(names), ""): given["task"]}
    values |= {"task": given["task"], "base_url": url, "api_key": key}
    if openai:
        http = openai.DefaultHttpxClient(verify=False, trust_env=False)  # quick to make
        values["client"] = openai.OpenAI(base_url=url, api_key=key, http_client=http)
    result = function(**{name: values[name] for name in names if name in values})
    return event_loop.wait_for(result) if inspect.isawaitable(result) else result


def exception(name: str) -> type[BaseException]:
    """The exception `module.Name`, or Python's `Name`. Raises UsageError if there is none."""
    module, _, bare = name.rpartition(".")
    kind = import_attribute(f"{module or 'builtins'}:{bare}")
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise UsageError(f"zero_on={name}: that is no exception, such as httpx.ConnectError")
    return kind


def failure_in(error: BaseException, zero_on: tuple[type[BaseException], ...]) -> Any:
    """The failure of infrastructure that an exception is, has in its group, or was raised from;
    None if there is none. `zero_on`: are the policy's doing.

    What was handled before it excuses nothing: `__context__` is set without a word of the program.
    """
    found = [error]
    for one in found:  # which grows
        group = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        more = [one.__cause__, *group]
        found += [cause for cause in more if cause is not None and cause not in found]
    said: list[BaseException] = [cause for cause in found if isinstance(cause, EnvFailure)]
    if not any(isinstance(cause, zero_on) for cause in found):
        said += [cause for cause in found if is_failure(cause)]
    return next(iter(said), None)


def is_failure(error: BaseException) -> bool:
    """Whether it is a deadline, a connection, or the status of a server that failed or refuses."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    places = error, getattr(error, "response", None)
    statuses = [getattr(p, name, 0) for p in places for name in ("status_code", "status", "code")]
    failed = any(isinstance(s, int) and (s in (401, 403, 429) or s // 100 == 5) for s in statuses)
    return isinstance(error, TimeoutError) or bool(kinds & CONNECTION) or failed


# In the server that forks it


@cache
def libraries_of(run: str) -> tuple[str, ...]:
    """The libraries that the file of a program names, in its functions too, and openai."""
    names, source = list[str](), run.rpartition(":")[0]
    with suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(find_file(source).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.append(node.module)
    return tuple(sorted({"openai", *filter(is_installed, names)}))


def is_installed(name: str) -> bool:
    """Whether a module is of a library, not a file of the user."""
    with suppress(ValueError, ImportError):
        spec = find_spec(name.partition(".")[0])
        return spec is not None and (spec.origin or "").startswith(INSTALLED)
    return False


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
