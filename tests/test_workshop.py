"""The exercises of scratch.py and their checker: stubs, solutions, typical mistakes, errors."""

import ast
import inspect
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from algorithms import common, grpo, ppo, reinforce
from core.sampler import SamplingParams, draw
from core.workshop import checker, solutions
from core.workshop.checker import check, check_all, load, run_command
from core.workshop.exercises import EXERCISES, Exercise
from core.workshop.mistakes import MISTAKES, UNCHANGED

ROOT = Path(__file__).parent.parent
STUBS = ROOT / "scratch.py"
CASES = [
    (exercise, hint, wrong)
    for exercise in EXERCISES
    for hint, wrong in MISTAKES[exercise.name]
    if hint is not UNCHANGED
]


def solved(**others: str) -> str:
    """The text of scratch.py with the solutions in place of the stubs; `others`: code by name."""
    text = STUBS.read_text()
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef):
            lines = text.splitlines(keepends=True)
            code = others.get(node.name, inspect.getsource(getattr(solutions, node.name)))
            text = "".join([*lines[: node.lineno - 1], code, *lines[node.end_lineno :]])
    return text


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a scratch.py with the solutions, except for the functions given as text."""

    def write(**others: str) -> Path:
        (tmp_path / "scratch.py").write_text(solved(**others))
        return tmp_path / "scratch.py"

    return write


def test_stubs_are_not_yet_written_and_the_exit_code_is_1(capsys):
    code = run_command([], STUBS)
    out = capsys.readouterr().out
    assert (code, out.count("· not yet")) == (1, 10)
    assert "✗" not in out and "✓" not in out


def test_solutions_are_right_and_the_exit_code_is_0(write, capsys):
    code = run_command([], write())
    assert (code, capsys.readouterr().out.count("✓ right")) == (0, 10)


def test_each_exercise_has_a_function_a_solution_and_four_mistakes():
    stubs = load(STUBS)
    defined = [n.name for n in ast.parse(STUBS.read_text()).body if isinstance(n, ast.FunctionDef)]
    assert defined == [exercise.name for exercise in EXERCISES]
    assert [exercise.number for exercise in EXERCISES] == list(range(1, 11))
    for name in defined:
        stub, solution = (inspect.signature(vars(m)[name]) for m in (stubs, solutions))
        assert stub == solution
        assert len(MISTAKES[name]) >= 4


@pytest.mark.parametrize(
    "exercise, hint, wrong", CASES, ids=[f"{e.number} {h[:50]}" for e, h, _ in CASES]
)
def test_mistake_gets_its_own_hint(exercise: Exercise, hint: str, wrong: Callable[..., Any]):
    module = ModuleType("scratch")
    module.__file__ = str(STUBS)
    vars(module).update({k: v for k, v in vars(solutions).items() if callable(v)})
    vars(module)[exercise.name] = wrong
    verdict = check(exercise, module)
    assert verdict.state == "wrong" and verdict.statement
    assert verdict.hint == hint
    assert verdict.expected != verdict.actual


def test_solutions_compute_log_probs_losses_and_kl_as_the_library():
    torch.manual_seed(0)
    hidden, to_logits = torch.randn(3, 7, 6), torch.nn.Linear(6, 11)
    ids, mask = torch.randint(11, (3, 7)), torch.rand(3, 6) < 0.6
    logprobs = solutions.token_logprobs(to_logits(hidden), ids)
    ours, _ = common.token_logprobs(hidden, ids, mask, to_logits)
    assert torch.allclose(torch.where(mask, logprobs, 0), ours, atol=1e-6)

    old = logprobs.detach() + 0.5 * torch.randn(3, 6)
    advantages, ones, weights = torch.randn(3, 6), torch.ones(3, 6), mask / mask.sum()
    loss, _ = reinforce.compute_loss(
        logprobs, logprobs.detach(), advantages, mask, ones, weights, reinforce.Options()
    )
    assert torch.allclose(solutions.reinforce_loss(logprobs, advantages, mask), loss)
    options = grpo.with_loss_type(grpo.Options("grpo"))
    loss, _ = grpo.compute_loss(logprobs, old, advantages, mask, ones, weights, options)
    assert torch.allclose(solutions.clipped_loss(logprobs, old, advantages, mask), loss)
    assert torch.equal(solutions.kl_k3(logprobs, old), common.kl_estimate(logprobs, old, "k3"))


def test_solution_of_gae_computes_as_ppo():
    rewards, values = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(0))
    mask, turn_ids = torch.ones(1, 5, dtype=torch.bool), torch.zeros(1, 5, dtype=torch.int64)
    ours = ppo.gae(rewards, mask, turn_ids, values, 1.0, 0.95)
    assert torch.allclose(solutions.gae(rewards[0], values[0]), ours[0], atol=1e-6)


def test_solution_of_sample_returns_the_log_probs_of_the_sampler():
    logits, params = torch.randn(50, 9), SamplingParams(1, temperature=0.7)
    ids, logprobs = solutions.sample(logits, 0.7, torch.Generator().manual_seed(3))
    probs = (logits / 0.7).softmax(-1)
    chance = probs.cumsum(-1) - probs / 2  # the middle of each token's interval
    drawn, ours = draw(logits, params, chance.gather(1, ids[:, None]).squeeze(1))
    assert torch.equal(drawn, ids)
    assert torch.allclose(logprobs, ours, atol=1e-6)


def test_exception_in_one_exercise_names_its_line_and_leaves_the_others(write, capsys):
    file = write(
        gae="def gae(rewards, values, gamma=1.0, lam=0.95):\n    return rewards.nope\n",
        kl_k3="def kl_k3(logprobs, ref_logprobs):\n    sys.exit(3)\n",
    )
    code, out = run_command([], file), capsys.readouterr().out
    assert (code, out.count("✓ right")) == (1, 8)
    for text, error in (("return rewards.nope", "AttributeError"), ("sys.exit(3)", "SystemExit")):
        lines = file.read_text().splitlines()
        number = next(n for n, line in enumerate(lines, 1) if text in line)
        assert f"scratch.py, line {number}: {error}: " in out


@pytest.mark.parametrize(
    "code, hint",
    [
        ("    return None", "is there a `return`?"),
        ("    return logprobs.sum(1)", "the shape is [1], not []"),
        ("    return logprobs.log().sum()", "the answer contains nan"),
        ("    return 6", "-A · log π"),
    ],
)
def test_answer_without_a_known_mistake_is_described(write, capsys, code, hint):
    file = write(reinforce_loss=f"def reinforce_loss(logprobs, advantages, mask):\n{code}\n")
    assert run_command([], file) == 1
    assert hint in " ".join(capsys.readouterr().out.split())


def test_endless_loop_ends_at_the_time_limit(write, monkeypatch):
    monkeypatch.setattr(checker, "TIME_LIMIT", 0.2)
    slow = "def gae(rewards, values, gamma=1.0, lam=0.95):\n    import time\n    time.sleep(1)\n"
    verdict = check(EXERCISES[6], load(write(gae=slow)))
    assert verdict.state == "wrong"
    assert "still running after 0.2 s" in verdict.actual


def test_exercise_waits_for_those_that_it_calls(write):
    stub = "def group_advantages(returns, group_ids):\n    raise TODO\n"
    verdicts = check_all(load(write(group_advantages=stub)))
    assert [v.exercise.number for v in verdicts if v.state == "not yet"] == [3, 9]
    assert verdicts[8].hint == "first: exercise 3"


@pytest.mark.parametrize(
    "text, message",
    [
        ("def token_logprobs(:\n", "scratch.py, line 1: invalid syntax"),
        ("import torch\nimport nothing_like_it\n", "scratch.py, line 2: ModuleNotFoundError"),
        ("x = 1 / 0\n", "scratch.py, line 1: ZeroDivisionError: division by zero"),
    ],
)
def test_file_that_cannot_be_imported_is_one_line(tmp_path, capsys, text, message):
    (tmp_path / "scratch.py").write_text(text)
    assert run_command([], tmp_path / "scratch.py") == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_script_checks_itself_wherever_it_is(write, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scratch.py"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(write()), run_name="__main__")
    assert stopped.value.code == 0


def test_missing_function_is_named(tmp_path):
    (tmp_path / "scratch.py").write_text(solved().replace("def kl_k3(", "def k3("))
    assert "kl_k3" in check(EXERCISES[5], load(tmp_path / "scratch.py")).hint


def test_hint_and_solution_are_printed_on_request(capsys):
    assert run_command(["--hint", "3"]) == 0
    assert "group_ids.unique()" in capsys.readouterr().out
    assert run_command(["--solution", "3"]) == 0
    assert capsys.readouterr().out.startswith("def group_advantages(")
    for wrong in (["--hint", "11"], ["--solution", "x"]):
        with pytest.raises(SystemExit) as stopped:
            run_command(wrong)
        assert stopped.value.code == 2


def test_course_answers_the_question_of_every_exercise():
    asked = re.findall(r"Question: (.*?)\n    \"\"\"", STUBS.read_text(), re.DOTALL)
    course = (ROOT / "core/workshop/README.md").read_text()
    answered = re.findall(r"<details><summary>(\d+)\. (.*?)</summary>", course)
    assert [int(n) for n, _ in answered] == list(range(1, 11))
    assert [question for _, question in answered[:9]] == [" ".join(q.split()) for q in asked]


def test_functions_that_exercises_point_to_exist():
    places = [re.search(r"(\w+) in ([\w/]+\.py)", exercise.read) for exercise in EXERCISES]
    for place in filter(None, places):
        assert f"def {place[1]}(" in (ROOT / place[2]).read_text(), place[0]
