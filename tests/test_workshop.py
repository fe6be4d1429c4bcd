"""The exercises: stubs are not yet, answers are right, and mistakes are told what they are."""

import ast
import inspect
import time
from pathlib import Path

import pytest
import torch

from algorithms import common, grpo, ppo, reinforce
from core.sampler import SamplingParams, draw
from core.workshop import checker, solutions
from core.workshop.checker import check_all, load, run_command
from core.workshop.exercises import EXERCISES
from core.workshop.mistakes import MISTAKES, UNTOUCHED

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


def test_the_solutions_are_what_the_project_itself_computes():
    torch.manual_seed(0)
    hidden, to_logits = torch.randn(3, 7, 6), torch.nn.Linear(6, 11)
    ids, mask = torch.randint(11, (3, 7)), torch.rand(3, 6) < 0.6
    logprobs = solutions.token_logprobs(to_logits(hidden), ids)
    ours, _ = common.token_logprobs(hidden, ids, mask, to_logits)
    assert torch.allclose(torch.where(mask, logprobs, 0), ours, atol=1e-6)

    old = logprobs.detach() + 0.5 * torch.randn(3, 6)
    advantages, scale = torch.randn(3, 6), common.token_scale(mask, "token", 8)
    options = grpo.with_loss_type(grpo.Options("grpo"))
    loss, _ = grpo.compute_loss(logprobs, old, advantages, mask, mask * 1.0, scale, options)
    assert torch.allclose(solutions.clipped_loss(logprobs, old, advantages, mask), loss)
    loss, _ = reinforce.compute_loss(
        logprobs, old, advantages, mask, mask * 1.0, scale, reinforce.Options()
    )
    assert torch.allclose(solutions.reinforce_loss(logprobs, advantages, mask), loss)
    assert torch.equal(solutions.kl_k3(logprobs, old), common.kl_estimate(logprobs, old, "k3"))

    rewards, group_ids = torch.randn(6, 1), torch.tensor([4, 1, 4, 1, 4, 1])
    one_turn, whole = torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1, dtype=torch.bool)
    ours = grpo.compute_advantages(
        rewards, whole, one_turn, group_ids, None, whole[:, 0], 1.0, options
    )
    theirs = solutions.group_advantages(rewards[:, 0], group_ids)
    assert torch.allclose(theirs, ours[:, 0], atol=1e-5)

    values, ended = torch.randn(1, 5), torch.zeros(1, dtype=torch.bool)
    rewards, whole = torch.randn(1, 5), torch.ones(1, 5, dtype=torch.bool)
    targets = ppo.value_targets(
        rewards, whole, torch.zeros(1, 5, dtype=torch.int64), values, ended, 1.0, ppo.Options()
    )
    assert torch.allclose(solutions.gae(rewards[0], values[0]), (targets - values)[0], atol=1e-6)

    logits, params = torch.randn(50, 9), SamplingParams(1, temperature=0.7)
    ids, logprobs = solutions.sample(logits, 0.7, torch.Generator().manual_seed(3))
    mass = (logits / 0.7).softmax(-1)
    chance = mass.cumsum(-1) - mass / 2  # amid the stretch of each token
    columns = [draw(logits, params, chance[:, token]) for token in range(9)]
    ours = torch.stack([logprob for _, logprob in columns], 1)
    assert all((drawn == token).all() for token, (drawn, _) in enumerate(columns))
    assert torch.allclose(logprobs, ours.gather(1, ids[:, None]).squeeze(1), atol=1e-6)


def test_what_somebodys_code_raises_costs_its_own_exercise_and_names_the_line(tmp_path, capsys):
    broken = "def gae(rewards, values, gamma=1.0, lam=0.95):\n    return rewards.nope\n"
    leaves = "def kl_k3(logprobs, ref_logprobs):\n    sys.exit(3)\n"
    text = solved(gae=broken, kl_k3=leaves)
    code, out = checked(tmp_path, text, capsys)
    assert (code, out.count("✓ right")) == (1, 8)
    for line in ("return rewards.nope", "sys.exit(3)"):
        number = next(n for n, found in enumerate(text.splitlines(), 1) if line in found)
        assert f"scratch.py, line {number}: " in out
    assert "AttributeError" in out and "SystemExit: 3" in out


def test_an_answer_that_never_comes_is_told_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checker, "PATIENCE", 3.0)  # the others share the core with it
    endless = (
        "def gae(rewards, values, gamma=1.0, lam=0.95):\n"
        "    import time\n    end = time.time() + 8\n"
        "    while time.time() < end:\n        pass\n"  # busy, but not for the tests that follow
    )
    code, out = checked(tmp_path, solved(gae=endless), capsys)
    assert (code, out.count("✓ right")) == (1, 9)
    assert "still running after 3 s" in out


def test_an_exercise_waits_for_those_that_it_needs(tmp_path, capsys):
    stub = "def group_advantages(returns, group_ids):\n    raise TODO\n"
    code, out = checked(tmp_path, solved(group_advantages=stub), capsys)
    assert (code, out.count("· not yet"), out.count("✓ right")) == (1, 2, 8)
    assert "needs exercise 3 first" in out


@pytest.mark.parametrize(
    "text, says",
    [
        ("def token_logprobs(:\n", "scratch.py, line 1: invalid syntax"),
        ("import torch\nimport nothing_like_it\n", "scratch.py, line 2: ModuleNotFoundError"),
        ("x = 1 / 0\n", "scratch.py, line 1: ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line(tmp_path, capsys, text, says):
    (tmp_path / "scratch.py").write_text(text)
    assert run_command([], tmp_path / "scratch.py") == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_solution_is_shown_only_when_it_is_asked_for(capsys):
    run_command([], STUBS)
    assert "members = " not in capsys.readouterr().out
    assert run_command(["--hint", "3"]) == 0
    assert "group_ids.unique()" in capsys.readouterr().out
    assert run_command(["--solution", "3"]) == 0
    assert capsys.readouterr().out.startswith("def group_advantages(")
    for wrong in (["--hint", "11"], ["--solution", "x"]):
        with pytest.raises(SystemExit) as stopped:
            run_command(wrong)
        assert stopped.value.code == 2


def test_a_missing_function_is_named(tmp_path, capsys):
    text = solved().replace("def kl_k3(", "def k3(")
    assert "there is no function kl_k3" in checked(tmp_path, text, capsys)[1]
