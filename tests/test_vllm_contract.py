"""runs/vllm_contract/contract.py: what NanoLLM uses of vLLM, looked up in vLLM's sources."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "runs/vllm_contract"))
import contract  # noqa: E402

OURS = '''
"""vllm.Removed is only prose, and so is "VLLM_PROSE"."""
import vllm
from vllm.loader import Loader
from unittest.mock import patch
VARIABLES = {"VLLM_CACHE": "0"}
class Mine(Loader):
    def load(self, model): ...
def _limits():
    return {"memory": 0.5}
def start(self, limits):
    arguments = vllm.EngineArgs(model="m", dtype="d", **limits)
    with patch.object(Loader, "close", now):
        self.engine.sleep(level=1)
        self.engine.cache.drop("all")
    if hasattr(vllm.EngineArgs, "new"):
        arguments.new = True
def now(loader, tag): ...
'''
VLLM = {
    "__init__": """
        if TYPE_CHECKING:
            from vllm.args import EngineArgs
        """,
    "envs": 'environment = {"VLLM_CACHE": lambda: 1}',
    "args": """
        class Base:
            memory: float = 1
        class EngineArgs(Base):
            model: str
            dtype: str = ""
        """,
    "loader": """
        class Loader:
            def load(self, model): ...
            def close(self, tag): ...
        """,
    "v1.engine.llm_engine": """
        from ...cache import Cache
        class LLMEngine:
            cache: "Cache | None"
            def sleep(self, level=1): ...
        """,
    "cache": "class Cache:\n def drop(self, *which): ...",
}


@pytest.fixture
def problems(tmp_path):
    """Writes the sources, with one text replaced in vLLM's, and returns name -> problem."""
    (tmp_path / "ours.py").write_text(OURS)

    def check(old="", new=""):
        for module, source in VLLM.items():
            path = tmp_path.joinpath("vllm", *module.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.relative_to(tmp_path).parents[:-1]:
                (tmp_path / folder / "__init__.py").touch()
            path.write_text("\n".join(x.removeprefix(" " * 8) for x in source.splitlines()))
            path.write_text(path.read_text().replace(old, new) if old else path.read_text())
        package = contract.Package(tmp_path)
        uses = contract.used(tmp_path, ("ours.py",))
        return {str(use): package.problem(use) for use in uses if not use.optional}

    return check


ENGINE = "vllm.v1.engine.llm_engine.LLMEngine"


def test_all_that_is_used_is_found(problems):
    assert problems() == dict.fromkeys([
        "VLLM_CACHE", "vllm.EngineArgs", "vllm.EngineArgs(model=)", "vllm.EngineArgs(dtype=)",
        "vllm.EngineArgs(memory=)", "vllm.loader.Loader", "vllm.loader.Loader.load",
        "vllm.loader.Loader.load: _, _", "vllm.loader.Loader.close",
        "vllm.loader.Loader.close: loader, tag", f"{ENGINE}.sleep", f"{ENGINE}.sleep(level=)",
        f"{ENGINE}.cache", f"{ENGINE}.cache.drop", f"{ENGINE}.cache.drop: 1 positional",
    ], "")  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "use", "problem"),
    [
        ("dtype: str", "kind: str", "vllm.EngineArgs(dtype=)", "has no argument dtype"),
        ("memory: float", "share: float", "vllm.EngineArgs(memory=)", "has no argument memory"),
        ("def sleep", "def rest", f"{ENGINE}.sleep", "LLMEngine has no sleep"),
        ("level=1", "depth=1", f"{ENGINE}.sleep(level=)", "has no argument level"),
        ("*which", "*, which", f"{ENGINE}.cache.drop: 1 positional", "takes 0 positional"),
        ("self, tag", "self, name", "vllm.loader.Loader.close: loader, tag", "self, name"),
        ("self, model)", "self)", "vllm.loader.Loader.load: _, _", "parameters are self"),
        ("class Loader", "class Reader", "vllm.loader.Loader", "vllm.loader has no Loader"),
        ('"VLLM_CACHE"', '"VLLM_ROOT"', "VLLM_CACHE", "VLLM_CACHE is not in vllm/envs.py"),
    ],
)
def test_a_change_in_vllm_is_named(problems, old, new, use, problem):
    assert problem in problems(old, new)[use]


def test_what_our_sources_ask_for_first_is_optional(tmp_path):
    (tmp_path / "ours.py").write_text(OURS)
    uses = contract.used(tmp_path, ("ours.py",))
    assert [str(use) for use in uses if use.optional] == ["vllm.EngineArgs.new"]


@pytest.mark.vllm
def test_installed_vllm_has_what_nanollm_uses():
    [folder] = importlib.util.find_spec("vllm").submodule_search_locations
    package = contract.Package(Path(folder).parent)
    uses = [use for use in contract.used() if not use.optional]
    assert {str(use): found for use in uses if (found := package.problem(use))} == {}
    assert len(uses) > 90
