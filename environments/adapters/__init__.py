"""One file per third-party library: its environments behind our interface."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from environments.plumbing.registry import describe_error

TOLD: set[tuple[str, type[Exception]]] = set()  # what has been said in this process


@contextmanager
def preserve_global_generators() -> Iterator[None]:
    """Restores the states of `random` and `numpy.random` on exit."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def tell_once(name: str, error: Exception, cost: str) -> None:
    """Prints what the code of a library raised for an answer and what that costs; each kind once.

    Whether the answer or the code is to blame nobody can know: who reads the line can.
    """
    if (name, type(error)) not in TOLD:
        TOLD.add((name, type(error)))
        print(f"{name} raised {describe_error(error)}: {cost}, now and whenever it does",
              file=sys.stderr)  # fmt: skip
