"""Reasoning Gym: one generated question, one answer, graded by the dataset's own scorer.

Observation: the dataset's question and the format of the answer:

    Calculate ( -6 + -77 - 8 + -38 ). End with <answer>..</answer>.

Reward of the one response:

    0 to 1    the dataset's score; `info["correct"]`: the score is at least 0.99
    0         no answer could be read, or the scorer rejects it

Security: some scorers evaluate the answer as Python code. SAFE has a pattern for each of their
datasets. An answer that does not match it as a whole gets 0 and never reaches the scorer.

Some datasets iterate over sets of texts. They repeat their questions only under PYTHONHASHSEED=0.

>>> [is_safe("countdown", "4*(30 - 4)"), is_safe("countdown", "9**9**9**9")]
[True, False]
>>> [is_safe("simple_integration", "x**3/3 + C"), is_safe("simple_integration", "exit(1)")]
[True, False]
"""

import json
import os
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from environments.base import Env, Message, Step, UsageError
from environments.parsing import read_action, user
from environments.plumbing.installed import import_library

ARITHMETIC = re.compile(r"(?:[\d\s+/()-]|\*(?!\*)){1,1000}")
POLYNOMIAL = re.compile(r"(?:[\d\s+/()C-]|[xyzX](?:\s*\*\*\s*\d\d?(?!\d))?|\*(?!\*)){1,1000}")
NESTED_LIST = re.compile(r"[\[\],\s\dA-Z_'\".-]*")  # no lower case: no keywords, no calls
SAFE = {
    "countdown": ARITHMETIC, "puzzle24": ARITHMETIC,
    "simple_integration": POLYNOMIAL, "polynomial_multiplication": POLYNOMIAL,
    "binary_matrix": NESTED_LIST, "n_queens": NESTED_LIST, "spiral_matrix": NESTED_LIST,
    "string_insertion": NESTED_LIST,
}  # fmt: skip
# accepts the question, written as Integral(..), as an answer; mixes other datasets
UNSUPPORTED = "intermediate_integration", "composite"
SET_ORDERED = """isomorphic_strings knight_swap polynomial_multiplication ransom_note
    word_ladder""".split()


class ReasoningGym(Env):
    """One question, one response.

    `dataset`: a name that Reasoning Gym registers.
    `options`: settings of the dataset, such as min_terms=5.
    """

    def __init__(self, dataset: str = "basic_arithmetic", **options: Any) -> None:
        if dataset in UNSUPPORTED:
            raise UsageError(f"the dataset {dataset} is not supported: name another one")
        if dataset in SET_ORDERED and os.environ.get("PYTHONHASHSEED") != "0":
            raise UsageError(f"set PYTHONHASHSEED=0: {dataset} depends on the order of a set")
        self.name, self.options = dataset, options
        self.create = import_library("reasoning_gym").create_dataset
        self.reset(0)  # raises for an unknown dataset and for wrong options

    def reset(self, seed: int) -> list[Message]:
        with preserve_global_generators():  # some datasets seed them
            random.seed(seed)  # list_functions draws from it
            self.dataset: Any = self.create(self.name, size=2, seed=seed, **self.options)
            self.entry, self.other = self.dataset[0], self.dataset[1]
        return [user(f"{self.entry['question']} End with <answer>..</answer>.")]

    def step(self, response: str) -> Step:
        answer = read_action(
            response, "answer", lambda v: v if isinstance(v, str) else json.dumps(v)
        )
        score = 0.0
        if answer is not None and is_safe(self.name, answer):
            with preserve_global_generators():
                try:
                    score = float(self.dataset.score_answer(answer, self.entry))
                except Exception as error:  # each scorer's own for an unreadable answer
                    tell_once(self.name, type(error).__name__)
        return Step(None, score, True, {"correct": score >= 0.99, "invalid": answer is None})

    def demonstrate(self, hasty: bool = False) -> str | None:
        """Returns the dataset's answer, None without one; `hasty`: another question's answer."""
        answer = (self.other if hasty else self.entry)["answer"]
        return None if answer is None else f"<answer>{answer}</answer>"


def is_safe(dataset: str, answer: str) -> bool:
    """Whether the answer may be passed to the dataset's scorer."""
    return dataset not in SAFE or SAFE[dataset].fullmatch(answer) is not None


@contextmanager
def preserve_global_generators() -> Iterator[None]:
    """Restores the states of `random` and `numpy.random` on exit."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@cache
def tell_once(dataset: str, error: str) -> None:
    """Names what a scorer raised: whether it or the answer is to blame, the reader can see."""
    print(f"reasoning_gym:dataset={dataset} raised {error}: the answer gets 0", file=sys.stderr)
