"""All adapters: without their library they raise one line that says how to install it."""

import sys

import pytest

from core.faults import UsageError
from environments.plumbing.registry import make


@pytest.mark.parametrize("name", ["gymnasium", "reasoning_gym"])
def test_missing_library_is_a_usage_error_with_the_install_command(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    package = name.replace("_", "-")
    with pytest.raises(UsageError, match=rf"{package} is not installed: pip install -e .*envs"):
        make(name)
