"""Calls of code that is not ours: quick ones in this thread, those that wait side by side.

A quick call has no limit. One that lasts a minute shows its line on the terminal, and Ctrl-C ends
it. A call that waits is made in a daemon thread and has a time limit. Beyond that its outcome is
TimeLimit; its thread runs on, so the objects that it works with must not be used again.
"""

import faulthandler
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar, cast

LONG = 60.0  # seconds after which a quick call shows where it is

Outcome = tuple[Any, BaseException | None]  # (result, None), or (None, exception) of a call
T = TypeVar("T")
LOOKS = list[Callable[[], None]]()  # the `look` of each block of quick calls in the main thread


class TimeLimit(TimeoutError):
    """A call was given up. It may still be at work."""


@contextmanager
def quick_calls(look: Callable[[], None]) -> Iterator[None]:
    """A call in this block that lasts a minute shows its line on stderr.

    A signal that ends the run calls `look` at that line, in the main thread, where signals arrive;
    an exception of `look` ends the call.
    """
    takes_signals = threading.current_thread() is threading.main_thread()
    if takes_signals:
        LOOKS.append(look)
    faulthandler.dump_traceback_later(LONG, file=cast(TextIO, sys.__stderr__))
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if takes_signals:
            LOOKS.pop()


class Calls:
    """At most `count` calls at the same time, each in a daemon thread; further calls wait."""

    def __init__(self, count: int):
        self.count = count
        self.waiting = deque[tuple[Any, Callable[[], Any], float]]()
        self.at_work: dict[Future[Any], tuple[Any, float]] = {}  # key and deadline

    def start(self, key: Any, function: Callable[[], Any], limit: float = 0.0) -> None:
        """Makes a call once fewer than `count` are at work; `finished` returns its outcome.
        `limit` in seconds; 0: no limit."""
        self.waiting.append((key, function, limit or float("inf")))
        self._begin()

    def finished(self, wait: float) -> list[tuple[Any, Outcome]]:
        """Key and outcome of the calls that have finished, after at most `wait` seconds."""
        futures.wait(self.at_work, wait, futures.FIRST_COMPLETED)
        outcomes: list[tuple[Any, Outcome]] = []
        for future, (key, deadline) in [*self.at_work.items()]:
            if future.done():
                outcomes.append((key, outcome_of(future.result)))
            elif deadline < time.monotonic():
                error = TimeLimit("no answer within --env-timeout")
                outcomes.append((key, (None, error)))
            else:
                continue
            del self.at_work[future]
        self._begin()
        return outcomes

    def clear(self) -> list[Any]:
        """Forgets all calls, and returns the keys of those under way."""
        self.waiting.clear()
        under_way = [key for key, _ in self.at_work.values()]
        self.at_work.clear()
        return under_way

    def _begin(self) -> None:
        while self.waiting and len(self.at_work) < self.count:
            key, function, limit = self.waiting.popleft()
            self.at_work[in_thread(function)] = key, time.monotonic() + limit


def outcome_of(function: Callable[[], Any]) -> Outcome:
    """Calls a function; returns its result or its exception."""
    try:
        return function(), None
    except BaseException as error:  # SystemExit too: an environment must not end the run
        return None, error


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Makes one call in a daemon thread of its own, for which the end of the process won't wait."""
    future = Future[T]()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future
