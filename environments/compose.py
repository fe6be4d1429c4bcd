r"""Compose functions of words: in `abcd:RL`, apply R, then L to its result.

The reward is for the last word alone, so a policy that knows each function has to find out by
itself that the names after the first are to be applied as well, in their order. Two kinds of
demonstration can be compared: careless ones (`--sft-hasty 1`) apply the first function and often go
on with others at random, which teaches the functions and never a composition; correct ones
(`--sft-hasty 0`) show the answer, with its steps or, with `steps=false`, alone. After careless
demonstrations greedy decoding solves no task, and sampling a few (runs/parts has the commands).

    R  reverse         L  first letter to the end    H  swap the halves     E  swap the ends
    S  swap the first two            D  double the first
    N  first letter to the next one  P  last letter to the one before

In no task does a single function, or another order, give the same answer. That leaves 43 ordered
pairs of functions: 13 of them are for `pairs=unseen`, 30 for `pairs=seen`, the default.

Observation: one user message, the word and the names. Reward of the one response: 1 if it ends with
the right word, else 0.

>>> env = Compose()
>>> env.reset(seed=0)[0]["content"]
'ghcf:DE'
>>> env.demonstrate()
'D ggcf E fgcg'
>>> env.step("fgcg").reward, env.step("D ggcf").reward
(1.0, 0.0)
"""

import random
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, permutations
from typing import Literal

from environments.base import EVAL_SEEDS, Env, Message, Step, check_range, is_held_out
from environments.parsing import user

LETTERS = "abcdefgh"
LENGTH = 4  # of a word
FUNCTIONS = {
    "R": lambda w: w[::-1],
    "L": lambda w: w[1:] + w[0],
    "H": lambda w: w[2:] + w[:2],
    "N": lambda w: _shift(w[0], 1) + w[1:],
    "P": lambda w: w[:-1] + _shift(w[-1], -1),
    "E": lambda w: w[-1] + w[1:-1] + w[0],
    "S": lambda w: w[1] + w[0] + w[2:],
    "D": lambda w: w[0] + w[0] + w[2:],
}
NAMES = list(FUNCTIONS)
MAX_DEPTH = 5  # beyond it few tasks are unambiguous, and a search takes seconds
Pairs = Literal["seen", "unseen", "all"]
GO_ON = 0.4  # probability that a careless demonstration applies a second function


class Compose(Env):
    """`depth`: functions of a task, 1 to 5; `mixed`: 1 to `depth` of them; `pairs`: seen, unseen or
    all; `steps`: demonstrations show the steps, or the answer alone."""

    meanings: Mapping[str, str] = {"steps": "functions that the response applies"}

    def __init__(
        self, depth: int = 2, mixed: bool = False, pairs: Pairs = "seen", steps: bool = True
    ):
        check_range("depth", depth, 1, MAX_DEPTH)
        self.depth, self.mixed, self.pairs, self.steps = depth, mixed, pairs, steps

    def reset(self, seed: int) -> list[Message]:
        self.rng = rng = random.Random(seed)
        depth = rng.randint(1, self.depth) if self.mixed else self.depth
        while True:
            self.word = "".join(rng.choices(LETTERS, k=LENGTH))
            self.names = rng.choices(NAMES, k=depth)
            is_of_use = is_held_out(self.word) == (seed in EVAL_SEEDS)
            if is_of_use and self._has_pairs() and is_unambiguous(self.names, self.word):
                break
        self.answer = apply(self.names, self.word)
        return [user(f"{self.word}:{''.join(self.names)}")]

    def step(self, response: str) -> Step:
        correct = re.search(rf"\b{self.answer}$", response.strip()) is not None
        steps = len(re.findall(rf"\b[{''.join(NAMES)}] ", response))
        return Step(None, float(correct), True, {"correct": correct, "steps": steps})

    def demonstrate(self, hasty: bool = False) -> str:
        """The answer with its steps; `hasty`: the first function, and perhaps others at random."""
        if not hasty and not self.steps:
            return self.answer
        names = self._careless() if hasty else self.names
        words = [apply(names[: i + 1], self.word) for i in range(len(names))]
        return " ".join(f"{name} {word}" for name, word in zip(names, words, strict=True))

    def _careless(self) -> list[str]:
        """The first name and up to two random ones; never the answer to a composition."""
        while True:
            names = self.names[:1]
            if self.rng.random() < GO_ON:
                for _ in range(self.rng.choice([1, 1, 2])):
                    names.append(self.rng.choice(self.rng.choice([self.names, NAMES])))
            if self.names == names[:1] or apply(names, self.word) != self.answer:
                return names

    def _has_pairs(self) -> bool:
        """Whether any two functions in sequence differ, and are a pair for `pairs`."""
        for first, then in pairwise(self.names):
            if first == then or self.pairs == ("seen" if is_unseen(first, then) else "unseen"):
                return False
        return True


def apply(names: Sequence[str], word: str) -> str:
    """The word after all functions, from left to right.

    >>> apply("RL", "abcd")
    'cbad'
    """
    for name in names:
        word = FUNCTIONS[name](word)
    return word


def is_unseen(first: str, then: str) -> bool:
    """Whether the pair is for `pairs=unseen`; the same for both orders.

    >>> is_unseen("L", "R"), is_unseen("R", "L"), is_unseen("R", "H")
    (True, True, False)
    """
    return (NAMES.index(first) + NAMES.index(then)) % 4 == 1


def is_unambiguous(names: Sequence[str], word: str) -> bool:
    """Whether neither one function nor another order gives the answer.

    >>> is_unambiguous("NP", "abcd"), is_unambiguous("RL", "aaaa"), is_unambiguous("RL", "abcd")
    (False, False, True)
    """
    if len(names) == 1:
        return True
    sequences = {*permutations(names), *((name,) for name in NAMES)} - {tuple(names)}
    answer = apply(names, word)
    return answer != word and all(apply(sequence, word) != answer for sequence in sequences)


def _shift(letter: str, by: int) -> str:
    return LETTERS[(LETTERS.index(letter) + by) % len(LETTERS)]
