"""Reverse and its echo: which answers are right, and what they earn."""

import pytest

from environments.reverse import Reverse, ReverseEcho

ANSWERS = {  # to the word abc
    1.0: ["Aa Bb Cc <answer> cba\n</answer>", '<answer>"cba"</answer>', '"cba".',
          "The answer is cba."],
    -1.0: ["<answer>abc</answer>", "<answer>CBA</answer>", "<answer>c b a</answer>",
           "<answer>cba</answer> or <answer>abc</answer>", "<answer></answer>", "<answer>cba",
           '{"answer": ["cba"]}', "cba, I think", ""],
}  # fmt: skip


@pytest.mark.parametrize("reward, response", [
    (reward, response) for reward, responses in ANSWERS.items() for response in responses
])  # fmt: skip
def test_a_right_answer_goes_on_and_a_wrong_or_missing_one_ends_the_episode(reward, response):
    env = Reverse(turns=2)
    env.reset(0)
    env.items = ["abc", "bcd"]
    step, is_right = env.step(response), reward > 0
    assert (step.reward, step.done) == (reward, not is_right)
    assert step.info == {"correct": False, "right": int(is_right)}
    right = {"role": "user", "content": 'Right. Word: "bcd"'}
    assert step.message == (right if is_right else None)


def test_the_echo_expects_a_copy():
    env = ReverseEcho(turns=1)
    for answer, reward in {"abc": 1.0, "cba": -1.0}.items():
        env.reset(0)
        env.items = ["abc"]
        assert env.step(f'{{"answer": "{answer}"}}').reward == reward
