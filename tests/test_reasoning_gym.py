"""Reasoning Gym: rewards, which answers reach a scorer, and seeds."""

import functools
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")

import numpy as np

from core.types import UsageError
from environments.adapters.reasoning_gym import ReasoningGym, is_safe
from environments.registry import make

DATASETS = """chain_sum gcd spell_backward countdown simple_integration n_queens pool_matrix
letter_counting maze rotate_matrix sudoku tower_of_hanoi""".split()


make_env = functools.cache(ReasoningGym)  # one instance per dataset


@pytest.mark.parametrize("name", DATASETS)
def test_answer_of_the_dataset_has_reward_1(name):
    env = make_env(name)
    for seed in range(5):
        question = env.reset(seed)
        assert question[0]["role"] == "user" and question[0]["content"].endswith("</answer>.")
        step = env.step(env.demonstrate())
        assert step.reward == pytest.approx(1) and step.done and step.message is None
        assert step.info == {"correct": True, "invalid": False}


def test_options_of_the_dataset_are_passed_on():
    env = make("reasoning_gym:dataset=chain_sum,min_terms=6,max_terms=6,min_digits=1,max_digits=1")
    for seed in range(5):
        sum_ = re.search(r"[\d+ -]+ =", env.reset(seed)[0]["content"])[0]
        assert len(re.findall(r"\d+", sum_)) == 6
        assert env.step(env.demonstrate()).reward == 1
    for bad in ("min_terms=9,max_terms=2", "colour=red", "size=7", "seed=3"):
        with pytest.raises(UsageError) as error:
            make(f"reasoning_gym:dataset=chain_sum,{bad}")
        assert "\n" not in str(error.value)


def test_last_answer_in_json_or_tags_counts():
    env = make("reasoning_gym:dataset=basic_arithmetic")
    env.reset(7)
    assert env.entry["answer"] == "-129"  # -6 - 77 - 8 - 38
    for text in ("<answer>-129</answer>", "<answer>5</answer> no: <answer> -129 </answer>",
                 '{"answer": -129}', '{"answer": "-129"}'):  # fmt: skip
        assert env.step(text).reward == 1.0
    wrong = env.step("<answer>-129</answer> or <answer>12</answer>")
    assert wrong.reward < 0.99 and wrong.info == {"correct": False, "invalid": False}
    missing = env.step("-129")
    assert (missing.reward, missing.info) == (0, {"correct": False, "invalid": True})


def test_partial_credit_is_not_correct():
    env = ReasoningGym("countdown")
    env.reset(1)
    step = env.step("<answer>1 + 1</answer>")  # not the given numbers
    assert 0 < step.reward < 0.99 and step.info["correct"] is False


@pytest.mark.parametrize("name", DATASETS)
def test_same_seed_gives_the_same_question_and_global_generators_are_unchanged(name):
    env = ReasoningGym(name)
    random.seed(5), np.random.seed(5)
    first = env.reset(1_999_999_999), env.demonstrate(), env.demonstrate(hasty=True)
    env.step(env.demonstrate(hasty=True))
    drawn = random.random(), np.random.random()
    assert env.reset(3) != first[0]
    assert (env.reset(1_999_999_999), env.demonstrate(), env.demonstrate(hasty=True)) == first
    random.seed(5), np.random.seed(5)
    assert drawn == (random.random(), np.random.random())


def test_hasty_demonstrations_are_readable_and_mostly_wrong():
    env = ReasoningGym("chain_sum")
    steps = []
    for seed in range(50):
        env.reset(seed)
        steps.append(env.step(env.demonstrate(hasty=True)))
    assert not any(step.info["invalid"] for step in steps)
    assert sum(step.info["correct"] for step in steps) < 5


def test_dataset_without_answers_has_no_demonstrations():
    env = ReasoningGym("graph_color")
    env.reset(0)
    assert env.demonstrate() is None


@pytest.mark.parametrize(
    "name, answer, safe",
    [
        ("countdown", "(94*4 - 61)/6", True),
        ("countdown", "2**3", False),
        ("countdown", "__import__('os').getpid()", False),
        ("countdown", "1e9", False),
        ("polynomial_multiplication", "12*x**10 - z ** 2 + 7", True),
        ("polynomial_multiplication", "x**100", False),
        ("polynomial_multiplication", "x**9**9", False),
        ("polynomial_multiplication", "(x+1)**9", False),
        ("simple_integration", "-X**5/7 + C", True),
        ("simple_integration", "Integral(x, x)", False),
        ("spiral_matrix", "[1, 2, 3]", True),
        ("spiral_matrix", "1 2 3", True),
        ("spiral_matrix", "exit()", False),
        ("spiral_matrix", "[x for x in 'a']", False),
        ("string_insertion", "['A', 'B']", True),
        ("n_queens", "_ Q\nQ _", True),
        ("chain_sum", "exit()", True),  # compared as text
    ],
)
def test_is_safe_rejects_code(name, answer, safe):
    assert is_safe(name, answer) is safe


def test_unsafe_answer_gets_0_without_reaching_the_scorer(monkeypatch):
    env = ReasoningGym("countdown")
    env.reset(0)
    monkeypatch.setattr(env.dataset, "score_answer", lambda *_: pytest.fail("scored"))
    assert env.step("<answer>__import__('os').getpid()</answer>").reward == 0


@pytest.mark.parametrize("name", ["countdown", "simple_integration", "binary_matrix", "n_queens"])
def test_answers_of_datasets_that_evaluate_them_are_safe(name):
    env = make_env(name)
    for seed in range(10):
        env.reset(seed)
        assert env.step(env.demonstrate()).info["correct"]


def test_set_ordered_datasets_need_a_fixed_hash_seed(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with pytest.raises(UsageError, match="PYTHONHASHSEED=0: ransom_note"):
        make("reasoning_gym:dataset=ransom_note")


@pytest.mark.slow
def test_set_ordered_datasets_repeat_with_a_fixed_hash_seed():
    code = "from environments.registry import make; env = make('reasoning_gym:dataset=ransom_note')"
    arguments = [sys.executable, "-c", f"{code}; print(env.reset(1_600_000_001))"]
    pipe, environ = subprocess.PIPE, {"PYTHONHASHSEED": "0"}
    processes = [subprocess.Popen(arguments, stdout=pipe, env=environ) for _ in range(2)]
    first, second = [process.communicate()[0] for process in processes]
    assert first == second != b""


@pytest.mark.parametrize(
    ("name", "culprit"),
    [("nope", "nope"), ("composite", "composite"), ("", "''"),
     ("intermediate_integration", "intermediate_integration")],
)  # fmt: skip
def test_bad_dataset_is_a_usage_error_of_one_line(name, culprit):
    with pytest.raises(UsageError, match=culprit) as error:
        make(f"reasoning_gym:dataset={name}")
    assert "\n" not in str(error.value)


HOSTILE = [
    "",
    "<answer>" * 12_500,
    "<answer>\ud800</answer>",
    f"<answer>{'(' * 100_000}</answer>",
    f"<answer>{'1' * 10_000}</answer>",
    f"<answer>{'x ' * 9_000}</answer>",
    f'{{"answer": {"[" * 900}{"]" * 900}}}',
    '{"answer": NaN}',
    "\0" * 100_000,
]


@pytest.mark.parametrize("name", [*DATASETS, "prime_factorization"])
def test_hostile_response_is_not_correct_and_scored_fast(name):
    env = make_env(name)
    env.reset(0)
    env.step("")  # the first answer imports the scorer
    for text in HOSTILE:
        started = time.process_time()
        step = env.step(text)
        assert time.process_time() - started < 5  # seconds; what backtracks takes minutes
        assert step.done and step.info["correct"] is False and step.reward < 0.5


EACH_NTH = """
import sys
from reasoning_gym.factory import DATASETS
from environments.adapters.reasoning_gym import UNSUPPORTED, ReasoningGym
for name in sorted(DATASETS.keys() - UNSUPPORTED)[:: int(sys.argv[1])]:
    env = ReasoningGym(name)
    for seed in (0, 1, 1_600_000_000):
        env.reset(seed)
        answer = env.demonstrate()
        print(name, None if answer is None else env.step(answer).reward)
"""


NO_ANSWERS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, pytest.param(1, marks=pytest.mark.seeds)])
def test_answer_of_every_dataset_has_reward_1(n):
    env = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", EACH_NTH, str(n)], env=env, capture_output=True,
                          text=True, check=True)  # fmt: skip
    rewards = {tuple(line.split()) for line in done.stdout.splitlines()}
    names, without = {name for name, _ in rewards}, {name for name, r in rewards if r == "None"}
    assert without == names & NO_ANSWERS and len(names) >= 104 // n
    assert {reward for name, reward in rewards if name not in without} == {"1.0"}
