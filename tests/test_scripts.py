"""The scripts under runs/ start: those with options print their help, the others are imported."""

import os
import re
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from environments.plumbing import registry

ROOT = Path(__file__).parent.parent
SCRIPTS = [f for f in sorted(ROOT.glob("runs/**/*.py")) if "__main__" in f.read_text()]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_script_starts(file, monkeypatch, capsys):
    if file.stem == "verifiers_task":
        pytest.importorskip("verifiers")
    has_help = bool(re.search(r"argparse\.|tyro\.", file.read_text()))
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(sys, "path", [str(file.parent), *sys.path])
    monkeypatch.setattr(registry, "ENVIRONMENTS", {**registry.ENVIRONMENTS})
    modules = set(sys.modules)
    try:
        with pytest.raises(SystemExit) if has_help else nullcontext() as end:
            runpy.run_path(str(file), run_name="__main__" if has_help else "imported")
    finally:  # its neighbours have common names
        for name in set(sys.modules) - modules:
            if str(ROOT / "runs") in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    if has_help:
        assert end.value.code in (0, None) and "usage" in capsys.readouterr().out.lower()
