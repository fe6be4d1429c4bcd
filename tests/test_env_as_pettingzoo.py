"""Our games as PettingZoo's: its own API test, who is asked, when an agent's life ends."""

import sys
import warnings

import pytest

pytest.importorskip("pettingzoo")

from pettingzoo.test import parallel_api_test

from core.types import UsageError
from environments.adapters.as_pettingzoo import as_pettingzoo
from environments.base import MultiAgentEnv, Step
from environments.parsing import user


class Count(MultiAgentEnv):
    """Two players take turns to say anything, `turns` times in all; the last to speak wins."""

    def __init__(self, turns=5):
        self.turns = turns

    def reset(self, seed):
        self.left = self.turns
        self.mover = "ab"[seed % 2]
        self.heard = []
        return {self.mover: [user(f"seed {seed}"), user("begin")]}

    def step(self, responses):
        assert list(responses) == [self.mover]
        self.heard.append(responses[self.mover])
        mover, self.mover = self.mover, "ab"[self.mover == "a"]
        self.left -= 1
        if self.left == 0:
            won = {"correct": True}
            return {mover: Step(None, 1, True, won), self.mover: Step(None, -1, True)}
        return {
            mover: Step(None, 0.0, False),
            self.mover: Step(user(f"{mover}: {responses[mover]}"), 0.0, False),
        }


class Together(MultiAgentEnv):
    """Three players at once; each leaves after as many turns as its place in the alphabet."""

    def reset(self, seed):
        self.turn = 0
        return {agent: [user("go")] for agent in "abc"}

    def step(self, responses):
        self.turn += 1
        done = {agent: "abc".index(agent) < self.turn for agent in responses}
        return {a: Step(None if done[a] else user("go"), 0.5, done[a]) for a in responses}


@pytest.mark.parametrize("env, agents", [(Count(), "ab"), (Together(), "abc")])
def test_pettingzoo_finds_no_fault(env, agents):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(as_pettingzoo(env, list(agents)), num_cycles=20)


def test_only_the_asked_agent_is_heard():
    ours = Count(turns=3)
    env = as_pettingzoo(ours, ["a", "b"])
    observations, infos = env.reset(seed=1)
    assert observations == {"a": "", "b": "seed 1\n\nbegin"}
    assert infos == {"a": {"asked": False}, "b": {"asked": True}}
    observations, rewards, terminated, truncated, infos = env.step({"a": "psst", "b": "hello"})
    assert observations == {"a": "b: hello", "b": ""} and rewards == {"a": 0, "b": 0}
    assert terminated == truncated == {"a": False, "b": False}
    assert infos["a"]["asked"] and env.agents == ["a", "b"]
    env.step({"a": "hi"})
    assert ours.heard == ["hello", "hi"]
    observations, rewards, terminated, _, infos = env.step({"b": "bye"})
    assert rewards == {"a": -1, "b": 1} and terminated == {"a": True, "b": True}
    assert infos == {"a": {"asked": False}, "b": {"asked": False, "correct": True}}
    assert env.agents == [] and observations == {"a": "", "b": ""}


def test_agents_leave_one_by_one():
    env = as_pettingzoo(Together(), ["a", "b", "c"])
    env.reset(seed=0)
    living = []
    while env.agents:
        _, rewards, *_ = env.step(dict.fromkeys(env.agents, "x"))
        living.append((sorted(rewards), env.agents))
    assert living == [(["a", "b", "c"], ["b", "c"]), (["b", "c"], ["c"]), (["c"], [])]


def test_a_seed_names_our_task_and_later_resets_draw_from_it():
    env, other = (as_pettingzoo(Count(), ["a", "b"]) for _ in range(2))
    assert env.reset(seed=6)[0]["a"].startswith("seed 6\n")
    other.reset(seed=6)
    drawn = [env.reset()[0] for _ in range(3)]
    assert drawn == [other.reset()[0] for _ in range(3)] and drawn[0] != drawn[1]


def test_an_agent_that_was_not_named_is_an_error():
    with pytest.raises(UsageError, match="other agents too: b"):
        as_pettingzoo(Together(), ["a", "c"]).reset(seed=0)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(UsageError, match="needs pettingzoo: pip install"):
        as_pettingzoo(Count(), ["a", "b"])
