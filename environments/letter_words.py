"""The words and letters of `letter_counting`, by difficulty.

Difficulty 1 to 5 has invented, pronounceable words, 6 to 10 random strings of up to 500 letters;
difficulty 1 asks for one letter, difficulty 10 for about 25.
"""

import random
import string
from typing import NamedTuple

from environments.base import is_held_out


class Tier(NamedTuple):
    """The tasks of one difficulty."""

    min_length: int  # of the word
    max_length: int
    p_several: float  # probability that a question asks for min_letters to max_letters, not for one
    min_letters: int
    max_letters: int


TIERS = {
    1: Tier(3, 8, 0.0, 1, 1),
    2: Tier(5, 12, 0.5, 1, 2),
    3: Tier(8, 18, 0.6, 2, 3),
    4: Tier(10, 25, 0.8, 3, 5),
    5: Tier(15, 35, 0.9, 5, 8),
    6: Tier(40, 80, 1.0, 8, 12),
    7: Tier(80, 150, 1.0, 12, 20),
    8: Tier(150, 250, 1.0, 18, 26),
    9: Tier(250, 400, 1.0, 22, 26),
    10: Tier(400, 500, 1.0, 24, 26),
}
MAX_WORD_TIER = 5  # higher tiers use random strings
P_ANY_LETTER = 0.2  # probability of drawing a letter from the alphabet instead of the word
ONSETS = "b bl br c ch d dr f fl g gr h j k l m n p pl pr qu r s sh st t tr v w z".split()
VOWELS = "a e i o u ai ea oo ou".split()
CODAS = ["", "", "", "n", "r", "s", "t", "l", "ng", "ck", "nd", "rt"]


def draw_question(
    rng: random.Random, difficulty: int, held_out: bool, answer: int
) -> tuple[str, list[str]]:
    """Draws a word and the letters to count in it; a single letter occurs `answer` times."""
    tier = TIERS[difficulty]
    if rng.random() < tier.p_several:
        word = _draw_word(rng, difficulty, held_out)
        return word, _draw_letters(rng, word, rng.randint(tier.min_letters, tier.max_letters))
    letters: list[str] = []
    while not letters:  # until a letter occurs as often as the answer says
        word = _draw_word(rng, difficulty, held_out)
        letters = [letter for letter in string.ascii_lowercase if word.count(letter) == answer]
    return word, [rng.choice(letters)]


def _draw_word(rng: random.Random, difficulty: int, held_out: bool) -> str:
    tier = TIERS[difficulty]
    while True:
        length = rng.randint(tier.min_length, tier.max_length)
        if difficulty > MAX_WORD_TIER:
            word = "".join(rng.choices(string.ascii_lowercase, k=length))
        else:
            word = ""
            while len(word) < length:
                word += rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
            word = word[:length]
        if is_held_out(word) == held_out:
            return word


def _draw_letters(rng: random.Random, word: str, number: int) -> list[str]:
    letters: list[str] = []
    while len(letters) < number:
        any_letter = rng.random() < P_ANY_LETTER
        letter = rng.choice(string.ascii_lowercase if any_letter else word)
        if letter not in letters:
            letters.append(letter)
        elif set(word) <= set(letters):  # all letters of the word are taken
            letters.append(rng.choice(sorted(set(string.ascii_lowercase) - set(letters))))
    return letters
