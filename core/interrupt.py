"""Stopping what runs: by Ctrl-C, or because it takes too long.

Ctrl-C once: stop at the next safe point, with nothing half-written. Twice: stop at once.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from core import distributed
from core.types import Stopped


class Interrupt:
    """Inside `with Interrupt() as stop:` a signal only sets a flag, and `stop.check()` raises."""

    def __init__(self) -> None:
        self.requested = False
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Stopped if a signal came to any rank; all of them ask at the same point."""
        if any(distributed.all_gather([self.requested])):
            raise Stopped

    def check_alone(self) -> None:
        """The same at a point where ranks are apart: only a run of one rank stops there."""
        if self.requested and distributed.num_ranks() == 1:
            raise Stopped

    def _note(self, number: int, frame: Any) -> None:
        self.requested = True
        signal.signal(number, self.previous[number])  # the second one acts as usual


class _Late(BaseException):
    """No Exception, for what is interrupted may catch those."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError when the seconds are over; 0, or not in the main thread: never.

    Code that holds on to the interpreter, such as a C library's, is stopped when it returns; an
    environment like that can have a process of its own (environments/adapters/remote.py).
    """
    if seconds == 0 or threading.current_thread() is not threading.main_thread():
        yield
        return

    over = False

    def late(number: int, frame: Any) -> None:
        if not over:
            raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # and again, should it be caught
    try:
        yield
        over = True
    except _Late:
        raise TimeoutError(f"no answer in {seconds:g} seconds (--env-timeout)") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
