"""Ctrl-C once: stop at the next safe point, with nothing half-written. Twice: stop at once."""

import signal
from typing import Any

from core import distributed


class Stopped(Exception):
    """Raised at a safe point after Ctrl-C or SIGTERM."""


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
        if any(distributed.gather([self.requested])):
            raise Stopped

    def check_alone(self) -> None:
        """The same at a point where ranks are apart: only a run of one rank stops there."""
        if self.requested and distributed.num_ranks() == 1:
            raise Stopped

    def _note(self, number: int, frame: Any) -> None:
        self.requested = True
        signal.signal(number, self.previous[number])  # the second one acts as usual
