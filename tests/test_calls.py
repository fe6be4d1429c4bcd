"""Quick environments are called in order, those that wait side by side, each within its limit."""

import asyncio
import os
import random
import signal
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from test_env_failures import OneTurn
from test_episodes import PARAMS, Scripted, message

from core import calls, pool
from core.calls import Calls, call_here
from core.context import Renderer
from core.episodes import RolloutCollector
from core.extras.tools import ToolRenderer
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task
from environments.base import EndRun, Env, EnvFailure, MultiAgentEnv, Step
from environments.plumbing import registry
from environments.plumbing.registry import place_of


@pytest.fixture
def register(monkeypatch):
    def add(kind):
        monkeypatch.setitem(registry.ENVIRONMENTS, "slow", kind)
        return kind

    return add


def tasks(number):
    return [Task("slow", seed, seed) for seed in range(number)]


HAS_ALARM = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no alarm")


@pytest.fixture(params=["here", "in one thread", "side by side"])
def way(request, monkeypatch):
    """The three ways in which a pool calls environments."""
    if request.param == "here" and not hasattr(signal, "SIGALRM"):
        pytest.skip("Windows has no alarm")
    if request.param == "in one thread":  # as under --overlap, and on Windows
        monkeypatch.setattr(pool, "can_call_here", lambda: False)
    if request.param == "side by side":
        monkeypatch.setattr(OneTurn, "waits", True)
        monkeypatch.setattr(Uneven, "waits", True)
    return request.param


def test_quick_environments_are_called_by_one_thread_in_order(policy, register, way):
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
        assert len(used) == 1 and (threading.main_thread() in used) == (way == "here")
        random.seed(3)
        assert [drawn for _, drawn in seen] == [random.random() for _ in range(4)]
        assert order == [0, 1, 2, 3]


@HAS_ALARM
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


@HAS_ALARM
def test_environments_may_run_asyncio_in_a_notebook(policy, register):
    class Asks(OneTurn):
        def step(self, response):
            asyncio.run(asyncio.sleep(0))
            return super().step(response)

    async def cell():  # a notebook has a running loop
        rollouts = RolloutCollector(policy, 1).collect(tasks(2), Scripted(policy), PARAMS)
        assert asyncio.get_running_loop()  # as before
        return rollouts

    register(Asks)
    assert [r.error for r in asyncio.run(cell())] == ["", ""]


@HAS_ALARM
def test_ctrl_c_is_not_taken_for_an_error_of_the_environment(policy, register):
    class Interrupted(OneTurn):
        def step(self, response):
            signal.raise_signal(signal.SIGINT)
            return super().step(response)

    register(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        RolloutCollector(policy, 4).collect(tasks(2), Scripted(policy), PARAMS)


def never(seconds, frame):
    """A `look` that sees nothing."""


@HAS_ALARM
@pytest.mark.parametrize("own_alarm", [False, True])
def test_an_endless_loop_ends_at_its_limit_also_after_an_alarm_of_its_own(monkeypatch, own_alarm):
    monkeypatch.setattr(calls, "LOOK", 0.05)

    def loops():
        if own_alarm:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.alarm(60)
            signal.alarm(0)
        with suppress(calls.Overdue):  # it is raised again
            while True:
                sum(range(1000))
        while True:
            sum(range(1000))

    def settings():
        numbers, timers = (signal.SIGALRM, signal.SIGVTALRM), (signal.ITIMER_REAL, 1)
        return [*map(signal.getsignal, numbers), *map(signal.getitimer, timers)]

    before = settings()
    value, error = call_here(loops, 0.2, never)
    assert value is None and str(error) == "no answer in 0.2 seconds (--env-timeout)"
    assert place_of(error).startswith(" (test_calls.py, line ")
    assert settings() == before


@HAS_ALARM
def test_a_loop_that_catches_everything_ends_too(monkeypatch):
    monkeypatch.setattr(calls, "LOOK", 0.02)

    def retries():
        while True:
            try:  # noqa: SIM105
                time.sleep(600)
            except BaseException:  # as `except:`
                pass

    _, error = call_here(retries, 0.05, never)
    assert isinstance(error, calls.TimeLimit) and place_of(error)


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


def test_what_ends_the_run_in_the_last_episode_closes_its_environment(policy, register, way):
    closed = threading.Event()

    class Ends(OneTurn):
        def step(self, response):
            raise EndRun("it cannot go on")

        def close(self):
            closed.set()

    register(Ends)
    with pytest.raises(EndRun):
        RolloutCollector(policy, 1).collect(tasks(1), Scripted(policy), PARAMS)
    assert closed.wait(60)


def test_others_do_not_wait_for_ever_for_the_first_environment(policy, register, monkeypatch):
    class Slow(OneTurn):
        waits, built, met = True, [], []

        def __init__(self):
            Slow.built.append(1)
            if len(Slow.built) == 1:
                Slow.met.append(all_others.wait(60))
            elif len(Slow.built) == 4:
                all_others.set()

    register(Slow)
    all_others = threading.Event()
    monkeypatch.setattr(pool, "LONG", 0.1)
    monkeypatch.setattr(pool, "FIRST", threading.Lock())
    monkeypatch.setattr(pool, "BUILT", set())
    rollouts = RolloutCollector(policy, 1).collect(tasks(4), Scripted(policy), PARAMS)
    assert Slow.met == [True] and not any(r.error for r in rollouts)


@HAS_ALARM
def test_who_looks_at_a_call_may_end_it(monkeypatch):
    """As the first Ctrl-C does."""
    monkeypatch.setattr(calls, "LOOK", 0.01)
    looks = []

    def look(seconds, frame):
        looks.append(seconds)
        if len(looks) == 3:
            raise RuntimeError("the run ends")

    with pytest.raises(RuntimeError, match="the run ends"):
        call_here(lambda: time.sleep(600), 1e9, look)
    assert len(looks) == 3 and looks == sorted(looks)


def test_what_takes_long_is_named_once_and_told_what_to_declare(policy, register, way, monkeypatch):
    class Long(OneTurn):
        def step(self, response):
            time.sleep(0.02)
            return super().step(response)

    register(Long)
    monkeypatch.setattr(pool, "LONG", 0.05)
    said = []
    collector = RolloutCollector(policy, 1, say=said.append)
    for _ in range(2):
        collector.collect(tasks(8), Scripted(policy), PARAMS)
    if way == "side by side":
        assert not said
    else:
        assert [line.partition(" takes long: ")[0] for line in said] == ["slow: step()"]
        assert "set waits = True in its class" in said[0]


def test_the_working_directory_is_put_back(policy, register, way, tmp_path):
    class Leaves(OneTurn):
        def reset(self, seed):
            self.seed = seed
            return super().reset(seed)

        def step(self, response):
            if self.seed == 1:
                os.chdir(tmp_path)
            return super().step(response)

    register(Leaves)
    folder = os.getcwd()
    assert folder != str(tmp_path)
    for number in (2, 2):
        collector = RolloutCollector(policy, 1, env_workers=1)
        rollouts = collector.collect(tasks(number), Scripted(policy), PARAMS)
        assert [r.error.partition(" (")[0] for r in rollouts] == [
            "", "RuntimeError: the environment changed the working directory"
        ]  # fmt: skip
        assert os.getcwd() == folder


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


def test_a_failure_costs_its_own_episode(policy, register, way):
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
    collector = RolloutCollector(policy, 9, env_timeout=1.0)
    rollouts = collector.collect(tasks(8), Partial(policy), PARAMS)
    assert [r.error.partition(" (test_calls.py")[0] for r in rollouts] == [
        "", "OSError: no disk", "TimeLimit: no answer in 1 seconds (--env-timeout)",
        "EnvFailure: gone", "", "", "EnvFailure: no server", "",
    ]  # fmt: skip
    assert [len(r.turns) for r in rollouts] == [1, 0, 1, 3, 1, 2, 0, 4]
    collector.close()
    assert closed and 2 not in closed  # it is still at work


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


def test_a_call_cannot_change_the_settings_of_pytorch(policy, register, way):
    """Nor can a call that is given up, which ends later."""

    class Rude(OneTurn):
        def reset(self, seed):
            self.seed = seed
            return super().reset(seed)

        def step(self, response):
            assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
            if self.seed == 1:
                time.sleep(2)
            return super().step(response)

    register(Rude)
    collector = RolloutCollector(policy, 1, env_timeout=0.2, env_workers=1)
    with torch.no_grad():
        rollouts = collector.collect(tasks(3), Scripted(policy), PARAMS)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    assert [r.error.partition(":")[0] for r in rollouts] == ["", "TimeLimit", ""]


def test_a_thread_whose_call_was_given_up_makes_no_other_one():
    made, go, late = Calls(1, 0.05, interrupts=True), threading.Event(), []

    def ended():
        while not (found := made.ended(0.01)):
            pass
        [(key, (value, error))] = found
        return key, value, type(error)

    made.start("hangs", lambda: go.wait(60), lambda outcome: late.append(outcome))
    assert ended() == ("hangs", None, calls.TimeLimit)
    made.start("next", threading.get_ident)
    _, first, _ = ended()
    made.start("unlimited", lambda: time.sleep(0.2) or threading.get_ident(), limited=False)
    assert ended() == ("unlimited", first, type(None))  # in the same thread, beyond the limit
    made.start("finished", lambda: 3, lambda outcome: (outcome[0] + 1, OSError()))
    assert ended() == ("finished", 4, OSError)

    def fails(outcome):
        raise OSError("the folder is gone")

    made.start("unfinished", lambda: 3, fails)
    assert ended() == ("unfinished", None, OSError)
    go.set()
    assert made.num_open == 0 and not made.ended(
        0.1
    )  # the outcome of the call that was given up is dropped
    assert not late
    made.start("forgotten", time.monotonic)
    made.clear()
    assert not made.ended(0.1)
    made.close()


@pytest.mark.parametrize("interrupts", [True, False])
def test_python_code_that_was_given_up_is_interrupted(interrupts):
    made, threads, go = Calls(1, 0.05, interrupts), [], threading.Event()

    def loops():
        threads.append(threading.current_thread())
        while not go.is_set():
            time.sleep(0.001)

    made.start("loops", loops)
    while not (found := made.ended(0.01)):
        pass
    assert isinstance(found[0][1][1], calls.TimeLimit)
    threads[0].join(60 if interrupts else 0.2)
    assert threads[0].is_alive() != interrupts
    go.set()


@pytest.mark.skipif(not calls.can_call_here(), reason="Windows has no alarm")
def test_the_other_timer_may_ring_in_a_look_and_while_the_first_is_caught(monkeypatch):
    outcome = calls._outcome

    def interrupted_again(function):
        outcome(function)
        raise calls.Overdue

    def turns():
        while True:
            pass

    monkeypatch.setattr(calls, "_outcome", interrupted_again)
    ring = signal.SIGVTALRM  # and in the middle of a look
    value, error = calls.call_here(turns, 0.05, lambda seconds, frame: signal.raise_signal(ring))
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert value is None and isinstance(error, calls.TimeLimit) and frames[-1] == "turns"
