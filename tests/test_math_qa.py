"""Mathematical questions: the reward table, the data sets and files of one's own."""

import json
import re
from fractions import Fraction

import datasets
import pytest
from conftest import needs

import environments.math_qa
from environments.base import DEMO_SEEDS, EVAL_SEEDS, TRAIN_SEEDS, RunInfo, is_held_out
from environments.math_qa import MathQA
from environments.plumbing.math_answers import parse_number
from environments.plumbing.registry import make

GSM8K = {
    f"Ann has {n} pens and buys {n} more. How many has she?":
    f"She has {n} + {n} = <<{n}+{n}={2 * n}>>{2 * n} pens.\n#### {2 * n:,}"
    for n in range(600, 640)
}  # fmt: skip
MATH = {
    rf"Simplify $\sqrt{{{n * n * 3}}}$.":
    rf"It is $\sqrt{{{n}^2 \cdot 3}} = \boxed{{{n}\sqrt{{3}}}}$."
    for n in range(2, 12)
}  # fmt: skip
MATH_500 = {"": "", r"What is $\sqrt{2}$ squared?": r"It is $\boxed{2}$."}
HUB = {  # the first half of each is the training split
    "openai/gsm8k": GSM8K, "EleutherAI/hendrycks_math": MATH, "HuggingFaceH4/MATH-500": MATH_500,
}  # fmt: skip
ROWS = (
    [{"question": f"Twice {n}?", "answer": f"{n} + {n}\n#### {2 * n}"} for n in range(40)]
    + [{"question": f"Half of {n}?", "answer": rf"\boxed{{\frac{{{n}}}{{2}}}}"} for n in range(40)]
    + [{"question": f"Next to {n}?", "answer": n + 1} for n in range(40)]
)


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    """Replaces `datasets.load_dataset`; returns the list of its calls."""
    environments.math_qa.load.cache_clear()
    calls = []

    def load_dataset(path, name, split):
        calls.append((path, name, split))
        rows = [{"question": text, "problem": text, "answer": worked, "solution": worked}
                for text, worked in HUB[path].items()]  # fmt: skip
        half = len(rows) // 2
        return datasets.Dataset.from_list(rows[:half] if split == "train" else rows[half:])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    yield calls
    environments.math_qa.load.cache_clear()


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def question(env, seed):
    return env.reset(seed)[0]["content"]


def questions(env, seeds):
    return {question(env, seed).partition(" Work it out")[0] for seed in seeds}


def test_rewards_follow_the_table():
    env = MathQA()
    assert question(env, 713).startswith("What is 17 - 8? ")
    for response, reward, answered, lenient in [
        ("<answer>9</answer>", 1.0, True, True),
        (r"\boxed{9.0}", 1.0, True, True),
        ("<answer>10</answer>", 0.1, True, False),
        ("<answer>17 - 8</answer>", 0.1, True, False),
        ("<answer></answer>", 0.0, False, False),
        ("9", 0.0, False, True),
    ]:
        step = env.step(response)
        assert (step.message, step.reward, step.done) == (None, reward, True)
        assert step.info == {"correct": reward == 1.0, "answered": answered, "lenient": lenient}


def test_gsm8k_is_evaluated_on_its_test_split_and_demonstrated_with_its_solutions(hub):
    env = make("math_qa:data=gsm8k")
    make("math_qa:data=gsm8k")  # from the cache
    assert hub == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    train, test = {*[*GSM8K][:20]}, {*[*GSM8K][20:]}
    assert questions(env, TRAIN_SEEDS[:200]) == questions(env, DEMO_SEEDS[:200]) == train
    assert questions(env, EVAL_SEEDS[:200]) == test
    text = question(env, 0)
    assert text.endswith("end with <answer>exact result</answer>.")
    n = int(re.search(r"\d+", text)[0])
    assert env.demonstrate() == f"She has {n} + {n} = {2 * n} pens. <answer>{2 * n:,}</answer>"
    assert env.step(env.demonstrate()).reward == 1.0
    assert env.step(f"<answer>{n} + {n}</answer>").reward == 0.1
    assert abs(parse_number(env.demonstrate(hasty=True)[8:-9])[0] - 2 * n) <= 10


@needs("envs", "math_verify")
def test_math500_trains_on_the_training_splits_of_math_alone_and_accepts_equal_formulas(hub):
    env = make("math_qa:data=math500")
    assert {split for path, _, split in hub if path == "EleutherAI/hendrycks_math"} == {"train"}
    assert ("HuggingFaceH4/MATH-500", "default", "test") in hub
    assert questions(env, EVAL_SEEDS[:50]) == {"What is $\\sqrt{2}$ squared?"}
    assert questions(env, TRAIN_SEEDS[:50]) == {*[*MATH][:5]}
    root = re.search(r"\\sqrt\{\d+\}", question(env, 0))[0]
    for answer in (env.demonstrate(), f"<answer>{root}</answer>"):
        assert env.step(answer).reward == 1.0
    assert env.step("<answer>1</answer>").reward == 0.1


def test_a_file_reserves_one_line_in_eight_and_reads_three_forms_of_answers(tmp_path):
    path = write_lines(tmp_path / "a=b: c.jsonl", ROWS)
    env = make(f"math_qa:data={path}")
    held_out = {row["question"] for row in ROWS if is_held_out(row["question"])}
    assert 3 < len(held_out) < 40
    assert questions(env, TRAIN_SEEDS[:1000]) == {row["question"] for row in ROWS} - held_out
    assert questions(env, EVAL_SEEDS[:300]) == held_out
    forms = set()
    for seed in range(60):
        form, n = re.match(r"(\w+)\D*(\d+)", question(env, seed)).groups()
        solution = {"Twice": 2 * int(n), "Half": Fraction(int(n), 2), "Next": int(n) + 1}[form]
        assert env.step(f"<answer>{solution}</answer>").reward == 1.0
        assert env.step(env.demonstrate()).reward == 1.0
        forms.add(form)
    assert forms == {"Twice", "Half", "Next"}
    other = write_lines(tmp_path / "test.jsonl", ROWS[:9])
    MathQA.begin_run(RunInfo([f"math_qa:data={path}"], [f"math_qa:data={other}"]))
    sizes = len(make(f"math_qa:data={path}").train), len(make(f"math_qa:data={other}").test)
    MathQA.begin_run(RunInfo((), ()))
    assert sizes == (len(ROWS), 9)  # both are used whole
