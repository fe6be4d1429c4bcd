"""Countdown: the tasks have solutions, and only expressions of the given numbers are right."""

from fractions import Fraction

import pytest

from environments.base import DEMO_SEEDS, EVAL_SEEDS
from environments.countdown import LEVELS, MIN_TARGET, Countdown, value_of


def env_with(numbers, target):
    env = Countdown()
    env.reset(0)
    env.numbers, env.target = numbers, target
    return env


@pytest.mark.parametrize("answer, reward", [
    ("(25 - 8) * 3", 1.0), ("3*(25-8)", 1.0), ("(25 − 8) × 3", 1.0), ("-3 * (8 - 25)", 1.0),
    ("25 - 8 + 3", 0.1),  # 20
    ("51", 0.1), ("25 + 26", 0.1), ("25 + 25 + 1", 0.1),  # other numbers
    ("(25 - 8) * 3 * 1", 0.1), ("(25 - 8) * 3 + 8 - 8", 0.1),  # a number more, one twice
    ("(25 - 8) * 3 = 51", 0.1), ("25 8 3", 0.1), ("(25 - 8) * 3)", 0.1), ("51 if 1 else 0", 0.1),
    ("", 0.0),
])  # fmt: skip
def test_reward_is_1_for_an_expression_of_exactly_these_numbers(answer, reward):
    step = env_with([3, 25, 8], 51).step(f"So <answer>{answer}</answer>")
    assert (step.reward, step.done, step.info["correct"]) == (reward, True, reward == 1.0)


def test_fractions_are_exact():
    assert value_of("8 / (3 - 8 / 3)") == (Fraction(24), [3, 3, 8, 8])
    assert value_of("1 / 3 + 1 / 3 + 1 / 3") == (Fraction(1), [1, 1, 1, 3, 3, 3])


@pytest.mark.parametrize("text", [
    "9**9**9", "9//2", "1e9", "True", "__import__('os').system('ls')", "(3)(4)", "5 +",
    "8 / (3 - 3)", "1+" * 120 + "1", "(" * 150 + "1",
])  # fmt: skip
def test_any_other_text_has_no_value(text):
    assert value_of(text) is None


@pytest.mark.parametrize("level", LEVELS)
def test_every_task_has_a_solution_within_the_bounds_of_its_level(level):
    env, bounds = Countdown(level), LEVELS[level]
    for seed in [*range(100), *DEMO_SEEDS[:50], *EVAL_SEEDS[:50]]:
        text = env.reset(seed)[0]["content"]
        assert bounds.min_numbers <= len(env.numbers) <= bounds.max_numbers
        assert all(1 <= number <= bounds.max_number for number in env.numbers)
        assert MIN_TARGET <= env.target <= bounds.max_target and env.target != sum(env.numbers)
        assert all(str(number) in text for number in [*env.numbers, env.target])
        assert env.step(env.demonstrate()).reward == 1.0
        assert env.step(env.demonstrate(hasty=True)).info["valid"]
