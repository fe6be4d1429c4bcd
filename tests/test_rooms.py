"""The layout: imports point one way and form no circle, and the algorithm files line up."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("algorithms", "core", "environments", "runs", "tests", "train", "scratch")
ALLOWED = {  # package: what it may import of ours, besides itself
    "algorithms": set(),
    "environments": set(),
    "core": {"algorithms", "algorithms.options", "algorithms.common", "environments.base",
             "environments.registry", "environments.text", "environments.tools",
             "environments.web"},
}  # fmt: skip
REPORT = {f"algorithms.{name}" for name in ("grpo", "gspo", "cispo")}  # losses that it shows


def imports_of(file, top_level_only=False):
    """The modules of ours that a file imports, `from package import module` included."""
    tree = ast.parse(file.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            is_package = (ROOT / node.module.replace(".", "/")).is_dir()
            names = [f"{node.module}.{a.name}" for a in node.names] if is_package else [node.module]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in PACKAGES)


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package):
    for file in (ROOT / package).rglob("*.py"):
        for module in imports_of(file):
            allowed = module.startswith(package) or module in ALLOWED[package]
            in_report = file.parent.name == "report" and module in REPORT
            assert allowed or in_report, (file.name, module)


def test_no_circle_of_imports():
    modules = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for package in ALLOWED
        for file in (ROOT / package).rglob("*.py")
    }
    graph = {name: set(imports_of(file, True)) & modules.keys() for name, file in modules.items()}
    done: set[str] = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for other in graph[name]:
                visit(other, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])
