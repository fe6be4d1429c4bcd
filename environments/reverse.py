"""Reverse, or copy, one word per turn; the first error ends the episode.

The simplest task with several turns. `reverse_echo` asks for plain copies instead. One word in
eight is reserved for evaluation and never occurs under a training or demonstration seed.

Observation: one user message per turn. The first one is a single line:

    Write each word in reverse; a wrong one ends it. Work it out, then end with
    <answer>word</answer>. Word: "denwo"

The following ones:

    Right. Word: "gabir"

Reward of each response:

     1    the answer is exactly right; after `turns` right answers the episode ends
    -1    the answer is wrong or missing; the episode ends

The maximum return is `turns`; only then `info["correct"]` is True. `info["right"]` counts the right
answers.

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
from typing import Any

from environments.base import EVAL_SEEDS, Env, Message, Step, check_range, is_held_out
from environments.parsing import read_action, user

MIN_LENGTH, MAX_LENGTH = 3, 50  # characters of a word
VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnprstvwz"
# an answer without tags: at the end, after "answer is" or on its own line
PLAIN = r"(?:^|\n|answer is|answer:)[ \t]*[\"'`]?([A-Za-z]+)[\"'`.]*\s*$"


class Reverse(Env):
    """`turns`: words of an episode; `length`: the longest word, 3 to 50."""

    backwards = True

    def __init__(self, turns: int = 3, length: int = 5):
        check_range("turns", turns, 1)
        check_range("length", length, MIN_LENGTH, MAX_LENGTH)
        self.turns, self.length = turns, length

    def reset(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        held_out = seed in EVAL_SEEDS
        self.items = [_draw(rng, self.length, held_out) for _ in range(self.turns)]
        self.guesses = [_draw_guess(rng, item, self.backwards) for item in self.items]
        self.right = 0
        rules = (
            f"Write each word {'in reverse' if self.backwards else 'again'}; a wrong one ends it."
        )
        form = "Work it out, then end with <answer>word</answer>."
        return [user(f"{rules} {form} {self._question()}")]

    def step(self, response: str) -> Step:
        answer = read_action(response, "answer", _as_text, PLAIN)
        if answer != _solution(self.items[self.right], self.backwards):
            return Step(None, -1.0, True, {"correct": False, "right": self.right})
        self.right += 1
        if self.right == self.turns:
            return Step(None, 1.0, True, {"correct": True, "right": self.right})
        info = {"correct": False, "right": self.right}
        return Step(user(f"Right. {self._question()}"), 1.0, False, info)

    def demonstrate(self, hasty: bool = False) -> str:
        """Labels each character A, B, .. and reads the labels backwards; `hasty`: an error."""
        item = self.items[self.right]
        if hasty:
            return _answer(self.guesses[self.right])
        if not self.backwards:
            return _answer(item)
        # The label makes each character unique, even if the string repeats a character.
        labels = (string.ascii_uppercase * 2)[: len(item)]
        labelled = [label + character for label, character in zip(labels, item, strict=True)]
        return f"{' '.join(labelled + labelled[::-1])} {_answer(item[::-1])}"

    def _question(self) -> str:
        return f'Word: "{self.items[self.right]}"'


class ReverseEcho(Reverse):
    """Asks for a copy of each string; the options are the same. An easy task for comparisons."""

    backwards = False


def _draw(rng: random.Random, length: int, held_out: bool) -> str:
    while True:
        size, first = rng.randint(MIN_LENGTH, length), rng.randrange(2)
        item = "".join(rng.choice((VOWELS, CONSONANTS)[(first + i) % 2]) for i in range(size))
        is_palindrome = item == item[::-1]
        if is_held_out(item) == held_out and not is_palindrome:
            return item


def _solution(item: str, backwards: bool) -> str:
    return item[::-1] if backwards else item


def _draw_guess(rng: random.Random, item: str, backwards: bool) -> str:
    """Draws a wrong answer: the opposite direction, or two characters swapped."""
    if rng.random() < 0.5:
        return _solution(item, not backwards)
    characters = list(_solution(item, backwards))
    while "".join(characters) == _solution(item, backwards):
        i, k = rng.sample(range(len(item)), 2)
        characters[i], characters[k] = characters[k], characters[i]
    return "".join(characters)


def _as_text(value: Any) -> str | None:
    """Returns a text without its quotes; else None."""
    return (value.strip().strip("\"'`") or None) if isinstance(value, str) else None


def _answer(text: str) -> str:
    return f"<answer>{text}</answer>"
