"""Any dataset of Reasoning Gym: one generated question, one answer, its own scorer.

Observation: the dataset's question and the form of the answer, like

    Calculate ( -6 + -77 - 8 + -38 ). End with <answer>..</answer>.

Reward of the one response:

    0             without an answer that can be read and scored
    0 to 1        the dataset's score; "correct" is a score of at least 0.99

Some scorers run the answer as Python code, so for them SAFE says what they may get to see; all else
earns 0. Some datasets draw in the order of a set, which only PYTHONHASHSEED=0 makes repeatable.

>>> [is_safe("countdown", "4*(30 - 4)"), is_safe("countdown", "9**9**9**9")]
[True, False]
>>> [is_safe("simple_integration", "x**3/3 + C"), is_safe("simple_integration", "exit(1)")]
[True, False]
"""

import json
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from core.types import Message, UsageError
from environments.base import Env, Step
from environments.parsing import read_action, user

ARITHMETIC = re.compile(r"(?:[\d\s+/()-]|\*(?!\*)){1,1000}")
POLYNOMIAL = re.compile(r"(?:[\d\s+/()C-]|[xyzX](?:\s*\*\*\s*\d\d?(?!\d))?|\*(?!\*)){1,1000}")
NESTED_LIST = re.compile(r"[\[\],\s\dA-Z_'\".-]*")  # without small letters: no keywords, no calls
SAFE = {
    **dict.fromkeys(("countdown", "puzzle24"), ARITHMETIC),
    **dict.fromkeys(("simple_integration", "polynomial_multiplication"), POLYNOMIAL),
    **dict.fromkeys(
        ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), NESTED_LIST
    ),
}
REFUSED = {
    "intermediate_integration": "takes the question for an answer, as Integral(..)",
    "composite": "is made of other datasets: name one of those",
}
SET_ORDERED = (
    "isomorphic_strings knight_swap polynomial_multiplication ransom_note word_ladder".split()
)


class ReasoningGym(Env):
    """One question, one response. `dataset`: a name of Reasoning Gym's."""

    def __init__(self, dataset: str = "basic_arithmetic"):
        if dataset in REFUSED:
            raise UsageError(f"the dataset {dataset} {REFUSED[dataset]}")
        if dataset in SET_ORDERED and os.environ.get("PYTHONHASHSEED") != "0":
            raise UsageError(f"set PYTHONHASHSEED=0 first: {dataset} draws in the order of a set")
        try:
            import reasoning_gym
        except ImportError:
            raise UsageError(
                'reasoning_gym needs reasoning-gym: pip install -e ".[envs]"'
            ) from None
        self.name, self.create = dataset, reasoning_gym.create_dataset
        try:
            self.reset(0)
        except ValueError as error:
            raise UsageError(f"Reasoning Gym: {' '.join(str(error).split())}") from None

    def reset(self, seed: int) -> list[Message]:
        with _global_draws_kept():
            self.dataset: Any = self.create(self.name, size=2, seed=seed)
            self.entry: dict[str, Any] = self.dataset[0]
        return [user(f"{self.entry['question']} End with <answer>..</answer>.")]

    def step(self, response: str) -> Step:
        answer = read_action(response, "answer", _as_text)
        score = 0.0
        if answer is not None and is_safe(self.name, answer):
            with _global_draws_kept():
                try:
                    score = float(self.dataset.score_answer(answer, self.entry))
                except Exception:  # scorers differ in what they can't read, and how they say so
                    score = 0.0
        return Step(None, score, True, {"correct": score >= 0.99, "invalid": answer is None})

    def demonstrate(self, hasty: bool = False) -> str | None:
        """The dataset's answer, None if it gives none; `hasty`: that of another question."""
        with _global_draws_kept():
            answer = self.dataset[1 if hasty else 0]["answer"]
        return None if answer is None else f"<answer>{answer}</answer>"


def is_safe(dataset: str, answer: str) -> bool:
    """Whether the answer may reach the dataset's scorer."""
    return dataset not in SAFE or SAFE[dataset].fullmatch(answer) is not None


def _as_text(value: Any) -> str | None:
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        return None


@contextmanager
def _global_draws_kept() -> Iterator[None]:
    """Some datasets seed the global generators: leave them as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
