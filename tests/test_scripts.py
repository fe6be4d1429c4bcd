"""The scripts under runs/ start: each prints its help."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from environments.registry import ENVIRONMENTS

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    file
    for file in sorted(ROOT.glob("runs/**/*.py"))
    if re.search(r"argparse\.|tyro\.", file.read_text()) and "__main__" in file.read_text()
]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_script_prints_its_help(file, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    monkeypatch.setattr(sys, "path", [str(file.parent), *sys.path])
    modules, environments = set(sys.modules), dict(ENVIRONMENTS)
    try:
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(file), run_name="__main__")
    finally:  # a script may register an environment, and its neighbours have common names
        ENVIRONMENTS.clear()
        ENVIRONMENTS.update(environments)
        for name in set(sys.modules) - modules:
            if str(ROOT / "runs") in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    assert end.value.code in (0, None) and "usage" in capsys.readouterr().out.lower()
