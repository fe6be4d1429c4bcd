"""Quick environments are called in order, those that wait side by side and within a limit."""

import faulthandler
import signal
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from test_env_failures import OneTurn
from test_episodes import PARAMS, Scripted, message

from core import calls, pool
from core.calls import Calls, TimeLimit, in_thread
from core.episodes import RolloutCollector
from core.faults import Stopped
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task
from core.terminal.interrupt import Interrupt
from environments.base import Env, Step
from environments.plumbing import registry


class Uneven(Env):
    """`seed` % 4 + 1 turns; steps take up to 12 ms."""

    def reset(self, seed):
        self.seed, self.left = seed, seed % 4 + 1
        return [message(f"task {seed % 3}" + "." * seed)]

    def step(self, response):
        time.sleep(0.004 * (self.seed * self.left % 4))
        self.left -= 1
        return Step(
            message(f"{self.left} left") if self.left else None, len(response), not self.left
        )


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
        waits, num_building, seen = True, 0, []

        def __init__(self):
            Together.num_building += 1
            time.sleep(0 if Together.seen else 0.05)
            Together.seen.append(Together.num_building)
            Together.num_building -= 1

        def step(self, response):
            together.wait(60)  # all four wait for each other
            return super().step(response)

    monkeypatch.setattr(pool, "BUILT", set())
    together, (made, tasks) = threading.Barrier(4), collector(Together, 4)
    assert not any(r.error for r in made.collect(tasks, Scripted(policy), PARAMS))
    assert Together.seen[0] == 1 and len(Together.seen) == 4


def test_quick_calls_are_made_in_order_in_this_thread_and_a_long_one_shows_its_line(
    policy, collector, monkeypatch
):
    """Between two calls the loop looks at Ctrl-C."""

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
    assert {*looks} == {0, 1, 2, 3, 4}
    shown = [((60.0,), {"file": sys.__stderr__})]
    assert made == [(seed, threading.main_thread(), shown) for seed in range(4)] and not armed
    assert [r.error for r in rollouts] == [""] * 4  # --env-timeout is for those that wait


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
    if handled:
        with Interrupt() as interrupt, pytest.raises(Stopped):
            made.collect(tasks, Scripted(policy), PARAMS, interrupt.check_alone)
    else:
        with pytest.raises(KeyboardInterrupt):
            made.collect(tasks, Scripted(policy), PARAMS)
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
        played = in_thread(
            lambda: made.collect(tasks, Scripted(policy), PARAMS, interrupt.check_alone)
        )
        assert begun.wait(60)
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        go.set()
        assert isinstance(played.exception(60), Stopped)  # after the call


def test_episodes_that_move_alone_have_the_same_tokens_and_rewards(policy, collector):
    policy.stop_ids = sorted({*range(0, 704, 9), *policy.stop_ids})
    policy.max_length = 100  # some contexts are full
    params, alone = SamplingParams(6, 1.0, seed=5), []
    made, tasks = collector(Uneven, 8, 3)
    expected = made.collect(tasks, TorchSampler(policy), params)
    sampler = TorchSampler(policy)
    add = sampler.add
    sampler.add = lambda request: alone.append(request.alone) or add(request)
    made, tasks = collector(type("Alone", (Uneven,), {"waits": True, "alone": True}), 8, 3)
    rollouts = made.collect(tasks, sampler, params)
    assert all(alone)  # NanoLLM then draws by seeds
    for found, rollout in zip(rollouts, expected, strict=True):
        for turn in (*found.turns, *rollout.turns):
            turn.sampler_logprobs = []  # which differ in the last digits
        assert found == rollout and not found.error
    assert len({len(r.turns) for r in expected}) >= 2
    assert any(r.episode_truncated for r in expected)


def test_a_call_has_a_limit_or_none_and_what_is_late_or_forgotten_has_no_consequence(monkeypatch):
    now, go, made = [0.0], threading.Event(), Calls(2, 5.0)
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for key in ("late", "unlimited", "next"):
        made.start(key, lambda: go.wait(60), limited=key != "unlimited")
    assert made.ended(0.0) == []
    now[0] = 6.0
    [(key, (value, error))] = made.ended(0.0)
    assert (key, value, str(error)) == ("late", None, "no answer in 5 seconds (--env-timeout)")
    go.set()
    found = {}
    while len(found) < 2:
        found |= made.ended(1.0)
    assert found == {"unlimited": (True, None), "next": (True, None)}
    made.start("forgotten", lambda: 1)
    assert made.clear() == ["forgotten"] and not made.at_work and not made.ended(0.0)


@pytest.mark.parametrize("waits", [False, True])
def test_a_failure_costs_its_own_episode_and_what_is_late_is_not_used_again(
    policy, collector, waits
):
    class Faulty(Uneven):
        def reset(self, seed):
            if seed == 1:
                raise OSError("no disk")
            return super().reset(seed)

        def step(self, response):
            if self.seed == 2:
                raise TimeLimit("late")
            return super().step(response)

        def close(self):
            closed.append(self.seed)

    Faulty.waits, closed = waits, []
    made, tasks = collector(Faulty, 4)
    rollouts = made.collect(tasks, Scripted(policy), PARAMS)
    errors = [r.error.partition(" (test_calls.py")[0] for r in rollouts]
    assert errors == ["", "OSError: no disk", "TimeLimit: late", ""]
    assert [len(r.turns) for r in rollouts] == [1, 0, 1, 4]
    made.close()
    assert closed and 2 not in closed  # it may still be at work


@pytest.mark.parametrize("waits", [False, True])
def test_heavy_environments_are_capped_reused_and_closed(policy, collector, monkeypatch, waits):
    living, most = set(), []

    class Heavy(OneTurn):
        heavy = True

        def reset(self, seed):
            living.add(self)
            most.append(len(living))
            if seed == 5:
                raise RuntimeError
            return super().reset(seed)

        def close(self):
            living.remove(self)

    Heavy.waits = waits
    monkeypatch.setattr(pool, "MAX_HEAVY", 2)
    made, tasks = collector(Heavy, 8)
    rollouts = made.collect(tasks, Scripted(policy), PARAMS)
    assert [bool(r.error) for r in rollouts] == [seed == 5 for seed in range(8)]
    assert max(most) == 2 and len(living) == 2  # the failed one is closed, the others are idle
    made.close()
    assert not living


def test_what_stops_the_sampling_closes_the_environments_and_the_next_episodes_are_whole(
    policy, collector
):
    closed = threading.Semaphore(0)

    class Counted(Uneven):
        def close(self):
            closed.release()

    class Stops(Scripted):
        def step(self):
            raise KeyboardInterrupt

    (made, tasks), stops = collector(Counted, 4), Stops(policy)
    with pytest.raises(KeyboardInterrupt):
        made.collect(tasks, stops, PARAMS)
    assert all(closed.acquire(timeout=60) for _ in range(4)) and not stops.waiting
    again = made.collect(tasks, Scripted(policy), PARAMS)
    assert [len(r.turns) for r in again] == [1, 2, 3, 4] and not any(r.error for r in again)
