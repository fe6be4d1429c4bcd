"""Slow environments are called at the same time; results do not depend on the threads."""

import random
import threading
import time

import pytest
from test_rollouts import PARAMS, Scripted, message

from core.env_calls import EnvCalls
from core.rollouts import RolloutCollector
from core.tasks import Task
from environments import registry
from environments.base import Env, Step

MAIN = threading.main_thread()


@pytest.fixture
def register(monkeypatch):
    def add(kind):
        monkeypatch.setitem(registry.ENVIRONMENTS, "slow", kind)
        return kind

    return add


def tasks(number):
    return [Task("slow", seed, seed) for seed in range(number)]


class Slow(Env):
    """Two turns; a step takes longer for lower seeds, so that later ones end first."""

    def reset(self, seed):
        self.seed, self.left = seed, 2
        return [message(f"task {seed}")]

    def step(self, response):
        time.sleep(0.02 + 0.005 * (8 - self.seed))
        self.left -= 1
        return Step(message("on") if self.left else None, float(self.seed), not self.left)


@pytest.mark.parametrize("workers", [1, 64])
def test_rollouts_have_the_order_of_the_tasks_whatever_thread_ends_first(policy, register, workers):
    register(Slow)
    collector = RolloutCollector(policy, 4, env_workers=workers)
    rollouts = collector.collect(tasks(8), Scripted(policy), PARAMS)
    assert [r.seed for r in rollouts] == list(range(8))
    assert [r.episode_return for r in rollouts] == [2.0 * seed for seed in range(8)]
    assert (("step", "slow") in collector.calls.slow) == (workers == 64)


def test_slow_episodes_are_played_at_the_same_time(policy, register):
    class Sleeps(Env):
        def reset(self, seed):
            return [message("?")]

        def step(self, response):
            time.sleep(0.2)
            return Step(None, 1.0, True)

    register(Sleeps)
    started = time.monotonic()
    rollouts = RolloutCollector(policy, 1).collect(tasks(64), Scripted(policy), PARAMS)
    assert time.monotonic() - started < 6  # one after the other: 12.8 seconds
    assert sum(r.episode_return for r in rollouts) == 64


def hang():
    time.sleep(60)


def spin():
    while True:
        pass


@pytest.mark.parametrize("fault", [hang, spin])
def test_a_time_limit_in_a_thread_costs_its_own_episode(policy, register, fault):
    class Faulty(Slow):
        def step(self, response):
            if self.seed == 5:
                fault()
            return super().step(response)

    register(Faulty)
    before = threading.active_count()
    collector = RolloutCollector(policy, 4, env_timeout=1.0)
    rollouts = collector.collect(tasks(8), Scripted(policy), PARAMS)
    assert [bool(r.error) for r in rollouts] == [seed == 5 for seed in range(8)]
    assert rollouts[5].error == "TimeoutError: no answer in 1 seconds (--env-timeout)"
    if fault is spin:  # the thread is interrupted
        time.sleep(0.2)
        assert threading.active_count() == before


def test_time_limits_work_outside_the_main_thread():
    outcomes = []
    calls = EnvCalls(4, timeout=0.2)
    thread = threading.Thread(target=lambda: outcomes.extend(calls.call_all("step", [("e", spin)])))
    thread.start()
    thread.join(timeout=20)
    ((_, error),) = outcomes
    assert isinstance(error, TimeoutError)


def test_an_environment_that_is_not_thread_safe_is_called_in_the_main_thread(policy, register):
    threads = []

    class Fussy(Slow):
        thread_safe = False

        def step(self, response):
            threads.append(threading.current_thread())
            return super().step(response)

    register(Fussy)
    RolloutCollector(policy, 4).collect(tasks(4), Scripted(policy), PARAMS)
    assert threads == [MAIN] * 8
    threads.clear()
    Fussy.thread_safe = True
    RolloutCollector(policy, 4).collect(tasks(4), Scripted(policy), PARAMS)
    assert threads[0] is MAIN and MAIN not in threads[1:]


def test_process_wide_generators_draw_as_if_the_environments_were_alone(policy, register):
    class Sloppy(Env):
        def reset(self, seed):
            random.seed(seed)
            time.sleep(0.02)
            return [message(f"{random.random()}")]

        def step(self, response):
            return Step(None, 1.0, True)

    register(Sloppy)
    said = []
    collector = RolloutCollector(policy, 1)
    collector.calls.say = said.append
    rollouts = collector.collect(tasks(8), Scripted(policy), PARAMS)
    expected = [f"{random.Random(seed).random()}" for seed in range(8)]
    assert [r.messages[0]["content"] for r in rollouts] == expected
    assert len(said) == 1 and said[0].startswith("slow: one call at a time, because it draws")


def test_heavy_environments_are_capped_reused_and_closed(policy, register):
    living, most = set(), []

    class Heavy(Env):
        heavy = True

        def reset(self, seed):
            living.add(self)
            most.append(len(living))
            if seed == 3:
                raise RuntimeError
            return [message(f"task {seed}")]

        def step(self, response):
            return Step(None, 1.0, True)

        def close(self):
            living.remove(self)

    register(Heavy)
    collector = RolloutCollector(policy, 1, env_instances=4)
    rollouts = collector.collect(tasks(10), Scripted(policy), PARAMS)
    assert [r.seed for r in rollouts] == list(range(10))
    assert max(most) == 4 and len(living) == 4  # the failed one is closed, the others are idle
    registry.ENVIRONMENTS["other"] = Heavy
    collector.collect([Task("other", 0, 0)], Scripted(policy), PARAMS)
    assert max(most) == 4  # an idle one makes room
    del registry.ENVIRONMENTS["other"]
    collector.close()
    assert not living
