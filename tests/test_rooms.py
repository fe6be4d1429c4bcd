"""The layout: imports point one way, and form no circle of files or of folders."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for folder in ("algorithms", "environments", "core")
    for file in (ROOT / folder).rglob("*.py")
}
BASE = {"environments.base", "environments.parsing"}  # what authors of an environment need
# The rooms that those of each room import
BELOW = {
    "algorithms": set(),
    "algorithms.variants": {"algorithms"},
    "environments.base": set(),
    "environments.agents": set(),  # programs that know nothing of us
    "environments.plumbing": {"environments.base"},
    "environments": {"environments.base", "environments.plumbing"},
    "environments.adapters": {"environments.base", "environments.plumbing", "environments"},
    "core": {"algorithms", "environments.base", "environments.plumbing", "environments"},
    "core.files": {"core"},
    "core.terminal": {"core"},
    "core.report": {"core", "core.files", "core.terminal"},
    "core.extras": {"core.report", "environments.adapters"},
    "core.loop": {"core.extras"},
    "core.workshop": {"core", "core.report"},
    "core.chat": {"core.extras"},  # two lines, for `python -m`
}


def room(module):
    """The folder of a module, or the files in BELOW and BASE that are rooms of their own."""
    if module in BASE:
        return "environments.base"
    names = module.split(".")
    return module if module in BELOW else ".".join(names[: max(1, len(names) - 1)])


def below(name):
    """All rooms that the files of a room may import: those below it, and those below these."""
    found = {name}
    for other in BELOW[name]:
        found |= below(other)
    return found


@cache
def imports_of(module):
    """The modules of ours that a module imports, in functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in inner]
        else:
            continue
        found |= {name for name in names if name in MODULES or name in ("train", "scratch")}
    return found


def test_imports_point_down():
    """No room is below itself, or `below` would not end; so there is no circle of rooms."""
    for module in MODULES:
        assert {room(name) for name in imports_of(module)} <= below(room(module)), module


def test_no_circle_of_imports():
    graph = {module: imports_of(module) & MODULES.keys() for module in MODULES}
    done: set[str] = set()

    def visit(module, path):
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])
