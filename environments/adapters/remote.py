"""An environment in another process or container, over JSON lines on stdin and stdout.

    python -m environments.adapters.remote tic_tac_toe     # serves one of our environments
    --env remote:env=tic_tac_toe                           # starts that server and plays it
    --env "remote:command=docker run -i my-image"          # or any program with this protocol

The client writes one request per line; the server answers each with one line:

    {"do": "reset", "seed": 7}              {"messages": [{"role": "user", "content": ".."}]}
    {"do": "step", "response": ".."}        {"message": {..} or null, "reward": 0.0, "done": false,
                                             "info": {}, "fresh": false, "truncated": false}
    {"do": "demonstrate", "hasty": false}   {"text": ".." or null}
    any request that fails on the server    {"error": ".."}

A server that is late (`timeout`), exits, or sends anything but one valid line is killed, and the
episode fails with EnvFailure and the last lines of its stderr; the next one starts a new server. An
{"error": ".."} fails it with RemoteError instead.

>>> env = Remote(env="letter_counting")
>>> env.reset(seed=62)[0]["content"]
'How many i in "waini"? Work it out, then end with <answer>number</answer>.'
>>> env.step(env.demonstrate()).reward
1.0
>>> env.close()
"""

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO, Any, TypeVar

from environments.base import (
    PLAYER,
    Env,
    EnvFailure,
    Message,
    Step,
    UsageError,
    check_range,
    checked_step,
)
from environments.plumbing import processes
from environments.plumbing.options import split_words
from environments.plumbing.registry import make
from environments.plumbing.text import one_line
from environments.plumbing.tools import schemas

T = TypeVar("T")
STARTUP_FACTOR = 3  # the first answer may take this many timeouts: a container has to start


class RemoteError(RuntimeError):
    """The served environment raised an exception."""


class Remote(Env):
    """Plays an environment for one player in a server process.

    `env`: name of one of our environments, with `;` between its options instead of `,`.
    `command`: command line of any other server; it is not passed to a shell.
    `timeout`: seconds until each answer.
    """

    heavy = waits = True

    def __init__(self, env: str = "", command: str = "", timeout: float = 10.0) -> None:
        if bool(env) == bool(command):
            raise UsageError("name either env=.. (one of ours) or command=.. (any program)")
        check_range("timeout", timeout, 0.001, 1_000_000)
        self.timeout, self.arguments = timeout, split_words(command)
        if env:
            spec = env.replace(";", ",")
            served = make(spec)  # raises UsageError here instead of in the server
            if schemas(served) or not isinstance(served, Env):
                raise UsageError(f"{spec}: remote plays neither tools nor several agents")
            self.arguments = processes.interpreter("environments.adapters.remote:main", spec)
        self.process: processes.Forked | processes.Fresh | None = None

    def reset(self, seed: int) -> list[Message]:
        request = {"do": "reset", "seed": seed}
        if self.process is not None:
            with suppress(EnvFailure):  # the server has ended since the last episode
                return self._request(request, _read_opening)
        return self._request(request, _read_opening)

    def step(self, response: str) -> Step:
        return self._request({"do": "step", "response": response}, _read_step)

    def demonstrate(self, hasty: bool = False) -> str | None:
        return self._request({"do": "demonstrate", "hasty": hasty}, lambda a: a.get("text"))

    def close(self) -> None:
        """Kills the server process and its children."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def _request(self, request: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """Sends a request and returns what `read` makes of the answer.

        If anything fails, kills the server and raises RemoteError or EnvFailure.
        """
        timeout, problem = self.timeout, "no answer within the timeout"
        kind: type[Exception] = EnvFailure
        if self.process is None:
            self._start()
            timeout *= STARTUP_FACTOR
        try:
            self.stdin.write(json.dumps(request).encode() + b"\n")
            if not (line := self.answers.get(timeout=timeout)):
                raise OSError("the process ended")
            answer = json.loads(line)
            if "error" not in answer:
                return read(answer)
            problem, kind = f"{answer['error']}"[:500], RemoteError
        except Empty:
            pass
        except OSError as error:
            problem = str(error)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            problem = f"no answer of the protocol: {error!r}"[:500]
        self.close()
        shown = " | ".join(processes.last_lines(self.stderr)[-3:])[-1000:]
        said = f"; last lines of its stderr: {shown}" if shown else ""
        raise kind(f"remote environment: {problem}{said}")

    def _start(self) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # not a pipe: if nobody reads a pipe, it fills up and the server waits
        self.stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.stdin = os.fdopen(ours_out, "wb", buffering=0)
        with open(theirs_in, "rb") as stdin, open(theirs_out, "wb") as stdout:
            self.process = processes.start([stdin, stdout, self.stderr], {}, self.arguments)
        self.answers = answers = SimpleQueue[bytes]()

        def read() -> None:  # in a thread, as not every system can wait for a pipe
            with open(ours_in, "rb") as stdout:
                while line := stdout.readline():
                    answers.put(line)
            answers.put(b"")

        threading.Thread(target=read, daemon=True).start()


def main(spec: str) -> None:
    """Answers requests on stdin until it closes; what the environment prints goes to stderr."""
    env: Any = make(spec)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            answer = json.dumps(_answer(env, json.loads(line)))
        except Exception as error:
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        print(answer, file=answers, flush=True)


def _answer(env: Any, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "reset":
        return {"messages": env.reset(request["seed"])}
    if request["do"] == "step":
        return vars(checked_step(env.step(request["response"]), PLAYER, is_single=True))
    return {"text": env.demonstrate(request["hasty"])}


def _read_opening(answer: dict[str, Any]) -> list[Message]:
    return _read_messages(answer["messages"])


def _read_messages(value: Any) -> list[Message]:
    return [{"role": m.get("role", "user"), "content": m["content"]} for m in value]


def _read_step(answer: Any) -> Step:
    message = None if answer.get("message") is None else _read_messages([answer["message"]])[0]
    optional = {name: answer[name] for name in ("info", "fresh", "truncated") if name in answer}
    step = Step(message, answer["reward"], answer["done"], **optional)
    return checked_step(step, PLAYER, is_single=True)


if __name__ == "__main__":
    try:
        main(" ".join(sys.argv[1:]))
    except UsageError as error:
        print(f"environments.adapters.remote: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
