"""One event loop for the coroutines of reward functions, tools and agents, for the whole process.

    event_loop.wait_for(coroutine)         # its result, or its exception
    future, loop = event_loop.start(coroutine)
    event_loop.stop(future, loop, is_its)  # cancels it, and interrupts it where it computes on

What a module makes once, such as a client with its connections, a lock or a semaphore, belongs to
the loop in which it was first used. So it works in every call, whichever thread makes it.
"""

import asyncio
import concurrent.futures
import ctypes
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any
from weakref import WeakKeyDictionary

POLL = 0.1  # seconds after which a thread that waits can be interrupted
PATIENCE = 1.0  # seconds that the loop may take to answer before another one takes its place


_threads: dict[asyncio.AbstractEventLoop, threading.Thread] = {}
_contexts = WeakKeyDictionary[asyncio.Task, Context]()


class _Loop:
    """The event loop and its thread; the next one if it hangs."""

    current: asyncio.AbstractEventLoop | None = None
    lock = threading.Lock()


def start(awaitable: Awaitable[Any]) -> tuple[concurrent.futures.Future, asyncio.AbstractEventLoop]:
    """Begins to await it in the loop, in the context of the caller."""

    async def wait() -> Any:
        return await awaitable

    loop = _loop()
    return asyncio.run_coroutine_threadsafe(wait(), loop), loop


def at_work(loop: asyncio.AbstractEventLoop) -> Context | None:
    """The context of the coroutine that runs at this moment; None between two of them."""
    task = asyncio.current_task(loop)
    return _contexts.get(task) if task is not None else None


def stop(
    future: concurrent.futures.Future,
    loop: asyncio.AbstractEventLoop,
    is_its: Callable[[Context], bool],
) -> None:
    """Cancels what `start` began, and interrupts a coroutine with its context that keeps the loop.

    Only Python code can be interrupted; until then later calls get a new loop.
    """
    future.cancel()
    while not _answers(loop) and (context := at_work(loop)) and is_its(context):
        ident, error = ctypes.c_ulong(_threads[loop].ident or 0), ctypes.py_object(SystemExit)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
        _leave_if_it_hangs(loop)


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """Awaits it in the loop, and returns its result or raises its exception.

    If the thread that waits is interrupted, the coroutine is cancelled. One that does not return to
    the loop, as it computes or sleeps without `await`, keeps the loop: later calls get a new one.
    """
    future, loop = start(awaitable)
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
            _Loop.current = loop = asyncio.new_event_loop()
            loop.set_task_factory(_make_task)
            thread = threading.Thread(target=_run_forever, args=(loop,), daemon=True)
            _threads[loop] = thread
            thread.start()
        return _Loop.current


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task:
    """A task as the loop makes it; Python 3.11 does not tell its context."""
    task = asyncio.Task(coroutine, loop=loop, **options)
    _contexts[task] = options.get("context") or copy_context()
    return task


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with suppress(SystemExit, KeyboardInterrupt):  # of a coroutine: it ends no other one
            loop.run_forever()


def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    return answered.wait(PATIENCE)


def _leave_if_it_hangs(loop: asyncio.AbstractEventLoop) -> None:
    if not _answers(loop):
        with _Loop.lock:
            if _Loop.current is loop:
                _Loop.current = None
