"""All adapters: without their library they raise one line that says how to install it."""

import sys

import pytest

from core.faults import UsageError
from environments.plumbing.registry import make


@pytest.mark.parametrize(
    ("library", "build"),
    [
        ("gymnasium", lambda: make("gymnasium")),
        ("pettingzoo", lambda: make("pettingzoo")),
        ("textarena", lambda: make("textarena")),
    ],
)
def test_missing_library_is_a_usage_error_with_the_install_command(library, build, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    package = library.partition(".")[0].replace("_", "-")
    with pytest.raises(UsageError, match=rf"{package} is not installed: pip install -e .*envs"):
        build()
