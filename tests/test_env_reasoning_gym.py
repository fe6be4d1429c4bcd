"""Reasoning Gym: what is paid, what may reach a scorer, seeds, and that any dataset plays."""

import random
import subprocess
import sys
import time

import pytest

pytest.importorskip("reasoning_gym")

import numpy as np

import environments.adapters.reasoning_gym  # noqa: F401  registers
from core.types import UsageError
from environments.adapters.reasoning_gym import ReasoningGym, is_safe
from environments.registry import make

SOME = """chain_sum gcd spell_backward countdown simple_integration n_queens pool_matrix
letter_counting maze rotate_matrix sudoku tower_of_hanoi""".split()


def answered(name, answer, seed=0):
    env = ReasoningGym(name)
    env.reset(seed)
    return env.step(answer)


@pytest.mark.parametrize("name", SOME)
def test_the_dataset_s_own_answer_earns_everything(name):
    env = ReasoningGym(name)
    for seed in range(5):
        question = env.reset(seed)
        assert question[0]["role"] == "user" and question[0]["content"].endswith("</answer>.")
        step = env.step(env.demonstrate())
        assert step.reward == pytest.approx(1) and step.done and step.message is None
        assert step.info == {"correct": True, "invalid": False}


def test_the_answer_may_be_json_or_tagged_and_the_last_counts():
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


def test_partial_credit_is_passed_through_and_is_not_correct():
    env = ReasoningGym("countdown")
    env.reset(1)
    step = env.step("<answer>1 + 1</answer>")  # other numbers than were given
    assert 0 < step.reward < 0.99 and step.info["correct"] is False


@pytest.mark.parametrize("name", SOME)
def test_same_seed_is_the_same_question_and_the_global_draws_stay(name):
    env = ReasoningGym(name)
    random.seed(5), np.random.seed(5)
    first = env.reset(1_999_999_999), env.demonstrate(), env.demonstrate(hasty=True)
    env.step(env.demonstrate(hasty=True))
    drawn = random.random(), np.random.random()
    assert env.reset(3) != first[0]
    assert (env.reset(1_999_999_999), env.demonstrate(), env.demonstrate(hasty=True)) == first
    random.seed(5), np.random.seed(5)
    assert drawn == (random.random(), np.random.random())


def test_hasty_answers_are_well_formed_and_mostly_wrong():
    env = ReasoningGym("chain_sum")
    steps = []
    for seed in range(50):
        env.reset(seed)
        steps.append(env.step(env.demonstrate(hasty=True)))
    assert not any(step.info["invalid"] for step in steps)
    assert sum(step.info["correct"] for step in steps) < 5


def test_a_dataset_without_an_answer_shows_none():
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
def test_only_safe_answers_reach_a_scorer_that_runs_them(name, answer, safe):
    assert is_safe(name, answer) is safe
    if not safe:
        assert answered(name if "poly" not in name else "simple_integration",
                        f"<answer>{answer}</answer>").reward == 0  # fmt: skip


@pytest.mark.parametrize("name", ["countdown", "simple_integration", "binary_matrix", "n_queens"])
def test_the_answers_of_datasets_that_run_them_are_safe(name):
    env = ReasoningGym(name)
    for seed in range(30):
        env.reset(seed)
        assert env.step(env.demonstrate()).info["correct"]


def test_datasets_in_the_order_of_a_set_need_a_fixed_hash_seed(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with pytest.raises(UsageError, match="set PYTHONHASHSEED=0 first: ransom_note"):
        make("reasoning_gym:dataset=ransom_note")
    code = """if True:
        import environments.adapters.reasoning_gym
        from environments.registry import make
        env = make("reasoning_gym:dataset=ransom_note")
        print(env.reset(1_600_000_001))
    """
    said = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                       env={"PYTHONHASHSEED": "0"}).stdout
        for _ in range(2)
    ]  # fmt: skip
    assert said[0] == said[1] != ""


@pytest.mark.parametrize(
    "name, message",
    [("nope", "'nope' not registered"), ("composite", "other datasets"), ("", "not registered"),
     ("intermediate_integration", "takes the question for an answer")],
)  # fmt: skip
def test_a_bad_dataset_is_one_clear_line(name, message):
    with pytest.raises(UsageError, match=message) as error:
        make(f"reasoning_gym:dataset={name}")
    assert "\n" not in str(error.value)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match="needs reasoning-gym: pip install"):
        make("reasoning_gym")


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


@pytest.mark.parametrize("index", range(len(HOSTILE)))
@pytest.mark.parametrize("name", [*SOME, "prime_factorization"])
def test_a_hostile_response_is_not_correct_and_raises_nothing(name, index):
    env = ReasoningGym(name)
    env.reset(0)
    started = time.perf_counter()
    step = env.step(HOSTILE[index])
    assert time.perf_counter() - started < 0.5
    assert step.done and step.info["correct"] is False and step.reward < 0.5
