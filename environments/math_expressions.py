"""Arithmetic to be worked out exactly, in six levels, with the working.

    1    one sum or difference of numbers below 20, never below zero       17 - 8
    2    the same below 100                                                47 + 38
    3    two operations of + - *, numbers up to 12                         (5 - 9) * 7
    4    three of them                                                     6 * (2 + 11) - 3
    5    three operations of + - * /, up to 20; fractions                  7 / 4 - 3 * 2
    6    five operations of + - * / and percentages                        (25% of (8 / 3)) + ..

>>> make_expression(random.Random(0), level=5, held_out=False)
('(17 + 16) / (16 / 12)', Fraction(99, 4), '17 + 16 = 33, 16 / 12 = 4/3, 33 / (4/3) = 99/4')
"""

import random
import zlib
from fractions import Fraction
from typing import NamedTuple, TypeAlias

# level: (operations, largest number, operators); % stands for "25% of .."
LEVELS = {
    1: (1, 19, "+-"),
    2: (1, 99, "+-"),
    3: (2, 12, "+-*"),
    4: (3, 12, "+-*"),
    5: (3, 20, "+-*/"),
    6: (5, 20, "+-*/%"),
}
PERCENTAGES = [5, 10, 20, 25, 40, 50, 75, 80]
BINDS = {"%": 0, "+": 1, "-": 1, "*": 2, "/": 2}  # % as an operand is always in brackets
LARGEST = 9999  # of any numerator or denominator on the way


class Node(NamedTuple):
    operator: str
    left: "Tree"
    right: "Tree"


Tree: TypeAlias = Node | int


def make_expression(rng: random.Random, level: int, held_out: bool) -> tuple[str, Fraction, str]:
    """An expression, its value and its working, drawn from those kept for evaluation or the rest.

    The working of level 1 and 2 goes by tens; above, it takes one operation at a time.
    """
    operations, largest, operators = LEVELS[level]
    while True:
        tree = _draw(rng, operations, largest, operators)
        expression = _render(tree)
        if is_held_out(expression) != held_out:
            continue
        steps: list[str] = []
        try:
            value = _solve(tree, steps)
        except ArithmeticError:  # a division by zero, or too large a number
            continue
        if operations > 1:
            return expression, value, ", ".join(steps)
        if value >= 0:
            return expression, value, ", ".join(_by_tens(expression))


def is_held_out(text: str) -> bool:
    """Whether `text` is kept for evaluation: one in eight is, the same on any machine."""
    return zlib.crc32(text.encode(errors="replace")) % 8 == 0


def _draw(rng: random.Random, operations: int, largest: int, operators: str) -> Tree:
    if operations == 0:
        return rng.randint(1, largest)
    operator = rng.choice(operators)
    on_the_left = 0 if operator == "%" else rng.randrange(operations)
    if operator == "%":
        left: Tree = rng.choice(PERCENTAGES)
    else:
        left = _draw(rng, on_the_left, largest, operators)
    return Node(operator, left, _draw(rng, operations - 1 - on_the_left, largest, operators))


def _render(tree: Tree) -> str:
    if isinstance(tree, int):
        return str(tree)
    left, right = _render(tree.left), _render(tree.right)
    binds = BINDS[tree.operator]
    if isinstance(tree.left, Node) and BINDS[tree.left.operator] < binds:
        left = f"({left})"
    if isinstance(tree.right, Node) and (binds == 0 or BINDS[tree.right.operator] <= binds):
        right = f"({right})"
    return _join(left, tree.operator, right)


def _solve(tree: Tree, steps: list[str]) -> Fraction:
    """The value of `tree`; each operation on the way is added to `steps`."""
    if isinstance(tree, int):
        return Fraction(tree)
    a, b = _solve(tree.left, steps), _solve(tree.right, steps)
    if tree.operator == "/":
        value = a / b
    else:
        value = {"+": a + b, "-": a - b, "*": a * b, "%": a * b / 100}[tree.operator]
    if max(abs(value.numerator), value.denominator) > LARGEST:
        raise OverflowError
    right = str(b) if b >= 0 and b.denominator == 1 else f"({b})"
    steps.append(f"{_join(str(a), tree.operator, right)} = {value}")
    return value


def _join(left: str, operator: str, right: str) -> str:
    return f"{left}% of {right}" if operator == "%" else f"{left} {operator} {right}"


def _by_tens(expression: str) -> list[str]:
    """The tens first, then up or down to a round number, then the rest.

    >>> _by_tens("47 + 38")
    ['47 + 30 = 77', '8 = 3 + 5', '77 + 3 = 80', '80 + 5 = 85']
    """
    first, operator, second = expression.split()
    total, sign, units = int(first), 1 if operator == "+" else -1, int(second) % 10
    steps = []

    def move(by: int) -> None:
        nonlocal total
        steps.append(f"{total} {operator} {by} = {total + sign * by}")
        total += sign * by

    if int(second) >= 10:
        move(int(second) - units)
    to_round = -sign * total % 10
    if 0 < to_round < units:
        steps.append(f"{units} = {to_round} + {units - to_round}")
        move(to_round)
        move(units - to_round)
    elif units:
        move(units)
    return steps
