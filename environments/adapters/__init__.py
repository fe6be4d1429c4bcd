"""One file per third-party library: its environments behind our interface, or the other way."""

import importlib
from types import ModuleType

from core.types import UsageError


def import_library(name: str) -> ModuleType:
    """Imports an optional library; raises UsageError with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0].replace("_", "-")
        raise UsageError(f'{package} is not installed: pip install -e ".[envs]"') from None
