"""Calls of code that may be slow, hang or raise: in this thread, or side by side in daemon threads.

`call_here` makes one call in the main thread, where `signal.alarm` works and an exception has its
whole traceback. `Calls` makes many, each in a thread, such as those that wait for a server.

A call that exceeds its time limit is given up: its outcome is a TimeLimit. Python code is
interrupted; what a library does in a thread goes on, so what it works with must not be used again.
"""

import asyncio
import ctypes
import math
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, TypeVar

LOOK = 1.0  # seconds between two looks at a call in the main thread
PATIENCE = 5  # interruptions that a call may catch
LEAVE = 1.0  # seconds that a thread stays whose call was given up

Outcome = tuple[Any, BaseException | None]  # what a call returned or raised
Look = Callable[[float, FrameType | None], None]  # at a call: seconds so far, and where it is
T = TypeVar("T")


class TimeLimit(TimeoutError):
    """A call was given up. One in a thread may still be at work."""


class Overdue(BaseException):
    """Raised in a call that was given up, when it runs Python code again."""


def can_call_here() -> bool:
    """Whether `call_here` works: signals reach the main thread only, and Windows has no SIGALRM."""
    return hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()


def call_here(function: Callable[[], Any], limit: float, look: Look) -> Outcome:
    """Makes a call in this thread, the main one, within `limit` seconds; inf: no limit.

    Calls `look` once a second while it lasts; an exception of `look` ends the call and is raised
    here. If the call sets an alarm of its own, processor time takes the place of seconds: an
    endless loop still ends.
    """
    since, is_overdue, ends = time.monotonic(), False, list[BaseException]()
    at_work, is_looking, caught = True, False, 0
    where: TracebackType | None = None  # at which the call was when it was interrupted

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal is_overdue, caught, where, is_looking
        if not at_work:
            return
        if is_looking:  # the other timer, in the middle of a look
            signal.setitimer(timers[number], LOOK)
            return
        seconds = time.monotonic() - since
        is_overdue = seconds >= limit
        is_looking = True
        try:
            look(seconds, frame)
        except BaseException as error:
            ends.append(error)
        finally:
            is_looking = False
        if not (is_overdue or ends):
            # less than a microsecond would be 0, which stops the timer
            signal.setitimer(timers[number], max(1e-3, min(LOOK, limit - seconds)))
            return
        caught += 1  # unless this one ends the call
        where = where or traceback_of(frame)
        signal.setitimer(timers[number], LOOK)
        if caught > PATIENCE:
            _raise_at_next_line(frame)
        raise Overdue

    timers: dict[int, int] = {
        signal.SIGALRM: signal.ITIMER_REAL,
        signal.SIGVTALRM: signal.ITIMER_VIRTUAL,
    }
    before = {number: signal.signal(number, ring) for number in timers}
    loop = asyncio._get_running_loop()  # of a notebook, where `asyncio.run` would raise
    trace = sys.gettrace()  # of a debugger
    outcome: Outcome = None, None
    try:
        try:
            asyncio._set_running_loop(None)
            for timer in timers.values():
                signal.setitimer(timer, min(LOOK, limit))
            outcome = _outcome(function)
        finally:
            at_work = False
    except Overdue:
        is_overdue = True
    finally:
        for number, timer in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number] or signal.SIG_DFL)
        asyncio._set_running_loop(loop)
        if caught > PATIENCE:
            sys.settrace(trace)
    if ends:
        raise ends[0]
    if is_overdue:
        error = outcome[1]  # None if the other timer rang while it was caught
        return None, _time_limit(limit, error.__traceback__ if error else where)
    return outcome


@dataclass(eq=False)
class Call:
    """A call that a thread makes or will make."""

    key: Any
    function: Callable[[], Any]
    finish: Callable[[Outcome], Outcome]
    is_limited: bool
    ended: "queue.SimpleQueue[tuple[Any, Outcome]]"  # where its outcome is put
    since: float = 0.0  # when it began, and in which thread
    ident: int = 0


class Calls:
    """At most `count` calls at the same time, each in a daemon thread; the others wait.

    `limit`: seconds of a call; 0: no limit. `interrupts`: one that is given up ends when it next
    runs Python code.
    """

    def __init__(self, count: int, limit: float, interrupts: bool = False):
        self.count, self.limit, self.interrupts = count, limit or math.inf, interrupts
        self.to_make = queue.SimpleQueue[Call | None]()
        self.made = queue.SimpleQueue[tuple[Any, Outcome]]()
        self.at_work = dict[Call, bool]()  # who takes a call out answers for it; needs no lock
        self.num_open = self.num_threads = 0  # calls without an outcome; threads that make calls

    def start(
        self,
        key: Any,
        function: Callable[[], Any],
        finish: Callable[[Outcome], Outcome] = lambda outcome: outcome,
        limited: bool = True,
    ) -> None:
        """Makes a call once a thread is free; `ended` returns its outcome with the key, as `finish`
        changes it in the thread. What was given up is not finished."""
        self.to_make.put(Call(key, function, finish, limited, self.made))
        self.num_open += 1
        if self.num_threads < min(self.count, self.num_open):
            self._hire()

    def ended(self, wait: float) -> list[tuple[Any, Outcome]]:
        """Key and outcome of the calls that have ended, after at most `wait` seconds."""
        found = list[tuple[Any, Outcome]]()
        with suppress(queue.Empty):
            found.append(self.made.get(timeout=wait) if wait else self.made.get_nowait())
            while True:
                found.append(self.made.get_nowait())
        due = time.monotonic() - self.limit
        for call in [c for c in self.at_work.copy() if c.is_limited and c.since < due]:
            error = _time_limit(self.limit, traceback_of(sys._current_frames().get(call.ident)))
            if self._give_up(call):
                found.append((call.key, (None, error)))
                self._hire()
        self.num_open -= len(found)
        return found

    def clear(self) -> list[Any]:
        """Forgets all calls, and gives up those under way; returns their keys."""
        with suppress(queue.Empty):
            while True:
                self.to_make.get_nowait()
        self.made = queue.SimpleQueue()  # an outcome that still comes goes to the old one
        self.num_open = 0
        return [call.key for call in self.at_work.copy() if self._give_up(call)]

    def close(self) -> None:
        """Ends the threads."""
        self.clear()
        for _ in range(self.num_threads):
            self.to_make.put(None)
        self.num_threads = 0

    def _hire(self) -> None:
        self.num_threads += 1
        threading.Thread(target=self._make, daemon=True).start()

    def _make(self) -> None:
        """What a thread does: one call after the other, until one was given up."""
        with suppress(Overdue):
            while call := self.to_make.get():
                call.since, call.ident = time.monotonic(), threading.get_ident()
                self.at_work[call] = True
                outcome = _outcome(call.function)
                if not self.at_work.pop(call, False):  # given up
                    time.sleep(LEAVE)  # Overdue may be on its way
                    return
                try:
                    outcome = call.finish(outcome)
                except Exception as error:  # such as a folder that is gone
                    outcome = None, error
                call.ended.put((call.key, outcome))

    def _give_up(self, call: Call) -> bool:
        """Leaves the thread to its call. False if the call has just ended."""
        if not self.at_work.pop(call, False):
            return False
        self.num_threads -= 1
        if self.interrupts:
            interrupt(call.ident)
        return True


def in_thread(function: Callable[[], T], name: str | None = None) -> Future[T]:
    """Makes one call in a daemon thread of its own, for which the end of the process won't wait."""
    future = Future[T]()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def interrupt(ident: int) -> None:
    """Raises Overdue in the thread with this ident when it next runs Python code."""
    error = ctypes.py_object(Overdue)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), error)


def _raise_at_next_line(frame: FrameType | None) -> None:
    """Raises Overdue where the code goes on after it has caught one: outside of that `try`."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            raise Overdue
        return trace

    sys.settrace(trace)  # until it raises
    while frame and frame.f_code.co_filename != __file__:
        frame.f_trace, frame = trace, frame.f_back


def traceback_of(frame: FrameType | None) -> TracebackType | None:
    """Where a call is, as the traceback of an exception that it would raise there."""
    found = None
    while frame and frame.f_code.co_filename != __file__:
        found = TracebackType(found, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return found


def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return function(), None
    except BaseException as error:  # SystemExit too: an environment must not end the run
        return None, error


def _time_limit(limit: float, where: TracebackType | None) -> TimeLimit:
    error = TimeLimit(f"no answer in {limit:g} seconds (--env-timeout)")
    return error.with_traceback(where)
