"""Letter counting: the tiers, the reward table and the demonstrations."""

import re

import pytest

from environments.letter_counting import LetterCounting, reward_of
from environments.letter_words import TIERS

QUESTION = re.compile(r'How many ([a-z, ]+) in "([a-z]+)"\?')


def answer(text):
    return f"<answer>{text}</answer>"


@pytest.mark.parametrize("difficulty", TIERS)
def test_tier_bounds_the_word_and_the_number_of_letters(difficulty):
    tier, env = TIERS[difficulty], LetterCounting(difficulty)
    fewest, numbers = 1 if tier.p_several < 1 else tier.min_letters, set()
    for seed in range(120):
        letters, word = QUESTION.match(env.reset(seed)[0]["content"]).groups()
        assert tier.min_length <= len(word) <= tier.max_length
        assert env.counts == {letter: word.count(letter) for letter in letters.split(", ")}
        numbers.add(len(env.counts))
    assert {fewest, tier.max_letters} <= numbers <= {*range(fewest, tier.max_letters + 1)}


ONE, TWO = {"r": 3}, {"r": 3, "s": 0}


@pytest.mark.parametrize("response, counts, reward", [
    ("r1 r2 r3 <answer>3</answer>", ONE, 1.0), (answer(" 3\n"), ONE, 1.0),
    (answer('{"r": 3}'), ONE, 1.0), (answer('{"s": 0, "r": 3}'), TWO, 1.0),
    (answer("4"), ONE, 0.1), (answer("{}"), ONE, 0.1), (answer('{"r": 1, "s": 1}'), TWO, 0.1),
    (answer('{"r": 3, "s": 1}'), TWO, 0.55), (answer('{"r": 3}'), TWO, 0.55),
    (answer('{"r": 3, "s": 0, "t": 1}'), TWO, 0.55),  # an extra letter is never exact
    (answer('{"r": 3, "s": 0}'), ONE, 0.1),
    (answer("3"), TWO, 0.0),  # ambiguous
    ("3", ONE, 0.0), (answer(""), ONE, 0.0), (answer("three"), ONE, 0.0),
    (answer('"3"'), ONE, 0.0), (answer("3") + answer("3"), ONE, 0.0),
    ("<answer>3", ONE, 0.0), (answer("true"), {"r": 1}, 0.0), (answer("3.0"), ONE, 0.0),
])  # fmt: skip
def test_score_follows_the_reward_table(response, counts, reward):
    assert reward_of(response, counts) == pytest.approx(reward, abs=1e-9)
