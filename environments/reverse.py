"""Reverse strings, one a turn, until one comes out wrong; `reverse_echo` asks for plain copies.

The simplest task of several turns. Strings whose checksum divides by eight are kept for evaluation:
no training or demonstration seed ever shows them.

Observation: one user message a turn, like

    Write each word in reverse; a wrong one ends it. Work it out, then end with
    <answer>word</answer>. Word: "denwo"                                (the first; on one line)
    Right. Word: "gabir"                                                (the others)

Reward of each response:

     1    the answer is right, to the letter; after `turns` of them the episode ends
    -1    it is wrong or can't be read, and the episode ends

So the most is `turns`; only an episode that earns it is "correct". `info["right"]` counts.

>>> env = Reverse(turns=2)
>>> env.reset(seed=7)[0]["content"].partition(". Work")[0]
'Write each word in reverse; a wrong one ends it'
>>> env.demonstrate()
'Ao Bc Ca Dz Dz Ca Bc Ao <answer>zaco</answer>'
>>> env.step(env.demonstrate()).message["content"]
'Right. Word: "cuj"'
>>> env.step("I give up").reward
-1.0
"""

import random
import string
import uuid
import zlib
from typing import Any

from core.types import Message, UsageError
from environments.base import EVAL_SEEDS, Env, Step
from environments.parsing import read_action, user

NOUNS = {"words": "word", "numbers": "number", "uuids": "string"}
SHORTEST, LONGEST = 3, 50  # of words and numbers, in characters
VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnprstvwz"
# an answer without tags: the last thing said, after "answer is" or on a line of its own
PLAIN = r"(?:^|\n|answer is|answer:)[ \t]*[\"'`]?([0-9A-Za-z-]+)[\"'`.]*\s*$"


class Reverse(Env):
    """`kind`: words, numbers or uuids; `turns`; `length`: the longest word or number, 3 to 50."""

    backwards = True

    def __init__(self, kind: str = "words", turns: int = 3, length: int = 5):
        if kind not in NOUNS:
            raise UsageError(f"kind is {', '.join(NOUNS)}, not {kind!r}")
        if turns < 1:
            raise UsageError(f"turns is at least 1, not {turns}")
        if not SHORTEST <= length <= LONGEST:
            raise UsageError(f"length is {SHORTEST} to {LONGEST}, not {length}")
        self.kind, self.turns, self.length = kind, turns, length

    def reset(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        held_out = seed in EVAL_SEEDS
        self.items = [_draw(rng, self.kind, self.length, held_out) for _ in range(self.turns)]
        self.guesses = [_guess(rng, item, self.backwards) for item in self.items]
        self.right = 0
        noun, way = NOUNS[self.kind], "in reverse" if self.backwards else "again"
        rules = f"Write each {noun} {way}; a wrong one ends it."
        form = f"Work it out, then end with <answer>{noun}</answer>."
        return [user(f"{rules} {form} {self._ask()}")]

    def step(self, response: str) -> Step:
        answer = read_action(response, "answer", _as_text, PLAIN)
        if answer != _target(self.items[self.right], self.backwards):
            return Step(None, -1.0, True, {"correct": False, "right": self.right})
        self.right += 1
        if self.right == self.turns:
            return Step(None, 1.0, True, {"correct": True, "right": self.right})
        info = {"correct": False, "right": self.right}
        return Step(user(f"Right. {self._ask()}"), 1.0, False, info)

    def demonstrate(self, hasty: bool = False) -> str:
        """Mark each character with a letter and read the marks backwards; `hasty`: a near miss."""
        item = self.items[self.right]
        if hasty:
            return _answer(self.guesses[self.right])
        if not self.backwards:
            return _answer(item)
        # with its mark each character is one of a kind, even if it comes twice
        marks = (string.ascii_uppercase * 2)[: len(item)]
        marked = [mark + character for mark, character in zip(marks, item, strict=True)]
        return f"{' '.join(marked + marked[::-1])} {_answer(item[::-1])}"

    def _ask(self) -> str:
        return f'{NOUNS[self.kind].capitalize()}: "{self.items[self.right]}"'


class ReverseEcho(Reverse):
    """The same to be repeated as it is, with the same options: a task that is nearly learnt."""

    backwards = False


def _draw(rng: random.Random, kind: str, length: int, held_out: bool) -> str:
    while True:
        size = rng.randint(SHORTEST, length)
        if kind == "uuids":
            item = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        elif kind == "numbers":  # without 0 at either end, so that its reverse is a number too
            item = "".join(
                rng.choice("123456789" if i in (0, size - 1) else string.digits)
                for i in range(size)
            )
        else:
            first = rng.randrange(2)
            item = "".join(rng.choice((VOWELS, CONSONANTS)[(first + i) % 2]) for i in range(size))
        kept = zlib.crc32(item.encode()) % 8 == 0
        if kept == held_out and item != item[::-1]:  # a palindrome would tell nothing
            return item


def _target(item: str, backwards: bool) -> str:
    return item[::-1] if backwards else item


def _guess(rng: random.Random, item: str, backwards: bool) -> str:
    """A hasty answer: the item the wrong way round, or with two characters swapped."""
    if rng.random() < 0.5:
        return _target(item, not backwards)
    characters = list(_target(item, backwards))
    while "".join(characters) == _target(item, backwards):
        i, k = rng.sample(range(len(item)), 2)
        characters[i], characters[k] = characters[k], characters[i]
    return "".join(characters)


def _as_text(value: Any) -> str | None:
    """Text without quotes around it, or a whole number's digits; None for anything else."""
    if type(value) is int and abs(value) < 10 ** (LONGEST + 1):  # str() refuses 5,000 digits
        value = str(value)
    return (value.strip().strip("\"'`") or None) if isinstance(value, str) else None


def _answer(text: str) -> str:
    return f"<answer>{text}</answer>"
