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

A server that is late (`timeout`), exits, or sends anything but one valid line is killed, and the
episode fails with EnvFailure and the last lines of its stderr; the next one starts a new server.
"""

import json
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import IO, Any

from environments.base import PLAYER, Env, EnvFailure, Message, Step, UsageError, checked_step
from environments.plumbing import processes
from environments.plumbing.options import split_words
from environments.plumbing.registry import make
from environments.plumbing.text import one_line
from environments.plumbing.tools import schemas

STARTUP_FACTOR = 3  # the first answer may take this many timeouts: a container has to start


class Remote(Env):
    """Plays an environment for one player in a server process.

    `env`: one of our environments, with `;` between its options. `command`: any other server; no
    shell reads it. `timeout`: seconds until each answer.
    """

    heavy = waits = True

    def __init__(self, env: str = "", command: str = "", timeout: float = 10.0) -> None:
        if bool(env) == bool(command):
            raise UsageError("name either env=.. (one of ours) or command=.. (any program)")
        self.timeout, self.arguments = timeout, split_words(command)
        if env:
            spec = env.replace(";", ",")
            served = make(spec)  # raises UsageError here instead of in the server
            if schemas(served) or not isinstance(served, Env):
                raise UsageError(f"{spec}: remote plays neither tools nor several agents")
            self.arguments = processes.interpreter("environments.adapters.remote:serve", spec)
        self.process: processes.Forked | processes.Fresh | None = None

    def reset(self, seed: int) -> list[Message]:
        if self.process is not None:
            with suppress(EnvFailure):  # the server has ended since the last episode
                return self._ask("reset", seed=seed)
        return self._ask("reset", seed=seed)

    def step(self, response: str) -> Step:
        return self._ask("step", response=response)

    def demonstrate(self, hasty: bool = False) -> str | None:
        return self._ask("demonstrate", hasty=hasty)

    def close(self) -> None:
        """Kills the server process and its children."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def _ask(self, do: str, **values: Any) -> Any:
        """Sends a request, and returns what its answer says."""
        timeout = self.timeout if self.process else STARTUP_FACTOR * self.timeout
        self.process = self.process or self._start()
        begun, limit = time.monotonic(), threading.Timer(timeout, self.process.kill)
        limit.start()
        try:
            self.stdin.write(json.dumps({"do": do} | values).encode() + b"\n")
            if not (line := self.stdout.readline()):
                raise EOFError("the process ended")
            answer = json.loads(line)
            if "error" in answer:
                raise RuntimeError(f"remote environment: {answer['error']}"[:500])
            if do == "step":
                return checked_step(Step(**answer), PLAYER, is_single=True)
            return answer["messages" if do == "reset" else "text"]
        except (OSError, EOFError, LookupError, TypeError, ValueError) as error:
            self.close()
            is_late = time.monotonic() - begun >= timeout
            reason = "no answer within the timeout" if is_late else f"no valid answer: {error!r}"
            shown = " | ".join(processes.last_lines(self.stderr)[-3:])[-1000:] or "empty"
            text = f"remote environment: {reason[:500]}; the end of its stderr: {shown}"
            raise EnvFailure(text) from None
        finally:
            limit.cancel()

    def _start(self) -> processes.Forked | processes.Fresh:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self.stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  a pipe would fill up
        self.stdin, self.stdout = os.fdopen(ours_out, "wb", buffering=0), os.fdopen(ours_in, "rb")
        with open(theirs_in, "rb") as stdin, open(theirs_out, "wb") as stdout:
            return processes.start([stdin, stdout, self.stderr], {}, self.arguments)


def serve(spec: str) -> None:
    """Answers requests on stdin until it closes; what the environment prints goes to stderr."""
    env: Any = make(spec)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = getattr(env, do := request.pop("do"))(**request)
            if do == "step":
                answer = vars(checked_step(result, PLAYER, is_single=True))
            else:
                answer = {"messages" if do == "reset" else "text": result}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    try:
        serve(" ".join(sys.argv[1:]))
    except UsageError as error:
        print(f"environments.adapters.remote: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
