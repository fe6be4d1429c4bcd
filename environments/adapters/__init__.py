"""One file per third-party library: its environments behind our interface."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def preserve_global_generators() -> Iterator[None]:
    """Restores the states of `random` and `numpy.random` on exit."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
