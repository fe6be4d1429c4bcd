"""An environment in another process or container, over JSON lines on stdin and stdout.

    python -m environments.adapters.remote tic_tac_toe     # serves one of our environments
    --env remote:env=tic_tac_toe                           # starts that server and plays it
    --env "remote:command=docker run -i my-image"          # or any program with this protocol

The client writes one request per line; the server answers each with one line:

    {"do": "reset", "seed": 7}              {"messages": [{"role": "user", "content": ".."}]}
    {"do": "step", "response": ".."}        {"message": {..} or null, "reward": 0.0, "done": false,
                                             "info": {}, "fresh": false}
    {"do": "demonstrate", "hasty": false}   {"text": ".." or null}
    any request that fails on the server    {"error": ".."}

Observations, actions and rewards are those of the served environment. If the server does not answer
within `timeout`, exits, or sends anything but one valid line, the client kills it and raises
RemoteError: the episode fails, and the next episode starts a new server.

>>> env = Remote(env="letter_counting")
>>> env.reset(seed=62)[0]["content"]
'How many i in "waini"? Work it out, then end with <answer>number</answer>.'
>>> env.step(env.demonstrate()).reward
1.0
>>> env.close()
"""

import contextlib
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from core.types import Message, UsageError
from environments.base import Env, Step
from environments.registry import make

T = TypeVar("T")
MAX_ANSWER_BYTES = 4 << 20
STARTUP_FACTOR = 3  # the first answer may take this many timeouts: a container has to start


class RemoteError(RuntimeError):
    """The server failed. Only its current episode is lost."""


class Remote(Env):
    """Plays an environment in a server process.

    `env`: name of one of our environments, with `;` between its options instead of `,`.
    `command`: command line of any other server; it is not passed to a shell.
    `timeout`: seconds until each answer.
    """

    def __init__(self, env: str = "", command: str = "", timeout: float = 10.0) -> None:
        if bool(env) == bool(command):
            raise UsageError("name either env=.. (one of ours) or command=.. (any program)")
        if timeout <= 0:
            raise UsageError(f"timeout must be more than 0 seconds, not {timeout:g}")
        spec = env.replace(";", ",")
        if env:
            make(spec)  # raises UsageError here instead of in the server
        serve_command = [sys.executable, "-m", "environments.adapters.remote", spec]
        self.arguments = shlex.split(command) if command else serve_command
        self.timeout = timeout
        self.process: subprocess.Popen | None = None

    def reset(self, seed: int) -> list[Message]:
        return self._request({"do": "reset", "seed": seed}, _read_messages)

    def step(self, response: str) -> Step:
        return self._request({"do": "step", "response": response}, _read_step)

    def demonstrate(self, hasty: bool = False) -> str | None:
        return self._request({"do": "demonstrate", "hasty": hasty}, lambda a: a.get("text"))

    def close(self) -> None:
        """Kills the server process, if it runs."""
        if self.process is not None:
            _kill(self.process)
            self.process = None

    def _request(self, request: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """Sends a request and returns what `read` makes of the answer.

        Kills the server and raises RemoteError if anything fails.
        """
        try:
            timeout = self.timeout
            if self.process is None or self.process.poll() is not None:
                self.process = self._start()
                timeout *= STARTUP_FACTOR
            answer = _exchange(self.process, request, time.monotonic() + timeout)
            if "error" in answer:
                raise RemoteError(f"{answer['error']}"[:500])
            return read(answer)
        except (RemoteError, OSError) as error:
            self.close()
            raise RemoteError(f"remote environment: {error}") from None

    def _start(self) -> subprocess.Popen:
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                self.arguments, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL,
                start_new_session=True,  # a process group of its own, which _kill ends as a whole
            )  # fmt: skip
        except OSError as error:
            raise UsageError(f"can't start {self.arguments[0]!r}: {error.strerror}") from None
        assert process.stdin and process.stdout
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        weakref.finalize(self, _kill, process)
        return process


def serve(spec: str) -> None:
    """Answers requests on stdin until it closes; what the environment prints goes to stderr."""
    env = make(spec)
    if not isinstance(env, Env):
        raise UsageError(f"{spec} has several agents; remote serves single-agent environments")
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if request["do"] == "reset":
                answer: dict[str, Any] = {"messages": env.reset(request["seed"])}
            elif request["do"] == "step":
                answer = vars(env.step(request["response"]))
            else:
                answer = {"text": env.demonstrate(request["hasty"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _exchange(
    process: subprocess.Popen, request: dict[str, Any], deadline: float
) -> dict[str, Any]:
    """Sends one line and returns the answer; RemoteError after `deadline` (time.monotonic)."""
    assert process.stdin and process.stdout
    outgoing, incoming = json.dumps(request).encode() + b"\n", bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while b"\n" not in incoming or outgoing:
            ready = selector.select(deadline - time.monotonic())
            if not ready or time.monotonic() > deadline:
                raise RemoteError("no answer within the timeout")
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    outgoing = outgoing[os.write(process.stdin.fileno(), outgoing) :]
                    if not outgoing:
                        selector.unregister(process.stdin)
                    continue
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise RemoteError("the process ended")
                incoming += chunk
                if len(incoming) > MAX_ANSWER_BYTES:
                    raise RemoteError(f"the answer exceeds {MAX_ANSWER_BYTES} bytes")
    line, _, rest = bytes(incoming).partition(b"\n")
    if rest:
        raise RemoteError("more than one answer to a request")
    answer = None
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(line)
    if not isinstance(answer, dict):
        raise RemoteError("the answer is not a JSON object")
    return answer


def _kill(process: subprocess.Popen) -> None:
    """Kills the process and its children, closes its pipes and waits for it."""
    with contextlib.suppress(ProcessLookupError), process:
        os.killpg(process.pid, signal.SIGKILL)


def _read_messages(answer: dict[str, Any]) -> list[Message]:
    return [_read_message(message) for message in _field(answer, "messages", list)]


def _read_step(answer: dict[str, Any]) -> Step:
    answer = {"message": None, "info": {}, "fresh": False} | answer
    return Step(
        None if answer["message"] is None else _read_message(answer["message"]),
        float(_field(answer, "reward", (int, float))),
        _field(answer, "done", bool),
        _field(answer, "info", dict),
        _field(answer, "fresh", bool),
    )


def _read_message(value: Any) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise RemoteError("a message has no text")
    return {"role": str(value.get("role", "user")), "content": value["content"]}


def _field(answer: dict[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    value = answer.get(key)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RemoteError(f"{key!r} is missing or has the wrong type")
    return value


if __name__ == "__main__":
    try:
        serve(" ".join(sys.argv[1:]))
    except UsageError as error:
        print(f"environments.adapters.remote: {error}", file=sys.stderr)
        sys.exit(2)
