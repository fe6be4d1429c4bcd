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


def test_stubs_are_not_yet_written_and_solutions_are_right(write, capsys):
    for file, code, mark in ((STUBS, 1, "· not yet"), (write(), 0, "✓ right")):
        assert execute([], file) == code
        assert capsys.readouterr().out.count(mark) == 10
    for exercise in EXERCISES:
        ours, theirs = (vars(m)[exercise.name] for m in (solutions, load(STUBS)))
        assert inspect.signature(ours) == inspect.signature(theirs)


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


# right answers far from ours: other algebra, other precision, other types, in place
OTHERWISE = {
    "completion_mask": """(turns):
    out = []
    for c, d in turns:
        while c: c.pop(); out.append(False)
        while d: d.pop(); out.append(True)
    return torch.BoolTensor(out[1:])
""",
    "group_advantages": """(returns, group_ids):
    for g in set(group_ids.tolist()):
        m = group_ids == g
        s = returns[m].std() + 1e-8
        returns[m] -= returns[m].mean()
        returns[m] /= s
    return returns.double()
""",
    "kl_k3": """(logprobs, ref_logprobs):
    logprobs -= ref_logprobs
    return (-logprobs).exp() - 1 + logprobs
""",
    "sample": """(logits, temperature, generator):
    if temperature == 0:
        return logits.argmax(-1), logits.log_softmax(-1).amax(-1)
    p = (logits / temperature).softmax(-1)
    ids = (p.cumsum(-1) < torch.rand(len(p), 1, generator=generator)).sum(-1)
    return [ids.int(), p[torch.arange(len(p)), ids].log()]
""",
}
NOT_YET = {"group_advantages": "def group_advantages(returns, group_ids):\n    raise TODO\n"}
# 5 accepts more than the solution: advantages of a row
OF_A_ROW = inspect.getsource(solutions.clipped_loss).replace(
    "advantages[mask]", "advantages.expand_as(mask)[mask]"
)
STEP = inspect.getsource(solutions.training_step).replace(".expand_as(logprobs)", "")


@pytest.mark.parametrize("others, states", [
    *(({name: f"def {name}{code}"}, ["right"] * 10) for name, code in OTHERWISE.items()),
    (NOT_YET, ["right"] * 2 + ["not yet"] + ["right"] * 7),  # 9 calls 3, and is right
    ({"training_step": STEP}, ["right"] * 8 + ["wrong", "right"]),
    ({"training_step": STEP, "clipped_loss": OF_A_ROW}, ["right"] * 10),
    ({"gae": ""}, ["right"] * 6 + ["wrong"] + ["right"] * 3),
], ids=range(8))  # fmt: skip
def test_each_exercise_is_judged_alone_and_by_what_it_returns(write, others, states):
    module = load(write(**others))
    own = {**vars(module)}
    assert [v.state for v in check_all(module)] == states
    assert vars(module) == own  # --algo scratch trains with wrong ones, too


ONES = torch.ones(2)


@pytest.mark.parametrize("expected, actual, differs", [
    (ONES, ONES.double() + 9e-5, ""), (torch.arange(2), torch.arange(2).int(), ""),
    (ONES, torch.tensor([1, 1.5]), "the number at [1] is 1.5, not 1"),
    (torch.tensor(1.0), torch.tensor(torch.nan), "the number is nan, not 1"),
    (ONES, ONES[:, None], "the shape is [2, 1], not [2]"),
    (ONES, ONES > 0, "the type is a bool tensor, not a float tensor"),
    ((1.0, 1.0), [1.0, None], "result 2: the type is None, not a float"),
    ((1.0, 1.0), (1.0,), "the type is a tuple of 1, not a tuple of 2"),
    (1.0, ValueError("x"), "ValueError: x"), (ValueError("x"), ValueError("x"), ""),
])  # fmt: skip
def test_difference_is_that_of_type_shape_or_the_first_number(expected, actual, differs):
    assert difference(expected, actual, 1e-4) == differs


def test_an_exception_is_named_with_its_line_and_a_file_that_raises_is_one_line(write, capsys):
    file = write(gae="def gae(rewards, values, gamma=1.0, lam=0.95):\n    return rewards.nope\n")
    number = file.read_text(encoding="utf-8").splitlines().index("    return rewards.nope") + 1
    assert execute([], file) == 1
    out = capsys.readouterr().out
    assert out.count("✓ right") == 9 and f"(scratch.py, line {number})" in out
    for line, text in ((1, "def f(:\n"), (2, "import torch\nimport nothing_x\n")):
        file.write_text(text, encoding="utf-8")
        assert execute([], file) == 2
        err = capsys.readouterr().err
        assert f"(scratch.py, line {line})" in err and err.count("\n") == 1


def test_the_third_hint_and_the_solution_are_code_of_the_exercise(capsys):
    for arguments, text in (("--hint 6 3", "log_r.exp"), ("--solution 6", "def kl_k3(")):
        assert execute(arguments.split()) == 0
        assert text in capsys.readouterr().out
    for wrong in ("--hint 11", "--hint 6 4", "--hint 6 3 1", "--solution 0"):
        with pytest.raises(SystemExit, match="2"):
            execute(wrong.split())
