"""The exercises: stubs are not yet, answers are right, and mistakes are told what they are."""

import ast
import inspect
import re
import time
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from algorithms import common, grpo, ppo, reinforce
from core import workshop
from core import workshop_solutions as solutions
from core.sampler import SamplingParams, draw
from core.workshop import check_all, load, run_command
from core.workshop_facts import EXERCISES
from core.workshop_mistakes import MISTAKES, UNTOUCHED

STUBS = Path(__file__).parent.parent / "scratch.py"
CASES = [
    (exercise, hint, wrong)
    for exercise in EXERCISES
    for hint, wrong in MISTAKES[exercise.name]
    if hint is not UNTOUCHED
]


def solved(**others):
    """The text of scratch.py with the solutions in place of the stubs; `others`: by name, text."""
    text = STUBS.read_text()
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef):
            lines = text.splitlines(keepends=True)
            answer = others.get(node.name, inspect.getsource(getattr(solutions, node.name)))
            text = "".join([*lines[: node.lineno - 1], answer, *lines[node.end_lineno :]])
    return text


def checked(folder, text, capsys):
    file = folder / "scratch.py"
    file.write_text(text)
    code = run_command([], file)
    return code, capsys.readouterr().out


def test_stubs_are_all_not_yet_and_the_exit_code_is_1(capsys):
    started = time.monotonic()
    code = run_command([], STUBS)
    out = capsys.readouterr().out
    assert (code, out.count("· not yet")) == (1, len(EXERCISES) == 10 and 10)
    assert "✗" not in out and "✓" not in out
    assert time.monotonic() - started < 10


def test_the_solutions_are_all_right_and_the_exit_code_is_0(tmp_path, capsys):
    code, out = checked(tmp_path, solved(), capsys)
    assert (code, out.count("✓ right")) == (0, 10)
    assert "python train.py --algo scratch" in out


def test_each_exercise_has_a_function_a_solution_and_four_mistakes_at_least():
    defined = [n.name for n in ast.parse(STUBS.read_text()).body if isinstance(n, ast.FunctionDef)]
    assert defined == [exercise.name for exercise in EXERCISES]
    for exercise in EXERCISES:
        stub, answer = (
            list(inspect.signature(vars(m)[exercise.name]).parameters)
            for m in (load(STUBS), solutions)
        )
        assert stub == answer
        assert len([1 for e, _, _ in CASES if e is exercise]) >= 4


@pytest.mark.parametrize(
    "exercise, hint, wrong", CASES, ids=[f"{e.number} {h[:50]}" for e, h, _ in CASES]
)
def test_a_mistake_is_caught_and_told_what_it_is(exercise, hint, wrong):
    mine = load(STUBS)
    for name, function in vars(solutions).items():
        setattr(mine, name, function) if callable(function) else None
    setattr(mine, exercise.name, wrong)
    verdict = check_all(mine)[exercise.number - 1]
    assert verdict.state == "wrong" and verdict.fact
    assert verdict.hint == hint
    assert verdict.expected != verdict.actual
