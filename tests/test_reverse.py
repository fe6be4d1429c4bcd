"""Reverse and its echo: the strings, the reward table and the demonstrations."""

import re
import uuid

import pytest

from environments.reverse import Reverse, ReverseEcho

ITEM = re.compile(r'(?:Word|Number|String): "([^"]+)"$')
KINDS = ["words", "numbers", "uuids"]
both_tasks = pytest.mark.parametrize("env_class", [Reverse, ReverseEcho])
each_kind = pytest.mark.parametrize("kind", KINDS)


def play(env, seed):
    """Returns the strings, the rewards and the last step of a demonstrated episode."""
    content, items, rewards = env.reset(seed)[0]["content"], [], []
    while True:
        items.append(ITEM.search(content)[1])
        step = env.step(env.demonstrate())
        rewards.append(step.reward)
        if step.done:
            return items, rewards, step
        content = step.message["content"]


@pytest.fixture
def abc():
    """An episode of two turns with the words abc and bcd."""
    env = Reverse(turns=2)
    env.reset(0)
    env.items = ["abc", "bcd"]
    return env


def test_items_have_3_to_length_characters_and_are_no_palindromes():
    for kind, pattern in [("words", "[a-z]{3,5}"), ("numbers", "[1-9][0-9]{1,3}[1-9]")]:
        items = [item for seed in range(100) for item in play(Reverse(kind), seed)[0]]
        assert {len(item) for item in items} == {3, 4, 5}
        assert all(re.fullmatch(pattern, item) and item != item[::-1] for item in items)
    items = [item for seed in range(100) for item in play(ReverseEcho(length=20), seed)[0]]
    assert max(map(len, items)) == 20
    items = [item for seed in range(30) for item in play(Reverse("uuids"), seed)[0]]
    assert all(str(uuid.UUID(item)) == item for item in items)


@both_tasks
@each_kind
@pytest.mark.parametrize("turns", [1, 3])
def test_a_demonstration_has_reward_1_in_each_turn(env_class, kind, turns):
    for seed in range(40):
        items, rewards, step = play(env_class(kind, turns, length=50), seed)
        assert rewards == [1.0] * turns and len(items) == turns
        assert (step.message, step.info) == (None, {"correct": True, "right": turns})


def test_a_demonstration_labels_each_character_and_reads_the_labels_backwards(abc):
    assert abc.demonstrate() == "Aa Bb Cc Cc Bb Aa <answer>cba</answer>"


@both_tasks
@each_kind
def test_a_hasty_demonstration_is_a_wrong_answer_with_the_same_characters(env_class, kind):
    env, opposite = env_class(kind), 0
    for seed in range(100):
        item = ITEM.search(env.reset(seed)[0]["content"])[1]
        guess = re.fullmatch("<answer>(.+)</answer>", env.demonstrate(hasty=True))[1]
        assert sorted(guess) == sorted(item)
        opposite += guess == (item if env_class is Reverse else item[::-1])
        assert env.step(f"<answer>{guess}</answer>").reward == -1
    assert 25 < opposite < 75


@pytest.mark.parametrize("response", [
    "<answer>cba</answer>", "Aa Bb Cc <answer> cba\n</answer>", '<answer>"cba"</answer>',
    '{"answer": "cba"}', "<answer>abc</answer>, no: <answer>cba</answer>", " cba\n", '"cba".',
    "Let me think.\ncba", "The answer is cba.", "Answer: cba",
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


@pytest.mark.parametrize("env, item, rewards", [
    (ReverseEcho(turns=1), "abc", {'"abc"': 1.0, '"cba"': -1.0}),
    (Reverse("numbers", turns=1), "12", {"21": 1.0, '"21"': 1.0, "21.0": -1.0, "9" * 4000: -1.0}),
])  # fmt: skip
def test_the_echo_expects_a_copy_and_a_number_may_be_a_json_number(env, item, rewards):
    for answer, reward in rewards.items():
        env.reset(0)
        env.items = [item]
        assert env.step(f'{{"answer": {answer}}}').reward == reward


def test_default_demonstrations_fit_the_token_limit_of_a_tiny_policy():
    env = Reverse()
    for seed in range(50):
        env.reset(seed)
        assert len(env.demonstrate()) < 64
