"""The process of one episode of an agent program: it reads the task, writes what came of it, ends.

The last line of its output is {"result": ..} or {"error": {"kind": .., "text": .., "place": ..}}.
What the function prints goes to stderr. OPENAI_BASE_URL and OPENAI_API_KEY are those of the episode
before the user's file is imported, so a client that the file makes has them.
"""

import asyncio
import inspect
import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

from environments.base import EnvFailure, UsageError
from environments.plumbing.installed import import_library
from environments.plumbing.registry import describe_error, import_attribute, place_of

Json = dict[str, Any]
# What connection errors derive from: requests and Python, httpx, aiohttp, openai and litellm
CONNECTION = {"ConnectionError", "TransportError", "ClientConnectionError", "APIConnectionError"}


def main(run: str, zero_on: list[str]) -> None:
    """Plays the episode whose task is on stdin. Never returns."""
    output, me = os.dup(1), os.getpid()
    os.dup2(2, 1)
    found = play(run, zero_on, json.loads(sys.stdin.buffer.read()))
    if os.getpid() == me:  # else it is a fork that the function has made
        with open(output, "w", encoding="utf-8", newline="\n") as file:
            file.write(f"\n{found}\n")
    os._exit(0)  # threads that go on end here


def play(run: str, zero_on: list[str], given: Json) -> str:
    """What came of the episode, as JSON; without a task, whether there could be one."""
    kinds: tuple[type[BaseException], ...] = ()
    try:
        function = import_attribute(run)
        if not callable(function):
            raise UsageError(f"run={run}: it is no function")
        kinds = tuple(map(exception, zero_on))
        if "client" in inspect.signature(function).parameters:
            import_library("openai", "openai")
        if "task" not in given:
            return json.dumps({"result": None})
        random.seed(given["seed"])
        if "numpy" in sys.modules:  # a fork has the state of its parent
            sys.modules["numpy"].random.seed(given["seed"] % 2**32)
        return json.dumps({"result": call(function, given["task"])}, default=as_number)
    except BaseException as error:  # SystemExit too
        return json.dumps({"error": described(error, kinds)})


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
    text = str(error) if isinstance(error, UsageError) else describe_error(error)
    found = {"kind": "own", "text": text, "place": place}
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
    kind = import_attribute(f"{module or 'builtins'}:{bare}")
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise UsageError(f"zero_on={name}: that is no exception, such as httpx.ConnectError")
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
    places = error, getattr(error, "response", None)
    names = "status_code", "status", "code"
    statuses = [getattr(place, name, None) for place in places for name in names]
    return any(isinstance(s, int) and (s in (401, 403, 429) or s // 100 == 5) for s in statuses)
