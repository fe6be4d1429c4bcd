"""An agent program, unchanged, as an environment: it asks the policy for answers over HTTP.

    --env "agent:run=my_agent.py:run,data=tasks.jsonl"              a function, or async function
    --env "agent:command=node agent.mjs,data=tasks.jsonl"           any program

    def run(task, client, base_url, api_key):        # those of the four that it wants
        answer = client.chat.completions.create(
            model="picorl", messages=[{"role": "user", "content": task["question"]}])
        return float(task["answer"] in answer.choices[0].message.content)

All requests with one API key are one episode: the program has one for each, and many run at the
same time, each in a thread; those of an async function in one event loop. endpoint.py has the
addresses. agents/README.md says what a program gets and returns, which failures are the policy's
doing, and which rows are for evaluation; `info["row"]` is FILE:LINE of the row.
"""

import builtins
import copy
import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from environments.adapters import endpoint
from environments.adapters.endpoint import Ask, Choice, Session
from environments.base import (
    MAX_MESSAGE,
    MAX_REWARD,
    EndRun,
    Env,
    EnvFailure,
    Message,
    RunInfo,
    Step,
    UsageError,
    check_range,
    checked_step,
)
from environments.plumbing import event_loop, processes
from environments.plumbing.dataset import Row
from environments.plumbing.installed import import_library
from environments.plumbing.options import split_words
from environments.plumbing.registry import import_attribute, place_of
from environments.plumbing.tools import read_calls
from environments.rewarded import begin_run, draw, load

POLL = 0.5  # seconds between two looks of a call at its program
SILENCE = 10.0  # seconds without a word of any program, until those that ask do not wait on
INTERVAL = 0.5  # seconds between interruptions of a program that must end
SWITCH = 5e-4  # seconds until another thread's turn: a program may compute without an end
GRACE = 5.0  # seconds in which the threads that asked for a program end after it
MAX_REFUSED = 100  # requests of an episode that get no answer; then the program is ended
EX_TEMPFAIL = 75  # of sysexits.h: a command ends with it where its infrastructure fails
# What connection errors derive from: requests and Python, httpx, aiohttp, openai and litellm
CONNECTION = {"ConnectionError", "TransportError", "ClientConnectionError", "APIConnectionError"}

LOOKS = 20  # of POLL seconds, after which a program that keeps the event loop is named
KEPT = (
    "the copies of an async agent share an event loop, and one keeps it for long: the others wait."
    " Use await for what takes long, as with openai.AsyncOpenAI, or write def in place of async def"
)
SHARED = (
    "the copies of a program share one process: its global variables, os.environ, its folder. A"
    " client of the module, the default client of a library and OPENAI_API_KEY are those of all"
    " copies. Three ways out: make the client in the function, with the base_url and api_key that"
    " this gets, and ask there, in its own tasks and threads, or in a pool; give a worker of the"
    " module the context, too: contextvars.copy_context().run(ask, ..); or use command=, which"
    " shares nothing"
)
BLOCKED = (
    f"programs that asked waited {SILENCE:g} s for one that did not ask or end, as if it waited for"
    f" them: from now on they wait {POLL:g} s for each other, so that a run which is repeated may"
    " differ in the last digits. With alone=true they never wait"
)
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
    task: Any = None  # that of an async function: what event_loop.start returned
    thread: threading.Thread = field(init=False)
    running: bool = False  # else nothing must be raised in the thread: another may get its id
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `running`

    def stop(self) -> None:
        """Ends the program, as far as possible: a thread is interrupted in Python code only."""
        self.session.close()
        if self.process is not None:
            processes.kill(self.process)
        elif self.thread.is_alive():
            threading.Thread(target=self._interrupt, daemon=True).start()

    def _interrupt(self) -> None:
        """Raises Ended in the thread until it ends: a program may catch it. Most programs end
        before the first time, by the refusal of their request. An async one is cancelled."""
        while self.thread.is_alive():
            self.thread.join(INTERVAL)
            if self.task:
                future, loop = self.task
                event_loop.stop(future, loop, self.is_its)
            with self.lock:
                if self.running and not self.task:
                    ident, error = ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(Ended)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)

    def is_its(self, context: Context) -> bool:
        """Whether a context is that of the program."""
        return context.get(endpoint.PROGRAM) is self.session

    def waits_for_another(self) -> bool:
        """Whether another program that has not ended keeps the event loop at this moment."""
        context = event_loop.at_work(self.task[1]) if self.task else None
        session = context.get(endpoint.PROGRAM) if context else None
        return session not in (None, self.session) and session.is_open

    def end(self) -> None:
        """The last thing that the thread does."""
        while self.running:
            try:
                with self.lock:
                    self.running = False
            except Ended:
                pass


class Program(Env):
    """`run`: FILE.py:function, or `command`; `data`: FILE.jsonl, a data set of the hub or a folder
    with one, with its `config` and `split`; `zero_on`: exceptions that are the policy's doing, as
    module.Name; `error_reward`: what they earn at most; `timeout`: seconds between two requests,
    and until the program ends after its last one; `host`: the address of this machine at which
    programs in containers reach the endpoint; `alone`: as `Env.alone`, for programs that take
    different times or wait for each other."""

    is_program = waits = True  # core/extras/programs.py answers its requests
    heard = 0.0  # when a program of this process last asked or ended, or was answered
    patience = SILENCE
    meanings: Mapping[str, str] = {"agent_error": "episodes that the policy's answers broke"}

    def __init__(
        self, run: str = "", command: str = "", data: str = "", zero_on: tuple[str, ...] = (),
        error_reward: float = 0.0, timeout: float = 300.0, config: str = "", split: str = "train",
        host: str = endpoint.HOST, alone: bool = False,
    ):  # fmt: skip
        if bool(run) == bool(command):
            raise UsageError("name either run=FILE.py:function or command=PROGRAM")
        if not data:
            raise UsageError("set data=FILE.jsonl: a task in each line")
        check_range("timeout", timeout, 0.001, 1_000_000)
        self.function: Any = None
        if run:
            self.function = import_attribute(run)
            sys.setswitchinterval(min(SWITCH, sys.getswitchinterval()))
        if run and not callable(self.function):
            raise UsageError(f"run={run}: it is no function")
        if run and "client" in _parameters(self.function):
            import_library("openai", "openai")
        self.arguments = split_words(command)
        self.train, self.test, _ = load(data, "", config, split)
        self.zero_on = tuple(map(_exception, zero_on))
        self.error_reward, self.timeout, self.host = _number(error_reward), timeout, host
        self.alone = alone
        try:
            if socket.gethostbyname(host) == "0.0.0.0":  # all: no program can ask there
                raise OSError(0, "that is no single address")
            endpoint.shared(host)
        except OSError as error:
            raise UsageError(f"host={host}: {error.strerror}; name an IPv4 address of this "
                             "machine") from None  # fmt: skip
        self.error: BaseException | None = None  # why the episode earned `error_reward`
        self.num_looks = 0  # one after the other, that found the event loop with another program
        self.remark = ""  # to be said once
        self.play: Play | None = None  # None: it has ended
        self.since = 0.0  # when the program was started, or was last answered
        self.asks: list[Ask] = []  # that wait for an answer
        self.turns: list[float] = []  # the rewards of single answers, at the end
        self.over_limit = False  # a request was refused: see `refuse`

    @classmethod
    def begin_run(cls, info: RunInfo) -> None:
        begin_run(info)

    def reset(self, seed: int) -> list[Message]:
        """Starts the program. Returns the messages of its first request, if that comes at once."""
        self.close()
        row = draw(seed, self.train, self.test)
        self.asks, self.turns, self.over_limit, self.error = [], [], False, None
        self.since, self.place = time.monotonic(), row.place
        self.play = play = Play(endpoint.shared(self.host).open())
        work = self._call_function if self.function else self._execute_command
        play.thread = threading.Thread(target=self._play, args=(work, play, {**row}), daemon=True)
        play.thread.start()
        if not self._wait(play):
            self._outcome(play)  # raises: nothing was answered
        messages = self.asks[0].messages if self.asks else [STILL]
        return [{"role": m["role"], "content": m["content"]} for m in messages]

    def step(self, response: str) -> Step:
        """Goes on until the next requests, or for a moment; one that still waits is answered by
        `response`. The step's message is the last one of the next request."""
        if self.asks:
            self.since = time.monotonic()
        for ask in self.asks:
            if not ask.outcome.done():
                ask.reply([_choice(response)], 0)
        play = self.play
        assert play
        if self._wait(play):
            last = self.asks[0].messages[-1] if self.asks else STILL
            message: Message = {"role": last["role"], "content": last["content"][:MAX_MESSAGE]}
            return Step(message, 0.0, False, {"correct": False, "agent_error": 0})
        return self._outcome(play)

    def refuse(self, ask: Ask, reason: str, code: str) -> None:
        """Refuses a request beyond a limit, which cuts the episode."""
        self.over_limit = True
        ask.refuse(400, reason, code)

    def close(self) -> None:
        if self.play is not None:
            self.play.stop()
            self.play = None

    def _wait(self, play: Play) -> bool:
        """Waits for requests; False once the program has ended. Where others wait for their answers
        and no program says anything, this one is passed over: it may wait for one of them.

        Raises TimeoutError.
        """
        session, program = play.session, Program  # what all copies share
        program.heard = time.monotonic()
        try:
            while True:
                found = session.receive(min(POLL, program.patience))
                self.asks = found or []
                if session.mixed_up:
                    raise EndRun(f"{session.mixed_up}: {SHARED}")
                if len(refusals := session.refusals) > MAX_REFUSED:
                    raise TimeoutError(f"{MAX_REFUSED} requests got no answer: {refusals[-1]}")
                now = time.monotonic()
                if found is None or found:
                    program.heard = now
                    return found is not None
                if play.waits_for_another():
                    self.since = now
                    self.num_looks += 1
                    if self.num_looks >= LOOKS:
                        self.remark = KEPT
                else:
                    self.num_looks = 0
                if now - self.since > self.timeout:
                    raise TimeoutError(f"the program did nothing for {self.timeout:g} seconds")
                is_silent = now - program.heard >= program.patience
                if is_silent and not self.alone and session.endpoint.others_wait(session):
                    if program.patience > POLL:
                        program.patience, self.remark = POLL, BLOCKED
                    return True
        except BaseException:  # that of --env-timeout, too
            self.close()
            raise

    def _outcome(self, play: Play) -> Step:
        """The last step. Raises what went wrong, unless the policy caused it."""
        until = time.monotonic() + GRACE
        while goes_on := play.session.has_company and play.session.has_workers():
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        play.session.close()
        if self.play is play:
            self.play = None
        error = play.error
        if goes_on:  # an error may leave what the program would have waited for
            kind = EndRun if error is None else EnvFailure
            raise kind("a thread or task that an agent started was answered, and goes on after the "
                       f"agent's end, as if it worked for all: {SHARED}")  # fmt: skip
        if self.function and not play.session.has_asked and (not error or _status_failed(error)):
            raise EndRun("an agent ended and had not asked with its own API key: it sent no request"
                         f" to its base_url, or with another key; {SHARED}")  # fmt: skip
        if error is None and not play.session.has_answer:
            why = "the client hung up" if play.session.has_asked else "it sent none"
            why = [why, *play.session.refusals][-1]
            error = ValueError(f"no request of the program was answered: {why}")
        try:
            if error is None:
                return self._scored(play.result)
        except Exception as wrong:  # the result is no reward
            error = wrong
        if (failure := self._failure(error)) is not None:
            raise failure from error
        if not play.session.has_answer:
            if isinstance(error, Exception | SystemExit):
                raise error
            raise RuntimeError(type(error).__name__) from error  # not Ctrl-C's
        self.error, self.turns = error, []
        return self._last_step(self.error_reward, {"correct": False, "agent_error": 1})

    def _failure(self, error: BaseException) -> EnvFailure | None:
        """What an exception says of the infrastructure that failed; None: it is not the cause."""
        causes = _causes(error)
        for cause in causes:
            if isinstance(cause, EnvFailure):
                return cause
        if self.over_limit or any(isinstance(cause, self.zero_on) for cause in causes):
            return None
        for cause in causes:
            kinds = {kind.__name__ for kind in type(cause).__mro__}
            if isinstance(cause, TimeoutError) or kinds & CONNECTION or _status_failed(cause):
                name = f"{type(cause).__module__}.{type(cause).__qualname__}"
                name = name.removeprefix("builtins.")
                where = place_of(error)
                return EnvFailure(f"{type(cause).__name__}: {cause}"[:300] + f"{where}; if the "
                                  f"policy's answers cause it: zero_on={name}")  # fmt: skip
        return None

    def _scored(self, result: Any) -> Step:
        """The last step of a program that ended well. Raises an exception if it returned none."""
        info = dict(result) if isinstance(result, dict) else {"reward": result}
        reward, turns = _number(info.pop("reward", None)), info.pop("turns", [])
        self.turns = [_number(value) for value in turns]
        info = {"correct": reward >= 1, "agent_error": 0} | info
        return checked_step(self._last_step(reward, info), "the program", is_single=True)

    def _last_step(self, reward: float, info: dict[str, Any]) -> Step:
        info = {"row": self.place} | info
        return Step(None, reward, True, info, truncated=self.over_limit)

    def _play(self, work: Any, play: Play, row: Row) -> None:
        """The thread of a program."""
        try:
            play.running = True
            endpoint.PROGRAM.set(play.session)
            try:
                play.result = work(play, copy.deepcopy(row))
            except Ended:
                pass
            except BaseException as error:  # SystemExit too
                play.error = error
            play.session.end()
        finally:
            play.end()

    def _call_function(self, play: Play, row: Row) -> Any:
        key, url = play.session.key, play.session.endpoint.url
        names = _parameters(self.function)
        given: dict[str, Any] = {"task": row, "base_url": url, "api_key": key}
        first = next(iter(names), "task")  # the task, whatever its name
        if first not in (*given, "client"):
            given[first] = row
        with ExitStack() as stack:
            if "client" in names:  # with connections of its own: to interrupt it may break them
                openai = import_library("openai", "openai")
                http = openai.DefaultHttpxClient(  # no certificates: quick to make
                    verify=False, trust_env=False
                )
                made = openai.OpenAI(base_url=url, api_key=key, http_client=http)
                given["client"] = stack.enter_context(made)
            result = self.function(**{k: value for k, value in given.items() if k in names})
            if not inspect.isawaitable(result):
                return result
            play.task = event_loop.start(endpoint.watched(result))
            return play.task[0].result()

    def _execute_command(self, play: Play, row: Row) -> Any:
        variables = {"OPENAI_BASE_URL": play.session.endpoint.url,
                     "OPENAI_API_KEY": play.session.key}  # fmt: skip
        with tempfile.TemporaryFile() as task, tempfile.TemporaryFile() as out, \
                tempfile.TemporaryFile() as err:  # fmt: skip
            task.write(json.dumps(row).encode() + b"\n")
            task.seek(0)
            play.process = processes.start(
                self.arguments, stdin=task, stdout=out, stderr=err, env=os.environ | variables
            )
            code = processes.wait(play.process)
            last = processes.last_lines(out)[-1:]
            if code:
                kind = EnvFailure if code == EX_TEMPFAIL else RuntimeError
                said = " | ".join(processes.last_lines(err)[-3:])
                raise kind(f"{self.arguments[0]} ended with code {code}: {said}"[:500])
        with suppress(ValueError, RecursionError):
            return json.loads(last[0] if last else "")
        raise ValueError(f"the last line of {self.arguments[0]} is no reward as JSON: {last}"[:300])


def _parameters(function: Any) -> dict[str, Any]:
    return dict(inspect.signature(function).parameters)


def _exception(name: str) -> type[BaseException]:
    """The exception `module.Name`, or Python's `Name`. Raises UsageError if there is none."""
    module, _, bare = name.rpartition(".")
    kind = import_attribute(f"{module}:{bare}") if module else getattr(builtins, bare, None)
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        raise UsageError(f"zero_on={name}: that is no exception; write where it is, such as "
                         "zero_on=httpx.ConnectError")  # fmt: skip
    return kind


def _causes(error: BaseException) -> list[BaseException]:
    """The exception, those of its group, and those that it was raised from. One that was handled
    before it excuses nothing: `__context__` is set without a word of the program."""
    found = [error]
    for one in found:  # which grows
        group = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        more = [one.__cause__, *group]
        found += [cause for cause in more if cause is not None and cause not in found]
    return found


def _status_failed(error: BaseException) -> bool:
    """Whether an exception has the status of a server that failed, or refuses the program."""
    for place in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            status = getattr(place, name, None)
            if isinstance(status, int) and (status in (401, 403, 429) or 500 <= status < 600):
                return True
    return False


def _number(value: Any) -> float:
    """Raises TypeError if it is none, and ValueError if it is too large, or NaN."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"the program returned {value!r:.60}, not a number or a dict with `reward`")
    if not abs(float(value)) <= MAX_REWARD:
        raise ValueError(f"the program returned {value!r:.60}, not within ±{MAX_REWARD:g}")
    return float(value)


def _choice(text: str) -> Choice:
    """A typed answer, with the calls in it."""
    calls = [(f"call{i}", call.name, json.dumps(call.arguments))
             for i, call in enumerate(read_calls(text)) if not call.error]  # fmt: skip
    content = text.partition("<tool_call>")[0].strip() if calls else text
    return Choice(content, "tool_calls" if calls else "stop", [], calls)
