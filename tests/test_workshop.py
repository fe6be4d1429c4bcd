"""The exercises of scratch.py and their checker: stubs, right answers, mistakes, errors."""

import ast
import inspect
from pathlib import Path

import pytest
import torch

from core.workshop import solutions
from core.workshop.checker import check, check_all, difference, execute, load
from core.workshop.exercises import EXERCISES, Exercise
from core.workshop.mistakes import NOT_REPAIRED, changed_solution, mistakes_in

STUBS = Path(__file__).parent.parent / "scratch.py"
ALL = {exercise.name: exercise for exercise in EXERCISES}


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
def write(tmp_path):
    """Writes a scratch.py with the solutions, except for the functions given as text."""

    def write(**others):
        (tmp_path / "scratch.py").write_text(solved(**others), encoding="utf-8")
        return tmp_path / "scratch.py"

    return write


def changed(name: str, *changes: str) -> str:
    """The code of a solution with changes (old, new, ..), or with another body."""
    code = inspect.getsource(getattr(solutions, name))
    if len(changes) == 1:
        return code[: code.index(":\n") + 2] + changes[0]
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in code, (name, old)
        code = code.replace(old, new)
    return code


def test_stubs_are_not_yet_written_and_solutions_are_right(write, capsys):
    for file, code, mark in ((STUBS, 1, "· not yet"), (write(), 0, "✓ right")):
        assert execute([], file) == code
        assert capsys.readouterr().out.count(mark) == 10
    stubs = load(STUBS)
    for name in ALL:
        assert inspect.signature(vars(stubs)[name]) == inspect.signature(vars(solutions)[name])


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_each_mistake_gets_its_own_cause(exercise: Exercise, write):
    module = load(write())
    for cause, changes in mistakes_in(exercise.name).items():
        for change in changes:
            vars(module)[exercise.name] = changed_solution(exercise.name, change)
            verdict = check(exercise, module)
            if cause == NOT_REPAIRED:
                assert verdict.state == "not yet"
            else:
                assert (verdict.state, verdict.rows["cause"]) == ("wrong", cause)
                assert verdict.statement and verdict.rows["inputs"]


PICK = "all_logprobs.gather(-1, ids[:, None]).squeeze(-1)"
OTHERWISE = {  # right answers far from ours: other algebra, other precision, other types, in place
    "completion_mask": [
        "    out = []\n"
        "    for c, d in turns:\n"
        "        while c: c.pop(); out.append(False)\n"
        "        while d: d.pop(); out.append(True)\n"
        "    return torch.BoolTensor(out[1:])\n"
    ],
    "group_advantages": [
        "    for g in set(group_ids.tolist()):\n"
        "        m = group_ids == g\n"
        "        s = returns[m].std() + 1e-8\n"
        "        returns[m] -= returns[m].mean()\n"
        "        returns[m] /= s\n"
        "    return returns.double()\n"
    ],
    "sample": [
        "ids = torch.multinomial(all_logprobs.exp(), 1, generator=generator).squeeze(-1)",
        "ids = (all_logprobs.exp().cumsum(-1) < torch.rand(len(logits), 1, generator=generator)"
        ").sum(-1)",
        f"return ids, {PICK}", f"return [ids.int(), {PICK}]",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_right_answer_in_other_words_is_right(name, write):
    verdict = check(ALL[name], load(write(**{name: changed(name, *OTHERWISE[name])})))
    assert verdict.state == "right", verdict.rows


ONES = torch.ones(2)


@pytest.mark.parametrize("expected, actual, said", [
    (ONES, ONES.double() + 9e-5, ""), (torch.arange(2), torch.arange(2).int(), ""),
    (ONES, torch.tensor([1, 1.5]), "the number at [1] is 1.5, not 1"),
    (torch.tensor(1.0), torch.tensor(torch.nan), "the number is nan, not 1"),
    (ONES, ONES[:, None], "the shape is [2, 1], not [2]"),
    (ONES, ONES > 0, "a bool tensor; a float tensor is asked for"),
    ((1.0, 1.0), [1.0, None], "result 2: None; a float is asked for"),
    (1.0, ValueError("x"), "an exception"), (ValueError("x"), ValueError("x"), ""),
])  # fmt: skip
def test_difference_is_that_of_type_shape_or_the_first_number(expected, actual, said):
    assert difference(expected, actual, 1e-4) == said


def test_each_exercise_is_judged_alone(write):
    not_yet = "def group_advantages(returns, group_ids):\n    raise TODO\n"
    states = [v.state for v in check_all(load(write(group_advantages=not_yet)))]
    assert states[2] == "not yet" and states.count("right") == 9  # 9 calls 3, and is right
    # an own exercise 5 may accept more than the solution: advantages of a row
    step = {"training_step": changed("training_step", ".expand_as(logprobs)", "")}
    assert check_all(load(write(**step)))[8].state == "wrong"
    of_a_row = "    return -(advantages * (logprobs - old_logprobs).exp())[mask].mean()\n"
    loss = {"clipped_loss": changed("clipped_loss", of_a_row)}
    assert check_all(load(write(**step, **loss)))[8].state == "right"


def test_an_exception_or_a_missing_function_leaves_the_others(write, capsys):
    file = write(gae="def gae(rewards, values, gamma=1.0, lam=0.95):\n    return rewards.nope\n")
    number = file.read_text(encoding="utf-8").splitlines().index("    return rewards.nope") + 1
    assert execute([], file) == 1
    out = capsys.readouterr().out
    assert out.count("✓ right") == 9 and f"(scratch.py, line {number})" in out
    assert execute([], write(gae="")) == 1
    assert "there is no function gae" in capsys.readouterr().out


def test_the_third_hint_and_the_solution_are_code_of_the_exercise(capsys):
    for arguments, text in (("--hint 6 3", "log_r.exp"), ("--solution 6", "def kl_k3(")):
        assert execute(arguments.split()) == 0
        assert text in capsys.readouterr().out
    for wrong in ("--hint 11", "--hint 6 4", "--hint 6 3 1", "--solution 0"):
        with pytest.raises(SystemExit, match="2"):
            execute(wrong.split())


def test_file_that_cannot_be_imported_is_one_line(tmp_path, capsys):
    for line, text in ((1, "def f(:\n"), (2, "import torch\nimport nothing_x\n")):
        (tmp_path / f"{line}.py").write_text(text, encoding="utf-8")
        assert execute([], tmp_path / f"{line}.py") == 2
        err = capsys.readouterr().err
        assert f"({line}.py, line {line})" in err and err.count("\n") == 1
