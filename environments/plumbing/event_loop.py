"""One event loop for the coroutines of reward functions and tools, for the whole process.

    event_loop.wait_for(coroutine)         # its result, or its exception

A client with connections, a lock or a semaphore that a module makes once belongs to the loop in
which it is first used. With one loop it works in every call, from whichever thread.
"""

import asyncio
import threading
from collections.abc import Awaitable
from contextlib import suppress
from functools import cache
from typing import Any

LOCK = threading.Lock()


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """Awaits an awaitable in the loop, and returns its result or raises its exception.

    If the thread that waits is interrupted, as by Ctrl-C, the coroutine is cancelled.
    """

    async def wait() -> Any:
        return await awaitable

    with LOCK:
        loop = _loop()
    future = asyncio.run_coroutine_threadsafe(wait(), loop)
    try:
        return future.result()
    finally:
        future.cancel()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # of one coroutine: the others go on
                loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    return loop
