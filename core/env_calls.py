"""Calls environments in daemon threads: slow ones many at the same time, each within a time limit.

Results do not depend on the timing of threads: every episode has an instance of its own, and
outcomes keep the order of the calls. One thread makes all calls one after the other as long as they
are fast, and always those of environments that declare `thread_safe = False` or draw from the
process-wide generators of `random` or NumPy. Slow ones have a thread for each call.

A call that exceeds the limit is given up. An endless loop in Python is interrupted; what a library
does goes on, so the environment of such a call must not be used or closed any more.

`call_all` waits for all calls of a round. `EnvThreads` hands over each outcome as it comes, for
episodes that do not wait for each other.
"""

import ctypes
import os
import queue
import random
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

POLL = 0.05  # seconds; Windows lets Ctrl-C wait for the end of a wait
SLOW = 0.01  # seconds; an environment with such a call is called in threads from then on
LATE = 0.03  # seconds; if half of the latest steps take longer, episodes do not wait for each other
ENOUGH = 8  # calls to know this from: a busy machine delays a few calls of a fast environment

Call = tuple[str, Callable[[], Any]]  # the spec of an environment, and what to call
Outcome = tuple[Any, BaseException | None]  # what the call returned or raised


class TimeLimit(TimeoutError):
    """A call was given up: its environment may still be at work in its thread."""


class _Overdue(BaseException):
    """Raised in a thread whose call was given up, when it runs Python code again."""


class EnvCalls:
    """`num_threads`: calls at the same time; `timeout`: seconds per call, 0: no limit."""

    def __init__(self, num_threads: int, timeout: float) -> None:
        self.num_threads, self.timeout = num_threads, timeout
        self.one: _OneThread | None = None  # makes the calls that are fast
        self.say: Callable[[str], None] = lambda line: None
        self.alone: set[str] = set()  # specs that are never called in threads
        self.slow: set[tuple[str, str]] = set()  # kinds of calls and specs: called in threads
        self.seconds: dict[str, deque[float]] = defaultdict(partial(deque, maxlen=64))  # of steps

    def call_all(self, kind: str, calls: list[Call]) -> list[Outcome]:
        """Makes all calls of one kind, such as "reset"; the outcomes are in their order.

        An exception is an outcome.
        """
        if kind == "step":
            calls = [(spec, partial(self._timed, spec, call)) for spec, call in calls]
        folder, before = os.getcwd(), generators()
        outcomes = self._in_order([
            partial(self._unless_slow, kind, spec, partial(_outcome, folder, call), before)
            for spec, call in calls
        ], folder)  # fmt: skip
        together = [i for i, outcome in enumerate(outcomes) if outcome is None]
        before = generators()
        found = self._in_threads(folder, [calls[i][1] for i in together])
        self.check_generators({calls[i][0] for i in together}, before)
        late = dict(zip(together, found, strict=True))
        return [outcome or late[i] for i, outcome in enumerate(outcomes)]

    def close(self) -> None:
        """Ends the thread."""
        if self.one:
            self.one.given_up = True
            self.one.todo.put([])

    def _unless_slow(
        self, kind: str, spec: str, make: Callable[[], Outcome], before: tuple[Any, ...]
    ) -> Outcome | None:
        """The outcome of a call; None if an earlier call has shown that these are slow."""
        if (kind, spec) in self.slow and spec not in self.alone:
            return None
        started = time.perf_counter()
        outcome = make()
        if self.num_threads > 1 and time.perf_counter() - started > SLOW:
            self.slow.add((kind, spec))
            self.check_generators({spec}, before)
        return outcome

    def _in_order(
        self, makes: list[Callable[[], Outcome | None]], folder: str
    ) -> list[Outcome | None]:
        """The outcomes of calls that one thread makes, another one once it is given up."""
        outcomes: list[Outcome | None] = []
        while len(outcomes) < len(makes):
            if self.one is None or self.one.given_up:
                self.one = _OneThread(self.timeout)
            outcomes += self.one.make_all(makes[len(outcomes) :])
            if self.one.given_up:
                os.chdir(folder)
        return outcomes

    def _in_threads(self, folder: str, calls: list[Callable[[], Any]]) -> list[Outcome]:
        """Makes each call in a thread; the outcomes are in their order."""
        threads = EnvThreads(self.num_threads, self.timeout, folder)
        for i, call in enumerate(calls):
            threads.start(i, call)
        outcomes: dict[Any, Outcome] = {}
        while len(outcomes) < len(calls):
            outcomes |= threads.ended(POLL)
        return [outcomes[i] for i in range(len(calls))]

    def _timed(self, spec: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds[spec].append(time.perf_counter() - started)

    def answers_late(self, spec: str) -> bool:
        """Whether its steps are made in threads, and at least half of the latest ones took long."""
        if ("step", spec) not in self.slow or spec in self.alone:
            return False
        seconds = [*self.seconds[spec]]
        return len(seconds) >= ENOUGH and statistics.median(seconds) > LATE

    def in_threads(self) -> "EnvThreads":
        """For calls whose outcomes are collected as they come."""
        return EnvThreads(self.num_threads, self.timeout, os.getcwd())

    def check_generators(self, specs: set[str], before: tuple[Any, ...]) -> None:
        """Calls `specs` alone from now on if the process-wide generators have changed."""
        if specs - self.alone and generators() != before:
            self.alone |= specs
            self.say(f"{' '.join(sorted(specs))}: one call at a time, because it draws from the "
                     "process-wide generators of random or numpy")  # fmt: skip


class EnvThreads:
    """Makes each call in a thread; gives up one that exceeds the limit, and interrupts it.

    `num_threads`: calls at the same time; the others wait. `timeout`: seconds per call, 0: no
    limit. `folder`: the working directory.
    """

    def __init__(self, num_threads: int, timeout: float, folder: str) -> None:
        self.num_threads, self.timeout, self.folder = num_threads, timeout, folder
        self.todo = deque[tuple[Any, Callable[[], Any]]]()
        # in the order of their deadlines
        self.running: dict[Any, tuple[threading.Thread, float]] = {}
        self.done = queue.SimpleQueue[tuple[Any, Outcome]]()

    def start(self, key: Any, call: Callable[[], Any]) -> None:
        """Makes a call; `ended` returns its outcome by its key. Keys are never used twice."""
        self.todo.append((key, call))
        self._fill()

    def ended(self, wait: float) -> dict[Any, Outcome]:
        """The outcomes that have come since, after at most `wait` seconds."""
        outcomes: dict[Any, Outcome] = {}
        latest = time.monotonic() + wait
        while self.running:
            first, (thread, deadline) = next(iter(self.running.items()))
            until = min(deadline, latest) if self.timeout else latest
            left = 0.0 if outcomes else max(0.0, until - time.monotonic())
            try:
                key, outcome = self.done.get(timeout=left)
            except queue.Empty:
                if outcomes or not self.timeout or time.monotonic() < deadline:
                    break
                key, outcome = first, _give_up(thread, self.timeout)
                os.chdir(self.folder)
            if self.running.pop(key, None):  # else it was too late
                outcomes[key] = outcome
            self._fill()
        return outcomes

    def _fill(self) -> None:
        while self.todo and len(self.running) < self.num_threads:
            key, call = self.todo.popleft()
            thread = threading.Thread(target=self._work, args=(key, call), daemon=True)
            self.running[key] = thread, time.monotonic() + self.timeout
            thread.start()

    def _work(self, key: Any, call: Callable[[], Any]) -> None:
        with suppress(_Overdue):
            self.done.put((key, _outcome(self.folder, call)))


class _OneThread(threading.Thread):
    """A daemon thread that makes calls one after the other, each within `timeout` seconds."""

    def __init__(self, timeout: float) -> None:
        super().__init__(daemon=True)
        self.timeout, self.given_up = timeout, False
        self.lock = threading.Lock()  # of what follows
        self.outcomes: list[Outcome | None] = []
        self.since = 0.0  # when the latest call began
        self.todo, self.done = queue.SimpleQueue[list[Callable[[], Any]]](), threading.Event()
        self.start()

    def make_all(self, makes: list[Callable[[], Outcome | None]]) -> list[Outcome | None]:
        """The outcomes of all, or of those up to a call that exceeds the limit."""
        self.outcomes, self.since = [], time.monotonic()
        self.done.clear()
        self.todo.put(makes)
        try:
            while not self.done.wait(POLL):
                with self.lock:
                    late = self.timeout and time.monotonic() - self.since > self.timeout
                    if late and len(self.outcomes) < len(makes):
                        self.given_up = True
                        return [*self.outcomes, _give_up(self, self.timeout)]
        except BaseException:  # Ctrl-C
            self.given_up = True
            raise
        return self.outcomes

    def run(self) -> None:
        with suppress(_Overdue):
            while not self.given_up:
                for make in self.todo.get():
                    with self.lock:
                        if self.given_up:
                            return
                        self.since = time.monotonic()
                    outcome = make()
                    with self.lock:
                        if self.given_up:
                            return
                        self.outcomes.append(outcome)
                self.done.set()


def _give_up(thread: threading.Thread, timeout: float) -> Outcome:
    """Interrupts a call as soon as it runs Python code again. Returns its outcome."""
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Overdue))
    return None, TimeLimit(f"no answer in {timeout:g} seconds (--env-timeout)")


def _outcome(folder: str, call: Callable[[], Any]) -> Outcome:
    """Makes one call; restores the working directory `folder`, which the run's paths need."""
    try:
        outcome: Outcome = call(), None
    except _Overdue:
        raise
    except BaseException as error:  # SystemExit too: an environment must not end the run
        outcome = None, error
    now = ""
    with suppress(OSError):  # the new one may be deleted already
        now = os.getcwd()
    if now == folder:
        return outcome
    os.chdir(folder)
    return None, RuntimeError("the environment changed the working directory")


def generators() -> tuple[Any, ...]:
    """The states of the process-wide generators."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]
