"""Reasoning Gym: rewards, which answers reach a scorer, and seeds."""

import random
import re

import numpy as np
import pytest
from conftest import needs

from core.faults import UsageError
from environments.adapters.reasoning_gym import ReasoningGym, is_safe
from environments.plumbing.registry import make

pytestmark = needs("envs", "reasoning_gym")


@pytest.mark.parametrize("name", "chain_sum simple_integration n_queens list_functions".split())
def test_same_seed_gives_the_same_question_and_global_generators_are_unchanged(name):
    env = ReasoningGym(name)

    def play(seed):
        question, guess = env.reset(seed), env.demonstrate(hasty=True)
        assert question[0]["content"].endswith("</answer>.")
        right = env.step(env.demonstrate())
        assert right.reward == pytest.approx(1) and right.done and right.message is None
        assert right.info == {"correct": True, "invalid": False}
        return question, env.demonstrate(), guess, env.step(guess)

    random.seed(1), np.random.seed(1)
    first, other = play(0), play(1_999_999_999)
    drawn = random.random(), np.random.random()
    random.seed(2)
    assert first[0] != other[0] and (play(0), play(1_999_999_999)) == (first, other)
    random.seed(1), np.random.seed(1)
    assert drawn == (random.random(), np.random.random())


def test_options_of_the_dataset_are_passed_on():
    env = make("reasoning_gym:dataset=chain_sum,min_terms=6,max_terms=6,min_digits=1,max_digits=1")
    sum_ = re.search(r"[\d+ -]+ =", env.reset(3)[0]["content"])[0]
    assert len(re.findall(r"\d+", sum_)) == 6
    for bad in ("chain_sum,min_terms=9,max_terms=2", "chain_sum,colour=red", "nope", "composite"):
        with pytest.raises(UsageError):
            make(f"reasoning_gym:dataset={bad}")


@pytest.mark.parametrize(
    "name, answer, safe",
    [("countdown", "(94*4 - 61)/6", True), ("countdown", "2**3", False),
     ("countdown", "__import__('os').getpid()", False),
     ("polynomial_multiplication", "x**9**9", False),
     ("simple_integration", "-X**5/7 + C", True), ("simple_integration", "Integral(x, x)", False),
     ("chain_sum", "exit()", True)],  # compared as text
)  # fmt: skip
def test_is_safe_rejects_code(name, answer, safe):
    assert is_safe(name, answer) is safe


def test_a_scorer_that_raises_gives_0_and_is_named_once(capsys):
    def broken(answer, entry):
        raise KeyError("metadata")

    env = ReasoningGym("chain_sum")
    for seed in (0, 1):
        env.reset(seed)
        env.dataset.score_answer = broken
        assert env.step("<answer>12</answer>").reward == 0.0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("reasoning_gym:dataset=chain_sum raised KeyError: ")
