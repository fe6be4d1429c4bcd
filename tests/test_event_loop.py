"""One event loop for the coroutines of users: it outlives calls, threads and their errors."""

import asyncio
import concurrent.futures
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from environments.plumbing import event_loop


async def the_loop():
    await asyncio.sleep(0.001)
    return asyncio.get_running_loop()


def test_calls_of_all_threads_share_a_loop_which_outlives_exceptions():
    async def fail(error):
        await asyncio.gather(asyncio.sleep(0, error), asyncio.sleep(0))
        raise error

    async def inside():  # of a thread whose own loop runs, as in a notebook
        return event_loop.wait_for(the_loop())

    with ThreadPoolExecutor(4) as pool:
        loops = set(pool.map(lambda _: event_loop.wait_for(the_loop()), range(16)))
    for error in (TimeoutError("late"), KeyError("key"), SystemExit(3)):
        with pytest.raises(type(error)):
            event_loop.wait_for(fail(error))
    assert loops == {asyncio.run(inside())}


def test_a_call_that_is_interrupted_is_cancelled(monkeypatch):
    begun, ended = Event(), Event()

    async def work():
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    def interrupted(*_):
        assert begun.wait(60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(concurrent.futures.Future, "result", interrupted)
        event_loop.wait_for(work())
    assert ended.wait(60)
