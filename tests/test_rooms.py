"""The house: imports point one way, and no room outgrows what a reader can hold."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"algorithms", "core", "environments", "train", "scratch", "runs", "tests"}
ALLOWED = {
    "algorithms": {
        "algorithms.common",
        "algorithms.options",
    },  # nothing of ours but what they share
    "environments": {"core.types"},  # and what environments share among themselves
    "core": {"core", "environments.base", "environments.registry"},
}
BUDGET = {"algorithms": 220, "environments": 200, "core": 300}


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module in ("algorithms", "environments"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # whole modules
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_one_way(room):
    for file in (ROOT / room).glob("*.py"):
        for module in imported(file):
            if module.split(".")[0] in OURS:
                own = room in ("core", "environments") and module.split(".")[0] == room
                assert own or module in ALLOWED[room], f"{file.name} imports {module}"


def test_rooms_keep_to_their_budgets():
    assert len((ROOT / "train.py").read_text().splitlines()) <= 400
    assert len((ROOT / "scratch.py").read_text().splitlines()) <= 450
    for room, most in BUDGET.items():
        for file in (ROOT / room).glob("*.py"):
            assert len(file.read_text().splitlines()) <= most, file.name


def test_the_three_algorithms_line_up():
    names = {}
    for algo in ("reinforce", "grpo", "ppo"):
        tree = ast.parse((ROOT / f"algorithms/{algo}.py").read_text())
        names[algo] = [n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
        functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        names[f"{algo} arguments"] = [
            [a.arg for a in functions[f].args.args][:8]
            for f in ("compute_advantages", "compute_loss")
        ]
    first = ["compute_advantages", "compute_loss"]
    assert all(names[algo][:2] == first for algo in ("reinforce", "grpo", "ppo"))
    assert names["reinforce arguments"] == names["grpo arguments"]
    # PPO's loss goes on with its values
    assert [a[:7] for a in names["grpo arguments"]] == [a[:7] for a in names["ppo arguments"]]
