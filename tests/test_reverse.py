"""Reverse and its echo: the strings, the reward table and the demonstrations."""

import pytest

from environments.reverse import Reverse, ReverseEcho


@pytest.fixture
def abc():
    """An episode of two turns with the words abc and bcd."""
    env = Reverse(turns=2)
    env.reset(0)
    env.items = ["abc", "bcd"]
    return env


@pytest.mark.parametrize("response", [
    "Aa Bb Cc <answer> cba\n</answer>", '<answer>"cba"</answer>', '"cba".', "The answer is cba.",
])  # fmt: skip
def test_the_reversed_word_is_right_in_each_format(abc, response):
    step = abc.step(response)
    assert (step.reward, step.done) == (1.0, False)
    assert step.message == {"role": "user", "content": 'Right. Word: "bcd"'}
    assert step.info == {"correct": False, "right": 1}


@pytest.mark.parametrize("response", [
    "<answer>abc</answer>", "<answer>CBA</answer>", "<answer>c b a</answer>",
    "<answer>cba</answer> or <answer>abc</answer>", "<answer></answer>", "<answer>cba",
    '{"answer": ["cba"]}', "cba, I think", "",
])  # fmt: skip
def test_a_wrong_or_missing_answer_has_reward_minus_1_and_ends_the_episode(abc, response):
    step = abc.step(response)
    assert (step.reward, step.done, step.message) == (-1.0, True, None)
    assert step.info == {"correct": False, "right": 0}


def test_the_echo_expects_a_copy():
    env = ReverseEcho(turns=1)
    for answer, reward in {"abc": 1.0, "cba": -1.0}.items():
        env.reset(0)
        env.items = ["abc"]
        assert env.step(f'{{"answer": "{answer}"}}').reward == reward
