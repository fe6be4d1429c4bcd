"""Ctrl-C at safe points only, and time limits for calls into environments."""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from core.types import Stopped, printable

asked_early = False  # Ctrl-C came before an Interrupt; a library may have caught the exception


def is_program() -> bool:
    """Whether Python runs a command of picoRL; False where another program or a notebook does."""
    started = getattr(sys.modules["__main__"], "__file__", None) or "/"
    return Path(started).resolve().is_relative_to(Path(__file__).parents[1])


def set_hooks() -> None:
    """Lets Ctrl-C end this program with code 130 and no traceback, also while it imports torch.

    Tracebacks of errors lose the control characters that the message of an error may contain.
    """
    sys.excepthook = show_error
    if sys.unraisablehook is sys.__unraisablehook__:  # pytest has its own
        sys.unraisablehook = _on_dropped_error
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_early_ctrl_c)


def _on_early_ctrl_c(number: int, frame: FrameType | None) -> None:
    global asked_early
    asked_early = True
    raise KeyboardInterrupt


def end_start() -> None:
    """Raise KeyboardInterrupt if Ctrl-C came so far; from now on the program may catch it."""
    if asked_early:
        raise KeyboardInterrupt
    if signal.getsignal(signal.SIGINT) is _on_early_ctrl_c:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def show_error(*error: Any) -> None:
    """Prints the traceback of an error (its class, itself, its frames) that nobody caught."""
    if asked_early or issubclass(error[0], KeyboardInterrupt):
        sys.exit(130)
    print(printable("".join(traceback.format_exception(*error))), file=sys.stderr, end="")


def _on_dropped_error(dropped: Any) -> None:
    """Python drops what __del__ and callbacks of weak references raise, and calls this.

    Sends Ctrl-C again, from a thread and later: here the exception would be dropped again.
    """
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    main = threading.main_thread().ident
    timer = threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT))
    timer.daemon = True
    with suppress(RuntimeError):  # at the end of Python no thread starts
        timer.start()


class Interrupt:
    """Delays SIGINT, SIGTERM and SIGHUP: the first sets a flag for `check`, the next acts as usual.

    SIGHUP says that the terminal is gone; what is printed from then on is lost. A SIGHUP that is
    ignored, as under nohup, stays ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self.previous: dict[int, Any] = {}  # the handler of each signal outside this context

    def __enter__(self) -> "Interrupt":
        global asked_early
        self.requested, asked_early = asked_early, False
        self.terminals = [handle for handle in (1, 2) if os.isatty(handle)]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self.previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Stopped if any rank received a signal. All ranks must call this together."""
        from core import distributed  # imports torch

        if any(distributed.all_gather([self.requested])):
            raise Stopped

    def check_alone(self) -> None:
        """Raise Stopped after a signal if there is one rank. With several, wait for `check`."""
        from core import distributed

        if self.requested and distributed.num_ranks() == 1:
            raise Stopped

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(number, self.previous[number])
        for handle in self.terminals:
            if not os.isatty(handle):  # it is gone: a write would raise
                os.dup2(os.open(os.devnull, os.O_WRONLY), handle)


class _TimeLimit(BaseException):
    """Not an Exception, because the interrupted code may catch those."""


LEAVING = (__file__, contextlib.__file__)  # code that runs when the body has ended


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds`; 0: no limit.

    The signal arrives between two Python instructions, so it interrupts a C library only when that
    returns. Such an environment can run in a process of its own (environments/adapters/remote.py).
    Only the main thread gets signals; in others, functions that the body calls look at the time
    before each line, which makes them slower.
    """
    if seconds == 0:
        yield
        return

    finished, deadline = False, time.monotonic() + seconds

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if not finished and frame and frame.f_code.co_filename not in LEAVING:
            raise _TimeLimit

    def on_line(frame: FrameType, event: str, value: Any) -> Any:
        if time.monotonic() > deadline and frame.f_code.co_filename not in LEAVING:
            raise _TimeLimit
        return on_line

    in_main_thread = threading.current_thread() is threading.main_thread()
    before: Any
    if in_main_thread:
        before = signal.signal(signal.SIGALRM, on_alarm)
        # every second, if the body catches it
        outer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    else:
        before = sys.gettrace()
        sys.settrace(on_line)
    try:
        yield
    except _TimeLimit:
        raise TimeoutError(f"no answer in {seconds:g} seconds (--env-timeout)") from None
    finally:
        finished = True  # a second alarm while the first one is handled
        if in_main_thread:
            signal.signal(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, *outer)
        else:
            sys.settrace(before)
