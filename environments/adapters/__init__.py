"""One file per third-party library: its environments behind our interface."""

import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

TOLD: set[tuple[str, str, int | None]] = set()  # what has been said in this process


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
    """Prints what the code of a library raised for an answer and what that costs; each place once.

    Whether the answer or the code is to blame nobody can know: who reads the line can.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    if (name, place.filename, place.lineno) not in TOLD:
        TOLD.add((name, place.filename, place.lineno))
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        print(f"{name} raised {reason} ({place.filename}, line {place.lineno}): {cost}, now and "
              "whenever it does", file=sys.stderr)  # fmt: skip
