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
        self.guesses = [_draw_guess(rng, self._answer_to(item)) for item in self.items]
        self.right = 0
        how = "in reverse" if self.backwards else "again"
        form = "Work it out, then end with <answer>word</answer>."
        return [user(f"Write each word {how}; a wrong one ends it. {form} {self._question()}")]

    def step(self, response: str) -> Step:
        answer = read_action(response, "answer", _as_text, PLAIN)
        is_right = answer == self._answer_to(self.items[self.right])
        self.right += is_right
        info = {"correct": self.right == self.turns, "right": self.right}
        if not is_right or self.right == self.turns:
            return Step(None, 1.0 if is_right else -1.0, True, info)
        return Step(user(f"Right. {self._question()}"), 1.0, False, info)

    def demonstrate(self, hasty: bool = False) -> str:
        """Labels each character A, B, .. and reads the labels backwards; `hasty`: an error."""
        item = self.items[self.right]
        if hasty:
            return f"<answer>{self.guesses[self.right]}</answer>"
        if not self.backwards:
            return f"<answer>{item}</answer>"
        # The label makes each character unique, even if the string repeats a character.
        labels = (string.ascii_uppercase * 2)[: len(item)]
        labelled = [label + character for label, character in zip(labels, item, strict=True)]
        return f"{' '.join(labelled + labelled[::-1])} <answer>{item[::-1]}</answer>"

    def _answer_to(self, item: str) -> str:
        return item[::-1] if self.backwards else item

    def _question(self) -> str:
        return f'Word: "{self.items[self.right]}"'


class ReverseEcho(Reverse):
    """Asks for a copy of each string; the options are the same. An easy task for comparisons."""

    backwards = False


def _draw(rng: random.Random, length: int, held_out: bool) -> str:
    while True:
        size = rng.randint(MIN_LENGTH, length)
        first = rng.randrange(2)  # 0: a vowel, 1: a consonant
        item = "".join(rng.choice((VOWELS, CONSONANTS)[(first + i) % 2]) for i in range(size))
        if is_held_out(item) == held_out and item != item[::-1]:
            return item


def _draw_guess(rng: random.Random, answer: str) -> str:
    """Draws a wrong answer: the opposite direction, or two characters swapped."""
    if rng.random() < 0.5:
        return answer[::-1]
    characters = list(answer)
    while "".join(characters) == answer:
        i, j = rng.sample(range(len(answer)), 2)
        characters[i], characters[j] = characters[j], characters[i]
    return "".join(characters)


def _as_text(value: Any) -> str | None:
    """Returns a text without its quotes; None for anything else and for an empty text."""
    return value.strip().strip("\"'`") or None if isinstance(value, str) else None
