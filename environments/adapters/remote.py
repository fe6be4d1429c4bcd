"""An environment in a process of its own, or in a container: JSON lines over stdin and stdout.

    python -m environments.adapters.remote tic_tac_toe          # the serving side, for any of ours
    --env remote:env=tic_tac_toe                       # the playing side, which starts it
    --env "remote:command=docker run -i my-image"      # or any program that speaks these lines

Each request is a line, and so is each answer:

    {"do": "reset", "seed": 7}              {"messages": [{"role": "user", "content": ".."}]}
    {"do": "step", "response": ".."}        {"message": {..} or null, "reward": 0.0, "done": false,
                                             "info": {}, "fresh": false}
    {"do": "demonstrate", "hasty": false}   {"text": ".." or null}
    anything that went wrong there          {"error": ".."}

Reward, observations and actions are those of the environment that is served. A process that is
late (--env-timeout counts too), dies, floods its stdout or sends no answer is ended; the episode
fails with a RemoteError that says why, and the next one gets a fresh process.

>>> env = Remote(env="letter_counting")
>>> env.reset(seed=62)[0]["content"]
'How many o in "denwoor"? Work it out, then end with <answer>number</answer>.'
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
from typing import Any

from core.types import Message, UsageError
from environments.base import Env, Step
from environments.registry import make

LONGEST_LINE = 4 << 20  # bytes of an answer
START_TIMES = 3  # `timeout` of a first answer: a container has to start


class RemoteError(RuntimeError):
    """The other side failed; its episode is lost, nothing else."""


class Remote(Env):
    """`env`: name of one of ours, `;` between its options; or `command`. `timeout`: seconds."""

    def __init__(self, env: str = "", command: str = "", timeout: float = 10.0):
        if bool(env) == bool(command):
            raise UsageError("name either env=.. (one of ours) or command=.. (any program)")
        if timeout <= 0:
            raise UsageError(f"timeout is more than 0 seconds, not {timeout:g}")
        serve = [sys.executable, "-m", "environments.adapters.remote", env.replace(";", ",")]
        if env:
            make(serve[-1])  # refuse here what would be refused there
        self.arguments = shlex.split(command) if command else serve
        self.timeout = timeout
        self.process: subprocess.Popen | None = None

    def reset(self, seed: int) -> list[Message]:
        return self._ask({"do": "reset", "seed": seed},
                         lambda a: [_message(m) for m in _field(a, "messages", list)])  # fmt: skip

    def step(self, response: str) -> Step:
        return self._ask({"do": "step", "response": response}, _step)

    def demonstrate(self, hasty: bool = False) -> str | None:
        return self._ask({"do": "demonstrate", "hasty": hasty}, lambda answer: answer.get("text"))

    def close(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            _end(self.process)
            self.process = None

    def _ask(self, request: dict[str, Any], read: Callable[[dict[str, Any]], Any]) -> Any:
        """Send a request and `read` its answer; on any trouble end the process and raise."""
        try:
            patience = self.timeout
            if self.process is None or self.process.poll() is not None:
                self.process = self._start()
                patience *= START_TIMES
            answer = _exchange(self.process, request, time.monotonic() + patience)
            if "error" in answer:
                raise RemoteError(f"{answer['error']}"[:500])
            return read(answer)
        except (RemoteError, OSError) as error:
            self.close()
            raise RemoteError(f"remote environment: {error}") from None

    def _start(self) -> subprocess.Popen:
        try:
            pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
            process = subprocess.Popen(
                self.arguments, stdin=pipe, stdout=pipe, stderr=nowhere, start_new_session=True
            )
        except OSError as error:
            raise UsageError(f"can't start {self.arguments[0]!r}: {error.strerror}") from None
        os.set_blocking(process.stdin.fileno(), False)  # type: ignore[union-attr]
        os.set_blocking(process.stdout.fileno(), False)  # type: ignore[union-attr]
        weakref.finalize(self, _end, process)
        return process


def _exchange(process: subprocess.Popen, request: dict, deadline: float) -> dict[str, Any]:
    """One line there, one line back, before the deadline (time.monotonic)."""
    assert process.stdin and process.stdout
    outgoing, incoming = json.dumps(request).encode() + b"\n", bytearray()
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdin, selectors.EVENT_WRITE)
        waiting.register(process.stdout, selectors.EVENT_READ)
        while b"\n" not in incoming or outgoing:
            ready = waiting.select(deadline - time.monotonic())
            if not ready or time.monotonic() > deadline:
                raise RemoteError("no answer in time")
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    outgoing = outgoing[os.write(process.stdin.fileno(), outgoing) :]
                    if not outgoing:
                        waiting.unregister(process.stdin)
                    continue
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise RemoteError("the process ended")
                incoming += chunk
                if len(incoming) > LONGEST_LINE:
                    raise RemoteError("an answer without end")
    line, _, more = bytes(incoming).partition(b"\n")
    if more:
        raise RemoteError("more than one answer to a request")
    answer = None
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(line)
    if not isinstance(answer, dict):
        raise RemoteError("the answer is no JSON object")
    return answer


def _end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError), process:  # which closes its pipes and waits
        os.killpg(process.pid, signal.SIGKILL)  # with all that it started


def _step(answer: dict[str, Any]) -> Step:
    answer = {"message": None, "info": {}, "fresh": False} | answer
    return Step(
        None if answer["message"] is None else _message(answer["message"]),
        float(_field(answer, "reward", (int, float))),
        _field(answer, "done", bool),
        _field(answer, "info", dict),
        _field(answer, "fresh", bool),
    )


def _message(found: Any) -> Message:
    if not isinstance(found, dict) or not isinstance(found.get("content"), str):
        raise RemoteError("a message has no text")
    return {"role": str(found.get("role", "user")), "content": found["content"]}


def _field(answer: dict[str, Any], key: str, kind: Any) -> Any:
    value = answer.get(key)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RemoteError(f"{key!r} is missing or of the wrong kind")
    return value


def serve(spec: str) -> None:
    """Answer requests on stdin until it closes; what the environment prints goes to stderr."""
    env = make(spec)
    if not isinstance(env, Env):
        raise UsageError(f"{spec} has several players; remote serves environments of one")
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if request["do"] == "reset":
                answer: dict = {"messages": env.reset(request["seed"])}
            elif request["do"] == "step":
                answer = vars(env.step(request["response"]))
            else:
                answer = {"text": env.demonstrate(request["hasty"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    try:
        serve(" ".join(sys.argv[1:]))
    except UsageError as error:
        print(f"environments.adapters.remote: {error}", file=sys.stderr)
        sys.exit(2)
