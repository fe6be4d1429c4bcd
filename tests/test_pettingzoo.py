"""Our multi-agent environments as PettingZoo environments."""

import warnings

import pytest

pytest.importorskip("pettingzoo")

from pettingzoo.test import parallel_api_test

from core.types import UsageError
from environments.adapters.pettingzoo import as_pettingzoo
from environments.base import MultiAgentEnv, Step
from environments.parsing import user


class Alternating(MultiAgentEnv):
    """Agents a and b act in turn, `turns` times in all; the last to act wins."""

    def __init__(self, turns=5):
        self.turns = turns

    def reset(self, seed):
        self.left = self.turns
        self.agent = "ab"[seed % 2]
        self.responses = []
        return {self.agent: [user(f"seed {seed}"), user("begin")]}

    def step(self, responses):
        assert list(responses) == [self.agent]
        self.responses.append(responses[self.agent])
        previous, self.agent = self.agent, "ab"[self.agent == "a"]
        self.left -= 1
        if self.left == 0:
            won = {"correct": True}
            return {previous: Step(None, 1, True, won), self.agent: Step(None, -1, True)}
        return {
            previous: Step(None, 0.0, False),
            self.agent: Step(user(f"{previous}: {responses[previous]}"), 0.0, False),
        }


class Simultaneous(MultiAgentEnv):
    """Agents a, b and c act at once; a leaves after turn 1, b after turn 2, c after turn 3."""

    def reset(self, seed):
        self.turn = 0
        return {agent: [user("go")] for agent in "abc"}

    def step(self, responses):
        self.turn += 1
        done = {agent: "abc".index(agent) < self.turn for agent in responses}
        return {a: Step(None if done[a] else user("go"), 0.5, done[a]) for a in responses}


@pytest.mark.parametrize(("env", "agents"), [(Alternating(), "ab"), (Simultaneous(), "abc")])
def test_as_pettingzoo_passes_pettingzoos_checker(env, agents):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(as_pettingzoo(env, list(agents)), num_cycles=20)


def test_only_the_action_of_the_asked_agent_counts():
    alternating = Alternating(turns=3)
    env = as_pettingzoo(alternating, ["a", "b"])
    observations, infos = env.reset(seed=1)
    assert observations == {"a": "", "b": "seed 1\n\nbegin"}
    assert infos == {"a": {"asked": False}, "b": {"asked": True}}
    observations, rewards, terminated, truncated, infos = env.step({"a": "psst", "b": "hello"})
    assert observations == {"a": "b: hello", "b": ""} and rewards == {"a": 0, "b": 0}
    assert terminated == truncated == {"a": False, "b": False}
    assert infos["a"]["asked"] and env.agents == ["a", "b"]
    env.step({"a": "hi"})
    assert alternating.responses == ["hello", "hi"]
    observations, rewards, terminated, _, infos = env.step({"b": "bye"})
    assert rewards == {"a": -1, "b": 1} and terminated == {"a": True, "b": True}
    assert infos == {"a": {"asked": False}, "b": {"asked": False, "correct": True}}
    assert env.agents == [] and observations == {"a": "", "b": ""}


def test_agents_leave_one_by_one():
    env = as_pettingzoo(Simultaneous(), ["a", "b", "c"])
    env.reset(seed=0)
    history = []
    while env.agents:
        _, rewards, *_ = env.step(dict.fromkeys(env.agents, "x"))
        history.append((sorted(rewards), env.agents))
    assert history == [(["a", "b", "c"], ["b", "c"]), (["b", "c"], ["c"]), (["c"], [])]


def test_seed_selects_the_task_and_later_resets_draw_from_it():
    env, other = (as_pettingzoo(Alternating(), ["a", "b"]) for _ in range(2))
    assert env.reset(seed=6)[0]["a"].startswith("seed 6\n")
    other.reset(seed=6)
    drawn = [env.reset()[0] for _ in range(3)]
    assert drawn == [other.reset()[0] for _ in range(3)] and drawn[0] != drawn[1]


def test_agent_that_was_not_named_is_a_usage_error():
    with pytest.raises(UsageError, match=r": b$"):
        as_pettingzoo(Simultaneous(), ["a", "c"]).reset(seed=0)
