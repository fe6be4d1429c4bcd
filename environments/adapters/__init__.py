"""One file per third-party library: its environments behind our interface, or the other way."""

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np

from environments.base import UsageError


def import_library(name: str) -> ModuleType:
    """Imports an optional library; raises UsageError with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0].replace("_", "-")
        raise UsageError(f'{package} is not installed: pip install -e ".[envs]"') from None


@contextmanager
def preserve_global_generators() -> Iterator[None]:
    """Restores the states of `random` and `numpy.random` on exit."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
