"""Slow environments are called at the same time; results do not depend on the threads."""

import random
import threading
import time
from dataclasses import replace

import pytest
from conftest import load_small
from test_rollouts import PARAMS, Scripted, message

from core import env_calls
from core import rollouts as rollouts_module
from core.env_calls import EnvCalls
from core.rollouts import RolloutCollector
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task
from environments import registry
from environments.base import Env, EnvFailure, MultiAgentEnv, Step

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
        ends = time.monotonic() + 20
        while threading.active_count() > before:
            assert time.monotonic() < ends
            time.sleep(0.01)


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


@pytest.mark.parametrize(("start", "temperature"), [("known", 1.0), ("found out", 0.0)])
def test_episodes_without_rounds_have_the_tokens_of_rounds(
    small_folder, register, monkeypatch, start, temperature
):
    register(Uneven)
    policy = load_small(small_folder)
    policy.stop_ids = sorted({*range(0, 704, 9), *policy.stop_ids})
    policy.max_length = 150  # some contexts are full
    params = SamplingParams(10, temperature, seed=5)
    in_rounds = RolloutCollector(policy, 3, env_workers=1)
    expected = in_rounds.collect(tasks(12), TorchSampler(policy), params)
    monkeypatch.setattr(env_calls, "SLOW", 0.0)
    monkeypatch.setattr(env_calls, "LATE", 0.0)
    collector = (late_collector if start == "known" else RolloutCollector)(policy, 3)
    plays = []

    class Recorded(rollouts_module.ContinuousPlay):
        def __init__(self, collector, begun, tasks, ask):
            plays.append((len(begun), len(tasks)))
            super().__init__(collector, begun, tasks, ask)

    monkeypatch.setattr(rollouts_module, "ContinuousPlay", Recorded)
    rollouts = collector.collect(tasks(12), TorchSampler(policy), params)
    assert plays == [(0, 12) if start == "known" else (12, 0)]
    for found, rollout in zip(rollouts, expected, strict=True):
        assert found.messages == rollout.messages and found.seed == rollout.seed
        assert [t.completion_ids for t in found.turns] == [t.completion_ids for t in rollout.turns]
        assert [t.reward for t in found.turns] == [t.reward for t in rollout.turns]
        assert found.episode_truncated == rollout.episode_truncated
        for turn, other in zip(found.turns, rollout.turns, strict=True):
            assert turn.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-4)
    assert len({len(r.turns) for r in expected}) == 3
    assert any(r.episode_truncated for r in expected)


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
        "", "OSError: no disk", "TimeoutError: no answer in 1 seconds (--env-timeout)",
        "EnvFailure: gone", "", "", "EnvFailure: no server", "",
    ]  # fmt: skip
    assert [len(r.turns) for r in rollouts] == [1, 0, 1, 3, 1, 2, 0, 4]
    assert len(collector.idle_envs["slow"]) == 4


def test_agents_that_act_together_are_stepped_together_without_rounds(policy, register):
    class Pair(MultiAgentEnv):
        def reset(self, seed):
            self.left = seed
            return {"ann": [message("begin")], "bob": [message("?")]}

        def step(self, responses):
            self.left -= 1
            time.sleep(0.002)
            if self.left == 1:  # only Bob goes on
                return {"ann": Step(None, 1.0, True), "bob": Step(message("on"), 2.0, False)}
            done = self.left <= 0
            return {name: Step(None if done else message("on"), 1.0, done) for name in responses}

    register(Pair)
    rollouts = late_collector(policy).collect(tasks(4), TorchSampler(policy), SamplingParams(3))
    played = [(r.seed, r.agent, len(r.turns), r.episode_return) for r in rollouts]
    assert played == [
        (0, "ann", 1, 1.0), (0, "bob", 1, 1.0), (1, "ann", 1, 1.0), (1, "bob", 1, 1.0),
        (2, "ann", 1, 1.0), (2, "bob", 2, 3.0), (3, "ann", 2, 2.0), (3, "bob", 3, 4.0),
    ]  # fmt: skip


def test_a_free_heavy_environment_begins_the_next_task_at_once(policy, register):
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
            if self.seed == 0:  # the other instance plays all other tasks
                assert over.wait(20)
            if self.seed == 9:
                over.set()
            return super().step(response)

        def close(self):
            living.remove(self)

    register(Heavy)
    collector = late_collector(policy, env_instances=2)
    rollouts = collector.collect(tasks(10), TorchSampler(policy), SamplingParams(3))
    assert [r.seed for r in rollouts] == list(range(10))
    assert [bool(r.error) for r in rollouts] == [seed == 5 for seed in range(10)]
    assert max(most) == 2 and len(living) == 2
    registry.ENVIRONMENTS["other"] = Heavy
    collector.calls.slow.add(("step", "other"))
    collector.calls.seconds["other"].extend([1.0] * 8)
    collector.collect([Task("other", 1, 0)], TorchSampler(policy), SamplingParams(3))
    del registry.ENVIRONMENTS["other"]
    assert max(most) == 2  # an idle one makes room
    collector.close()
    assert not living


def test_a_few_delayed_calls_do_not_end_the_rounds(policy, register):
    class Hiccup(Uneven):
        def step(self, response):
            time.sleep(0.05 * (self.seed == 3))
            self.left = 0
            return Step(None, 1.0, True)

    register(Hiccup)
    collector = RolloutCollector(policy, 4)
    collector.collect(tasks(12), Scripted(policy), PARAMS)
    assert ("step", "slow") in collector.calls.slow and not collector.calls.answers_late("slow")
    collector.calls.seconds["slow"].extend([0.05] * 64)
    assert collector.calls.answers_late("slow")
    collector.calls.alone.add("slow")
    assert not collector.calls.answers_late("slow")


def test_batches_and_games_with_opponents_stay_in_rounds(policy, register):
    class Batched(Uneven):
        @classmethod
        def step_batch(cls, envs, responses):
            sizes.append(len(envs))
            return super().step_batch(envs, responses)

    register(Batched)
    sizes, collector = [], RolloutCollector(policy, 9)
    for calls in (4, 2):
        collector.collect([Task("slow", 0, i) for i in range(calls)], Scripted(policy), PARAMS)
        collector.calls.slow.add(("step", "slow"))
        collector.calls.seconds["slow"].extend([1.0] * 64)
        assert collector.calls.answers_late("slow")
    assert sizes == [4, 2]
    game = late_collector(policy, spec="tic_tac_toe:opponent=guess")
    assert game.is_late("tic_tac_toe:opponent=guess")
    game.opponents = object()
    assert not game.is_late("tic_tac_toe:opponent=guess")


def test_an_exception_in_on_progress_ends_the_wait_for_an_environment(policy, register):
    class Hangs(Uneven):
        def step(self, response):
            time.sleep(20)

    def stop():
        if time.monotonic() > started + 0.3:
            raise KeyboardInterrupt

    register(Hangs)
    for sampler in (Scripted(policy), TorchSampler(policy)):
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            late_collector(policy).collect(tasks(2), sampler, PARAMS, stop)
        assert time.monotonic() < started + 15  # before the step ends


def test_an_environment_that_draws_from_process_wide_generators_returns_to_rounds(policy, register):
    class Sloppy(Uneven):
        def step(self, response):
            random.random()
            return super().step(response)

    register(Sloppy)
    collector, said = late_collector(policy), []
    collector.calls.say = said.append
    collector.collect(tasks(4), Scripted(policy), PARAMS)
    assert len(said) == 1 and not collector.calls.answers_late("slow")
