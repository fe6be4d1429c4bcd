"""One event loop for the coroutines of users: it outlives calls, threads and their errors."""

import asyncio
import concurrent.futures
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from environments.plumbing import event_loop


async def loop_after(seconds=0.0):
    await asyncio.sleep(seconds)
    return asyncio.get_running_loop()


def test_calls_of_all_threads_share_a_loop():
    with ThreadPoolExecutor(4) as pool:
        loops = set(pool.map(lambda _: event_loop.wait_for(loop_after(0.001)), range(16)))
    assert loops == {event_loop.wait_for(loop_after())}

    async def inside():  # also of a thread whose own loop runs, as in a notebook
        return event_loop.wait_for(loop_after())

    assert asyncio.run(inside()) in loops


@pytest.mark.parametrize("error", [TimeoutError("late"), KeyError("key"), SystemExit(3)])
def test_an_exception_of_a_coroutine_is_raised(error):
    async def fail():
        raise error

    async def fail_beside():
        await asyncio.gather(fail(), asyncio.sleep(0))

    loop = event_loop.wait_for(loop_after())
    for failing in (fail, fail_beside):
        with pytest.raises(type(error)):
            event_loop.wait_for(failing())
    assert event_loop.wait_for(loop_after()) is loop


def test_a_call_that_is_interrupted_is_cancelled(monkeypatch):
    begun, cancelled = Event(), Event()

    async def work():
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def interrupted(*_):
        assert begun.wait(60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(concurrent.futures.Future, "result", interrupted)
        event_loop.wait_for(work())
    assert cancelled.wait(60)
