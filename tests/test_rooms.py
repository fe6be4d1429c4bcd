"""The layout: imports point one way, and form no circle of files or of folders."""

import ast
from functools import cache
from graphlib import TopologicalSorter
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
    """A room imports itself, the rooms below it, and what is below these."""
    may_import = {}
    for name in TopologicalSorter(BELOW).static_order():  # raises CycleError
        may_import[name] = {name}.union(*(may_import[other] for other in BELOW[name]))
    for module in MODULES:
        assert {*map(room, imports_of(module))} <= may_import[room(module)], module


def test_no_circle_of_imports():
    TopologicalSorter({module: imports_of(module) for module in MODULES}).prepare()
