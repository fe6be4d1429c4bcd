"""The afternoon, 1 of 9. Count how often letters occur in a word.

The training loop calls two methods of an environment: `reset(seed)` returns a question, and
`step(response)` reads the policy's response and returns the reward.

The answer is easy to verify and hard to guess; a policy that spells the word out and counts can be
right every time. Training, demonstrations and evaluation have separate ranges of seeds; one word in
eight occurs under evaluation seeds only. At difficulty 1, the default, the answers 0, 1, 2 and 3
are equally frequent, so a policy that always gives the same answer is right on a quarter.

Observation: one user message, for example

    How many r in "strawberry"? Work it out, then end with <answer>number</answer>.

Reward of the one response:

    0       not exactly one <answer>..</answer>, or something else in it than a number
    0.1     well-formed, but wrong
    1.0     right; only then `info["correct"]` is True

From difficulty 2 on, words are longer, and a question may ask for several letters. Its answer is a
JSON object with a count for each letter, and its reward is 0.1 + 0.9 · the fraction of exact
counts. An object with a letter that was not asked for counts as wrong in one letter at least. For
one letter an object is accepted, too.

Imported: `Env` and `Step` are the interface (base.py); `draw_question` draws a word and letters
(letter_words.py); `user` makes a message of the role user (parsing.py).

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
from collections.abc import Mapping

from environments.base import EVAL_SEEDS, Env, Message, Step, UsageError
from environments.letter_words import TIERS, draw_question
from environments.parsing import user

ANSWERS = range(4)  # to a question about one letter; a hasty demonstration draws one of these


class LetterCounting(Env):
    """One question, one response. `difficulty`: 1 to 10."""

    # how the screen and the report explain the metric info/worked, the mean of info["worked"]
    meanings: Mapping[str, str] = {"worked": "fraction that spell the word"}

    def __init__(self, difficulty: int = 1):
        if difficulty not in TIERS:
            raise UsageError(f"difficulty must be 1 to {max(TIERS)}, not {difficulty}")
        self.difficulty = difficulty

    def reset(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        answer = ANSWERS[seed % len(ANSWERS)]  # so that each of them is equally frequent
        self.word, letters = draw_question(rng, self.difficulty, seed in EVAL_SEEDS, answer)
        self.counts = {letter: self.word.count(letter) for letter in letters}
        self.guess = {letter: rng.choice(ANSWERS) for letter in letters}
        form = "number" if len(letters) == 1 else f'{{"{letters[0]}": number, ..}}'
        question = f'How many {", ".join(letters)} in "{self.word}"?'
        return [user(f"{question} Work it out, then end with <answer>{form}</answer>.")]

    def step(self, response: str) -> Step:
        reward = reward_of(response, self.counts)
        spelled_out = "[^a-z]+".join(self.word)  # all letters in order, separated
        worked = re.search(spelled_out, response) is not None
        return Step(None, reward, done=True, info={"correct": reward == 1.0, "worked": worked})

    def demonstrate(self, hasty: bool = False) -> str:
        """Spells the word and numbers the letters that count; `hasty`: guesses without spelling."""
        if hasty:
            return _in_tags(self.guess)
        counts_so_far = dict.fromkeys(self.counts, 0)
        spelled = []
        for letter in self.word:
            if letter in counts_so_far:
                counts_so_far[letter] += 1
            spelled.append(f"{letter}{counts_so_far.get(letter, '')}")
        return f"{' '.join(spelled)} {_in_tags(self.counts)}"

    def trivial(self) -> str:
        """Always answers 1; evaluations show its accuracy beside the policy's."""
        return _in_tags(dict.fromkeys(self.counts, 1))


def reward_of(response: str, counts: dict[str, int]) -> float:
    """Returns the reward of `response`; `counts` holds the correct answer.

    >>> reward_of("r1 r2 r3 <answer>3</answer>", {"r": 3})
    1.0
    >>> round(reward_of('<answer>{"r": 3, "s": 0}</answer>', {"r": 3, "s": 1}), 2)
    0.55
    >>> reward_of("<answer>3</answer> or <answer>4</answer>", {"r": 3})
    0.0
    """
    if re.findall("</?answer>", response) != ["<answer>", "</answer>"]:
        return 0.0
    try:
        answer = json.loads(re.split("</?answer>", response)[1])
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        return 0.0
    if len(counts) == 1 and type(answer) is int:
        answer = dict.fromkeys(counts, answer)
    if not isinstance(answer, dict):
        return 0.0
    num_exact = 0
    for letter, count in counts.items():
        if answer.get(letter) == count and type(answer[letter]) is int:  # neither true nor 3.0
            num_exact += 1
    if set(answer) - set(counts):
        num_exact = min(num_exact, len(counts) - 1)  # an extra letter makes the answer wrong
    return 1.0 if num_exact == len(counts) else 0.1 + 0.9 * num_exact / len(counts)


def _in_tags(counts: dict[str, int]) -> str:
    numbers = list(counts.values())
    text = json.dumps(counts) if len(numbers) > 1 else str(numbers[0])
    return f"<answer>{text}</answer>"
