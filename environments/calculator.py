"""Compute with numbers of several digits; a tool does it exactly.

`digits`, 1 to 9, is the length of both numbers. The policy may answer at once, where a small model
is nearly always wrong; or it calls `calculate`, reads the result, and repeats it. One pair of
numbers in eight is reserved for evaluation, for + and * in both orders.

Observation: one user message, for example

    What is 738 * 412? Use the tool, or end with <answer>number</answer>.

The tool `calculate(expression)` returns the value of an expression of integers with + - * / and
brackets, of at most 200 characters. Reward of the first response without a call:

    0      no <answer>..</answer>, or no number in it
    0.1    a wrong number
    1.0    the right number; only then `info["correct"]` is True

>>> env = Calculator()
>>> env.reset(seed=5)[0]["content"]
'What is 467 * 914? Use the tool, or end with <answer>number</answer>.'
>>> env.demonstrate()
'<tool_call>{"name": "calculate", "arguments": {"expression": "467 * 914"}}</tool_call>'
>>> env.calculate("467 * 914"), env.demonstrate()
('426838', '<answer>426838</answer>')
>>> env.step(env.demonstrate()).reward
1.0
"""

import ast
import random
import re
from collections.abc import Callable
from fractions import Fraction

from environments.base import EVAL_SEEDS, Env, Message, Step, check_range, is_held_out
from environments.parsing import user
from environments.plumbing.math_answers import find_answer, parse_number
from environments.plumbing.tools import call_text

OPERATORS = "+-*"
MAX_DIGITS = 9
ALLOWED = re.compile(r"[0-9+*/() -]{1,200}")
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


class Calculator(Env):
    """One question; the policy may call `calculate` first. `digits`: of each number, 1 to 9."""

    def __init__(self, digits: int = 3):
        check_range("digits", digits, 1, MAX_DIGITS)
        self.digits = digits
        self.tools = [self.calculate]

    def reset(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        while True:
            a, b = rng.randint(low, high), rng.randint(low, high)
            operator = rng.choice(OPERATORS)
            terms = (a, b) if operator == "-" else sorted((a, b))
            if is_held_out(f"{operator} {terms[0]} {terms[1]}") == (seed in EVAL_SEEDS):
                break
        self.expression = f"{a} {operator} {b}"
        self.value = {"+": a + b, "-": a - b, "*": a * b}[operator]
        length = len(str(abs(self.value)))
        guess = rng.randint(10 ** (length - 1), 10**length - 1)
        self.guess = -guess if self.value < 0 else guess
        self.result = ""  # of the last call of `calculate`
        ask = "Use the tool, or end with <answer>number</answer>."
        return [user(f"What is {self.expression}? {ask}")]

    def calculate(self, expression: str) -> str:
        """
        Compute an expression.

        Args:
            expression: Such as (2 + 3) * 4.
        """
        value = value_of(expression)
        if value is None:
            return "error: not an expression of integers with + - * / and brackets"
        self.result = str(value)
        return self.result

    def step(self, response: str) -> Step:
        number = parse_number(find_answer(response) or "")
        correct = number == (self.value,)
        reward = 1.0 if correct else 0.0 if number is None else 0.1
        return Step(None, reward, True, {"correct": correct})

    def demonstrate(self, hasty: bool = False) -> str:
        """Calls the tool, then repeats its result; `hasty`: a number of the right length."""
        if hasty or self.result:
            return f"<answer>{self.guess if hasty else self.result}</answer>"
        return call_text("calculate", expression=self.expression)


def value_of(text: str) -> Fraction | None:
    """The exact value of an expression; None for any other text, and for a division by zero.

    >>> [str(value_of(text)) for text in ("-3 * (8 - 25)", "8 / (3 - 8 / 3)", "7 / 4")]
    ['51', '24', '7/4']
    >>> {value_of(text) for text in ("9**9**9", "9//2", "8 / 0", "(3)(4)", "(" * 150, "exit()")}
    {None}
    """
    if not ALLOWED.fullmatch(text) or "**" in text or "//" in text:
        return None
    try:
        return _compute(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
        return None


def _compute(node: ast.expr) -> Fraction:
    """The value of a parsed expression. Raises ValueError for other syntax."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_compute(node.left), _compute(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_compute(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    raise ValueError("neither a number nor an operation on numbers")
