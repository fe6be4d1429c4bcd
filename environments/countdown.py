"""Countdown: make a target from given numbers with + - * / and brackets, each number used once.

The task of TinyZero and nano-aha-moment (https://github.com/McGill-NLP/nano-aha-moment), with tasks
that are generated here. Every task has a solution whose intermediate results are positive integers.
The sum of all numbers is never the target.

    level    numbers    up to    target up to
    1        2          30       99
    2        3          20       99
    3        3 or 4     99       99           as in those projects
    4        4 or 5     99       999
    5        6          99       999

One combination of numbers and target in eight is reserved for evaluation.

Observation: one user message, for example

    Use each of the numbers 3, 25, 8 exactly once, with + - * / and brackets, to make 17. Work it
    out, then end with <answer>expression</answer>.

Reward of the one response:

    0      no answer
    0.1    any other answer
    1.0    an expression of exactly these numbers that equals the target; then `info["correct"]`

The expression is parsed and computed exactly, with fractions; nothing is executed.

>>> [value_of(text) for text in ("(25 - 8) * 3", "9**9", "8 / 0", "__import__('os')")]
[(Fraction(51, 1), [3, 8, 25]), None, None, None]
"""

import ast
import random
import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from environments.base import EVAL_SEEDS, Env, Message, Step, check_range, is_held_out
from environments.math_expressions import MAX_VALUE, Node, Tree, render, solve
from environments.parsing import user
from environments.plumbing.math_answers import find_answer


class Level(NamedTuple):
    min_numbers: int
    max_numbers: int
    max_number: int
    max_target: int


LEVELS = {
    1: Level(2, 2, 30, 99),
    2: Level(3, 3, 20, 99),
    3: Level(3, 4, 99, 99),
    4: Level(4, 5, 99, 999),
    5: Level(6, 6, 99, 999),
}
MIN_TARGET = 10
OPERATORS = "+-*/"
ALLOWED = re.compile(r"[0-9+*/() -]{1,200}")
SIGNS = str.maketrans("×÷−", "*/-")
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


class Countdown(Env):
    """One task, one response. `level`: 1 to 5."""

    def __init__(self, level: int = 3):
        check_range("level", level, 1, max(LEVELS))
        self.level = level

    def reset(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        drawn = _draw(rng, LEVELS[self.level], seed in EVAL_SEEDS)
        self.numbers, self.target, self.solution = drawn
        operators = [rng.choice(OPERATORS) for _ in self.numbers[1:]]
        pairs = zip(operators, self.numbers[1:], strict=True)
        self.guess = " ".join([str(self.numbers[0]), *(f"{o} {n}" for o, n in pairs)])
        rules = f"Use each of the numbers {', '.join(map(str, self.numbers))} exactly once"
        form = "Work it out, then end with <answer>expression</answer>."
        return [user(f"{rules}, with + - * / and brackets, to make {self.target}. {form}")]

    def step(self, response: str) -> Step:
        answer = find_answer(response)
        found = None if answer is None else value_of(answer)
        valid = found is not None and found[1] == sorted(self.numbers)
        correct = found is not None and valid and found[0] == self.target
        reward = 1.0 if correct else 0.0 if answer is None else 0.1
        return Step(None, reward, True, {"correct": correct, "valid": valid})

    def demonstrate(self, hasty: bool = False) -> str:
        """Computes the solution step by step; `hasty`: the numbers with random operators."""
        if hasty:
            return f"<answer>{self.guess}</answer>"
        steps: list[str] = []
        solve(self.solution, steps)
        return f"{', '.join(steps)} <answer>{render(self.solution)}</answer>"


def value_of(text: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression, and its numbers, sorted; None for any other text.

    Also None for a division by zero and for more than 200 characters.
    """
    text = text.translate(SIGNS)
    if not ALLOWED.fullmatch(text) or "**" in text or "//" in text:
        return None
    numbers: list[int] = []
    try:
        value = _compute(ast.parse(text.strip(), mode="eval").body, numbers)
    except (SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
        return None
    return value, sorted(numbers)


def _compute(node: ast.expr, numbers: list[int]) -> Fraction:
    """The value of a parsed expression; appends its numbers. Raises ValueError for other syntax."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _compute(node.left, numbers), _compute(node.right, numbers)
        return OPERATIONS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_compute(node.operand, numbers)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    raise ValueError("neither a number nor an operation on numbers")


def _draw(rng: random.Random, level: Level, held_out: bool) -> tuple[list[int], int, Tree]:
    """Draws numbers, a target, and a solution."""
    while True:
        count = rng.randint(level.min_numbers, level.max_numbers)
        numbers = [rng.randint(1, level.max_number) for _ in range(count)]
        target, solution = _combine(rng, numbers)
        text = f"{sorted(numbers)} {target}"
        in_range = MIN_TARGET <= target <= level.max_target
        if in_range and target != sum(numbers) and is_held_out(text) == held_out:
            return numbers, target, solution


def _combine(rng: random.Random, numbers: list[int]) -> tuple[int, Tree]:
    """A random expression of all numbers with its value; the value is 0 if there was none."""
    parts: list[tuple[int, Tree]] = [(number, number) for number in numbers]
    while len(parts) > 1:
        rng.shuffle(parts)
        (a, left), (b, right) = parts.pop(), parts.pop()
        values = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if a % b == 0 else 0}
        allowed = [operator for operator, value in values.items() if 0 < value <= MAX_VALUE]
        if not allowed:
            return 0, 0
        operator = rng.choice(allowed)
        parts.append((values[operator], Node(operator, left, right)))
    return parts[0]
