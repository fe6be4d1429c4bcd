"""All adapters: without their library they raise one line that says how to install it."""

import sys

import pytest

from core.types import UsageError
from environments.adapters.pettingzoo import as_pettingzoo
from environments.plumbing.registry import make
from environments.tic_tac_toe import tic_tac_toe


@pytest.mark.parametrize(
    ("library", "build"),
    [
        ("gymnasium", lambda: make("gymnasium")),
        ("pettingzoo", lambda: as_pettingzoo(tic_tac_toe("self"), ["X", "O"])),
        ("textarena", lambda: make("textarena")),
    ],
)
def test_missing_library_is_a_usage_error_with_the_install_command(library, build, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    package = library.partition(".")[0].replace("_", "-")
    with pytest.raises(UsageError, match=rf"{package} is not installed: pip install -e .*envs"):
        build()
