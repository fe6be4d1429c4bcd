"""Gymnasium environments as text."""

from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest

pytest.importorskip("gymnasium", reason="needs picorl[envs]")

import numpy as np
from gymnasium import spaces

from core.faults import UsageError
from environments.adapters.gymnasium import Gymnasium
from environments.adapters.gymnasium_players import find_game, read_json_action, to_json
from environments.parsing import user
from environments.plumbing.registry import make


@pytest.mark.parametrize(("response", "action"), [
    ("not left, it falls: Right.", 1), (" 1\n", 1),
    ('{"action": "left"} is better than right', 0),
    ("a is 0.1 and v is 1", None),  # numbers of the observation
    ("leftish", None), ('{"action": 2}', None),
])  # fmt: skip
def test_the_last_named_action_counts(response, action):
    assert Gymnasium("CartPole-v1")._read(response) == action


def test_rewards_are_scaled_and_summed_over_repeats():
    env = make("gymnasium:id=CartPole-v1,max_steps=10,repeat=3,scale=0.5")
    env.reset(0)
    steps = [env.step(env.demonstrate()) for _ in range(4)]
    assert [step.reward for step in steps] == [1.5, 1.5, 1.5, 0.5]
    assert [step.done for step in steps] == [False, False, False, True]
    assert not steps[-1].truncated and steps[-1].info == {"correct": True, "steps": 10}


def test_without_memory_each_message_is_fresh_and_repeats_the_rules():
    env, with_memory = Gymnasium("CartPole-v1", memory=False), Gymnasium("CartPole-v1")
    (opening,) = env.reset(3)
    assert with_memory.reset(3) == [opening]
    rules, _ = opening["content"].split("\n")
    fresh, appended = env.step("left"), with_memory.step("left")
    assert (fresh.fresh, appended.fresh) == (True, False)
    assert fresh.message["content"] == f"{rules}\n{appended.message['content']}"
    assert not env.step("up?").fresh  # the hint refers to the message before it


@pytest.mark.parametrize(("space", "valid", "invalid"), [
    (spaces.Box(0, 255, (2,), np.uint8), "[0, 255]",
     ["[0, 256]", "[[0, 1]]", "[0]", '"a"', "null", "{}", "[[0], 1]"]),
    (spaces.Box(0, np.inf, (1,)), "0.5", ["[-2]", "[NaN]", "[[0.5]]"]),
    (spaces.MultiDiscrete([2, 3]), "[1, 2]", ["[2, 0]", "1"]),
    (spaces.Text(3), '"go7"', ['"go on"', '"go!"', "[7]"]),
    (spaces.Dict(say=spaces.Text(9), times=spaces.Discrete(3)), '{"say": "go", "times": 2}',
     ['{"say": "go"}', '{"say": "go", "times": 3}', '{"say": 1, "times": 1}', '"go"']),
])  # fmt: skip
def test_json_action_is_checked_against_its_space(space, valid, invalid):
    for response in (f'so {{"action": {valid}}}', f"<action>{valid}</action>"):
        action = read_json_action(space, response)
        assert space.contains(action)
    assert space.contains(read_json_action(space, to_json(action)))
    for value in invalid:
        assert read_json_action(space, f'{{"action": {value}}}') is None, value


TWO = spaces.Discrete(2)


@pytest.mark.parametrize(("observed", "acted", "words"), [
    (spaces.Box(0, 255, (64, 64, 3), np.uint8), TWO, "observes images"),
    (TWO, spaces.Graph(TWO, TWO), "are not read from text"),
])  # fmt: skip
def test_a_picture_and_a_space_that_no_json_expresses_are_refused(observed, acted, words):
    spec = Namespace(id="Racer", max_episode_steps=9)
    with pytest.raises(UsageError, match=words):
        find_game(Namespace(spec=spec, unwrapped=0, observation_space=observed, action_space=acted))


GAME = """
import string
import gymnasium
from gymnasium import spaces
class Echo(gymnasium.Env):
    "Say the word."
    observation_space = spaces.Text(40)
    action_space = spaces.Text(20, min_length=0, charset=string.printable)
    def __init__(self, word="pear"):
        self.word = word
    def reset(self, *, seed=None, options=None):
        return f"The word is {self.word}.", {}
    def step(self, action):
        return "Done.", float(self.word in action), True, False, {}
class Count(Echo):
    ""
    observation_space, action_space = spaces.Text(40), spaces.Discrete(2, start=5)
    def step(self, action):
        return "", float(action), True, False, {}
"""


def test_a_class_whose_actions_are_texts_reads_the_whole_response(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("echoes.py").write_text(GAME)
    with pytest.raises(UsageError, match=r"write --env gymnasium:id=echoes\.py:Echo"):
        make("echoes.py:Echo")
    env, hint = make("gymnasium:id=echoes.py:Echo,word=plum"), "Answer with a text of at most 20"
    for response, reward in (
        ("a plum!", 1), ('{"action": "plum"}', 1), ("<action>a plum</action>", 1),
        ("a pear", 0), ("ü", -0.1),
    ):  # fmt: skip
        opening = f"Echo.\nSay the word. {hint} characters.\nThe word is plum."
        assert env.reset(0) == [user(opening)]
        step = env.step(response)
        assert (step.reward, step.info["correct"]) == (reward, reward > 0), response
    env = make("gymnasium:id=echoes.py:Count")  # its actions are 5 and 6
    assert " End with a number from 5 to 6.\n" in env.reset(0)[0]["content"]
    assert [env.step(text).reward for text in ("0", "6")] == [-0.1, 6.0]


def test_an_environment_without_words_has_the_rules_of_its_docstring_and_numbers():
    env = make("gymnasium:id=FrozenLake-v1,map_name=8x8,is_slippery=false")
    head, line = env.reset(0)[0]["content"].rsplit("\n", 1)
    assert head.startswith("FrozenLake-v1.\n") and head.endswith(" End with a number from 0 to 3.")
    assert "- 0: Move left" in head and line == "0" and env.demonstrate() is None
    steps = [env.step(move) for move in "22222221111111"]  # 7 right, 7 down
    assert steps[7].message["content"] == "15"  # the end of the second row
    assert [step.done for step in steps] == [False] * 13 + [True] and steps[-1].reward == 1
    assert steps[-1].info["correct"] and not steps[-1].truncated


def test_continuous_actions_are_json_and_a_time_limit_that_is_no_goal_truncates():
    env = make("gymnasium:id=Pendulum-v1,max_steps=2")
    hint = 'End with JSON: {"action": ..}, which is of Box(-2.0, 2.0, (1,), float32).'
    assert f"{hint}\n" in env.reset(0)[0]["content"]
    assert env.step('{"action": [3]}').message["content"] == hint
    assert env.demonstrate() is None and env.trivial() is None
    guess = env.demonstrate(hasty=True)
    first, last = env.step(guess), env.step("<action>0</action>")
    assert -17 < first.reward < 0 and (first.truncated, first.done) == (False, False)
    assert (last.truncated, last.done, last.info["correct"]) == (True, True, False)
    env.reset(0)
    assert env.demonstrate(hasty=True) == guess
