"""An environment in another process or container, over JSON lines on stdin and stdout.

    python -m environments.adapters.remote tic_tac_toe     # serves one of our environments
    --env remote:env=tic_tac_toe                           # starts that server and plays it
    --env "remote:command=docker run -i my-image"          # or any program with this protocol

The client writes one request per line; the server answers each with one line:

    {"do": "reset", "seed": 7}              {"messages": [{"role": "user", "content": ".."}]}
    {"do": "step", "response": ".."}        {"message": {..} or null, "reward": 0.0, "done": false}
                                             and any other field of `Step`
    {"do": "demonstrate", "hasty": false}   {"text": ".." or null}
    any request that fails on the server    {"error": ".."}, an exception as if it were raised here

A server that is late (`timeout`), exits, or sends anything but one valid line is killed. Its
episode fails with EnvFailure and the last lines of stderr; the next episode starts a new server.
"""

import json
import os
import sys
import tempfile
import threading
from contextlib import suppress
from typing import IO, Any

from environments.base import PLAYER, Env, EnvFailure, Message, Step, UsageError, checked_step
from environments.plumbing import processes
from environments.plumbing.options import split_words
from environments.plumbing.registry import make

FIELDS = {"reset": "messages", "demonstrate": "text"}  # request: the one field of its answer


class Remote(Env):
    """Plays an environment for one player in a server process. `env`: one of our environments, with
    `;` between its options. `command`: any other server; no shell reads it. `timeout`: seconds
    until each answer; the first may take three times as long."""

    heavy = waits = True

    def __init__(self, env: str = "", command: str = "", timeout: float = 10.0) -> None:
        if bool(env) == bool(command):
            raise UsageError("name either env=.. (one of ours) or command=.. (any program)")
        self.timeout, self.arguments = timeout, split_words(command)
        if env:
            spec = env.replace(";", ",")
            served = make(spec)  # raises UsageError here instead of in the server
            if not isinstance(served, Env) or served.tools:
                raise UsageError(f"{spec}: remote plays neither tools nor several agents")
            self.arguments = processes.interpreter("environments.adapters.remote:serve", spec)
        self.process: processes.Forked | processes.Fresh | None = None  # the server

    def reset(self, seed: int) -> list[Message]:
        if self.process is not None:
            with suppress(EnvFailure):  # the server has ended since the last episode
                return self._ask("reset", self.timeout, seed=seed)
        self._start()
        return self._ask("reset", 3 * self.timeout, seed=seed)  # a container has to start

    def step(self, response: str) -> Step:
        return self._ask("step", self.timeout, response=response)

    def demonstrate(self, hasty: bool = False) -> str | None:
        return self._ask("demonstrate", self.timeout, hasty=hasty)

    def close(self) -> None:
        """Kills the server process and its children."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()

    def _ask(self, do: str, timeout: float, **values: Any) -> Any:
        """Returns the server's answer to a request: messages, a text or a checked Step."""
        timer = threading.Timer(timeout, self.close)
        timer.start()
        try:
            self.stdin.write(json.dumps({"do": do} | values).encode() + b"\n")
            line = self.stdout.readline()
            if not line:
                raise EOFError("the process ended")
            answer = json.loads(line)
            if "error" in answer:
                raise RuntimeError(f"remote environment: {answer['error']}"[:500])
            if do in FIELDS:
                return answer[FIELDS[do]]
            return checked_step(Step(**answer), PLAYER, is_single=True)
        except (OSError, EOFError, LookupError, TypeError, ValueError) as error:
            is_late = self.process is None  # closed by the timer
            reason = "no answer within the timeout" if is_late else f"no valid answer: {error!r}"
            self.close()
            stderr = " | ".join(processes.last_lines(self.stderr)[-3:])[-1000:] or "empty"
            raise EnvFailure(f"remote server: {reason:.500}; stderr ends with: {stderr}") from None
        finally:
            timer.cancel()

    def _start(self) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self.stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  a pipe would fill up
        self.stdin, self.stdout = os.fdopen(ours_out, "wb", buffering=0), os.fdopen(ours_in, "rb")
        with open(theirs_in, "rb") as stdin, open(theirs_out, "wb") as stdout:
            self.process = processes.start([stdin, stdout, self.stderr], {}, self.arguments)


def serve(spec: str) -> None:
    """Answers requests on stdin until it closes; what the environment prints goes to stderr."""
    env: Any = make(spec)
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            do = request.pop("do")
            result = getattr(env, do)(**request)
            if do in FIELDS:
                answer = {FIELDS[do]: result}
            else:
                answer = vars(checked_step(result, PLAYER, is_single=True))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    try:
        serve(" ".join(sys.argv[1:]))
    except UsageError as error:
        print(f"environments.adapters.remote: {error}", file=sys.stderr)
        sys.exit(2)
