"""Slow environments are called at the same time; results do not depend on the threads."""

import asyncio
import random
import threading
import time
from dataclasses import replace

import pytest
from test_rollouts import PARAMS, Scripted, message

from core import env_calls
from core.rollouts import RolloutCollector
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task
from environments import registry
from environments.base import Env, EnvFailure, MultiAgentEnv, Step


@pytest.fixture
def register(monkeypatch):
    def add(kind):
        monkeypatch.setitem(registry.ENVIRONMENTS, "slow", kind)
        return kind

    return add


def tasks(number):
    return [Task("slow", seed, seed) for seed in range(number)]


class Slow(Env):
    """Two turns. The first step of seed 0 shows that the environment is slow; a second step waits
    for that of the next seed, so all must be called at the same time, and later ones end first."""

    waits = False

    def reset(self, seed):
        self.seed, self.left = seed, 2
        if seed == 0:
            Slow.ended = [threading.Event() for _ in range(9)]
            Slow.ended[8].set()
        return [message(f"task {seed}")]

    def step(self, response):
        self.left -= 1
        if self.left:
            time.sleep(0.02 * (self.seed == 0))
            return Step(message("on"), float(self.seed), False)
        assert not self.waits or self.ended[self.seed + 1].wait(20)
        self.ended[self.seed].set()
        return Step(None, float(self.seed), True)


@pytest.mark.parametrize("workers", [1, 64])
def test_rollouts_have_the_order_of_the_tasks_whatever_thread_ends_first(policy, register, workers):
    register(type("Waits", (Slow,), {"waits": workers > 1}))
    collector = RolloutCollector(policy, 4, env_workers=workers)
    rollouts = collector.collect(tasks(8), Scripted(policy), PARAMS)
    assert not any(r.error for r in rollouts)
    assert [r.seed for r in rollouts] == list(range(8))
    assert [r.episode_return for r in rollouts] == [2.0 * seed for seed in range(8)]


def hang():
    time.sleep(30)


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

        def close(self):
            closed.append(self.seed)

    closed = []
    register(Faulty)
    before = set(threading.enumerate())
    collector = RolloutCollector(policy, 4, env_timeout=1.0)
    rollouts = collector.collect(tasks(8), Scripted(policy), PARAMS)
    assert [bool(r.error) for r in rollouts] == [seed == 5 for seed in range(8)]
    assert rollouts[5].error == "TimeLimit: no answer in 1 seconds (--env-timeout)"
    collector.close()
    assert sorted(closed) == [0, 1, 2, 3, 4, 6, 7]  # the other one may still be at work
    for thread in set(threading.enumerate()) - before if fault is spin else ():
        thread.join(20)
        assert not thread.is_alive()  # it was interrupted


def test_an_environment_that_is_not_thread_safe_is_called_in_one_thread(policy, register):
    threads = set()

    class Fussy(Slow):
        thread_safe = False

        def step(self, response):
            threads.add(threading.current_thread())
            return super().step(response)

    register(Fussy)
    collector = RolloutCollector(policy, 4)
    for _ in range(2):
        collector.collect(tasks(4), Scripted(policy), PARAMS)
    assert len(threads) == 1 and threading.main_thread() not in threads
    Fussy.thread_safe = True
    RolloutCollector(policy, 4).collect(tasks(4), Scripted(policy), PARAMS)
    assert len(threads) > 2


def test_environments_may_run_asyncio_in_a_notebook(policy, register):
    class Asks(Slow):
        def step(self, response):
            asyncio.run(asyncio.sleep(0))
            return Step(None, 1.0, True)

    async def cell():  # a notebook has a running loop
        return RolloutCollector(policy, 1).collect(tasks(2), Scripted(policy), PARAMS)

    register(Asks)
    assert [r.error for r in asyncio.run(cell())] == ["", ""]


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


def late_collector(policy, max_turns=9, spec="slow", **options):
    """A collector that knows that the environment answers late, so it does not play in rounds."""
    collector = RolloutCollector(policy, max_turns, **options)
    collector.calls.slow.add(("step", spec))
    collector.calls.seconds[spec].extend([1.0] * 8)
    return collector


class Pair(MultiAgentEnv):
    """Ann and Bob act together; for the last turn, Bob alone."""

    def reset(self, seed):
        self.left = seed % 3
        return {"ann": [message(f"begin {seed}")], "bob": [message("?" * seed)]}

    def step(self, responses):
        self.left -= 1
        time.sleep(0.002)
        if self.left == 1:
            return {"ann": Step(None, 1.0, True), "bob": Step(message("on"), 2.0, False)}
        done = self.left <= 0
        return {
            name: Step(None if done else message("on"), len(text), done)
            for name, text in responses.items()
        }


@pytest.mark.parametrize(("kind", "start"), [(Uneven, "known"), (Uneven, "found"), (Pair, "known")])
def test_episodes_without_rounds_have_the_tokens_of_rounds(
    policy, register, monkeypatch, kind, start
):
    register(kind)
    policy.stop_ids = sorted({*range(0, 704, 9), *policy.stop_ids})
    policy.max_length = 150  # some contexts are full
    params = SamplingParams(10, float(start == "known"), seed=5)
    in_rounds = RolloutCollector(policy, 3, env_workers=1)
    expected = in_rounds.collect(tasks(12), TorchSampler(policy), params)
    monkeypatch.setattr(env_calls, "SLOW", 0.0)
    monkeypatch.setattr(env_calls, "LATE", 0.0)
    collector = (late_collector if start == "known" else RolloutCollector)(policy, 3)
    rollouts = collector.collect(tasks(12), TorchSampler(policy), params)
    assert collector.is_late("slow") and not in_rounds.is_late("slow")
    for found, rollout in zip(rollouts, expected, strict=True):
        assert found.messages == rollout.messages and not found.error
        assert (found.seed, found.agent) == (rollout.seed, rollout.agent)
        assert [t.completion_ids for t in found.turns] == [t.completion_ids for t in rollout.turns]
        assert [t.reward for t in found.turns] == [t.reward for t in rollout.turns]
        assert found.episode_truncated == rollout.episode_truncated
        for turn, other in zip(found.turns, rollout.turns, strict=True):
            assert turn.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-4)
    assert len({len(r.turns) for r in expected}) >= 2
    assert kind is Pair or any(r.episode_truncated for r in expected)


def test_an_episode_does_not_wait_for_a_slower_one(policy, register):
    """In rounds, the first step would wait for an episode that waits for the step."""
    over = threading.Event()

    class Waits(Uneven):
        def step(self, response):
            if self.seed == 0:
                assert over.wait(20)
            step = super().step(response)
            if self.seed == 3 and step.done:  # after four turns
                over.set()
            return step

    register(Waits)
    sampler = TorchSampler(policy)
    rollouts = late_collector(policy).collect(tasks(6), sampler, SamplingParams(4))
    assert [len(r.turns) for r in rollouts] == [1, 2, 3, 4, 1, 2]
    assert not any(r.error for r in rollouts)


def test_a_failure_without_rounds_costs_its_own_episode(policy, register):
    class Faulty(Uneven):
        def reset(self, seed):
            if seed == 1:
                raise OSError("no disk")
            return super().reset(seed)

        def step(self, response):
            if self.seed == 2:
                time.sleep(60)
            if self.seed == 3 and self.left == 2:
                raise EnvFailure("gone")
            return super().step(response)

    class Partial(Scripted):
        def sample(self, prompts, params, on_progress=lambda: None, chats=None):
            completions = super().sample(prompts, params)
            failed = ["task 0...." in chat[0]["content"] for chat in chats]
            return [
                replace(c, error="no server" if bad else "")
                for c, bad in zip(completions, failed, strict=True)
            ]

    register(Faulty)
    collector = late_collector(policy, env_timeout=1.0)
    rollouts = collector.collect(tasks(8), Partial(policy), PARAMS)
    assert [r.error for r in rollouts] == [
        "", "OSError: no disk", "TimeLimit: no answer in 1 seconds (--env-timeout)",
        "EnvFailure: gone", "", "", "EnvFailure: no server", "",
    ]  # fmt: skip
    assert [len(r.turns) for r in rollouts] == [1, 0, 1, 3, 1, 2, 0, 4]
    assert len(collector.idle_envs["slow"]) == 4


@pytest.mark.parametrize("late", [False, True])
def test_heavy_environments_are_capped_reused_and_closed(policy, register, monkeypatch, late):
    living, most, over = set(), [], threading.Event()

    class Heavy(Uneven):
        heavy = True

        def reset(self, seed):
            living.add(self)
            most.append(len(living))
            if seed == 5:
                raise RuntimeError
            return super().reset(seed)

        def step(self, response):
            if late and self.seed == 0:  # the other instance plays all other tasks
                assert over.wait(20)
            if self.seed == 9:
                over.set()
            return super().step(response)

        def close(self):
            living.remove(self)

    register(Heavy)
    collector = (late_collector if late else RolloutCollector)(policy, 9, env_instances=2)
    rollouts = collector.collect(tasks(10), TorchSampler(policy), SamplingParams(3))
    assert [r.seed for r in rollouts] == list(range(10))
    assert [bool(r.error) for r in rollouts] == [seed == 5 for seed in range(10)]
    assert max(most) == 2 and len(living) == 2  # the failed one is closed, the others are idle
    monkeypatch.setitem(registry.ENVIRONMENTS, "other", Heavy)
    collector.collect([Task("other", 1, 0)], TorchSampler(policy), SamplingParams(3))
    assert max(most) == 2  # an idle one makes room
    collector.close()
    assert not living


def test_environments_that_are_stepped_together_stay_in_rounds(policy, register):
    sizes = []

    class Batched(Uneven):
        @classmethod
        def step_batch(cls, envs, responses):
            sizes.append(len(envs))
            return super().step_batch(envs, responses)

    register(Batched)
    collector = late_collector(policy)
    for calls in (4, 2):
        collector.collect([Task("slow", 0, i) for i in range(calls)], Scripted(policy), PARAMS)
    assert sizes == [1, 1, 1, 1, 2]  # the first collection finds it out


def test_an_exception_in_on_progress_ends_the_wait_for_an_environment(policy, register):
    class Hangs(Uneven):
        def step(self, response):
            time.sleep(20)

    def stop():
        if time.monotonic() > started + 0.3:
            raise KeyboardInterrupt

    register(Hangs)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        late_collector(policy).collect(tasks(2), TorchSampler(policy), PARAMS, stop)
    assert time.monotonic() < started + 15  # before the step ends
