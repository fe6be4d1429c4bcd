"""Reading path, 2 of 10. Count how often letters occur in a word.

The training loop calls two methods of an environment: `reset` gives the task
as a message, `step` reads the policy's response and gives the reward.

The answer is easy to verify and hard to guess; a policy that spells the word out and counts can be
right every time. `difficulty` 1 to 5 uses invented, pronounceable words, 6 to 10 random strings of
up to 500 letters; difficulty 1 asks for one letter, difficulty 10 for about 25. One word in eight
is reserved for evaluation and never occurs under a training or demonstration seed. At difficulty 1
the answers 0, 1, 2 and 3 are equally frequent, so a constant answer is right on a quarter.

Observation: one user message, for example

    How many r in "strawberry"? Work it out, then end with <answer>number</answer>.

Reward of the one response. The answer is an integer, for several letters a JSON object:

    0                           not exactly one <answer>..</answer> with such an answer
    0.1                         well-formed, but wrong
    0.1 + 0.9 · fraction        several letters: the fraction of counts that are exact; it is
                                below 1 if the object has letters that were not asked for
    1.0                         all counts are exact; only then `info["correct"]` is True

>>> env = LetterCounting(difficulty=1)
>>> env.reset(seed=62)[0]["content"]
'How many i in "waini"? Work it out, then end with <answer>number</answer>.'
>>> env.demonstrate()
'w a i1 n i2 <answer>2</answer>'
>>> env.step(env.demonstrate()).reward
1.0
"""

import json
import random
import re
import string
from collections.abc import Mapping
from typing import NamedTuple

from environments.base import EVAL_SEEDS, Env, Message, Step, UsageError, is_held_out
from environments.parsing import user


class Tier(NamedTuple):
    """The tasks of one difficulty."""

    min_length: int  # of the word
    max_length: int
    p_several: float  # probability of min_letters to max_letters letters; otherwise it is one
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
ANSWERS = range(4)  # to a question about one letter; a hasty demonstration draws one of these
ONSETS = "b bl br c ch d dr f fl g gr h j k l m n p pl pr qu r s sh st t tr v w z".split()
VOWELS = "a e i o u ai ea oo ou".split()
CODAS = ["", "", "", "n", "r", "s", "t", "l", "ng", "ck", "nd", "rt"]
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class LetterCounting(Env):
    """One question, one response. `difficulty`: 1 to 10."""

    meanings: Mapping[str, str] = {"worked": "fraction that spell the word"}

    def __init__(self, difficulty: int = 1):
        if difficulty not in TIERS:
            raise UsageError(f"difficulty must be 1 to {max(TIERS)}, not {difficulty}")
        self.difficulty = difficulty

    def reset(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        tier, held_out = TIERS[self.difficulty], seed in EVAL_SEEDS
        if rng.random() < tier.p_several:
            self.word = _draw_word(rng, self.difficulty, held_out)
            letters = _draw_letters(rng, self.word, rng.randint(tier.min_letters, tier.max_letters))
        else:
            letters = []
            while not letters:  # until a letter occurs as often as the answer says
                self.word = _draw_word(rng, self.difficulty, held_out)
                letters = _letters_that_occur(self.word, ANSWERS[seed % len(ANSWERS)])
            letters = [rng.choice(letters)]
        self.counts = {letter: self.word.count(letter) for letter in letters}
        self.guess = {letter: rng.choice(ANSWERS) for letter in letters}
        form = "number" if len(letters) == 1 else f'{{"{letters[0]}": number, ..}}'
        question = f'How many {", ".join(letters)} in "{self.word}"?'
        return [user(f"{question} Work it out, then end with <answer>{form}</answer>.")]

    def step(self, response: str) -> Step:
        reward = score(response, self.counts)
        spelled_out = "[^a-z]+".join(self.word)  # all letters in order, separated
        worked = re.search(spelled_out, response) is not None
        return Step(None, reward, True, {"correct": reward == 1.0, "worked": worked})

    def demonstrate(self, hasty: bool = False) -> str:
        """Spells the word and numbers the letters that count; `hasty`: guesses without spelling."""
        if hasty:
            return _answer(self.guess)
        seen = dict.fromkeys(self.counts, 0)
        spelled = []
        for letter in self.word:
            if letter in seen:
                seen[letter] += 1
                spelled.append(f"{letter}{seen[letter]}")
            else:
                spelled.append(letter)
        return f"{' '.join(spelled)} {_answer(self.counts)}"

    def trivial(self) -> str:
        """Always answers 1."""
        return _answer(dict.fromkeys(self.counts, 1))


def score(response: str, counts: dict[str, int]) -> float:
    """Returns the reward of `response`; `counts` holds the correct answer.

    >>> score("r1 r2 r3 <answer>3</answer>", {"r": 3})
    1.0
    >>> round(score('<answer>{"r": 3, "s": 0}</answer>', {"r": 3, "s": 1}), 2)
    0.55
    >>> score("<answer>3</answer> or <answer>4</answer>", {"r": 3})
    0.0
    """
    # Count the tags first: with many openings the regular expression takes quadratic time.
    if response.count("<answer>") != 1 or response.count("</answer>") != 1:
        return 0.0
    match = ANSWER.search(response)
    if match is None:  # the closing tag comes first
        return 0.0
    try:
        answer = json.loads(match[1])
    except (ValueError, RecursionError):
        return 0.0
    if len(counts) == 1 and type(answer) is int:
        answer = dict.fromkeys(counts, answer)
    if not isinstance(answer, dict):
        return 0.0
    # `type is int`, because in Python True == 1 and 3.0 == 3
    exact = sum(type(answer.get(k)) is int and answer[k] == n for k, n in counts.items())
    if set(answer) - set(counts):
        exact = min(exact, len(counts) - 1)  # an extra letter makes the answer wrong
    if exact == len(counts):
        return 1.0
    return 0.1 + 0.9 * exact / len(counts)


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


def _letters_that_occur(word: str, times: int) -> list[str]:
    return [letter for letter in string.ascii_lowercase if word.count(letter) == times]


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


def _answer(counts: dict[str, int]) -> str:
    text = json.dumps(counts) if len(counts) > 1 else str(next(iter(counts.values())))
    return f"<answer>{text}</answer>"
