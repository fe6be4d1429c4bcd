"""Reverse and its echo: who may see which string, what pays, and that nothing breaks it."""

import random
import re
import time
import uuid
import zlib

import pytest

from core.types import UsageError
from environments.base import DEMO_SEEDS, EVAL_SEEDS, TRAIN_SEEDS
from environments.registry import make
from environments.reverse import Reverse, ReverseEcho

ITEM = re.compile(r'(?:Word|Number|String): "([^"]+)"$')
KINDS = ["words", "numbers", "uuids"]


def play(env, seed, hasty=False):
    """The strings shown, the rewards and the last step of an episode as it is demonstrated."""
    content, items, rewards = env.reset(seed)[0]["content"], [], []
    while True:
        items.append(ITEM.search(content)[1])
        step = env.step(env.demonstrate(hasty))
        rewards.append(step.reward)
        if step.done:
            return items, rewards, step
        content = step.message["content"]


@pytest.fixture
def abc():
    """Two turns of which the first shows abc and the second bcd."""
    env = Reverse(turns=2)
    env.reset(0)
    env.items = ["abc", "bcd"]
    return env


def test_both_names_are_registered_with_their_options():
    assert type(make("reverse:kind=numbers,turns=2,length=8")) is Reverse
    assert type(make("reverse_echo:kind=uuids,turns=1")) is ReverseEcho


@pytest.mark.parametrize("option", ["kind=letters", "turns=0", "length=2", "length=51"])
@pytest.mark.parametrize("name", ["reverse", "reverse_echo"])
def test_an_impossible_option_is_refused_in_one_line(name, option):
    with pytest.raises(UsageError) as refusal:
        make(f"{name}:{option}")
    assert "\n" not in str(refusal.value)


def test_words_and_numbers_have_3_to_length_characters_and_no_zero_at_an_end():
    for kind, pattern in [("words", "[a-z]{3,5}"), ("numbers", "[1-9][0-9]{1,3}[1-9]")]:
        items = [item for seed in range(200) for item in play(Reverse(kind), seed)[0]]
        assert {len(item) for item in items} == {3, 4, 5}
        assert all(re.fullmatch(pattern, item) for item in items)


def test_length_bounds_the_longest_word():
    items = [item for seed in range(200) for item in play(Reverse(length=20), seed)[0]]
    assert max(map(len, items)) == 20


def test_uuids_are_uuids():
    for seed in range(50):
        for item in play(Reverse("uuids"), seed)[0]:
            assert str(uuid.UUID(item)) == item


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("env_class", [Reverse, ReverseEcho])
def test_no_item_reads_the_same_backwards(env_class, kind):
    for seed in range(200):
        assert all(item != item[::-1] for item in play(env_class(kind, length=3), seed)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_strings_of_evaluation_never_appear_in_training_or_demonstrations(kind):
    env = Reverse(kind)
    for seeds, held_out in [(TRAIN_SEEDS, False), (DEMO_SEEDS, False), (EVAL_SEEDS, True)]:
        for seed in seeds[:200]:
            for item in play(env, seed)[0]:
                assert (zlib.crc32(item.encode()) % 8 == 0) is held_out


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_is_the_same_episode_whatever_was_played_before(kind):
    env = Reverse(kind)
    first = env.reset(3), env.demonstrate(hasty=True), play(env, 3)[0]
    assert play(env, 4)[0] != first[2]
    random.seed(0)
    assert (env.reset(3), env.demonstrate(hasty=True), play(env, 3)[0]) == first
    assert play(Reverse(kind), 3)[0] == first[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("env_class", [Reverse, ReverseEcho])
def test_a_demonstration_earns_1_a_turn(env_class, kind):
    for turns in (1, 3):
        for seed in range(100):
            items, rewards, step = play(env_class(kind, turns, length=50), seed)
            assert rewards == [1.0] * turns and len(items) == turns
            assert (step.message, step.info) == (None, {"correct": True, "right": turns})


def test_a_demonstration_marks_each_character_and_reads_the_marks_backwards(abc):
    assert abc.demonstrate() == "Aa Bb Cc Cc Bb Aa <answer>cba</answer>"


def test_an_echo_is_demonstrated_as_it_stands():
    env = ReverseEcho()
    item = ITEM.search(env.reset(0)[0]["content"])[1]
    assert env.demonstrate() == f"<answer>{item}</answer>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("env_class", [Reverse, ReverseEcho])
def test_a_hasty_demonstration_is_a_wrong_answer_of_the_same_characters(env_class, kind):
    unturned = 0
    for seed in range(100):
        env = env_class(kind)
        item = ITEM.search(env.reset(seed)[0]["content"])[1]
        guess = re.fullmatch("<answer>(.+)</answer>", env.demonstrate(hasty=True))[1]
        assert sorted(guess) == sorted(item)
        assert env.demonstrate(hasty=True) == f"<answer>{guess}</answer>"  # the same when repeated
        unturned += guess == (item if env_class is Reverse else item[::-1])
        assert env.step(env.demonstrate(hasty=True)).reward == -1
    assert 25 < unturned < 75


@pytest.mark.parametrize(
    "response",
    [
        "<answer>cba</answer>",
        "Aa Bb Cc <answer> cba\n</answer>",
        '<answer>"cba"</answer>',
        '{"answer": "cba"}',
        'I first had {"answer": "abc"}, but {"answer": "cba"}',
        "<answer>abc</answer>, no: <answer>cba</answer>",
        "cba",
        " cba\n",
        '"cba".',
        "Let me think.\ncba",
        "The answer is cba.",
        "Answer: cba",
    ],
)
def test_the_reversed_word_counts_in_each_form(abc, response):
    step = abc.step(response)
    assert (step.reward, step.done) == (1.0, False)
    assert step.message == {"role": "user", "content": 'Right. Word: "bcd"'}
    assert step.info == {"correct": False, "right": 1}


@pytest.mark.parametrize(
    "response",
    [
        "<answer>abc</answer>",
        "<answer>CBA</answer>",
        "<answer>c b a</answer>",
        "<answer>cba</answer> or <answer>abc</answer>",
        "<answer></answer>",
        "<answer>cba",
        '{"answer": ["cba"]}',
        '{"answer": null}',
        "cba, I think",
        "",
    ],
)
def test_a_wrong_or_unreadable_answer_costs_1_and_ends_the_episode(abc, response):
    step = abc.step(response)
    assert (step.reward, step.done, step.message) == (-1.0, True, None)
    assert step.info == {"correct": False, "right": 0}


def test_an_error_after_a_right_answer_leaves_what_was_earned(abc):
    rewards = [abc.step("<answer>cba</answer>").reward, abc.step("<answer>bcd</answer>").reward]
    assert rewards == [1.0, -1.0]
    assert abc.items == ["abc", "bcd"]


def test_an_echo_pays_for_the_word_itself():
    env = ReverseEcho(turns=1)
    for answer, reward in [("abc", 1.0), ("cba", -1.0)]:
        env.reset(0)
        env.items = ["abc"]
        assert env.step(f"<answer>{answer}</answer>").reward == reward


def test_a_number_may_be_answered_as_a_number():
    env = Reverse("numbers", turns=1)
    for answer, reward in [("21", 1.0), ('"21"', 1.0), ("21.0", -1.0), ("9" * 4000, -1.0)]:
        env.reset(0)
        env.items = ["12"]
        assert env.step(f'{{"answer": {answer}}}').reward == reward


def test_a_demonstrated_default_turn_is_within_64_bytes():
    for seed in range(200):
        env = Reverse()
        env.reset(seed)
        assert len(env.demonstrate()) < 64  # what `tiny` may write by default


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("env_class", [Reverse, ReverseEcho])
def test_messages_are_short(env_class, kind):
    env = env_class(kind, length=50)
    for seed in range(50):
        assert len(env.reset(seed)[0]["content"]) < 200
        assert len(env.step(env.demonstrate()).message["content"]) < 70


@pytest.mark.parametrize(
    "response",
    [
        "a " * 50_000,
        "a" * 100_000,
        "\n" * 100_000,
        "\n \t" * 30_000,
        "a" + " " * 100_000 + ".",
        "answer is " * 10_000,
        "answer: a" * 10_000,
        "\n." * 50_000,
        "<answer>" * 12_500,
        "</answer>" * 12_500,
        '{"answer": ' * 10_000,
        "[" * 100_000,
        "<answer>\ud800</answer>",
        '{"answer": "\\ud800"}',
        "\0" * 1000,
        "<answer>٣</answer>",
        '{"answer": NaN}',
    ],
)
def test_a_hostile_response_is_wrong_at_once(response):
    env = Reverse()
    env.reset(0)
    started = time.perf_counter()
    step = env.step(response)
    assert time.perf_counter() - started < 0.5  # seconds
    assert (step.reward, step.done) == (-1.0, True)
