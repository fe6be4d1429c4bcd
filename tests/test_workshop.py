"""The exercises of scratch.py and their checker: stubs, solutions, typical mistakes, errors."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.workshop import checker, solutions
from core.workshop.checker import check, check_all, execute, load
from core.workshop.exercises import EXERCISES, Exercise
from core.workshop.mistakes import advantages_as_given, changed_solution, mistakes_in

ROOT = Path(__file__).parent.parent
STUBS = ROOT / "scratch.py"


def solved(**others: str) -> str:
    """The text of scratch.py with the solutions in place of the stubs; `others`: code by name."""
    text = STUBS.read_text(encoding="utf-8")
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef):
            lines = text.splitlines(keepends=True)
            code = others.get(node.name, inspect.getsource(getattr(solutions, node.name)))
            text = "".join([*lines[: node.lineno - 1], code, *lines[node.end_lineno :]])
    return text


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a scratch.py with the solutions, except for the functions given as text."""

    def write(**others: str) -> Path:
        (tmp_path / "scratch.py").write_text(solved(**others), encoding="utf-8")
        return tmp_path / "scratch.py"

    return write


def test_stubs_are_not_yet_written_and_solutions_are_right(write, capsys):
    for file, code, mark in ((STUBS, 1, "· not yet"), (write(), 0, "✓ right")):
        assert execute([], file) == code
        assert capsys.readouterr().out.count(mark) == 10


def test_each_exercise_has_a_function_and_a_solution_with_its_signature():
    stubs = load(STUBS)
    assert [exercise.number for exercise in EXERCISES] == list(range(1, 11))
    for exercise in EXERCISES:
        stub, solution = (inspect.signature(vars(m)[exercise.name]) for m in (stubs, solutions))
        assert stub == solution


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_each_mistake_gets_its_own_cause(exercise: Exercise):
    for cause, changes in mistakes_in(exercise.name).items():
        for change in changes:
            wrong = {exercise.name: changed_solution(exercise.name, change)}
            verdict = check(exercise, SimpleNamespace(**vars(solutions) | wrong))
            assert (verdict.state, verdict.cause) == ("wrong", cause)
            assert verdict.statement and verdict.inputs and verdict.expected != verdict.actual


NOT_YET = "def group_advantages(returns, group_ids):\n    raise TODO\n"
OF_A_ROW = (
    "def clipped_loss(x, old, a, mask, clip=0.2):\n    return -(a * (x - old).exp())[mask].mean()\n"
)


def test_each_exercise_is_judged_alone(write):
    step = inspect.getsource(solutions.training_step)
    states = [v.state for v in check_all(load(write(group_advantages=NOT_YET)))]
    assert states[2] == "not yet" and states.count("right") == 9  # 9 calls 3, and is right
    # an own exercise 5 may accept more than the solution: advantages of a row
    broadcast = {"training_step": step.replace(".expand_as(logprobs)", "")}
    assert check_all(load(write(**broadcast)))[8].state == "wrong"
    with_own = check_all(load(write(**broadcast, clipped_loss=OF_A_ROW)))[8]
    assert with_own.state == "right"


def test_exercise_10_is_not_yet_written_only_as_it_was_given(write):
    given = inspect.getsource(advantages_as_given).replace("_as_given", "_of_tokens")
    for code, state in (
        (given.replace("  # [B]\n", "  # mine\n"), "not yet"),
        (given.replace("/ mask.sum(1)", "/ mask.sum(1).clamp(min=1)"), "wrong"),
        (given.replace("mask.sum(1)", "mask.sum(0)"), "wrong"),
    ):
        assert check_all(load(write(advantages_of_tokens=code)))[9].state == state


def test_exception_in_one_exercise_names_its_line_and_leaves_the_others(write, capsys):
    file = write(gae="def gae(rewards, values, gamma=1.0, lam=0.95):\n    return rewards.nope\n")
    code, out = execute([], file), capsys.readouterr().out
    assert (code, out.count("✓ right")) == (1, 9)
    number = file.read_text(encoding="utf-8").splitlines().index("    return rewards.nope") + 1
    assert "AttributeError: " in out and f"(scratch.py, line {number})" in out


def test_a_copy_gets_commands_with_its_own_name(write, monkeypatch, capsys):
    for name, algo in (("scratch.py", "scratch"), ("mine.py", "mine.py")):
        file = write().rename(write().with_name(name))
        monkeypatch.chdir(file.parent)
        execute([], file)
        assert capsys.readouterr().out.endswith(f" python train.py --algo {algo}\n")


def test_hints_come_in_three_steps_and_the_solution_last(capsys):
    for step, text in (("1", "How do you get log r"), ("2", "r is its"), ("3", "return log_r.exp")):
        assert execute(["--hint", "6", step]) == 0
        assert text in capsys.readouterr().out
    assert execute(["--solution", "6"]) == 0
    assert capsys.readouterr().out.startswith("def kl_k3(")
    with pytest.raises(SystemExit, match="2"):
        execute(["--hint", "11"])


def test_endless_loop_ends_at_the_time_limit(write, monkeypatch):
    monkeypatch.setattr(checker, "TIME_LIMIT", 0.2)
    slow = "def gae(rewards, values, gamma=1.0, lam=0.95):\n    import time\n    time.sleep(1)\n"
    verdict = check(EXERCISES[6], load(write(gae=slow)))
    assert verdict.state == "wrong" and "still running after 0.2 s" in verdict.actual


def test_file_that_cannot_be_imported_is_one_line(tmp_path, capsys):
    for line, text in (
        (1, "def token_logprobs(:\n"),
        (2, "import torch\nimport nothing_like_it\n"),
    ):
        (tmp_path / "scratch.py").write_text(text, encoding="utf-8")
        assert execute([], tmp_path / "scratch.py") == 2
        err = capsys.readouterr().err
        assert f"(scratch.py, line {line})" in err and err.count("\n") == 1
