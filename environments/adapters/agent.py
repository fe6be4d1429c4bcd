"""An agent program, unchanged, as an environment: it asks the policy for answers over HTTP.

    --env "agent:run=my_agent.py:run,data=tasks.jsonl"              a function, or async function
    --env "agent:command=node agent.mjs,data=tasks.jsonl"           any program

    def run(task, client, base_url, api_key):        # those of the four that it wants
        answer = client.chat.completions.create(
            model="picorl", messages=[{"role": "user", "content": task["question"]}])
        return float(task["answer"] in answer.choices[0].message.content)

Each episode is a process (plumbing/processes.py) with an API key of its own: all requests with that
key are the episode. endpoint.py has the addresses. agents/README.md says what a program gets and
returns, which failures are the policy's doing, and which rows are for evaluation; `info["row"]` is
FILE:LINE of the row.
"""

import json
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import IO, Any

from environments.adapters import endpoint
from environments.adapters.endpoint import Ask, Choice, Session
from environments.base import (
    MAX_MESSAGE,
    Env,
    EnvFailure,
    Message,
    RunInfo,
    Step,
    UsageError,
    checked_step,
)
from environments.plumbing import processes
from environments.plumbing.options import split_words
from environments.plumbing.worker import EX_TEMPFAIL, libraries_of
from environments.rewarded import begin_run, draw, load


class ProgramError(Exception):
    """What a program ended with, in one line."""


class Program(Env):
    """`run`: FILE.py:function, or `command`; `data`: FILE.jsonl, a data set of the hub or a folder
    with one, with its `config` and `split`; `zero_on`: exceptions that are the policy's doing, as
    module.Name; `error_reward`: the most that an exception earns; `timeout`: seconds between two
    requests, and until the program ends after its last one; `host`: the address of this machine at
    which programs in containers reach the endpoint; `alone`: as `Env.alone`, for programs that take
    different times or wait for each other."""

    is_program = heavy = waits = True  # core/extras/programs.py answers its requests
    meanings: Mapping[str, str] = {"agent_error": "episodes that the policy's answers broke"}

    def __init__(
        self,
        run: str = "",
        command: str = "",
        data: str = "",
        zero_on: tuple[str, ...] = (),
        error_reward: float = 0.0,
        timeout: float = 300.0,
        config: str = "",
        split: str = "train",
        host: str = endpoint.HOST,
        alone: bool = False,
    ):
        if bool(run) == bool(command):
            raise UsageError("name either run=FILE.py:function or command=PROGRAM")
        if not data:
            raise UsageError("set data=FILE.jsonl: a task in each line")
        self.arguments, self.alone = split_words(command), alone
        self.libraries: tuple[str, ...] = ()
        self.train, self.test, _ = load(data, "", config, split)
        self.error_reward, self.timeout, self.host = error_reward, timeout, host
        try:
            endpoint.shared(host)
        except OSError as error:
            raise UsageError(f"host={host}: {error}; name an address of this machine") from None
        if run:
            self.arguments, self.libraries = [run, *zero_on], libraries_of(run)
            check_program(run, zero_on)
        self.session: Any = None  # of the episode's program
        self.asks: list[Ask] = []  # requests that wait for an answer; none: the program has ended
        self.error: Exception | None = None  # why the episode earned `error_reward`
        self.turns: list[float] = []  # the rewards of single answers, at the end
        self.over_limit = False  # a request was refused, which truncates the episode

    @classmethod
    def begin_run(cls, info: RunInfo) -> None:
        begin_run(info)

    def reset(self, seed: int) -> list[Message]:
        """Starts the program. Returns the messages of its first request, if that comes at once."""
        self.close()
        row = draw(seed, self.train, self.test)
        self.place = row.place
        self.turns, self.over_limit, self.error = [], False, None
        self.session = session = endpoint.shared(self.host).open()
        task = {"task": row, "seed": seed} if self.libraries else row
        self.files, self.process = start(session, task, self.arguments, self.libraries)
        process = self.process
        threading.Thread(target=lambda: session.end(process.wait()), daemon=True).start()
        if not self._wait():
            self._outcome()  # raises: no request was answered
        return [{"role": m["role"], "content": m["content"]} for m in self.asks[0].messages]

    def step(self, response: str) -> Step:
        """Answers requests that still wait with `response`, and waits for the next ones. The step's
        message is the last one of the next request."""
        for ask in self.asks:
            if not ask.outcome.done():
                answer = {"role": "assistant", "content": response}
                ask.reply([Choice(answer, "stop", [])] * ask.n, 0)
        if not self._wait():
            return self._outcome()
        last = self.asks[0].messages[-1]
        message: Message = {"role": last["role"], "content": last["content"][:MAX_MESSAGE]}
        return Step(message, 0.0, False, {"correct": False, "agent_error": 0})

    def close(self) -> None:
        """Ends the program and its children."""
        if self.session is not None:
            self.session.close()
            self.process.kill()

    def _wait(self) -> bool:
        """Waits for requests; False once the program has ended. Raises TimeoutError."""
        asks, refusals = self.session.receive(self.timeout), self.session.refusals
        if len(refusals) > endpoint.MAX_REFUSED:
            raise TimeoutError(f"{len(refusals)} requests got no answer: {refusals[-1]}")
        if asks == []:
            raise TimeoutError(f"the program did nothing for {self.timeout:g} seconds")
        self.asks = asks or []
        return asks is not None

    def _outcome(self) -> Step:
        """Returns the last step. Raises the error of the episode, unless the policy caused it."""
        self.close()
        session = self.session
        try:
            result = result_of(self.arguments[0], session.code, self.files, bool(self.libraries))
            if not session.has_answer:
                reason = ["it sent none with its API key", *session.refusals][-1]
                raise ValueError(f"no request of the program was answered: {reason}")
            info = dict(result) if isinstance(result, dict) else {"reward": result}
            reward = _checked_reward(info.pop("reward", None))
            self.turns = [*map(_checked_reward, info.pop("turns", []))]
            info = {"correct": reward >= 1, "agent_error": 0} | info
            return checked_step(self._last_step(reward, info), "the program", is_single=True)
        except Exception as error:
            if not session.has_answer or (isinstance(error, EnvFailure) and not self.over_limit):
                raise
            self.error, self.turns = error, []
            return self._last_step(self.error_reward, {"correct": False, "agent_error": 1})

    def _last_step(self, reward: float, info: dict[str, Any]) -> Step:
        return Step(None, reward, True, {"row": self.place} | info, truncated=self.over_limit)


@cache
def check_program(run: str, zero_on: tuple[str, ...]) -> None:
    """Imports a program, in a process. Raises UsageError if that fails."""
    session = endpoint.shared().open()
    session.close()  # its requests are refused
    files, process = start(session, None, [run, *zero_on], libraries_of(run))
    try:
        result_of(run, process.wait(), files, True)
    except (EnvFailure, ProgramError) as error:
        raise UsageError(str(error)) from None


def start(
    session: Session, task: Any, arguments: Sequence[str], libraries: tuple[str, ...]
) -> tuple[list[IO[bytes]], processes.Forked | processes.Fresh]:
    """Starts the process of an episode; returns its files and the process. Raises EnvFailure."""
    files: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115
    files[0].write(json.dumps(task).encode() + b"\n")
    files[0].seek(0)
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    hosts = f"{hosts},{session.endpoint.host}"
    variables = {"OPENAI_BASE_URL": session.endpoint.url, "OPENAI_API_KEY": session.key}
    variables |= {"no_proxy": hosts, "NO_PROXY": hosts}
    return files, processes.start(files, variables, arguments, libraries)


def result_of(name: str, code: int, files: list[IO[bytes]], is_function: bool) -> Any:
    """What a function returned or a command printed. Raises ProgramError, or EnvFailure."""
    if code:
        errors = processes.last_lines(files[2])
        text = f"{name} ended with code {code}: {' | '.join(errors[-3:])}"
        if is_function and errors and code in (1, EX_TEMPFAIL):  # worker.main has said why
            text = errors[-1]
        raise (EnvFailure if code == EX_TEMPFAIL else ProgramError)(text[:500])
    last = ["", *processes.last_lines(files[1])][-1]
    with suppress(ValueError):
        return json.loads(last)
    raise ValueError(f"the last line of {name} is no reward as JSON: {last}"[:300])


def _checked_reward(value: Any) -> float:
    """Raises TypeError or ValueError if `value` cannot be a reward."""
    return checked_step(Step(None, value, True), "the program", is_single=True).reward
