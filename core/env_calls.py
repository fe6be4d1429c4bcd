"""Calls environments: slow ones many at the same time, in threads, each within a time limit.

Results do not depend on the timing of threads: every episode has an instance of its own, and
outcomes keep the order of the calls. Calls are made one after the other in the calling thread as
long as they are fast, and always for environments that declare `thread_safe = False` or draw from
the process-wide generators of `random` or NumPy.
"""

import ctypes
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from core.interrupt import time_limit

SLOW = 0.01  # seconds; an environment with such a call is called in threads from then on

Call = tuple[str, Callable[[], Any]]  # the spec of an environment, and what to call
Outcome = tuple[Any, BaseException | None]  # what the call returned or raised


class _Overdue(BaseException):
    """Raised in a thread whose call exceeds its time limit."""


class EnvCalls:
    """`num_threads`: calls at the same time; `timeout`: seconds per call, 0: no limit."""

    def __init__(self, num_threads: int, timeout: float) -> None:
        self.num_threads, self.timeout = num_threads, timeout
        self.say: Callable[[str], None] = lambda line: None
        self.alone: set[str] = set()  # specs that are never called in threads
        self.slow: set[tuple[str, str]] = set()  # kinds of calls and specs: called in threads

    def call_all(self, kind: str, calls: list[Call]) -> list[Outcome]:
        """Makes all calls of one kind, such as "reset"; the outcomes are in their order.

        An exception is an outcome, except for KeyboardInterrupt, which is raised.
        """
        folder, before = os.getcwd(), _generators()
        outcomes: dict[int, Outcome] = {}
        together = []
        for i, (spec, call) in enumerate(calls):
            if (kind, spec) in self.slow and spec not in self.alone:
                together.append(i)
                continue
            started = time.perf_counter()
            if threading.current_thread() is threading.main_thread():
                outcomes[i] = _outcome(folder, call, self.timeout)
            else:  # where time limits need a thread, because they cannot use a signal
                (outcomes[i],) = self._in_threads(folder, [call])
            if self.num_threads > 1 and time.perf_counter() - started > SLOW:
                self.slow.add((kind, spec))
                self._check_generators({spec}, before)
        before = _generators()
        found = self._in_threads(folder, [calls[i][1] for i in together])
        self._check_generators({calls[i][0] for i in together}, before)
        outcomes |= dict(zip(together, found, strict=True))
        os.chdir(folder)
        return [outcomes[i] for i in range(len(calls))]

    def _in_threads(self, folder: str, calls: list[Callable[[], Any]]) -> list[Outcome]:
        """Makes each call in a thread; gives up one that exceeds the limit, and interrupts it."""
        done = queue.SimpleQueue[tuple[int, Outcome]]()

        def work(i: int) -> None:
            with suppress(_Overdue):
                done.put((i, _outcome(folder, calls[i])))

        todo, outcomes = deque(range(len(calls))), dict[int, Outcome]()
        running: dict[int, tuple[threading.Thread, float]] = {}  # in the order of their deadlines
        while len(outcomes) < len(calls):
            while todo and len(running) < self.num_threads:
                i = todo.popleft()
                thread = threading.Thread(target=work, args=(i,), daemon=True)
                running[i] = thread, time.monotonic() + self.timeout
                thread.start()
            first, (thread, deadline) = next(iter(running.items()))
            left = max(0.0, deadline - time.monotonic()) if self.timeout else None
            try:
                i, outcome = done.get(timeout=left)
            except queue.Empty:
                text = f"no answer in {self.timeout:g} seconds (--env-timeout)"
                i, outcome = first, (None, TimeoutError(text))
                # takes effect when the thread runs Python code again
                ident = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Overdue))
            if running.pop(i, None):  # else it was too late
                outcomes[i] = outcome
        return [outcomes[i] for i in range(len(calls))]

    def _check_generators(self, specs: set[str], before: tuple[Any, ...]) -> None:
        """Calls `specs` alone from now on if the process-wide generators have changed."""
        if specs - self.alone and _generators() != before:
            self.alone |= specs
            self.say(f"{' '.join(sorted(specs))}: one call at a time, because it draws from the "
                     "process-wide generators of random or numpy")  # fmt: skip


def _outcome(folder: str, call: Callable[[], Any], timeout: float = 0.0) -> Outcome:
    """Makes one call; restores the working directory `folder`, which the run's paths need."""
    try:
        with time_limit(timeout):
            outcome: Outcome = call(), None
    except (KeyboardInterrupt, _Overdue):
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


def _generators() -> tuple[Any, ...]:
    """The states of the process-wide generators."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]
