"""An agent program, unchanged, as an environment: it asks the policy for answers over HTTP.

    --env "agent:run=my_agent.py:run,data=tasks.jsonl"              a function, or async function
    --env "agent:command=node agent.mjs,data=tasks.jsonl"           any program

    def run(task, client, base_url, api_key):        # those of the four that it wants
        answer = client.chat.completions.create(
            model="picorl", messages=[{"role": "user", "content": task["question"]}])
        return float(task["answer"] in answer.choices[0].message.content)

`task` is a row of `data`; `client` is an openai.OpenAI, `base_url` and `api_key` are for any other
client or framework (endpoint.py has the addresses). All requests with that key are one episode: the
program has one for each, and many run at the same time, each in a thread. A `command` reads
OPENAI_BASE_URL, OPENAI_API_KEY and the row as JSON on standard input; the last line that it prints
is the reward as JSON.

Reward: what the program returns, a number or a dict with `reward`, `turns`, a reward for each
answer, in the order in which they were asked for, and any other numbers, which become metrics.
`info["correct"]`: `correct` of the dict, else whether the reward is 1 or more.

0, and the episode counts: the program raises an exception that the policy's answers caused. Those
of three frameworks are known (`ZERO_ON`); `zero_on` names others. A limit, --max-turns or the
context, refuses further requests; if that raises, the reward is 0, too. Any other exception fails
the episode, and so does a command that ends with another code than 0 or prints no reward. Raise
environments.base.EnvFailure where something of the program's own fails, such as a search engine.

One row in eight is reserved for evaluation, decided by its content; where --eval-env names other
data, both are used whole, and rows that occur in both are not trained on.
"""

import asyncio
import copy
import ctypes
import inspect
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from environments.adapters import endpoint, remote
from environments.adapters.endpoint import Ask, Choice, Session
from environments.base import (
    EVAL_SEEDS,
    MAX_MESSAGE,
    MAX_REWARD,
    Env,
    EnvFailure,
    Message,
    Step,
    UsageError,
)
from environments.dataset import Row
from environments.options import split_words
from environments.registry import import_attribute
from environments.rewarded import load
from environments.tools import read_calls

POLL = 0.5  # seconds that a call waits at most; each look interrupts the sampling
INTERVAL = 0.5  # seconds between interruptions of a program that must end
SWITCH = 5e-4  # seconds until another thread's turn: a program may compute without an end
MAX_REFUSED = 100  # requests of an episode that get no answer; then the program is ended
MAX_OUTPUT = 100_000  # bytes of a command's output that are read, from its end
# Exceptions of openai-agents, pydantic-ai and smolagents about what the model wrote
ZERO_ON = (
    "agents.exceptions.ModelBehaviorError", "agents.exceptions.MaxTurnsExceeded",
    "pydantic_ai.exceptions.UnexpectedModelBehavior", "pydantic_ai.exceptions.UsageLimitExceeded",
    "smolagents.utils.AgentParsingError", "smolagents.utils.AgentExecutionError",
    "smolagents.utils.AgentMaxStepsError", "smolagents.utils.AgentToolCallError",
    "smolagents.utils.AgentToolExecutionError",
)  # fmt: skip


STILL = {"role": "user", "content": "(the program has not asked yet)"}


class Ended(SystemExit):
    """Raised in the thread of a program whose episode has ended."""


@dataclass(eq=False)
class Play:
    """A program while it runs. `result` or `error` is set before the session ends."""

    session: Session
    result: Any = None
    error: BaseException | None = None
    process: subprocess.Popen | None = None
    thread: threading.Thread = field(init=False)
    running: bool = False  # else nothing must be raised in the thread: another may get its id
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `running`

    def stop(self) -> None:
        """Ends the program, as far as possible: a thread is interrupted in Python code only."""
        self.session.close()
        if self.process is not None:
            remote._kill(self.process)
        elif self.thread.is_alive():
            threading.Thread(target=self._interrupt, daemon=True).start()

    def _interrupt(self) -> None:
        """Raises Ended in the thread until it ends: a program may catch it. Most programs end
        before the first time, by the refusal of their request."""
        while self.thread.is_alive():
            self.thread.join(INTERVAL)
            with self.lock:
                if self.running:
                    ident, error = ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(Ended)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)

    def end(self) -> None:
        """The last thing that the thread does."""
        while self.running:
            try:
                with self.lock:
                    self.running = False
            except Ended:
                pass


class Agent(Env):
    """`run`: FILE.py:function, or `command`; `data`: FILE.jsonl, a data set of the hub or a folder
    with one, with its `config` and `split`; `zero_on`: exceptions that are reward 0, by class name;
    `timeout`: seconds between two requests, and until the program ends after its last one."""

    is_program = True  # core/extras/agents.py answers its requests
    meanings: Mapping[str, str] = {"agent_error": "episodes that the policy's answers broke"}

    def __init__(
        self, run: str = "", command: str = "", data: str = "", zero_on: tuple[str, ...] = (),
        timeout: float = 300.0, config: str = "", split: str = "train",
    ):  # fmt: skip
        if bool(run) == bool(command):
            raise UsageError("name either run=FILE.py:function or command=PROGRAM")
        if not data:
            raise UsageError("set data=FILE.jsonl: a task in each line")
        if not 0 < timeout <= remote.MAX_TIMEOUT:
            raise UsageError(f"timeout must be more than 0 and at most {remote.MAX_TIMEOUT:,} "
                             f"seconds, not {timeout:g}")  # fmt: skip
        self.function: Any = None
        if run:
            self.function = import_attribute(*run.rpartition(":")[::2])
            sys.setswitchinterval(min(SWITCH, sys.getswitchinterval()))
        if run and not callable(self.function):
            raise UsageError(f"run={run}: it is no function")
        if run and "client" in _parameters(self.function):
            import_openai()
        self.arguments = split_words(command)
        self.train, self.test, _ = load(data, "", config, split)
        self.zero_on, self.timeout = {*ZERO_ON, *zero_on}, timeout
        self.play: Play | None = None  # None: it has ended
        self.waits = True  # whether reset and step wait for a request, however long that takes
        self.since = 0.0  # when the program was started, or was last answered
        self.asks: list[Ask] = []  # that wait for an answer
        self.turns: list[float] = []  # the rewards of single answers, at the end
        self.over_limit = False  # a request was refused: see `refuse`
        self.num_refused = 0

    def reset(self, seed: int) -> list[Message]:
        """Starts the program. Returns the messages of its first request, if that comes at once."""
        self.close()
        if seed in EVAL_SEEDS:  # in their order, each once
            row = self.test[(seed - EVAL_SEEDS.start) % len(self.test)]
        else:
            row = random.Random(seed).choice(self.train)
        self.asks, self.turns, self.over_limit, self.num_refused = [], [], False, 0
        self.since = time.monotonic()
        self.play = play = Play(endpoint.shared().open())
        work = self._run_function if self.function else self._run_command
        play.thread = threading.Thread(target=self._run, args=(work, play, row), daemon=True)
        play.thread.start()
        if not self._wait():
            self._outcome()  # raises its exception
            raise ValueError("the program ended without a request")
        messages = self.asks[0].messages if self.asks else [STILL]
        return [{"role": m["role"], "content": m["content"]} for m in messages]

    def step(self, response: str) -> Step:
        """Goes on until the next requests, or for a moment; one that still waits is answered by
        `response`. The step's message is the last one of the next request."""
        if self.asks:
            self.since = time.monotonic()
        for ask in self.asks:
            if not ask.done.is_set():
                ask.reply([_choice(response)], 0)
        if self._wait():
            last = self.asks[0].messages[-1] if self.asks else STILL
            message: Message = {"role": last["role"], "content": last["content"][:MAX_MESSAGE]}
            return Step(message, 0.0, False, {"correct": False, "agent_error": 0})
        return self._outcome()

    def refuse(self, ask: Ask, reason: str, code: str) -> None:
        """Refuses a request beyond a limit, which cuts the episode."""
        self.over_limit, self.num_refused = True, self.num_refused + 1
        ask.refuse(400, reason, code)

    def close(self) -> None:
        if self.play is not None:
            self.play.stop()
            self.play = None

    def _wait(self) -> bool:
        """Waits for requests, or for a moment; False once the program has ended.

        Raises TimeoutError.
        """
        assert self.play
        try:
            while True:
                found = self.play.session.receive(POLL)
                self.asks = found or []
                if self.num_refused > MAX_REFUSED:
                    raise TimeoutError(f"{MAX_REFUSED} requests got no answer")
                if found is None or found:
                    return found is not None
                if time.monotonic() - self.since > self.timeout:
                    raise TimeoutError(f"the program did nothing for {self.timeout:g} seconds")
                if not self.waits:
                    return True
        except BaseException:  # that of --env-timeout, too
            self.close()
            raise

    def _outcome(self) -> Step:
        """The last step. Raises the program's exception, unless the policy caused it."""
        assert self.play
        play, self.play = self.play, None
        play.session.close()
        if play.error is not None:
            names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(play.error).__mro__}
            names |= {kind.__name__ for kind in type(play.error).__mro__}
            if not self.over_limit and not names & self.zero_on:
                if isinstance(play.error, Exception | SystemExit):
                    raise play.error
                raise RuntimeError(type(play.error).__name__) from play.error  # not Ctrl-C's
            return self._last_step(0.0, {"correct": False, "agent_error": 1})
        info = dict(play.result) if isinstance(play.result, dict) else {"reward": play.result}
        reward, turns = _number(info.pop("reward", None)), info.pop("turns", [])
        self.turns = [_number(value) for value in turns]
        return self._last_step(reward, {"correct": reward >= 1, "agent_error": 0} | info)

    def _last_step(self, reward: float, info: dict[str, Any]) -> Step:
        return Step(None, reward, True, info, truncated=self.over_limit)

    def _run(self, work: Any, play: Play, row: Row) -> None:
        """The thread of a program."""
        try:
            play.running = True
            try:
                play.result = work(play, copy.deepcopy(row))
            except Ended:
                pass
            except BaseException as error:  # SystemExit too
                play.error = error
            play.session.end()
        finally:
            play.end()

    def _run_function(self, play: Play, row: Row) -> Any:
        key, url = play.session.key, play.session.endpoint.url
        names = _parameters(self.function)
        given: dict[str, Any] = {"task": row, "base_url": url, "api_key": key}
        first = next(iter(names), "task")  # the task, whatever its name
        if first not in (*given, "client"):
            given[first] = row
        with ExitStack() as stack:
            if "client" in names:  # with connections of its own: to interrupt it may break them
                openai = import_openai()
                http = openai.DefaultHttpxClient(verify=False)  # no certificates: quick to make
                made = openai.OpenAI(base_url=url, api_key=key, http_client=http)
                given["client"] = stack.enter_context(made)
            result = self.function(**{k: value for k, value in given.items() if k in names})
            return asyncio.run(_wait_for(result)) if inspect.isawaitable(result) else result

    def _run_command(self, play: Play, row: Row) -> Any:
        variables = {"OPENAI_BASE_URL": play.session.endpoint.url,
                     "OPENAI_API_KEY": play.session.key}  # fmt: skip
        with tempfile.TemporaryFile() as task, tempfile.TemporaryFile() as out, \
                tempfile.TemporaryFile() as err:  # fmt: skip
            task.write(json.dumps(row).encode() + b"\n")
            task.seek(0)
            try:
                play.process = process = subprocess.Popen(
                    self.arguments, stdin=task, stdout=out, stderr=err,
                    env=os.environ | variables, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise EnvFailure(f"can't start {self.arguments[0]!r}: {error.strerror}") from None
            if hasattr(os, "waitid"):  # its children end with it, so before its id is free
                with suppress(ChildProcessError):
                    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                remote._kill(process)
            code = process.wait()
            last = [line for line in _tail(out).splitlines() if line.strip()][-1:]
            if code:
                lines = [line.strip() for line in _tail(err).splitlines() if line.strip()]
                raise RuntimeError(f"{self.arguments[0]} ended with code {code}: "
                                   f"{' | '.join(lines[-3:])}"[:500])  # fmt: skip
        with suppress(ValueError, RecursionError):
            return json.loads(last[0] if last else "")
        raise ValueError(f"the last line of {self.arguments[0]} is no reward as JSON: {last}"[:300])


def import_openai() -> Any:
    """Raises UsageError if it is not installed."""
    try:
        import openai
    except ImportError:
        raise UsageError('openai is not installed: pip install -e ".[openai]"') from None
    return openai


async def _wait_for(result: Any) -> Any:
    """Awaits it. Python ends clients that earlier programs left open in this loop; each would say
    that its own loop is closed."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if str(context.get("exception")) != "Event loop is closed":
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(handle)
    return await result


def _parameters(function: Any) -> dict[str, Any]:
    return dict(inspect.signature(function).parameters)


def _number(value: Any) -> float:
    """Raises TypeError if it is none, and ValueError if it is too large, or NaN."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"the program returned {value!r:.60}, not a number or a dict with `reward`")
    if not abs(float(value)) <= MAX_REWARD:
        raise ValueError(f"the program returned {value!r:.60}, not within ±{MAX_REWARD:g}")
    return float(value)


def _tail(file: Any) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_OUTPUT))
    return file.read().decode(errors="replace")


def _choice(text: str) -> Choice:
    """A typed answer, with the calls in it."""
    calls = [(f"call{i}", call.name, json.dumps(call.arguments))
             for i, call in enumerate(read_calls(text)) if not call.error]  # fmt: skip
    content = text.partition("<tool_call>")[0].strip() if calls else text
    return Choice(content, "tool_calls" if calls else "stop", [], calls)
