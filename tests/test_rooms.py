"""The layout: imports point one way and form no circle."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for folder in ("algorithms", "environments", "core")
    for file in (ROOT / folder).rglob("*.py")
}
ENTRIES = {"core.chat"}  # two lines, for `python -m`
OPENS = {"core.run.open", "core.run.models"}  # open a run and its models, so they name extras


def room(module):
    """algorithms, environments, core (its flat files), or core.run, core.extras, .."""
    names = module.split(".")
    is_room = names[0] == "core" and len(names) > 1 and (ROOT / "core" / names[1]).is_dir()
    return ".".join(names[:2]) if is_room else names[0]


def imports_of(module, inside=True):
    """The modules of ours that a module imports, in functions and for type checkers too; without
    `inside` only those that importing it imports."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in inner]
        else:
            continue
        yield from (name for name in names if name in MODULES or name in ("train", "scratch"))


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    allowed = {
        "algorithms": {"algorithms"},
        "environments": {"environments"},
        "core": {"algorithms", "environments", "core"},
        "core.run": {"algorithms", "environments", "core", "core.run", "core.report"},
        "core.extras": {"algorithms", "environments", "core", "core.run", "core.extras",
                        "core.report"},
        "core.report": {"algorithms", "environments", "core", "core.run", "core.report"},
        "core.workshop": {"algorithms", "environments", "core", "core.report", "core.workshop"},
    }[room(module)]  # fmt: skip
    if module in OPENS:
        assert "core.extras" not in {room(name) for name in imports_of(module, inside=False)}
        allowed = allowed | {"core.extras"}
    if module not in ENTRIES:
        assert {room(name) for name in imports_of(module)} <= allowed


def test_no_circle_of_imports():
    graph = {module: set(imports_of(module)) & MODULES.keys() for module in MODULES}
    done: set[str] = set()

    def visit(module, path):
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])
