"""Quick environments are called in order, those that wait side by side and within a limit."""

import faulthandler
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from test_env_failures import OneTurn
from test_episodes import PARAMS, Scripted, message

from core import calls, pool
from core.calls import Calls, in_thread
from core.context import Renderer
from core.episodes import RolloutCollector
from core.extras.tools import ToolRenderer
from core.faults import Stopped
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task
from core.terminal.interrupt import Interrupt
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


@pytest.fixture(params=["here", "side by side"])
def way(request, monkeypatch):
    """The two ways in which a pool calls environments."""
    if request.param == "side by side":
        monkeypatch.setattr(OneTurn, "waits", True)
        monkeypatch.setattr(Uneven, "waits", True)
    return request.param


def test_quick_environments_are_called_in_order_in_this_thread(policy, register, way):
    class Seen(OneTurn):
        def reset(self, seed):
            self.seed = seed
            return super().reset(seed)

        def step(self, response):
            order.append(self.seed)
            seen.append((threading.current_thread(), random.random()))
            return super().step(response)

    seen, order, together = [], [], threading.Barrier(4)
    if way == "side by side":

        def step(self, response):  # all four wait for each other
            together.wait(60)
            seen.append((threading.current_thread(), 0))
            return OneTurn.step(self, response)

        Seen.step = step
    register(Seen)
    random.seed(3)
    RolloutCollector(policy, 4).collect(tasks(4), Scripted(policy), PARAMS)
    used = {thread for thread, _ in seen}
    if way == "side by side":
        assert len(used) == 4
    else:
        assert used == {threading.main_thread()}
        random.seed(3)
        assert [drawn for _, drawn in seen] == [random.random() for _ in range(4)]
        assert order == [0, 1, 2, 3]


def test_between_long_calls_the_loop_looks_at_ctrl_c(policy, register, monkeypatch):
    class Long(OneTurn):
        def step(self, response):
            time.sleep(0.02)
            made.append(1)
            return super().step(response)

    register(Long)
    monkeypatch.setattr(pool, "POLL", 0.01)
    made, looks = [], []
    collector = RolloutCollector(policy, 1)
    collector.collect(tasks(4), Scripted(policy), PARAMS, lambda: looks.append(len(made)))
    assert {*looks} == {0, 1, 2, 3, 4}


def test_ctrl_c_is_not_taken_for_an_error_of_the_environment(policy, register):
    class Interrupted(OneTurn):
        def step(self, response):
            signal.raise_signal(signal.SIGINT)
            return super().step(response)

    register(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        RolloutCollector(policy, 4).collect(tasks(2), Scripted(policy), PARAMS)


def test_a_signal_ends_a_quick_call_where_it_is(policy, register):
    """Also one whose code takes every Exception for a reason to go on."""

    class Endless(OneTurn):
        def step(self, response):
            with suppress(Exception):
                signal.raise_signal(signal.SIGINT)
            raise AssertionError("the call goes on")

        def close(self):
            closed.set()

    register(Endless)
    closed = threading.Event()
    with Interrupt() as interrupt, pytest.raises(Stopped):
        collector = RolloutCollector(policy, 4)
        collector.collect(tasks(1), Scripted(policy), PARAMS, interrupt.check_alone)
    assert closed.wait(60) and not calls.LOOKS


def test_a_signal_ends_no_other_thread_than_that_of_the_call(policy, register):
    """With --overlap the main thread trains meanwhile: it ends at a safe point."""

    class Asks(OneTurn):
        def step(self, response):
            begun.set()
            assert go.wait(60)
            return super().step(response)

    register(Asks)
    begun, go = threading.Event(), threading.Event()
    with Interrupt() as interrupt:
        collect = RolloutCollector(policy, 4).collect
        played = in_thread(
            lambda: collect(tasks(1), Scripted(policy), PARAMS, interrupt.check_alone)
        )
        assert begun.wait(60)
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        go.set()
        assert isinstance(played.exception(60), Stopped)  # after the call


def test_a_quick_call_that_lasts_long_shows_its_line(policy, register, monkeypatch):
    class Long(OneTurn):
        def step(self, response):
            time.sleep(0.05)
            seen.append([*armed])
            return super().step(response)

    register(Long)
    seen, armed, said = [], [], []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *a, **b: armed.append((a, b)))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", armed.clear)
    monkeypatch.setattr(pool, "LONG", 0.02)
    collector = RolloutCollector(policy, 1, env_timeout=0.01, say=said.append)
    rollouts = collector.collect(tasks(2), Scripted(policy), PARAMS)
    assert seen == [[((60.0,), {"file": sys.__stderr__})]] * 2 and not armed
    assert [r.error for r in rollouts] == ["", ""]  # --env-timeout is for those that wait
    [line] = said
    assert line.startswith("slow: step() took more than") and "waits = True" in line


def test_the_calls_of_one_environment_are_made_in_turn(policy, register):
    class Two(Pair):
        waits, at_work = True, 0

        def demonstrate(self, agent, hasty=False):
            Two.at_work += 1
            time.sleep(0.02)
            seen.append(Two.at_work)
            Two.at_work -= 1
            return agent

    register(Two)
    seen = []
    rollouts = RolloutCollector(policy, 9).demonstrate([Task("slow", 2, 0)])
    assert len(seen) >= 2 and {*seen} == {1} and not rollouts[0].error


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
def test_episodes_that_move_alone_have_the_same_tokens_and_rewards(
    policy, register, kind, temperature
):
    register(kind)
    policy.stop_ids = sorted({*range(0, 704, 9), *policy.stop_ids})
    policy.max_length = 150  # some contexts are full
    params = SamplingParams(10, temperature, seed=5)
    one_by_one = RolloutCollector(policy, 3, env_workers=1)
    expected = one_by_one.collect(tasks(12), TorchSampler(policy), params)
    register(type("Alone", (kind,), {"waits": True, "alone": True}))
    sampler, alone = TorchSampler(policy), []
    add = sampler.add
    sampler.add = lambda request: alone.append(request.alone) or add(request)
    rollouts = RolloutCollector(policy, 3).collect(tasks(12), sampler, params)
    assert all(alone)  # NanoLLM then draws by seeds
    for found, rollout in zip(rollouts, expected, strict=True):
        assert found.messages == rollout.messages and not found.error
        assert (found.seed, found.agent) == (rollout.seed, rollout.agent)
        assert [t.completion_ids for t in found.turns] == [t.completion_ids for t in rollout.turns]
        assert [t.reward for t in found.turns] == [t.reward for t in rollout.turns]
        assert found.episode_truncated == rollout.episode_truncated
    assert len({len(r.turns) for r in expected}) >= 2
    assert kind is Pair or any(r.episode_truncated for r in expected)


def test_the_first_of_those_that_wait_is_built_alone(policy, register, monkeypatch):
    """What it reads, such as a data set that a function caches, is there for the others."""

    class Reads(OneTurn):
        waits, building, seen = True, 0, []

        def __init__(self):
            Reads.building += 1
            time.sleep(0.05 if not Reads.seen else 0)
            Reads.seen.append(Reads.building)
            Reads.building -= 1

    register(Reads)
    monkeypatch.setattr(pool, "BUILT", set())
    rollouts = RolloutCollector(policy, 1).collect(tasks(8), Scripted(policy), PARAMS)
    assert Reads.seen[0] == 1 and len(Reads.seen) == 8 and not any(r.error for r in rollouts)


def test_a_failure_costs_its_own_episode(policy, register, way):
    class Faulty(Uneven):
        def reset(self, seed):
            if seed == 1:
                raise OSError("no disk")
            return super().reset(seed)

        def step(self, response):
            if self.seed == 2:
                go.wait(60 if waits else 0)
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

    closed, go, waits = [], threading.Event(), way == "side by side"
    register(Faulty)
    collector = RolloutCollector(policy, 9, env_timeout=1.0)
    rollouts = collector.collect(tasks(8), Partial(policy), PARAMS)
    assert [r.error.partition(" (test_calls.py")[0] for r in rollouts] == [
        "", "OSError: no disk",
        "TimeLimit: no answer in 1 seconds (--env-timeout)" if waits else "",
        "EnvFailure: gone", "", "", "EnvFailure: no server", "",
    ]  # fmt: skip
    assert [len(r.turns) for r in rollouts] == [1, 0, 1 if waits else 3, 3, 1, 2, 0, 4]
    collector.close()
    assert closed and (2 in closed) != waits  # it is still at work
    go.set()


def test_what_a_call_still_returns_after_its_limit_is_dropped():
    made, go = Calls(1, 0.05), threading.Event()

    def ended():
        while not (found := made.ended(0.01)):
            pass
        [(key, (value, error))] = found
        return key, value, type(error)

    made.start("hangs", lambda: go.wait(60))
    assert ended() == ("hangs", None, calls.TimeLimit)
    made.start("unlimited", lambda: time.sleep(0.1) or 3, limited=False)
    go.set()
    assert ended() == ("unlimited", 3, type(None))
    made.start("forgotten", time.monotonic)
    assert made.clear() == ["forgotten"] and not made.ended(0.1) and not made.num_open


def test_heavy_environments_are_capped_reused_and_closed(policy, register, way):
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
    for number in (4, 2):
        collector.collect([Task("slow", 0, i) for i in range(number)], Scripted(policy), PARAMS)
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
