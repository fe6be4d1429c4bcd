r"""A question with one exact answer: arithmetic made here, GSM8K, MATH, or lines of your own.

`level` 1 to 6 chooses the arithmetic (environments/math_expressions.py); expressions whose checksum
divides by eight are kept for evaluation. `data` replaces it. "gsm8k" (openai/gsm8k, main) and
"math" (EleutherAI/hendrycks_math, its seven subjects) are evaluated on their test split. Any other
name is that of a JSONL file with "question" and "answer" in each line ("#### 42" as in GSM8K and
\boxed{42} as in MATH are understood); of 16 lines or more, those whose question's checksum divides
by eight are kept for evaluation.

Observation: one user message, like

    What is 17 - 8? Work it out, then end with <answer>number</answer>.

The answer is the last <answer>..</answer> or \boxed{..}, whichever stands last. Reward:

    0      no answer: none, an empty one, or one of more than 200 characters
    0.1    an answer, but wrong
    1.0    right, as environments/math_answers.py judges; only this is "correct"

>>> env = MathQA(level=1)
>>> env.reset(seed=713)[0]["content"]
'What is 17 - 8? Work it out, then end with <answer>number</answer>.'
>>> env.demonstrate()
'8 = 7 + 1, 17 - 7 = 10, 10 - 1 = 9 <answer>9</answer>'
>>> env.step("It is $9.00: \\boxed{$9.00}").reward
1.0
"""

import functools
import importlib
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from core.types import Message, UsageError
from environments.base import EVAL_SEEDS, Env, Step
from environments.math_answers import LONGEST, find_answer, number, same
from environments.math_expressions import LEVELS, is_held_out, make_expression
from environments.parsing import user

OFF_BY = [-10, -2, -1, -1, 0, 1, 1, 2, 10]  # what a hasty guess misses a number by
FEWEST_LINES = 16  # of a file
SUBJECTS = (
    "algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra "
    "precalculus"
).split()
HUB = {  # data: (dataset, its configurations, the columns of question and solution)
    "gsm8k": ("openai/gsm8k", ["main"], "question", "answer"),
    "math": ("EleutherAI/hendrycks_math", SUBJECTS, "problem", "solution"),
}


class Problem(NamedTuple):
    question: str
    answer: str
    working: str  # "" where only the answer is known


class MathQA(Env):
    """One question, one response. `level`: 1 to 6; `data`: "gsm8k", "math" or a JSONL file."""

    def __init__(self, level: int = 1, data: str = ""):
        if level not in LEVELS:
            raise UsageError(f"level is 1 to {max(LEVELS)}, not {level}")
        self.level = level
        self.form = "number" if level < 5 and not data else "exact result"
        self.train, self.test = load(data) if data else ([], [])

    def reset(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        held_out = seed in EVAL_SEEDS
        problems = self.test if held_out else self.train
        if problems:
            self.problem = rng.choice(problems)
        else:
            expression, value, working = make_expression(rng, self.level, held_out)
            self.problem = Problem(f"What is {expression}?", str(value), working)
        truth = number(self.problem.answer)
        if truth is not None:
            self.guess = str(truth.value + rng.choice(OFF_BY))
        else:
            self.guess = rng.choice(problems).answer
        ask = f"Work it out, then end with <answer>{self.form}</answer>."
        return [user(f"{self.problem.question} {ask}")]

    def step(self, response: str) -> Step:
        answer = find_answer(response)
        correct = answer is not None and same(answer, self.problem.answer)
        reward = 1.0 if correct else 0.0 if answer is None else 0.1
        return Step(None, reward, True, {"correct": correct, "answered": answer is not None})

    def demonstrate(self, hasty: bool = False) -> str | None:
        """The working and the answer; None where no problem of the data has any working."""
        if hasty:
            return f"<answer>{self.guess}</answer>"
        if self.train and not any(problem.working for problem in self.train):
            return None
        return f"{self.problem.working} <answer>{self.problem.answer}</answer>".lstrip()


@functools.lru_cache(maxsize=4)
def load(data: str) -> tuple[list[Problem], list[Problem]]:
    """The problems for training and for evaluation; UsageError if they can't be had."""
    train, test = _from_hub(data) if data in HUB else _from_file(data)
    for problems, use in ((train, "training"), (test, "evaluation")):
        if not problems:
            raise UsageError(f"data={data} has no usable question for {use}")
    if any(number(problem.answer) is None for problem in train + test):
        _import("math_verify", data)
    return train, test


def _from_hub(data: str) -> list[list[Problem]]:
    datasets = _import("datasets", data)
    path, configurations, question, solution = HUB[data]
    try:
        return [
            _usable(
                _problem(row[question], row[solution])
                for configuration in configurations
                for row in datasets.load_dataset(path, configuration, split=split)
            )
            for split in ("train", "test")
        ]
    except Exception as error:  # no network, a full disk, a dataset that moved: all end here
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"can't load {path}: {type(error).__name__}: {reason}") from None


def _from_file(path: str) -> list[list[Problem]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"data is gsm8k, math or a JSONL file: {error}") from None
    problems = []
    for i, line in enumerate(lines, start=1):
        try:
            row = json.loads(line or "null")
            problems += [_problem(str(row["question"]), str(row["answer"]))] if row else []
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UsageError(f'{path}, line {i}: not {{"question": .., "answer": ..}}') from None
    problems = _usable(problems)
    if len(problems) < FEWEST_LINES:
        raise UsageError(f"{path} has {len(problems)} usable lines; it needs {FEWEST_LINES}")
    return [[p for p in problems if is_held_out(p.question) == use] for use in (False, True)]


def _problem(question: str, solution: str) -> Problem:
    working, marker, answer = solution.rpartition("####")
    if marker:  # GSM8K, which notes its sums as <<6*7=42>>
        return Problem(question.strip(), answer.strip(), re.sub("<<.*?>>", "", working).strip())
    if r"\boxed" in solution or r"\fbox" in solution:
        return Problem(question.strip(), find_answer(solution) or "", solution.strip())
    return Problem(question.strip(), solution.strip(), "")


def _usable(problems: Iterable[Problem]) -> list[Problem]:
    return [p for p in problems if p.question and 0 < len(p.answer) <= LONGEST]


def _import(module: str, data: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.replace("_", "-")
        raise UsageError(f'data={data} needs {package}: pip install -e ".[envs]"') from None
