"""Slow environments are called at the same time; results do not depend on the threads."""

import asyncio
import random
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from test_env_failures import OneTurn
from test_episodes import PARAMS, Scripted, message

from core import pool, threads
from core.context import Renderer
from core.episodes import RolloutCollector
from core.extras.tools import ToolRenderer
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task
from core.threads import Threads
from environments.base import Env, EnvFailure, MultiAgentEnv, Step
from environments.plumbing import registry


@pytest.fixture
def register(monkeypatch):
    def add(kind):
        monkeypatch.setitem(registry.ENVIRONMENTS, "slow", kind)
        return kind

    return add


def tasks(number):
    return [Task("slow", seed, seed) for seed in range(number)]


@pytest.fixture
def impatient(monkeypatch):
    """One call of over 10 ms makes its kind slow."""
    monkeypatch.setattr(threads, "PATIENCE", 0.0)


def test_an_environment_that_is_not_thread_safe_is_called_in_one_thread(
    policy, register, impatient
):
    class Fussy(OneTurn):
        thread_safe, seen = False, set()

        def step(self, response):
            self.seen.add(threading.current_thread())
            time.sleep(0.02)
            return super().step(response)

    register(Fussy)
    collector = RolloutCollector(policy, 4)
    for _ in range(2):
        collector.collect(tasks(4), Scripted(policy), PARAMS)
    assert len(Fussy.seen) == 1 and threading.main_thread() not in Fussy.seen


def test_environments_may_run_asyncio_in_a_notebook(policy, register):
    class Asks(OneTurn):
        main_thread = True

        def step(self, response):
            asyncio.run(asyncio.sleep(0))
            return super().step(response)

    async def cell():  # a notebook has a running loop
        return RolloutCollector(policy, 1).collect(tasks(2), Scripted(policy), PARAMS)

    register(Asks)
    assert [r.error for r in asyncio.run(cell())] == ["", ""]


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no alarm")
def test_the_main_thread_calls_an_environment_that_needs_it(policy, register):
    """Ctrl-C is not taken for an error of the environment."""
    seen = []

    class Alarmed(OneTurn):
        main_thread = True

        def step(self, response):
            seen.append(threading.current_thread())
            if len(seen) == 2:
                signal.raise_signal(signal.SIGINT)
            return super().step(response)

    register(Alarmed)
    with pytest.raises(KeyboardInterrupt):
        RolloutCollector(policy, 4).collect(tasks(2), Scripted(policy), PARAMS)
    assert seen == [threading.main_thread()] * 2


def test_process_wide_generators_draw_as_if_the_environments_were_alone(
    policy, register, impatient
):
    class Sloppy(OneTurn):
        def reset(self, seed):
            random.seed(seed)
            time.sleep(0.02)
            return [message(f"{random.random()}")]

    register(Sloppy)
    said = []
    collector = RolloutCollector(policy, 1)
    collector.pool.threads.say = said.append
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


@pytest.fixture
def no_rounds(monkeypatch):
    """Every environment counts as slow, so no episode waits for another."""
    monkeypatch.setattr(threads, "SLOW", 0.0)
    monkeypatch.setattr(threads, "PATIENCE", 0.0)
    monkeypatch.setattr(pool, "LATE", 0.0)
    monkeypatch.setattr(pool, "ENOUGH", 1)


def test_slow_environments_are_called_at_the_same_time(policy, register, no_rounds):
    together = threading.Barrier(8)

    class Meets(OneTurn):
        """Two turns: the first one shows that it is slow, the second one waits for all others."""

        def reset(self, seed):
            self.left = 2
            return super().reset(seed)

        def step(self, response):
            self.left -= 1
            if self.left:
                return Step(message("on"), 0.0, False)
            together.wait(60)
            return super().step(response)

    register(Meets)
    rollouts = RolloutCollector(policy, 4).collect(tasks(8), Scripted(policy), PARAMS)
    assert [(r.error, r.episode_return) for r in rollouts] == [("", 1.0)] * 8


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


@pytest.mark.parametrize(("kind", "temperature"), [(Uneven, 1.0), (Pair, 0.0)])
def test_slow_calls_change_no_token_and_no_reward(policy, register, request, kind, temperature):
    register(kind)
    policy.stop_ids = sorted({*range(0, 704, 9), *policy.stop_ids})
    policy.max_length = 150  # some contexts are full
    params = SamplingParams(10, temperature, seed=5)
    one_by_one = RolloutCollector(policy, 3, env_workers=1)
    expected = one_by_one.collect(tasks(12), TorchSampler(policy), params)
    request.getfixturevalue("no_rounds")
    sampler, alone = TorchSampler(policy), []
    add = sampler.add
    sampler.add = lambda request: alone.append(request.alone) or add(request)
    rollouts = RolloutCollector(policy, 3).collect(tasks(12), sampler, params)
    assert not alone[0] and alone[-1]  # NanoLLM then draws by seeds
    for found, rollout in zip(rollouts, expected, strict=True):
        assert found.messages == rollout.messages and not found.error
        assert (found.seed, found.agent) == (rollout.seed, rollout.agent)
        assert [t.completion_ids for t in found.turns] == [t.completion_ids for t in rollout.turns]
        assert [t.reward for t in found.turns] == [t.reward for t in rollout.turns]
        assert found.episode_truncated == rollout.episode_truncated
    assert len({len(r.turns) for r in expected}) >= 2
    assert kind is Pair or any(r.episode_truncated for r in expected)


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_costs_its_own_episode(policy, register, request, late):
    class Faulty(Uneven):
        def reset(self, seed):
            if seed == 1:
                raise OSError("no disk")
            return super().reset(seed)

        def step(self, response):
            if self.seed == 2:
                time.sleep(5)
            if self.seed == 3 and self.left == 2:
                raise EnvFailure("gone")
            return super().step(response)

        def close(self):
            closed.append(self.seed)

    class Partial(Scripted):
        def complete(self, request):
            failed = "task 0...." in request.chat[0]["content"]
            found = super().complete(request)
            return replace(found, finish_reason="error", text="no server") if failed else found

    closed = []
    register(Faulty)
    if late:
        request.getfixturevalue("no_rounds")
    collector = RolloutCollector(policy, 9, env_timeout=1.0)
    rollouts = collector.collect(tasks(8), Partial(policy), PARAMS)
    assert [r.error.partition(" (test_threads.py")[0] for r in rollouts] == [
        "", "OSError: no disk", "TimeLimit: no answer in 1 seconds (--env-timeout)",
        "EnvFailure: gone", "", "", "EnvFailure: no server", "",
    ]  # fmt: skip
    assert [len(r.turns) for r in rollouts] == [1, 0, 1, 3, 1, 2, 0, 4]
    collector.close()
    assert closed and 2 not in closed  # it is still at work


def test_heavy_environments_are_capped_reused_and_closed(policy, register, no_rounds):
    living, most = set(), []

    class Heavy(Uneven):
        heavy = True

        def reset(self, seed):
            living.add(self)
            most.append(len(living))
            if seed == 5:
                raise RuntimeError
            return super().reset(seed)

        def close(self):
            living.remove(self)

    register(Heavy)
    collector = RolloutCollector(policy, 9, env_instances=2)
    rollouts = collector.collect(tasks(10), TorchSampler(policy), SamplingParams(3))
    assert [bool(r.error) for r in rollouts] == [seed == 5 for seed in range(10)]
    assert max(most) == 2 and len(living) == 2  # the failed one is closed, the others are idle
    collector.close()
    assert not living


@pytest.mark.parametrize("renderer", [Renderer, ToolRenderer])  # others of the run have tools
def test_environments_may_be_stepped_together(policy, register, renderer):
    sizes = []

    class Batched(Uneven):
        @classmethod
        def step_batch(cls, envs, responses):
            sizes.append(len(envs))
            return super().step_batch(envs, responses)

    register(Batched)
    collector = RolloutCollector(policy, 9, renderer=renderer)
    for calls in (4, 2):
        collector.collect([Task("slow", 0, i) for i in range(calls)], Scripted(policy), PARAMS)
    assert sizes == [4, 2]


def test_environments_with_tools_which_answer_first_are_stepped_one_by_one(policy, register):
    def look() -> str:
        """Look."""

    class Tools(OneTurn):
        tools = (look,)

        def reset(self, seed):
            self.seed = seed
            return super().reset(seed)

        def step(self, response):
            return Step(None, 1 / self.seed, True)

        @classmethod
        def step_batch(cls, envs, responses):
            raise NotImplementedError

    register(Tools)
    collector = RolloutCollector(policy, 1, renderer=ToolRenderer)
    rollouts = collector.collect(tasks(2), Scripted(policy), PARAMS)
    assert [bool(rollout.error) for rollout in rollouts] == [True, False]


def test_what_stops_the_sampling_closes_the_environments_and_the_next_episodes_are_whole(
    policy, register
):
    closed = threading.Semaphore(0)

    class Counted(Uneven):
        def close(self):
            closed.release()

    class Stops(Scripted):
        def step(self):
            raise KeyboardInterrupt

    register(Counted)
    collector, stops = RolloutCollector(policy, 9), Stops(policy)
    with pytest.raises(KeyboardInterrupt):
        collector.collect(tasks(4), stops, PARAMS)
    assert all(closed.acquire(timeout=60) for _ in range(4)) and not stops.waiting
    again = collector.collect(tasks(4), Scripted(policy), PARAMS)
    assert [len(r.turns) for r in again] == [1, 2, 3, 4] and not any(r.error for r in again)


def test_a_call_cannot_change_the_settings_of_pytorch():
    """Nor can a call that is given up, which ends later."""
    calls = Threads(1, 0.1)

    def settings():
        return torch.get_default_dtype(), torch.is_grad_enabled()

    def rude():
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        time.sleep(2)  # with coverage, Python 3.11 waits until an interrupted thread notices it

    def made(function):
        calls.start("key", ("rude", "step"), function)
        while not (ended := calls.ended(0.1)):
            pass
        return ended[0][1][0]

    assert made(rude) is None
    assert settings() == (torch.float32, True) == made(settings)
    calls.close()
