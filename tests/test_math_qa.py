"""Mathematical questions: what counts as the answer, who may see which question, what pays."""

import json
import random
import re
import sys
import threading
import time
from fractions import Fraction

import datasets
import pytest

import environments.math_qa  # registers it
from core.types import UsageError
from environments import make
from environments.base import DEMO_SEEDS, EVAL_SEEDS, TRAIN_SEEDS
from environments.math_answers import find_answer, is_equal, parse_number
from environments.math_expressions import LEVELS, is_held_out, make_expression
from environments.math_qa import MathQA

GSM8K = [
    {
        "question": f"Ann has {n} pens and buys {n} more. How many has she?",
        "answer": f"She has {n} + {n} = <<{n}+{n}={2 * n}>>{2 * n} pens.\n#### {2 * n:,}",
    }
    for n in range(600, 640)
]
MATH = [
    {
        "problem": rf"Simplify $\sqrt{{{n * n * 3}}}$.",
        "solution": rf"It is $\sqrt{{{n}^2 \cdot 3}} = \boxed{{{n}\sqrt{{3}}}}$.",
        "level": "Level 1",
        "type": "Algebra",
    }
    for n in range(2, 12)
]


@pytest.fixture(autouse=True)
def nothing_is_loaded_yet():
    environments.math_qa.load.cache_clear()
    yield
    environments.math_qa.load.cache_clear()


@pytest.fixture
def hub(monkeypatch):
    """`datasets.load_dataset` without a network; returns the list of what was asked for."""
    asked = []

    def load_dataset(path, name, split):
        asked.append((path, name, split))
        rows = {"openai/gsm8k": GSM8K, "EleutherAI/hendrycks_math": MATH}[path]
        half = len(rows) // 2
        return datasets.Dataset.from_list(rows[:half] if split == "train" else rows[half:])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def question(env, seed):
    return env.reset(seed)[0]["content"]


def questions(env, seeds):
    return {question(env, seed) for seed in seeds}


@pytest.mark.parametrize(
    "response, answer",
    [
        ("<answer>5</answer>", "5"),
        ("<answer> 5\n</answer> I think", "5"),
        (r"so \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}} ", r"\frac{1}{2}"),
        (r"<answer>4</answer> no, \boxed{5}", "5"),
        (r"\boxed{4} no, <answer>5</answer>", "5"),
        (r"<answer>\boxed{5}</answer>", "5"),
        ("<answer>4</answer><answer>5</answer> <answer>", "5"),
        ("<answer>4<answer>5</answer>", "5"),
        (r"\boxed{5} and then \boxed{6", "5"),
        ("<answer>5", None),
        ("5</answer>", None),
        ("5", None),
        ("", None),
        ("<answer> \n </answer>", None),
        ("<answer>5</answer> or <answer></answer>", None),
        (r"\boxed{}", None),
        ("<answer>" + "5" * 200 + "</answer>", "5" * 200),
        ("<answer>" + "5" * 201 + "</answer>", None),
    ],
)
def test_answer_is_the_last_one_that_stands_complete(response, answer):
    assert find_answer(response) == answer


@pytest.mark.parametrize(
    "text, value",
    [
        ("18", 18),
        ("+18", 18),
        ("-18", -18),
        ("− 18", -18),
        ("018", 18),
        ("18.0", 18),
        ("18.", 18),
        (".5", Fraction(1, 2)),
        ("1,000", 1000),
        ("1{,}000", 1000),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("$18", 18),
        (r"\$18.00", 18),
        ("$18$", 18),
        ("-$5", -5),
        ("18 dollars", 18),
        ("18 miles per hour", 18),
        (r"18\text{ cm}^2", 18),
        (r"90^\circ", 90),
        ("x = 5", 5),
        ("2 + 3 = 5", 5),
        ("1/2", Fraction(1, 2)),
        ("2 / 4", Fraction(1, 2)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"-\dfrac{1}{2}", Fraction(-1, 2)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        (r"\frac12", Fraction(1, 2)),
        ("3 1/2", Fraction(7, 2)),
        (r"-3\frac{1}{2}", Fraction(-7, 2)),
    ],
)
def test_number_is_read_as_a_person_would(text, value):
    assert parse_number(text) == (value, False)


NO_NUMBERS = (
    "||.|-|x|2 + 2|6*3|1/0|1,00|3 4|18 or 19|18, 19|5 pi|5x|5 x|5 million|5!|5^2|5\\pi|\\sqrt{4}"
    "|x >= 5|x != 5|x = 1, y = 2|x = 1 or x = 2|x \\not= 5|1e3|9**9**9|٣|five"
    "|inf|nan|5 squared|1.2.3|--5|0x10|1/2/3|%|50%%|\ud800"
).split("|")


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_number_or_still_to_be_worked_out_is_not_read(text):
    assert parse_number(text) is None


def test_percent_passes_for_the_number_and_for_its_hundredth():
    assert parse_number("50%") == parse_number(r"50\%") == parse_number("50 percent") == (50, True)
    assert is_equal("50%", "50") and is_equal("50%", "0.5") and is_equal("50%", "1/2")
    assert is_equal("50", r"50\%") and is_equal("0.5", r"50\%")
    assert not is_equal("5000%", r"50\%") and not is_equal("0.5%", "50")


@pytest.mark.parametrize(
    "answer, truth",
    [("0.333333", "1/3"), ("12 + 6", "18"), ("6*3", "18"), ("17, 18", "18"), ("", "0")],
)
def test_rounded_unfinished_several_or_no_answers_are_wrong(answer, truth):
    assert not is_equal(answer, truth)


@pytest.mark.parametrize(
    "answer, truth, right",
    [
        (r"2^{1/2}", r"\sqrt{2}", True),
        (r"1/\sqrt{3}", r"\frac{\sqrt{3}}{3}", True),
        (r"x = 5 \pi", r"5\pi", True),
        ("5", r"5\pi", False),
        ("(x+1)^2", "x^2+2x+1", True),
        ("(x+1)^2", "x^2+2x+2", False),
        ("(1, 2)", "(1,2)", True),
        ("(2, 1)", "(1,2)", False),
        ("[0,1)", r"\left[0,1\right)", True),
        ("(0,1)", "[0,1)", False),
        ("2, 1", r"\{1,2\}", True),
        ("C", r"\text{(C)}", True),
        ("D", r"\text{(C)}", False),
        ("monday", r"\text{Monday}", True),
        ("dayMon", r"\text{Monday}", False),
        ("2", "x = 1, y = 2", False),
        ("y=2, x=1", "x=1, y=2", True),
        ("$", ".", False),
        ("12_5", "12_5", True),
        ("12_6", "12_5", False),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
    ],
)
def test_other_answers_are_compared_as_text_or_by_math_verify(answer, truth, right):
    assert is_equal(answer, truth) is right


def test_judging_works_outside_the_main_thread():
    judged = []
    answers = [r"\sqrt{8}", "9^{9^{9}}", "("]
    judge = lambda: judged.extend(is_equal(a, r"2\sqrt{2}") for a in answers)  # noqa: E731
    thread = threading.Thread(target=judge)
    thread.start()
    thread.join(10)
    assert judged == [True, False, False]


HOSTILE = {
    "100 kB": "9" * 100_000,
    "power tower": "9**9**9",
    "power tower in LaTeX": "9^{9^{9}}",
    "long power": "9^{999999999}",
    "chain of powers": "^".join("9" * 50),
    "root of a power": r"\sqrt{9^{99999999}}",
    "factorials": "9!!!",
    "binomial": r"\binom{1000000}{500000}",
    "polynomial": "(x+y+z)^{300}",
    "powers of powers": "(((x+1)^9+1)^9+x)^9",
    "logarithm": r"\log_{2}{10^{1000000}}",
    "opening brackets": "(" * 200,
    "brackets": "(" * 99 + "1" + ")" * 99,
    "opening fractions": r"\frac{" * 33,
    "nested fractions": r"\frac{1}{" * 18 + "2" + "}" * 18,
    "surrogate": "\ud800",
    "zero bytes": "\0" * 100,
    "commas": "," * 200,
    "spaces": "1" + " " * 150 + "x",
    "words": "1" + " ab" * 60,
    "dollars": "$" * 199,
    "import": "__import__('os').abort()",
}


@pytest.mark.parametrize("truth", ["7", r"7\sqrt{2}", "x^2+y^2+z"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answer_is_wrong_at_once(name, truth):
    is_equal(r"\sqrt{2}", r"2\sqrt{2}")  # what math-verify loads at its first use isn't timed
    started = time.perf_counter()
    assert is_equal(HOSTILE[name], truth) is False
    assert time.perf_counter() - started < 0.5  # seconds


@pytest.mark.parametrize(
    "response",
    [
        "<answer>" * 12_500,
        "</answer>" * 11_000,
        r"\boxed{" * 14_000,
        r"\boxed" + "{" * 100_000,
        r"\boxed{" + "}" * 99_000 + "</answer>",
        "<answer>\ud800</answer>",
        '{"answer":' * 10_000,
    ],
)
@pytest.mark.parametrize("level", [1, 6])
def test_hostile_response_is_wrong_at_once(level, response):
    env = MathQA(level)
    env.reset(0)
    started = time.perf_counter()
    step = env.step(response)
    assert time.perf_counter() - started < 0.05  # seconds
    assert step.done and step.reward <= 0.1 and step.info["correct"] is False


def test_reward_by_the_table():
    env = MathQA()
    assert question(env, 713).startswith("What is 17 - 8? ")
    rewards = {
        "<answer>9</answer>": (1.0, True, True),
        r"\boxed{9.0}": (1.0, True, True),
        "<answer>10</answer>": (0.1, False, True),
        "<answer>17 - 8</answer>": (0.1, False, True),
        "<answer>nine</answer>": (0.1, False, True),
        "<answer></answer>": (0.0, False, False),
        "9": (0.0, False, False),
        "": (0.0, False, False),
    }
    for response, (reward, correct, answered) in rewards.items():
        step = env.step(response)
        assert (step.message, step.reward, step.done) == (None, reward, True)
        assert step.info == {"correct": correct, "answered": answered}


@pytest.mark.parametrize("level", LEVELS)
def test_expression_has_the_value_that_python_finds(level):
    operations, largest, operators = LEVELS[level]
    fractions = 0
    for seed in range(300):
        expression, value, _ = make_expression(random.Random(seed), level, held_out=False)
        code = re.sub(r"(\d+)% of", r"Fraction(\1) / 100 *", expression)
        code = re.sub(r"(?<!Fraction\()\b(\d+)\b", r"Fraction(\1)", code)
        assert eval(code) == value, expression
        assert len(re.findall(r" [-+*/] |%", expression)) == operations
        assert max(int(n) for n in re.findall(r"\d+(?!%|\d)", expression)) <= largest
        assert set(re.findall(r"[-+*/%]", expression)) <= set(operators)
        assert level > 2 or value >= 0
        fractions += value.denominator > 1
    assert (fractions > 50) == (level >= 5)


def test_percentage_is_of_what_stands_in_its_bracket():
    for seed in range(300):
        expression, _, working = make_expression(random.Random(seed), 6, held_out=False)
        for outside in re.findall(r"(.?)\b\d+% of", expression):
            assert outside in ("", "(")
        assert all(" = " in step for step in working.split(", "))


@pytest.mark.parametrize(
    "expression, steps",
    [
        ("12 + 5", ["12 + 5 = 17"]),
        ("17 + 8", ["8 = 3 + 5", "17 + 3 = 20", "20 + 5 = 25"]),
        ("3 + 17", ["3 + 10 = 13", "13 + 7 = 20"]),
        ("17 - 17", ["17 - 10 = 7", "7 - 7 = 0"]),
        ("65 - 18", ["65 - 10 = 55", "8 = 5 + 3", "55 - 5 = 50", "50 - 3 = 47"]),
        ("80 - 5", ["80 - 5 = 75"]),
        ("99 + 90", ["99 + 90 = 189"]),
    ],
)
def test_steps_of_small_numbers(expression, steps):
    assert environments.math_expressions._steps_by_tens(expression) == steps


@pytest.mark.parametrize("level", LEVELS)
def test_demonstration_earns_everything_and_a_hasty_one_rarely(level):
    env = MathQA(level)
    lucky = 0
    for seed in [*DEMO_SEEDS[:150], *EVAL_SEEDS[:50]]:
        assert len(question(env, seed)) < 140
        shown, guess = env.demonstrate(), env.demonstrate(hasty=True)
        assert (shown, guess) == (env.demonstrate(), env.demonstrate(hasty=True))
        assert env.step(shown).reward == 1.0
        assert re.fullmatch("<answer>[-0-9/]+</answer>", guess)
        lucky += env.step(guess).reward == 1.0
    assert 5 <= lucky <= 50


@pytest.mark.parametrize("level", LEVELS)
def test_same_seed_is_the_same_task_whatever_was_played_before(level):
    env = MathQA(level)
    first, guess = env.reset(3), env.demonstrate(hasty=True)
    env.reset(4)
    assert env.reset(3) == first == MathQA(level).reset(3)
    assert env.demonstrate(hasty=True) == guess


@pytest.mark.parametrize("level", [1, 3])
def test_expressions_of_evaluation_never_appear_in_training_or_demonstrations(level):
    env = MathQA(level)
    seen = questions(env, TRAIN_SEEDS[:1500]) | questions(env, DEMO_SEEDS[:1500])
    held_out = questions(env, EVAL_SEEDS[:1500])
    assert len(seen) > 300 and len(held_out) > 50
    assert not seen & held_out


def test_gsm8k_is_loaded_once_and_split_as_published(hub):
    env, other = make("math_qa:data=gsm8k"), make("math_qa:data=gsm8k")
    assert hub == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    train = {row["question"] for row in GSM8K[:20]}
    test = {row["question"] for row in GSM8K[20:]}
    ending = " Work it out, then end with <answer>exact result</answer>."
    assert questions(env, TRAIN_SEEDS[:300]) == {q + ending for q in train}
    assert questions(other, DEMO_SEEDS[:300]) == {q + ending for q in train}
    assert questions(env, EVAL_SEEDS[:300]) == {q + ending for q in test}


def test_gsm8k_is_demonstrated_by_its_own_working(hub):
    env = MathQA(data="gsm8k")
    n = int(re.search(r"\d+", question(env, 0))[0])
    assert env.demonstrate() == f"She has {n} + {n} = {2 * n} pens. <answer>{2 * n:,}</answer>"
    assert env.step(env.demonstrate()).reward == 1.0
    assert env.step(f"<answer>${2 * n}.00</answer>").reward == 1.0
    assert env.step(f"<answer>{n} + {n}</answer>").reward == 0.1
    assert abs(parse_number(env.demonstrate(hasty=True)[8:-9]).value - 2 * n) <= 10


def test_math_joins_its_subjects_and_is_judged_by_math_verify(hub):
    env = MathQA(data="math")
    assert len(hub) == len({name for _, name, _ in hub}) * 2 == 14
    for seed in (*DEMO_SEEDS[:10], *EVAL_SEEDS[:10]):
        root = re.search(r"\\sqrt\{\d+\}", question(env, seed))[0]
        assert env.step(env.demonstrate()).reward == 1.0
        assert env.step(f"<answer>{root}</answer>").reward == 1.0
        assert env.step("<answer>1</answer>").reward == 0.1
        assert env.step(env.demonstrate(hasty=True)).reward >= 0.1


def test_dataset_that_cannot_be_loaded_is_one_line(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UsageError) as error:
        make("math_qa:data=gsm8k")
    assert "openai/gsm8k: ConnectionError: no route to the hub" in str(error.value)


@pytest.mark.parametrize(
    "missing, data", [("datasets", "gsm8k"), ("datasets", "math"), ("math_verify", "math")]
)
def test_missing_library_is_named_in_one_line(hub, monkeypatch, missing, data):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=f"needs {missing.replace('_', '-')}: pip install"):
        make(f"math_qa:data={data}")


def test_numbers_need_no_math_verify(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    for env in (MathQA(1), MathQA(6), MathQA(data="gsm8k")):
        env.reset(0)
        assert env.step(env.demonstrate()).reward == 1.0
        assert env.step(r"<answer>\sqrt{2}</answer>").reward == 0.1


ROWS = (
    [{"question": f"Twice {n}?", "answer": f"{n} + {n}\n#### {2 * n}"} for n in range(40)]
    + [{"question": f"Half of {n}?", "answer": rf"\boxed{{\frac{{{n}}}{{2}}}}"} for n in range(40)]
    + [{"question": f"Next to {n}?", "answer": n + 1} for n in range(40)]
)


def test_file_keeps_the_lines_whose_checksum_divides_by_eight_for_evaluation(tmp_path):
    path = write_lines(tmp_path / "a=b: c.jsonl", ROWS)
    env = make(f"math_qa:data={path}")
    asked = {row["question"]: is_held_out(row["question"]) for row in ROWS}
    assert 3 < sum(asked.values()) < 40
    for seeds, held_out in ((TRAIN_SEEDS[:1000], False), (EVAL_SEEDS[:1000], True)):
        shown = {q.partition(" Work")[0] for q in questions(env, seeds)}
        assert shown == {q for q, kept in asked.items() if kept == held_out}


def test_file_understands_all_three_forms_of_an_answer(tmp_path):
    env = MathQA(data=write_lines(tmp_path / "rows.jsonl", ROWS))
    forms = set()
    for seed in range(100):
        kind, n = re.match(r"(\w+)\D*(\d+)", question(env, seed)).groups()
        truth = {"Twice": 2 * int(n), "Half": Fraction(int(n), 2), "Next": int(n) + 1}[kind]
        assert env.step(f"<answer>{truth}</answer>").reward == 1.0
        assert env.step(env.demonstrate()).reward == 1.0
        forms.add(kind)
    assert forms == {"Twice", "Half", "Next"}


def test_file_without_any_working_has_no_demonstrations(tmp_path):
    env = MathQA(data=write_lines(tmp_path / "rows.jsonl", ROWS[80:]))
    env.reset(0)
    assert env.demonstrate() is None
    assert env.demonstrate(hasty=True).startswith("<answer>")


def test_rows_without_a_usable_answer_are_left_out(tmp_path):
    bad = [
        {"question": f"Why {n}?", "answer": a} for n in range(9) for a in ("", "#### ", "x" * 201)
    ]
    bad += [{"question": f"Why not {n}?", "answer": r"\boxed{5"} for n in range(9)]
    env = MathQA(data=write_lines(tmp_path / "rows.jsonl", ROWS + bad))
    assert not any("Why" in q for q in questions(env, range(500)))


@pytest.mark.parametrize(
    "text, message",
    [
        ("\n".join(json.dumps(row) for row in ROWS[:15]), "15 usable lines; it needs 16"),
        ("", "0 usable lines"),
        ('\n\n{"question": "a", "answer": ', "line 3"),
        ('{"question": "a"}', "line 1"),
        ("[1]", "line 1"),
        ("5", "line 1"),
        ("[" * 100_000, "line 1"),
        ("\udcff", "can't decode"),
    ],
)
def test_unreadable_file_is_one_line(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=message) as error:
        make(f"math_qa:data={path}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("math_qa:level=0", "level must be 1 to 6, not 0"),
        ("math_qa:level=7", "level must be 1 to 6, not 7"),
        ("math_qa:data=gsm9k", "data must be gsm8k, math or a JSONL file: .*gsm9k"),
        ("math_qa:data=/", "data must be gsm8k, math or a JSONL file"),
    ],
)
def test_bad_option_is_one_line(spec, message):
    with pytest.raises(UsageError, match=message):
        make(spec)
