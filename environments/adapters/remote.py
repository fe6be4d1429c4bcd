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

Observations, actions and rewards are those of the served environment. If the server does not answer
within `timeout`, exits, or sends anything but one valid line, the client kills it and raises
EnvFailure with the last lines that it wrote to stderr: the episode fails, and the next episode
starts a new server. After an {"error": ".."} it raises RemoteError instead.

>>> env = Remote(env="letter_counting")
>>> env.reset(seed=62)[0]["content"]
'How many i in "waini"? Work it out, then end with <answer>number</answer>.'
>>> env.step(env.demonstrate()).reward
1.0
>>> env.close()
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
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
from environments.plumbing.registry import make, variables_of_python
from environments.plumbing.text import one_line
from environments.plumbing.tools import schemas

T = TypeVar("T")
MAX_ANSWER_BYTES = 4 << 20
SHOWN_LINES, SHOWN_CHARACTERS = 3, 1000  # of the server's stderr
SLICE = 0.1  # seconds
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
        self.arguments = split_words(command)
        self.variables: dict[str, str] | None = None  # those of this process
        if env:
            spec = env.replace(";", ",")
            served = make(spec)  # raises UsageError here instead of in the server
            if schemas(served) or not isinstance(served, Env):
                raise UsageError(f"{spec}: remote plays neither tools nor several agents")
            self.variables = variables_of_python()
            self.arguments = [sys.executable, "-m", "environments.adapters.remote", spec]
        self.timeout = timeout
        self.process: subprocess.Popen | None = None
        self.stderr: IO[bytes] | None = None

    def reset(self, seed: int) -> list[Message]:
        return self._request({"do": "reset", "seed": seed}, lambda a: _read_messages(a["messages"]))

    def step(self, response: str) -> Step:
        return self._request({"do": "step", "response": response}, _read_step)

    def demonstrate(self, hasty: bool = False) -> str | None:
        return self._request({"do": "demonstrate", "hasty": hasty}, lambda a: a.get("text"))

    def close(self) -> None:
        """Kills the server process and its children, if it runs, and closes its pipes."""
        if self.process is not None:
            self.kill()  # works once: later its pid may be that of another process
            self.process = None

    def _request(self, request: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """Sends a request and returns what `read` makes of the answer.

        If anything fails, kills the server and raises RemoteError or EnvFailure.
        """
        try:
            timeout = self.timeout
            if self.process is not None and processes.has_ended(self.process):
                self.close()
            if self.process is None:
                self.process = self._start()
                timeout *= STARTUP_FACTOR
            answer = _exchange(self.process, request, timeout)
            if "error" in answer:
                raise RemoteError(f"{answer['error']}"[:500])
            try:
                return read(answer)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise EnvFailure(f"no answer of the protocol: {error!r}"[:500]) from None
        except (RemoteError, EnvFailure, OSError) as error:
            self.close()
            kind = RemoteError if isinstance(error, RemoteError) else EnvFailure
            raise kind(f"remote environment: {error}{self._last_lines()}") from None

    def _last_lines(self) -> str:
        """Returns the end of what the server wrote to stderr, to append to an error."""
        if self.stderr is None:
            return ""
        shown = " | ".join(processes.last_lines(self.stderr)[-SHOWN_LINES:])[-SHOWN_CHARACTERS:]
        return f"; last lines of its stderr: {shown}" if shown else ""

    def _start(self) -> subprocess.Popen:
        pipe = subprocess.PIPE
        # not a pipe: if nobody reads a pipe, it fills up and the server waits
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with this object
        process = processes.start(
            self.arguments, stdin=pipe, stdout=pipe, stderr=self.stderr, env=self.variables,
            bufsize=0,  # unlike a buffer, closing such a pipe waits for no thread that uses it
        )  # fmt: skip
        self.kill = weakref.finalize(self, processes.kill, process)
        return process


def serve(spec: str) -> None:
    """Answers requests on stdin until it closes; what the environment prints goes to stderr."""
    env = make(spec)
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


def _exchange(process: subprocess.Popen, request: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Sends one line and returns the answer; EnvFailure after so many `seconds` of waiting.

    Waits in slices, and counts a slice as at most twice its length: time in which this process was
    stopped (Ctrl-Z, a suspended machine) is not the server's.
    """
    outgoing, answers = json.dumps(request).encode() + b"\n", SimpleQueue[bytes]()
    threading.Thread(target=_talk, args=(process, outgoing, answers), daemon=True).start()
    received = None
    while received is None:
        started = time.monotonic()
        with contextlib.suppress(Empty):
            received = answers.get(timeout=min(seconds, SLICE))
        seconds -= min(time.monotonic() - started, 2 * SLICE)
        if received is None and seconds <= 0:
            raise EnvFailure("no answer within the timeout")
    if len(received) > MAX_ANSWER_BYTES:
        raise EnvFailure(f"the answer exceeds {MAX_ANSWER_BYTES} bytes")
    if b"\n" not in received:
        raise EnvFailure("the process ended")
    answer = None
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(received)
    if not isinstance(answer, dict):  # two answers are none
        raise EnvFailure("the answer is not a JSON object")
    return answer


def _talk(process: subprocess.Popen, outgoing: bytes, answers: SimpleQueue[bytes]) -> None:
    """Writes a request and reads a line; in a thread, as not every system can wait for a pipe."""
    assert process.stdin and process.stdout
    incoming = bytearray()
    with contextlib.suppress(OSError, ValueError):  # the process ended; its pipes are closed
        while outgoing:
            outgoing = outgoing[process.stdin.write(outgoing) :]
        while b"\n" not in incoming and len(incoming) <= MAX_ANSWER_BYTES:
            if not (chunk := process.stdout.read(1 << 16)):
                break
            incoming += chunk
    answers.put(bytes(incoming))


def _read_messages(value: Any) -> list[Message]:
    return [{"role": m.get("role", "user"), "content": m["content"]} for m in value]


def _read_step(answer: Any) -> Step:
    message = None if answer.get("message") is None else _read_messages([answer["message"]])[0]
    optional = {name: answer[name] for name in ("info", "fresh", "truncated") if name in answer}
    step = Step(message, answer["reward"], answer["done"], **optional)
    return checked_step(step, PLAYER, is_single=True)


if __name__ == "__main__":
    try:
        serve(" ".join(sys.argv[1:]))
    except UsageError as error:
        print(f"environments.adapters.remote: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
