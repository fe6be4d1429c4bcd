"""One event loop for the coroutines of reward functions and tools, as long as the process lives.

    event_loop.run(coroutine)      # its result, or its exception

What a module makes once, such as a client with its connections, a lock or a semaphore, belongs to
the loop in which it was first used. So it works in every call, whichever thread makes it.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

POLL = 0.1  # seconds after which a thread that waits can be interrupted
PATIENCE = 1.0  # seconds that the loop may take to answer before another one takes its place


class _Loop:
    """The event loop and its thread; the next one if it hangs."""

    current: asyncio.AbstractEventLoop | None = None
    lock = threading.Lock()


def run(awaitable: Awaitable[Any]) -> Any:
    """Awaits it in the loop, and returns its result or raises its exception.

    If the thread that waits is interrupted, the coroutine is cancelled. One that does not return to
    the loop, as it computes or sleeps without `await`, keeps the loop: later calls get a new one.
    """

    async def wait() -> Any:
        return await awaitable

    loop = _loop()
    future = asyncio.run_coroutine_threadsafe(wait(), loop)
    try:
        while not future.done():
            concurrent.futures.wait([future], POLL)
    except BaseException:  # of a deadline, Ctrl-C
        future.cancel()
        _leave_if_it_hangs(loop)
        raise
    return future.result()


def _loop() -> asyncio.AbstractEventLoop:
    with _Loop.lock:
        if _Loop.current is None:
            _Loop.current = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=(_Loop.current,), daemon=True).start()
        return _Loop.current


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with suppress(SystemExit, KeyboardInterrupt):  # of a coroutine: it ends no other one
            loop.run_forever()


def _leave_if_it_hangs(loop: asyncio.AbstractEventLoop) -> None:
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    if not answered.wait(PATIENCE):
        with _Loop.lock:
            if _Loop.current is loop:
                _Loop.current = None
