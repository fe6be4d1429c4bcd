r"""Answer a question that has one exact answer.

`level` 1 to 6 generates arithmetic (environments/math_expressions.py). `data` replaces it with a
data set:

    gsm8k         openai/gsm8k, main; evaluated on its test split
    math          EleutherAI/hendrycks_math, all seven subjects; evaluated on their test splits
    math500       the training splits of math; evaluated on HuggingFaceH4/MATH-500
    FILE.jsonl    a file with "question" and "answer" in each line; "#### 42" (GSM8K) and \boxed{42}
                  (MATH) mark the answer in a longer text; other kinds of files are read as
                  `rewarded` reads them

One expression or line of a file in eight is reserved for evaluation, a sum or product in all orders
of its terms. Where --eval-env names other data, files are used whole, as in `rewarded`.
Questions of a data set are evaluated in their order, so --eval-num-tasks 1319 evaluates the test
split of GSM8K once, and 500 that of MATH-500.

Observation: one user message; the second form is that of `style=plain`, for small models:

    What is 17 - 8? Work it out, then end with <answer>number</answer>.
    What is 17 - 8? Answer with the number only.

The answer is the last <answer>..</answer> or \boxed{..} of the response. With `style=plain` it is
the whole response. `info["lenient"]` is also True if only the last number of the response is right,
whatever the form. Reward:

    0      no answer: it is missing, empty or longer than 200 characters; plain: no number
    0.1    a wrong answer
    1.0    a right answer (plumbing/math_answers.py); only then `info["correct"]` is True

>>> env = MathQA(level=1)
>>> env.reset(seed=713)[0]["content"]
'What is 17 - 8? Work it out, then end with <answer>number</answer>.'
>>> env.demonstrate()
'8 = 7 + 1, 17 - 7 = 10, 10 - 1 = 9 <answer>9</answer>'
>>> env.step("It is $9.00: \\boxed{$9.00}").reward
1.0
"""

import functools
import random
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from environments import rewarded
from environments.base import EVAL_SEEDS, Env, Message, RunInfo, Step, UsageError, check_range
from environments.math_expressions import LEVELS, make_expression
from environments.parsing import user
from environments.plumbing.dataset import FILES, read_hub
from environments.plumbing.installed import import_library
from environments.plumbing.math_answers import MAX_ANSWER, find_answer, is_equal, parse_number

GUESS_ERRORS = [-10, -2, -1, -1, 0, 1, 1, 2, 10]  # a hasty demonstration adds one of these
ASK = {  # by style
    "tags": "Work it out, then end with <answer>{}</answer>.",
    "plain": "Answer with the {} only.",
}
SUBJECTS = (
    "algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra "
    "precalculus"
).split()
GSM8K = ("openai/gsm8k", ["main"])  # data set, configurations
MATH = ("EleutherAI/hendrycks_math", SUBJECTS)
MATH_500 = ("HuggingFaceH4/MATH-500", ["default"])  # 500 questions of the test splits of MATH
HUB = {  # data: (for training, for evaluation, question column, solution column)
    "gsm8k": (GSM8K, GSM8K, "question", "answer"),
    "math": (MATH, MATH, "problem", "solution"),
    "math500": (MATH, MATH_500, "problem", "solution"),
}


class Problem(NamedTuple):
    question: str
    answer: str
    working: str  # "" if the data has the answer only


class MathQA(Env):
    """One question, one response. `level`: 1 to 6; `data`: a name of `HUB` or a file;
    `style`: tags or plain."""

    def __init__(self, level: int = 1, data: str = "", style: Literal["tags", "plain"] = "tags"):
        check_range("level", level, 1, max(LEVELS))
        self.level, self.style = level, style
        self.form = "number" if level < 5 and not data else "exact result"
        self.train, self.test = load(data) if data else ([], [])

    @classmethod
    def begin_run(cls, info: RunInfo) -> None:
        load.cache_clear()
        rewarded.begin_run(info)

    def reset(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        held_out = seed in EVAL_SEEDS
        problems = self.test if held_out else self.train
        if problems and held_out:
            self.problem = problems[(seed - EVAL_SEEDS.start) % len(problems)]
        elif problems:
            self.problem = rng.choice(problems)
        else:
            expression, value, working = make_expression(rng, self.level, held_out)
            self.problem = Problem(f"What is {expression}?", str(value), working)
        number = parse_number(self.problem.answer)
        if number is not None:
            self.guess = str(number[0] + rng.choice(GUESS_ERRORS))
        else:
            self.guess = rng.choice(problems).answer
        return [user(f"{self.problem.question} {ASK[self.style].format(self.form)}")]

    def step(self, response: str) -> Step:
        answer = self._plain_answer(response) if self.style == "plain" else find_answer(response)
        answered = answer is not None
        correct = answer is not None and is_equal(answer, self.problem.answer)
        reward = 1.0 if correct else 0.1 * answered
        numbers = re.findall(r"-?[0-9][0-9.,/]*", response[-MAX_ANSWER:])
        lenient = correct
        if numbers and not correct:
            lenient = is_equal(numbers[-1].rstrip(".,/"), self.problem.answer)
        info = {"correct": correct, "answered": answered, "lenient": lenient}
        return Step(None, reward, True, info)

    def demonstrate(self, hasty: bool = False) -> str | None:
        """Returns the worked answer; `hasty`: a guess. None if the data has answers only.

        With `style=plain` it is the answer, or the guess, alone.
        """
        if self.style == "plain":
            return self.guess if hasty else self.problem.answer
        if hasty:
            return f"<answer>{self.guess}</answer>"
        if self.train and not any(problem.working for problem in self.train):
            return None
        return f"{self.problem.working} <answer>{self.problem.answer}</answer>".lstrip()

    def trivial(self) -> str:
        """Always answers 12, the most common answer of level 1."""
        return "12" if self.style == "plain" else "<answer>12</answer>"

    def _plain_answer(self, response: str) -> str | None:
        """The response, if it is short and, where the solution is a number, a number."""
        answer = response.strip()
        if not 0 < len(answer) <= MAX_ANSWER:
            return None
        is_text = parse_number(self.problem.answer) is None
        return answer if is_text or parse_number(answer) is not None else None


@functools.cache  # a run needs all its data until its end
def load(data: str) -> tuple[list[Problem], list[Problem]]:
    """Returns the problems for training and for evaluation.

    Raises UsageError for unusable data, and if a needed package is not installed.
    """
    train, test = _from_hub(data) if data in HUB else _from_file(data)
    for problems, use in ((train, "training"), (test, "evaluation")):
        if not problems:
            raise UsageError(f"data={data} has no usable question for {use}")
    if any(parse_number(problem.answer) is None for problem in train + test):
        import_library("math_verify")
    return train, test


def _from_hub(data: str) -> list[list[Problem]]:
    train_source, test_source, question, solution = HUB[data]
    splits = []
    for (path, configurations), split in ((train_source, "train"), (test_source, "test")):
        rows = [row for config in configurations for row in read_hub(path, config, split)]
        splits.append(_usable(_problem(row[question], row[solution]) for row in rows))
    return splits


def _from_file(path: str) -> list[list[Problem]]:
    if not path.endswith(FILES):
        raise UsageError(f"data must be {', '.join(HUB)} or a file such as FILE.jsonl, not {path}")
    train, test, _ = rewarded.load(path, "question", "", "train")
    for row in train + test:
        if "answer" not in row:
            raise UsageError(f'{path}: not {{"question": .., "answer": ..}}: {row!r:.60}')
    splits = []
    for rows in (train, test):
        splits.append(_usable(_problem(row["question"], str(row["answer"])) for row in rows))
    return splits


def _problem(question: str, solution: str) -> Problem:
    working, marker, answer = solution.rpartition("####")
    if marker:  # GSM8K; it annotates its calculations: <<6*7=42>>
        return Problem(question.strip(), answer.strip(), re.sub("<<.*?>>", "", working).strip())
    if r"\boxed" in solution or r"\fbox" in solution:
        return Problem(question.strip(), find_answer(solution) or "", solution.strip())
    return Problem(question.strip(), solution.strip(), "")


def _usable(problems: Iterable[Problem]) -> list[Problem]:
    return [p for p in problems if p.question and 0 < len(p.answer) <= MAX_ANSWER]
