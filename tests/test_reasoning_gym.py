"""Reasoning Gym: rewards, the datasets that are refused, and seeds."""

import inspect
import random
import re

import numpy as np
import pytest
from conftest import needs

from core.faults import UsageError
from environments.adapters.reasoning_gym import UNSUPPORTED, ReasoningGym
from environments.plumbing.registry import make

pytestmark = needs("envs", "reasoning_gym")


def test_same_seed_gives_the_same_question_and_global_generators_are_unchanged():
    env = ReasoningGym("list_functions")  # which draws from a global one

    def play(seed):
        question, guess = env.reset(seed), env.demonstrate(hasty=True)
        assert question[0]["content"].endswith("</answer>.")
        assert env.step(env.demonstrate()).info == {"correct": True, "invalid": False}
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
    for bad in ("chain_sum,min_terms=9,max_terms=2", "chain_sum,colour=red", "nope"):
        with pytest.raises(UsageError):
            make(f"reasoning_gym:dataset={bad}")


def test_every_dataset_whose_scorer_evaluates_an_answer_as_code_is_refused():
    from reasoning_gym.factory import DATASETS

    code = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\((?!entry)")
    sources = {name: inspect.getsource(kind.score_answer) for name, (kind, _) in DATASETS.items()}
    evaluating = {name for name, source in sources.items() if code.search(source)}
    assert evaluating | {"composite"} == {*UNSUPPORTED}
    for name in UNSUPPORTED:
        with pytest.raises(UsageError, match=f"the scorer of {name} "):
            ReasoningGym(name)


def test_a_scorer_that_raises_gives_0():
    env = ReasoningGym("chain_sum")
    env.reset(0)
    env.dataset.score_answer = {}.__getitem__  # raises TypeError
    assert env.step("<answer>12</answer>").reward == 0.0
