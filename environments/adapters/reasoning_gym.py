"""Reasoning Gym: one generated question, one answer, graded by the dataset's own scorer.

Observation: the dataset's question and the format of the answer:

    Calculate ( -6 + -77 - 8 + -38 ). End with <answer>..</answer>.

Reward of the one response:

    0 to 1    the dataset's score; `info["correct"]`: the score is at least 0.99
    0         no answer could be read, or the scorer rejects it

Datasets whose scorer evaluates the answer as code are refused. A few others iterate over sets of
texts, so their questions are repeatable only under PYTHONHASHSEED=0.
"""

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from environments.base import Env, Message, Step, UsageError
from environments.parsing import read_action, user
from environments.plumbing.installed import import_library

# their scorers pass the answer to eval or sympy.parse_expr; composite mixes other datasets
UNSUPPORTED = """binary_matrix composite countdown intermediate_integration n_queens
    polynomial_multiplication puzzle24 simple_integration spiral_matrix string_insertion""".split()
SET_ORDERED = "isomorphic_strings knight_swap ransom_note word_ladder".split()


class ReasoningGym(Env):
    """One question, one response.

    `dataset`: a name that Reasoning Gym registers.
    `options`: settings of the dataset, such as min_terms=5.
    """

    def __init__(self, dataset: str = "basic_arithmetic", **options: Any) -> None:
        if dataset in UNSUPPORTED:
            raise UsageError(f"the scorer of {dataset} may run an answer as code: name another")
        if dataset in SET_ORDERED and os.environ.get("PYTHONHASHSEED") != "0":
            raise UsageError(f"set PYTHONHASHSEED=0: {dataset} depends on the order of a set")
        self.name, self.options = dataset, options
        self.create = import_library("reasoning_gym").create_dataset
        self.reset(0)  # raises for an unknown dataset and for wrong options

    def reset(self, seed: int) -> list[Message]:
        with preserve_global_generators():  # some datasets seed them
            random.seed(seed)  # list_functions draws from it
            self.dataset: Any = self.create(self.name, size=2, seed=seed, **self.options)
            self.entry, self.other_entry = self.dataset[0], self.dataset[1]
        return [user(f"{self.entry['question']} End with <answer>..</answer>.")]

    def step(self, response: str) -> Step:
        answer = read_action(response, "answer", _as_text)
        score = 0.0
        if answer is not None:
            with preserve_global_generators(), suppress(Exception):  # the answer is unreadable
                score = float(self.dataset.score_answer(answer, self.entry))
        return Step(None, score, True, {"correct": score >= 0.99, "invalid": answer is None})

    def demonstrate(self, hasty: bool = False) -> str | None:
        """Returns the dataset's answer, None without one; `hasty`: another question's answer."""
        answer = (self.other_entry if hasty else self.entry)["answer"]
        return None if answer is None else f"<answer>{answer}</answer>"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@contextmanager
def preserve_global_generators() -> Iterator[None]:
    """Restores the states of `random` and `numpy.random` on exit."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
