"""Calls environments in daemon threads: slow ones many at the same time, each within a time limit.

One thread makes the calls of quick environments, in their order, and those of environments that
declare `thread_safe = False` or draw from the process-wide generators of `random` or NumPy. Each
call of a kind that has proved slow gets a thread.

A call that exceeds the limit is given up: its outcome is a TimeLimit. An endless loop in Python is
interrupted; what a library does goes on, so the environment must not be used any more.

Reward functions, and environments with `main_thread = True`, are called in the main thread, since
`signal.alarm` works nowhere else. SIGALRM ends such a call at the limit, unless the call sets an
alarm of its own. Windows has no SIGALRM, nor what would need the main thread for it.
"""

import asyncio
import ctypes
import math
import os
import queue
import random
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch

from environments.base import restored_torch

LEAVE = 1.0  # seconds that a thread stays whose call was given up
SLOW = 0.01  # seconds; a kind of call that takes longer is made in many threads,
PATIENCE = 0.1  # once its calls took this many seconds longer: one long call, or several

Kind = tuple[str, str]  # whose calls: the spec of an environment, and the method
Outcome = tuple[Any, BaseException | None]  # what a call returned or raised
T = TypeVar("T")


class TimeLimit(TimeoutError):
    """A call was given up: its environment may still be at work in its thread."""


class Overdue(BaseException):
    """Raised in a thread whose call was given up, when it runs Python code again."""


class Threads:
    """`count`: calls of slow environments at the same time; the others wait.
    `limit`: seconds per call, 0: no limit.
    `own`: the calls are picoRL's own: they are not interrupted, and stay in the folder."""

    def __init__(self, count: int, limit: float, own: bool = False):
        self.count, self.limit, self.own = count, limit or math.inf, own
        self.say: Callable[[str], None] = lambda line: None
        self.said = set[Any]()  # keys of lines
        self.slow = set[Kind]()
        self.longer = defaultdict[Kind, float](float)  # seconds beyond SLOW of the calls of a kind
        self.alone = set[str]()  # specs that one thread calls, however slow they are
        self.in_main = set[str]()  # specs that the main thread calls
        self.here: list[Any] = []  # calls that it is to make
        self.draws_freely = set[str]()  # specs whose draws from shared generators say nothing
        self.one, self.many = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()  # to be called
        self.done = deque[tuple[Any, Outcome, float]]()
        self.wake = threading.Event()  # there are outcomes; not set after each of many quick calls
        self.workers: list[_Worker] = []
        self.folder, self.dtype = os.getcwd(), torch.get_default_dtype()

    def start(self, key: Any, kind: Kind, function: Callable[[], Any]) -> None:
        """Makes a call once a thread is free; `ended` returns its outcome with the key."""
        if not self.workers:
            self.folder = os.getcwd()
        is_main = threading.current_thread() is threading.main_thread()
        if kind[0] in self.in_main and is_main and hasattr(signal, "SIGALRM"):
            self.here.append((key, function))
            return
        inbox = self.many if self.is_parallel(kind) else self.one
        inbox.put((key, kind, function, self.done))
        self._hire()

    def ended(self, wait: float) -> list[tuple[Any, Outcome, float]]:
        """Key, outcome and seconds of the calls that have ended, after at most `wait` seconds."""
        here, self.here = self.here, []
        made = [self._call_here(*call) for call in here]
        if wait and not made:
            self.wake.wait(wait)
            self.wake.clear()
        found = made + [self.done.popleft() for _ in range(len(self.done))]
        for key in [worker.give_up(self.limit) for worker in self.workers]:
            if key is not None:
                found.append((key, (None, self._time_limit()), self.limit))
                os.chdir(self.folder)
                torch.set_default_dtype(self.dtype)
        self._hire()
        return found

    def clear(self) -> list[Any]:
        """Forgets all calls, and gives up those under way; returns their keys."""
        for inbox in (self.one, self.many):
            with suppress(queue.Empty):
                while True:
                    inbox.get_nowait()
        self.here = []
        self.done = deque()  # an outcome that still comes goes to the old one
        keys = [worker.give_up(0.0) for worker in self.workers]
        return [key for key in keys if key is not None]

    def close(self) -> None:
        """Ends the threads."""
        self.clear()
        self.one.put(None)

    def say_once(self, line: str, key: Any = None) -> None:
        """Says a line, unless one with its `key` was said before; None: the line itself."""
        if (key or line) not in self.said:
            self.said.add(key or line)
            self.say(line)

    def is_parallel(self, kind: Kind) -> bool:
        """Whether calls of this kind are made at the same time."""
        return kind in self.slow and kind[0] not in self.alone

    def _call_here(self, key: Any, function: Callable[[], Any]) -> tuple[Any, Outcome, float]:
        """Makes a call in this thread, the main one."""

        def end(number: int, frame: Any) -> None:
            raise Overdue

        since, before = time.monotonic(), signal.signal(signal.SIGALRM, end)
        outcome: Outcome = None, self._time_limit()
        loop = asyncio._get_running_loop()  # of a notebook, where `asyncio.run` would raise
        try:
            asyncio._set_running_loop(None)
            with suppress(Overdue), restored_torch():
                torch.set_grad_enabled(True)
                signal.setitimer(signal.ITIMER_REAL, 0 if math.isinf(self.limit) else self.limit)
                outcome = _outcome(function)
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # a late Ctrl-C may have left it running
            asyncio._set_running_loop(loop)
            signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
        if isinstance(outcome[1], KeyboardInterrupt):
            raise outcome[1]
        if not _stayed_in(self.folder):
            outcome = None, RuntimeError("the environment changed the working directory")
        return key, outcome, time.monotonic() - since

    def _time_limit(self) -> TimeLimit:
        return TimeLimit(f"no answer in {self.limit:g} seconds (--env-timeout)")

    def _hire(self) -> None:
        """Starts the threads that are missing."""
        self.workers = [w for w in self.workers if w.is_alive() and not w.given_up]
        for inbox, most in ((self.one, 1), (self.many, self.count)):
            have = sum(worker.inbox is inbox for worker in self.workers)
            for _ in range(min(most - have, inbox.qsize())):
                self.workers.append(_Worker(self, inbox))


class _Worker(threading.Thread):
    """One thread of `Threads`. Those for slow calls end when nothing is left to call."""

    def __init__(self, threads: Threads, inbox: "queue.SimpleQueue[Any]"):
        super().__init__(daemon=True)
        self.threads, self.inbox, self.given_up = threads, inbox, False
        # key of the call that it makes, and since when; who takes it out answers for the call. No
        # lock guards it: an interrupted thread might never release it
        self.current: list[tuple[Any, float]] = []
        self.start()

    def run(self) -> None:
        threads, in_order, was_idle = self.threads, self.inbox is self.threads.one, True
        with suppress(Overdue, queue.Empty):
            while call := self.inbox.get(in_order):
                key, kind, function, done = call
                if in_order and threads.is_parallel(kind):  # found out since it was put there
                    threads.many.put(call)
                    threads.wake.set()  # `ended` starts a thread for it
                    continue
                if was_idle:
                    before = generators()
                self.current.append((key, time.monotonic()))
                outcome = _outcome(function)
                torch.set_default_dtype(threads.dtype)
                torch.set_grad_enabled(True)  # in this thread, for the calls that follow
                try:
                    _, since = self.current.pop()
                except IndexError:  # given up; the working directory is no longer its business
                    time.sleep(LEAVE)  # Overdue may be on its way, and must not meet another thread
                    return
                seconds = time.monotonic() - since
                if threads.own or _stayed_in(threads.folder):
                    pass
                elif threads.draws_freely:  # a program did, not this call
                    threads.say_once("an agent changed the working directory, which all share: the "
                                     "run changed it back")  # fmt: skip
                else:
                    error = RuntimeError("the environment changed the working directory")
                    outcome = None, error
                # quick calls make up for slow ones before them, not for those that follow
                threads.longer[kind] = max(0.0, threads.longer[kind] + seconds - SLOW)
                is_new = threads.count > 1 and kind not in threads.slow
                if is_new and threads.longer[kind] > PATIENCE:
                    threads.slow.add(kind)
                    self._check_generators(kind[0], before)
                done.append((key, outcome, seconds))
                was_idle = self.inbox.empty()
                if was_idle or not in_order:
                    threads.wake.set()

    def _check_generators(self, spec: str, before: tuple[Any, ...]) -> None:
        """One thread makes the calls of an environment that draws from shared generators."""
        known = self.threads.alone | self.threads.draws_freely
        if generators() != before and spec not in known:
            self.threads.alone.add(spec)
            self.threads.say(f"{spec}: one call at a time, because it draws from the "
                             "process-wide generators of random or numpy")  # fmt: skip

    def give_up(self, limit: float) -> Any:
        """Leaves the thread to a call that takes over `limit` seconds. Returns its key, or None.

        The call is interrupted when it next runs Python code.
        """
        for call in [*self.current]:
            key, since = call
            if time.monotonic() - since < limit:
                return None
            try:
                self.current.remove(call)
            except ValueError:  # it has just ended
                return None
            self.given_up = True
            if not self.threads.own:
                interrupt(self.ident or 0)
            return key
        return None


def in_thread(function: Callable[[], T], name: str | None = None) -> Future[T]:
    """Makes one call in a daemon thread of its own, for which the end of the process won't wait."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def interrupt(ident: int) -> None:
    """Raises Overdue in the thread with this ident when it next runs Python code."""
    error = ctypes.py_object(Overdue)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), error)


def generators() -> tuple[Any, ...]:
    """The states of the process-wide generators."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]


def _outcome(function: Callable[[], Any]) -> Outcome:
    """Makes one call."""
    try:
        return function(), None
    except Overdue:
        raise
    except BaseException as error:  # SystemExit too: an environment must not end the run
        return None, error


def _stayed_in(folder: str) -> bool:
    """Whether the working directory is still `folder`, which the run's paths need; restores it."""
    with suppress(OSError):  # the new one may be deleted already
        if os.getcwd() == folder:
            return True
    os.chdir(folder)
    return False
