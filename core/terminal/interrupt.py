"""Ends a run at a safe point after Ctrl-C, or another signal that asks for its end."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from core.calls import LOOKS
from core.faults import Stopped
from environments.plumbing.text import printable


def owns_process() -> bool:
    """Whether this process runs a command of picoRL, not another program or a notebook."""
    started = getattr(sys.modules["__main__"], "__file__", None) or "/"
    return Path(started).resolve().is_relative_to(Path(__file__).parents[2])


def show_error(*error: Any) -> None:
    """`sys.excepthook`: prints a traceback without control characters; none after Ctrl-C."""
    if issubclass(error[0], KeyboardInterrupt):
        sys.exit(130)
    print(printable("".join(traceback.format_exception(*error))), file=sys.stderr, end="")


class Interrupt:
    """Delays the signals that end a run: the first sets a flag for `check`, the next acts as usual.

    These are Ctrl-C, SIGTERM, SIGHUP, and SIGUSR1, with which Slurm warns before a job's time ends.
    SIGHUP says that the terminal is gone; later output is then lost. An ignored signal, such as
    SIGHUP under nohup, stays ignored. In a thread other than the main one, where Python has no
    signals, nothing is delayed. A quick call (core/calls.py) that an update makes while it samples
    ends at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self.say: Callable[[str], None] = lambda line: None
        self.previous: dict[int, Any] = {}  # the handler of each signal outside this context

    def __enter__(self) -> "Interrupt":
        self.terminals = [handle for handle in (1, 2) if os.isatty(handle)]
        in_main_thread = threading.current_thread() is threading.main_thread()
        names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if in_main_thread else ()
        for number in [getattr(signal, name) for name in names if hasattr(signal, name)]:
            if signal.getsignal(number) != signal.SIG_IGN:
                self.previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises Stopped if any rank received a signal. All ranks must call this together."""
        from core import distributed  # imports torch

        if any(distributed.all_gather([self.requested])):
            raise Stopped

    def check_alone(self) -> None:
        """Raises Stopped after a signal if there is one rank. With several, `check` does that."""
        from core import distributed

        if self.requested and distributed.num_ranks() == 1:
            raise Stopped

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(number, self.previous[number])
        for handle in self.terminals:
            if not os.isatty(handle):  # the terminal is gone: a write would raise
                os.dup2(os.open(os.devnull, os.O_WRONLY), handle)
        if number == signal.SIGINT:
            with suppress(RuntimeError):  # the signal came inside a write
                self.say("stopping after this step; press Ctrl-C again to quit")
        for look in LOOKS:  # ends a quick call that may never return
            with suppress(RuntimeError):
                look()
