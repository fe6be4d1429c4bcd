"""Quick environments are called in order, those that wait side by side and within a limit."""

import faulthandler
import signal
import sys
import threading
import time
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
from test_env_failures import OneTurn
from test_episodes import PARAMS, Scripted

from core import calls, pool
from core.calls import Calls, TimeLimit, in_thread
from core.episodes import RolloutCollector
from core.faults import Stopped
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task
from core.terminal.interrupt import Interrupt
from environments.base import Env, Step
from environments.parsing import user
from environments.plumbing import registry


class Uneven(Env):
    """`seed` % 4 + 1 turns; steps take up to 12 ms."""

    def reset(self, seed):
        self.seed, self.left = seed, seed % 4 + 1
        return [user(f"task {seed % 3}" + "." * seed)]

    def step(self, response):
        time.sleep(0.004 * (self.seed * self.left % 4))
        self.left -= 1
        message = user(f"{self.left} left") if self.left else None
        return Step(message, len(response), not self.left)


@pytest.fixture
def collector(policy, monkeypatch):
    """A collector of 9 turns whose environment "slow" is of this class, and its tasks."""

    def make(kind, number, max_turns=9, **options):
        monkeypatch.setitem(registry.ENVIRONMENTS, "slow", kind)
        tasks = [Task("slow", seed, seed) for seed in range(number)]
        return RolloutCollector(policy, max_turns, **options), tasks

    return make


def test_those_that_wait_are_called_side_by_side_and_the_first_one_is_built_alone(
    policy, collector, monkeypatch
):
    """What the first one reads, such as a data set that a function caches, the others have."""

    class Together(OneTurn):
        waits = True

        def __init__(self):
            if built.append(self) or len(built) == 1:  # the others do not begin meanwhile
                time.sleep(0.05)
                assert len(built) == 1

        def step(self, response):
            together.wait(60)  # all four wait for each other
            return super().step(response)

    monkeypatch.setattr(pool, "BUILT", set())
    built, together, limits = [], threading.Barrier(4), set()
    made, tasks = collector(Together, 4, env_timeout=70.0)
    start = made.pool.slow.start
    made.pool.slow.start = lambda key, call, limit: limits.add(limit) or start(key, call, limit)
    assert [r.error for r in made.collect(tasks, Scripted(policy), PARAMS)] == [""] * 4
    assert len(built) == 4 and limits == {70.0}


def test_quick_calls_are_made_in_order_in_this_thread_and_a_long_one_shows_its_line(
    policy, collector, monkeypatch
):
    """Between two calls the loop looks at Ctrl-C. --env-timeout is for those that wait."""

    class Long(Uneven):
        def step(self, response):
            time.sleep(0.05)
            made.append((self.seed, threading.current_thread(), [*armed]))
            return OneTurn.result()

    made, looks, armed = [], [], []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *a, **b: armed.append((a, b)))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", armed.clear)
    monkeypatch.setattr(pool, "POLL", 0.01)
    collect, tasks = collector(Long, 4, env_timeout=0.01)
    rollouts = collect.collect(tasks, Scripted(policy), PARAMS, lambda: looks.append(len(made)))
    assert {*looks} == {0, 1, 2, 3, 4} and [r.error for r in rollouts] == [""] * 4
    shown = [((60.0,), {"file": sys.__stderr__})]
    assert made == [(seed, threading.main_thread(), shown) for seed in range(4)] and not armed


@pytest.mark.parametrize("handled", [True, False])
def test_a_signal_ends_a_quick_call_where_it_is(policy, collector, handled):
    """Also one whose code takes every Exception for a reason to go on."""

    class Endless(OneTurn):
        def step(self, response):
            with suppress(Exception):
                signal.raise_signal(signal.SIGINT)
            raise AssertionError("the call goes on")

        def close(self):
            closed.set()

    closed, (made, tasks) = threading.Event(), collector(Endless, 1)
    with Interrupt() if handled else nullcontext() as interrupt:
        look = interrupt.check_alone if handled else lambda: None
        with pytest.raises(Stopped if handled else KeyboardInterrupt):
            made.collect(tasks, Scripted(policy), PARAMS, look)
    assert closed.wait(60) and not calls.LOOKS


def test_a_signal_ends_no_other_thread_than_that_of_the_call(policy, collector):
    """With --overlap the main thread trains meanwhile: it ends at a safe point."""

    class Asks(OneTurn):
        def step(self, response):
            begun.set()
            assert go.wait(60)
            return super().step(response)

    begun, go, (made, tasks) = threading.Event(), threading.Event(), collector(Asks, 1)
    with Interrupt() as interrupt:
        look = interrupt.check_alone
        played = in_thread(lambda: made.collect(tasks, Scripted(policy), PARAMS, look))
        assert begun.wait(60)
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        go.set()
        assert isinstance(played.exception(60), Stopped)  # after the call


def test_episodes_that_move_alone_have_the_same_tokens_and_rewards(policy, collector):
    class Alone(Uneven):
        waits = alone = True

        def step(self, response):
            if (self.seed, self.left) == (7, 3):  # its second step does not wait for
                go.set()
            assert self.seed != 3 or go.wait(60)  # the first one of another episode
            return super().step(response)

    policy.stop_ids = sorted({*range(0, 704, 9), *policy.stop_ids})
    policy.max_length = 100  # some contexts are full
    params, go, results = SamplingParams(6, 1.0, seed=5), threading.Event(), []
    for kind in (Uneven, Alone):
        made, tasks = collector(kind, 8, 3)
        results.append(made.collect(tasks, TorchSampler(policy), params))
    rollouts, expected = results
    for turn in [turn for r in rollouts + expected for turn in r.turns]:
        turn.sampler_logprobs = []  # which differ in the last digits
    assert rollouts == expected and not any(r.error for r in expected)
    assert len({len(r.turns) for r in expected}) >= 2
    assert any(r.episode_truncated for r in expected)


def test_a_call_has_a_limit_or_none_and_what_is_late_or_forgotten_has_no_consequence(monkeypatch):
    now, go, made = [0.0], threading.Event(), Calls(2)
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for key, limit in (("late", 5.0), ("unlimited", 0.0), ("next", 5.0)):
        made.start(key, lambda: go.wait(60), limit)
    assert made.finished(0.0) == []
    now[0] = 6.0
    [(key, (value, error))] = made.finished(0.0)
    assert (key, value, type(error)) == ("late", None, TimeLimit)
    go.set()
    outcomes = {}
    while len(outcomes) < 2:
        outcomes |= made.finished(1.0)
    assert outcomes == {"unlimited": (True, None), "next": (True, None)}
    made.start("forgotten", lambda: 1)
    assert made.clear() == ["forgotten"] and not made.at_work and not made.finished(0.0)


@pytest.mark.parametrize("waits", [False, True])
def test_heavy_environments_are_capped_reused_and_closed_and_a_failure_costs_its_own_episode(
    policy, collector, monkeypatch, waits
):
    """What is late may still be at work: it is neither used again nor closed."""
    living, most, late = set(), [], []

    class Heavy(Uneven):
        heavy = True

        def reset(self, seed):
            assert self not in late
            living.add(self)
            most.append(len(living))
            if seed == 5:
                raise OSError("no disk")
            return super().reset(seed)

        def step(self, response):
            if self.seed == 2:
                late.append(self)
                living.remove(self)
                raise TimeLimit("late")
            return super().step(response)

        def close(self):
            assert self not in late
            living.remove(self)

    Heavy.waits = waits
    monkeypatch.setattr(pool, "MAX_HEAVY", 2)
    made, tasks = collector(Heavy, 8)
    rollouts = made.collect(tasks, Scripted(policy), PARAMS)
    errors = {r.seed: r.error.partition(" (test_calls.py")[0] for r in rollouts if r.error}
    assert errors == {2: "TimeLimit: late", 5: "OSError: no disk"}
    assert [len(r.turns) for r in rollouts] == [1, 2, 1, 4, 1, 0, 3, 4]
    assert max(most) == 2 and len(living) == 2  # the failed one is closed, the others are idle
    made.close()
    assert not living


def test_what_stops_the_sampling_closes_the_environments_and_the_next_episodes_are_whole(
    policy, collector
):
    class Counted(Uneven):
        def close(self):
            closed.release()

    class Stops(Scripted):
        def step(self):
            raise KeyboardInterrupt

    closed, (made, tasks), stops = threading.Semaphore(0), collector(Counted, 4), Stops(policy)
    with pytest.raises(KeyboardInterrupt):
        made.collect(tasks, stops, PARAMS)
    assert all(closed.acquire(timeout=60) for _ in range(4)) and not stops.waiting
    again = made.collect(tasks, Scripted(policy), PARAMS)
    assert [len(r.turns) for r in again] == [1, 2, 3, 4] and not any(r.error for r in again)
