"""Letter counting: the tiers, who may see which word, what pays, and that nothing breaks it."""

import json
import re
import subprocess
import sys
import time

import pytest

from environments.base import DEMO_SEEDS, EVAL_SEEDS, TRAIN_SEEDS
from environments.letter_counting import LetterCounting, score

# tier: shortest and longest word, fewest and most letters asked for
TIERS = {
    1: (3, 8, 1, 1),
    2: (5, 12, 1, 2),
    3: (8, 18, 1, 3),
    4: (10, 25, 1, 5),
    5: (15, 35, 1, 8),
    6: (40, 80, 8, 12),
    7: (80, 150, 12, 20),
    8: (150, 250, 18, 26),
    9: (250, 400, 22, 26),
    10: (400, 500, 24, 26),
}
QUESTION = re.compile(r'How many ([a-z, ]+) in "([a-z]+)"\?')


def play(difficulty, seed):
    env = LetterCounting(difficulty)
    return env, env.reset(seed)


def words(seeds):
    env = LetterCounting(1)
    return {QUESTION.match(env.reset(seed)[0]["content"])[2] for seed in seeds}


def answer(text):
    return f"<answer>{text}</answer>"


@pytest.mark.parametrize("difficulty", TIERS)
def test_tier_bounds_the_word_and_the_number_of_letters(difficulty):
    shortest, longest, fewest, most = TIERS[difficulty]
    numbers = set()
    for seed in range(200):
        env, (message,) = play(difficulty, seed)
        letters, word = QUESTION.match(message["content"]).groups()
        letters = letters.split(", ")
        assert shortest <= len(word) <= longest
        assert fewest <= len(letters) == len(set(letters)) <= most
        assert env.counts == {letter: word.count(letter) for letter in letters}
        numbers.add(len(letters))
    assert {fewest, most} <= numbers  # both ends are reached


@pytest.mark.parametrize("difficulty", TIERS)
def test_same_seed_is_the_same_task_whatever_was_played_before(difficulty):
    env, first = play(difficulty, 3)
    guess = env.demonstrate(hasty=True)
    other = env.reset(4)
    assert other != first
    assert env.reset(3) == first == play(difficulty, 3)[1]
    assert env.demonstrate(hasty=True) == guess


def test_same_seed_is_the_same_task_in_another_process():
    code = """if True:
        import json
        from environments import make
        for seed in (5, 1_600_000_000):
            env = make("letter_counting:difficulty=4")
            print(json.dumps([env.reset(seed), env.demonstrate(), env.demonstrate(hasty=True)]))
    """
    lines = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for seed, line in zip((5, 1_600_000_000), lines, strict=True):
        env, messages = play(4, seed)
        assert json.loads(line) == [messages, env.demonstrate(), env.demonstrate(hasty=True)]


def test_words_of_evaluation_never_appear_in_training_or_demonstrations():
    seen = words(TRAIN_SEEDS[:2500]) | words(DEMO_SEEDS[:2500])
    held_out = words(EVAL_SEEDS[:5000])
    assert len(seen) > 1000 and len(held_out) > 200
    assert not seen & held_out


ONE, TWO = {"r": 3}, {"r": 3, "s": 0}


@pytest.mark.parametrize(
    "response, counts, reward",
    [
        ("r1 r2 r3 <answer>3</answer>", ONE, 1.0),
        (answer(" 3\n"), ONE, 1.0),
        (answer('{"r": 3}'), ONE, 1.0),
        (answer('{"s": 0, "r": 3}'), TWO, 1.0),
        (answer("4"), ONE, 0.1),
        (answer("-3"), ONE, 0.1),
        (answer('{"r": 2}'), ONE, 0.1),
        (answer("{}"), ONE, 0.1),
        (answer('{"r": 1, "s": 1}'), TWO, 0.1),
        (answer('{"r": 3, "s": 1}'), TWO, 0.55),
        (answer('{"r": 3}'), TWO, 0.55),
        (answer("3"), TWO, 0.0),  # which of the two?
        ("3", ONE, 0.0),
        (answer(""), ONE, 0.0),
        (answer("three"), ONE, 0.0),
        (answer("[3]"), ONE, 0.0),
        (answer('"3"'), ONE, 0.0),
        (answer("null"), ONE, 0.0),
        (answer("3") + answer("3"), ONE, 0.0),
        (answer("3") + " or <answer>", ONE, 0.0),
        (answer(answer("3")), ONE, 0.0),
        ("<answer>" + answer("3"), ONE, 0.0),
        (answer("3") + "</answer>", ONE, 0.0),
        ("</answer>3<answer>", ONE, 0.0),
        ("<answer>3", ONE, 0.0),
        ("<ANSWER>3</ANSWER>", ONE, 0.0),
    ],
)
def test_score_by_the_table(response, counts, reward):
    assert score(response, counts) == pytest.approx(reward, abs=1e-9)


@pytest.mark.parametrize(
    "number", ["3.0", "3e0", "true", "٣", "３", "³", "1,000", "+3", "03", "0x3", "3 3", "9" * 5000]
)
def test_only_a_plain_integer_counts(number):
    assert score(answer(number), {"r": 3}) == 0
    assert score(answer(f'{{"r": {number}}}'), {"r": 3}) < 1
    assert score(answer(number), {"r": 1}) == 0  # True == 1 in Python
    assert score(answer(f'{{"r": {number}, "s": 0}}'), {"r": 1, "s": 0}) < 1


@pytest.mark.parametrize(
    "letters, counts",
    [
        ({"r": 3, "s": 0, "t": 1}, TWO),
        ({"r": 3, "t": 0}, TWO),
        ({"r": 3, "R": 3}, TWO),
        ({"r": 3, "s": 0}, ONE),
        ({"r": 3, **dict.fromkeys("abcdefghij", 1)}, ONE),
    ],
)
def test_missing_or_extra_letters_are_never_exact(letters, counts):
    assert 0.1 <= score(answer(json.dumps(letters)), counts) < 0.99


def test_partial_credit_grows_with_each_letter_and_reaches_1_only_when_all_are_right():
    counts = {chr(97 + i): i for i in range(26)}
    rewards = [
        score(answer(json.dumps({k: n + (n >= right) for k, n in counts.items()})), counts)
        for right in range(27)
    ]
    assert rewards == pytest.approx([0.1 + 0.9 * right / 26 for right in range(27)])
    assert rewards[25] < 0.97 and rewards[26] == 1.0


def test_partial_credit_is_not_correct():
    env, _ = play(6, 0)
    nearly = dict(env.counts)
    nearly[next(iter(nearly))] += 1
    step = env.step(answer(json.dumps(nearly)))
    assert 0.1 < step.reward < 1 and step.info["correct"] is False


@pytest.mark.parametrize("difficulty", TIERS)
def test_a_demonstration_earns_everything_by_working(difficulty):
    for seed in range(50):
        env, _ = play(difficulty, seed)
        step = env.step(env.demonstrate())
        assert (step.reward, step.done, step.message) == (1.0, True, None)
        assert step.info == {"correct": True, "worked": True}


@pytest.mark.parametrize("difficulty", TIERS)
def test_a_hasty_demonstration_is_well_formed_without_work_and_mostly_wrong(difficulty):
    rewards = []
    for seed in range(50):
        env, _ = play(difficulty, seed)
        step = env.step(env.demonstrate(hasty=True))
        rewards.append(step.reward)
        assert step.reward >= 0.1 and step.info["worked"] is False
    assert sum(reward == 1.0 for reward in rewards) < 25


HOSTILE = {
    "empty": "",
    "100 kB": "r " * 50_000,
    "half JSON": answer('{"r": 3, "s"'),
    "nested tags": "<answer>" * 50 + "3" + "</answer>" * 50,
    "many openings": "<answer>" * 12_500,
    "openings, one end": "<answer>" * 12_500 + "</answer>",
    "deep lists": answer("[" * 100_000),
    "deep objects": answer('{"r":' * 100_000),
    "balanced": answer("[" * 100_000 + "]" * 100_000),
    "huge integer": answer('{"r": ' + "9" * 5000 + "}"),
    "not a number": answer("NaN"),
    "infinity": answer("-Infinity"),
    "surrogate": answer("\ud800"),
    "zero bytes": "\0" * 1000,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("difficulty", [1, 10])
def test_a_hostile_response_earns_nothing_and_raises_nothing(difficulty, name):
    env, _ = play(difficulty, 0)
    started = time.perf_counter()
    step = env.step(HOSTILE[name])
    assert time.perf_counter() - started < 1  # seconds: no search that grows with the square
    assert (step.reward, step.done, step.info["correct"]) == (0.0, True, False)
