"""One event loop for the coroutines of reward functions and tools, for the whole process.

    event_loop.wait_for(coroutine)         # its result, or its exception

What a module makes once, such as a client with its connections, a lock or a semaphore, belongs to
the loop in which it was first used. So it works in every call, whichever thread makes it.
"""

import asyncio
import threading
from collections.abc import Awaitable
from contextlib import suppress
from functools import cache
from typing import Any

LOCK = threading.Lock()


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """Awaits it in the loop, and returns its result or raises its exception.

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
            with suppress(SystemExit, KeyboardInterrupt):  # of a coroutine: it ends no other one
                loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    return loop
