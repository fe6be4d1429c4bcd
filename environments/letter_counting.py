"""Count letters in a word: easy to check, hard to guess, and sure for whoever spells it out.

Ten tiers (`difficulty`): 1-5 use pronounceable made-up words, 6-10 random strings of up to 500
letters; tier 1 asks for one letter, tier 10 for two dozen at once. Words whose checksum divides by
eight are kept for evaluation: no training or demonstration seed ever shows them.

Observation: one user message, like

    How many r in "strawberry"? Work it out, then end with <answer>number</answer>.

Reward of the one response:

    0                           without exactly one <answer>..</answer>, integer or JSON object
    0.1                         well formed, but wrong
    0.1 + 0.9 · letters right   several letters asked: the fraction that is exact
    1.0                         all exact; only this is "correct"

>>> env = LetterCounting(difficulty=1)
>>> env.reset(seed=62)[0]["content"]
'How many o in "denwoor"? Work it out, then end with <answer>number</answer>.'
>>> env.demonstrate()
'd e n w o1 o2 r <answer>2</answer>'
>>> env.step(env.demonstrate()).reward
1.0
"""

import json
import random
import re
import string
import zlib

from core.types import Message, UsageError
from environments.base import EVAL_SEEDS, Env, Step

# tier: (shortest, longest, chance of asking for several letters, fewest, most), in letters
TIERS = {
    1: (3, 8, 0.0, 1, 1),
    2: (5, 12, 0.5, 1, 2),
    3: (8, 18, 0.6, 2, 3),
    4: (10, 25, 0.8, 3, 5),
    5: (15, 35, 0.9, 5, 8),
    6: (40, 80, 1.0, 8, 12),
    7: (80, 150, 1.0, 12, 20),
    8: (150, 250, 1.0, 18, 26),
    9: (250, 400, 1.0, 22, 26),
    10: (400, 500, 1.0, 24, 26),
}
LAST_WORD_TIER = 5  # above it: strings of random letters
ABSENT_LETTER = 0.2  # chance that a letter asked for is drawn from the alphabet, not from the word
GUESSES = [0, 1, 2, 2, 3]  # of a hasty player: drawn without a look at the word
ONSETS = "b bl br c ch d dr f fl g gr h j k l m n p pl pr qu r s sh st t tr v w z".split()
VOWELS = "a e i o u ai ea oo ou".split()
CODAS = ["", "", "", "n", "r", "s", "t", "l", "ng", "ck", "nd", "rt"]  # half the syllables are open
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class LetterCounting(Env):
    """One question, one response. `difficulty`: 1 to 10."""

    def __init__(self, difficulty: int = 1):
        if difficulty not in TIERS:
            raise UsageError(f"difficulty is 1 to {max(TIERS)}, not {difficulty}")
        self.difficulty = difficulty

    def reset(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        self.word = _draw_word(rng, self.difficulty, held_out=seed in EVAL_SEEDS)
        letters = _draw_letters(rng, self.word, self.difficulty)
        self.counts = {letter: self.word.count(letter) for letter in letters}
        self.guess = {letter: rng.choice(GUESSES) for letter in letters}
        form = "number" if len(letters) == 1 else f'{{"{letters[0]}": number, ..}}'
        question = f'How many {", ".join(letters)} in "{self.word}"?'
        ask = f"{question} Work it out, then end with <answer>{form}</answer>."
        return [{"role": "user", "content": ask}]

    def step(self, response: str) -> Step:
        reward = score(response, self.counts)
        spelled_out = "[^a-z]+".join(self.word)  # all its letters in order, each on its own
        worked = re.search(spelled_out, response) is not None
        return Step(None, reward, True, {"correct": reward == 1.0, "worked": worked})

    def demonstrate(self, hasty: bool = False) -> str:
        """Spell the word out, each letter asked for with its running count; `hasty`: only guess."""
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


def score(response: str, counts: dict[str, int]) -> float:
    """The reward of `response`, by the table above.

    >>> score("r1 r2 r3 <answer>3</answer>", {"r": 3})
    1.0
    >>> round(score('<answer>{"r": 3, "s": 0}</answer>', {"r": 3, "s": 1}), 2)
    0.55
    >>> score("<answer>3</answer> or <answer>4</answer>", {"r": 3})
    0.0
    """
    # counted first: with many openings the search would take the square of the length
    if response.count("<answer>") != 1 or response.count("</answer>") != 1:
        return 0.0
    found = ANSWER.search(response)
    if found is None:  # it closes before it opens
        return 0.0
    try:
        answer = json.loads(found[1])
    except (ValueError, RecursionError):
        return 0.0
    if len(counts) == 1 and type(answer) is int:
        answer = dict.fromkeys(counts, answer)
    if not isinstance(answer, dict):
        return 0.0
    # `type is int` because True == 1 and 3.0 == 3 in Python
    right = sum(type(answer.get(k)) is int and answer[k] == n for k, n in counts.items())
    if set(answer) - set(counts):
        right = min(right, len(counts) - 1)  # letters that nobody asked for: not exact
    if right == len(counts):
        return 1.0
    return 0.1 + 0.9 * right / len(counts)


def _draw_word(rng: random.Random, difficulty: int, held_out: bool) -> str:
    shortest, longest = TIERS[difficulty][:2]
    while True:
        length = rng.randint(shortest, longest)
        if difficulty > LAST_WORD_TIER:
            word = "".join(rng.choices(string.ascii_lowercase, k=length))
        else:
            word = ""
            while len(word) < length:
                word += rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
            word = word[:length]
        if (zlib.crc32(word.encode()) % 8 == 0) == held_out:
            return word


def _draw_letters(rng: random.Random, word: str, difficulty: int) -> list[str]:
    several, fewest, most = TIERS[difficulty][2:]
    number = rng.randint(fewest, most) if rng.random() < several else 1
    letters: list[str] = []
    while len(letters) < number:
        absent = rng.random() < ABSENT_LETTER
        letter = rng.choice(string.ascii_lowercase if absent else word)
        if letter not in letters:
            letters.append(letter)
        elif set(word) <= set(letters):  # the word has no more letters to offer
            letters.append(rng.choice(sorted(set(string.ascii_lowercase) - set(letters))))
    return letters


def _answer(counts: dict[str, int]) -> str:
    shown = json.dumps(counts) if len(counts) > 1 else str(next(iter(counts.values())))
    return f"<answer>{shown}</answer>"
