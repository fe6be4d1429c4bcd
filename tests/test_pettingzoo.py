"""PettingZoo environments as text for several agents."""

import pytest

pytest.importorskip("pettingzoo", reason="needs picorl[envs]")

import pettingzoo
from gymnasium import spaces

from environments.adapters.gymnasium_players import Game
from environments.adapters.pettingzoo import PettingZoo


class Nim(pettingzoo.AECEnv):
    """Take one to three of the matches; who takes the last one wins."""

    metadata = {"name": "nim"}  # noqa: RUF012

    def __init__(self, matches=5, most=3):
        self.matches, self.most, self.possible_agents = matches, most, ["ann", "bob"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(99))

    def observation_space(self, agent):
        return spaces.Dict(
            observation=spaces.Discrete(99), action_mask=spaces.MultiBinary(self.most)
        )

    def action_space(self, agent):
        return spaces.Discrete(self.most)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.left, self.agent_selection = self.matches + (seed or 0) % 2, "ann"
        self.rewards = dict.fromkeys(self.agents, 0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}

    def observe(self, agent):
        return {"observation": self.left, "action_mask": [n < self.left for n in range(self.most)]}

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent]:
            return self._was_dead_step(action)
        self._cumulative_rewards[agent] = 0
        self.left -= action + 1
        other = "ann" if agent == "bob" else "bob"
        if self.left == 0:
            self.rewards = {agent: 1, other: -1}
            self.terminations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self.agent_selection = other


@pytest.fixture(autouse=True)
def registered():
    if "test/nim-v0" not in pettingzoo.aec_registry:
        pettingzoo.register("aec", "test/nim-v0", entry_point=Nim)


def test_pettingzoo_agents_act_in_turn_with_legal_actions():
    env = PettingZoo("test/nim-v0", matches=4)
    [(agent, [message])] = env.reset(0).items()
    assert agent == "ann" and message["content"].endswith("\n4\nLegal: 0 1 2")
    assert "who takes the last one wins." in message["content"]  # the docstring
    assert "You are ann. End with a number from 0 to 2." in message["content"]
    [(agent, step)] = env.step({"ann": "2"}).items()
    assert (agent, step.reward, step.done) == ("bob", 0, False)
    assert step.message["content"].endswith("You are bob. End with a number from 0 to 2.\n1\n"
                                            "Legal: 0")  # fmt: skip
    illegal = env.step({"bob": "1"})
    assert list(illegal) == ["bob"] and illegal["bob"].reward == -0.1
    assert illegal["bob"].message["content"] == "End with a number from 0 to 2."
    last = env.step({"bob": '{"action": 0}'})
    assert {a: (s.reward, s.done, s.truncated, s.info) for a, s in last.items()} == {
        "ann": (-1, True, False, {"correct": False}), "bob": (1, True, False, {"correct": True}),
    }  # fmt: skip
    assert env.reset(1)["ann"][0]["content"].endswith("\n5\nLegal: 0 1 2")  # the seed


def test_an_action_of_words_outside_the_space_is_invalid(monkeypatch):
    game = Game("Nim.", ("one", "two", "three"), read={"one": 0, "seven": 6, "minus": -1}.get)
    monkeypatch.setattr("environments.adapters.gymnasium.import_attribute", lambda *_: game)
    env = PettingZoo("test/nim-v0", words="a:b")
    rules = "Nim. You are ann. End with one or two or three.\n"
    assert env.reset(0)["ann"][0]["content"].startswith(rules)
    for response in ("seven", "minus"):
        refused = env.step({"ann": response})["ann"]
        assert (refused.reward, refused.done) == (-0.1, False)
        assert refused.message["content"] == "End with one or two or three."
    assert list(env.step({"ann": "one"})) == ["bob"]
