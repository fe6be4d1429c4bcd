"""Random arithmetic expressions of six levels, with their exact value and worked steps.

    level                                                           example
    1    one sum or difference of numbers below 20, not negative    17 - 8
    2    the same below 100                                         47 + 38
    3    two operations + - *, numbers up to 12                     (5 - 9) * 7
    4    three operations + - *, numbers up to 12                   6 * (2 + 11) - 3
    5    three operations + - * /, numbers up to 20; fractions      7 / 4 - 3 * 2
    6    five operations + - * / and percentages                    (25% of (8 / 3)) + 7 * ..

>>> make_expression(random.Random(0), level=5, held_out=False)
('(17 + 16) / (16 / 12)', Fraction(99, 4), '17 + 16 = 33, 16 / 12 = 4/3, 33 / (4/3) = 99/4')
"""

import random
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from environments.base import is_held_out


class Level(NamedTuple):
    operations: int
    max_number: int
    operators: str  # % stands for "25% of .."


LEVELS = {
    1: Level(1, 19, "+-"),
    2: Level(1, 99, "+-"),
    3: Level(2, 12, "+-*"),
    4: Level(3, 12, "+-*"),
    5: Level(3, 20, "+-*/"),
    6: Level(5, 20, "+-*/%"),
}
PERCENTAGES = [5, 10, 20, 25, 40, 50, 75, 80]
PRECEDENCE = {"%": 0, "+": 1, "-": 1, "*": 2, "/": 2}  # a percentage as operand has brackets
COMMUTATIVE = "+*"
MAX_VALUE = 9999  # of every numerator and denominator in the worked steps


class Node(NamedTuple):
    operator: str
    left: "Tree"
    right: "Tree"


Tree: TypeAlias = Node | int


def make_expression(rng: random.Random, level: int, held_out: bool) -> tuple[str, Fraction, str]:
    """Draws an expression and returns it with its value and the worked steps.

    `held_out`: draw from the expressions that are reserved for evaluation, else from the others.
    The steps of levels 1 and 2 add or subtract tens first; above, each step is one operation.
    """
    while True:
        tree = _draw(rng, LEVELS[level].operations, LEVELS[level])
        if is_held_out(canonical(tree)) != held_out:
            continue
        expression = render(tree)
        steps: list[str] = []
        try:
            value = solve(tree, steps)
        except ArithmeticError:  # division by zero, or a number above MAX_VALUE
            continue
        if LEVELS[level].operations == 1:
            steps = _worked_by_tens(expression)
        if LEVELS[level].operations > 1 or value >= 0:
            return expression, value, ", ".join(steps)


def canonical(tree: Tree) -> str:
    """The expression as text, the same for all orders of the terms of a sum or product.

    >>> canonical(Node("*", 7, Node("+", 4, Node("+", 12, 3))))
    '((12 + 3 + 4) * 7)'
    >>> canonical(Node("*", Node("+", Node("+", 3, 4), 12), 7))
    '((12 + 3 + 4) * 7)'
    """
    if isinstance(tree, int):
        return str(tree)
    if tree.operator in COMMUTATIVE:
        return f"({f' {tree.operator} '.join(sorted(_terms(tree, tree.operator)))})"
    return f"({canonical(tree.left)} {tree.operator} {canonical(tree.right)})"


def _terms(tree: Tree, operator: str) -> list[str]:
    """The terms of a nested sum, or the factors of a nested product."""
    if isinstance(tree, Node) and tree.operator == operator:
        return [*_terms(tree.left, operator), *_terms(tree.right, operator)]
    return [canonical(tree)]


def _draw(rng: random.Random, operations: int, level: Level) -> Tree:
    if operations == 0:
        return rng.randint(1, level.max_number)
    operator = rng.choice(level.operators)
    if operator == "%":
        return Node("%", rng.choice(PERCENTAGES), _draw(rng, operations - 1, level))
    left_operations = rng.randrange(operations)
    left = _draw(rng, left_operations, level)
    return Node(operator, left, _draw(rng, operations - 1 - left_operations, level))


def render(tree: Tree) -> str:
    """The expression as text, with the brackets that it needs.

    >>> render(Node("*", Node("-", 5, 9), 7))
    '(5 - 9) * 7'
    """
    if isinstance(tree, int):
        return str(tree)
    left, right = render(tree.left), render(tree.right)
    precedence = PRECEDENCE[tree.operator]
    if isinstance(tree.left, Node) and PRECEDENCE[tree.left.operator] < precedence:
        left = f"({left})"
    if isinstance(tree.right, Node) and (
        tree.operator == "%" or PRECEDENCE[tree.right.operator] <= precedence
    ):
        right = f"({right})"
    return _join(left, tree.operator, right)


def solve(tree: Tree, steps: list[str]) -> Fraction:
    """Returns the value of `tree` and appends each operation to `steps`.

    Raises ArithmeticError for a division by zero and for numbers above MAX_VALUE.
    """
    if isinstance(tree, int):
        return Fraction(tree)
    left, right = solve(tree.left, steps), solve(tree.right, steps)
    if tree.operator == "/":
        value = left / right
    else:
        product = left * right
        by_operator = {"+": left + right, "-": left - right, "*": product, "%": product / 100}
        value = by_operator[tree.operator]
    if max(abs(value.numerator), value.denominator) > MAX_VALUE:
        raise OverflowError
    right_text = str(right) if right >= 0 and right.denominator == 1 else f"({right})"
    steps.append(f"{_join(str(left), tree.operator, right_text)} = {value}")
    return value


def _join(left: str, operator: str, right: str) -> str:
    return f"{left}% of {right}" if operator == "%" else f"{left} {operator} {right}"


def _worked_by_tens(expression: str) -> list[str]:
    """The worked steps: the tens first, then to a multiple of ten, then the rest.

    >>> _worked_by_tens("47 + 38")
    ['47 + 30 = 77', '8 = 3 + 5', '77 + 3 = 80', '80 + 5 = 85']
    """
    first, operator, second = expression.split()
    sign = 1 if operator == "+" else -1
    total, units = int(first), int(second) % 10
    steps = []

    def add(amount: int) -> None:
        nonlocal total
        steps.append(f"{total} {operator} {amount} = {total + sign * amount}")
        total += sign * amount

    if int(second) >= 10:
        add(int(second) - units)
    to_ten = -sign * total % 10
    if 0 < to_ten < units:
        steps.append(f"{units} = {to_ten} + {units - to_ten}")
        add(to_ten)
        add(units - to_ten)
    elif units:
        add(units)
    return steps
