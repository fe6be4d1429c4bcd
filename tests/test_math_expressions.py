"""Random arithmetic expressions: their value, their bounds and their worked steps."""

import random
import re
from fractions import Fraction

import pytest

from environments.math_expressions import LEVELS, _worked_by_tens, make_expression


@pytest.mark.parametrize("level", LEVELS)
def test_expression_has_the_value_that_python_computes(level):
    bounds, num_fractions = LEVELS[level], 0
    for seed in range(150):
        expression, value, steps = make_expression(random.Random(seed), level, held_out=False)
        code = re.sub(r"(\d+)% of", r"Fraction(\1) / 100 *", expression)
        code = re.sub(r"(?<!Fraction\()\b(\d+)\b", r"Fraction(\1)", code)
        assert eval(code, {"Fraction": Fraction}) == value, expression
        assert len(re.findall(r" [-+*/] |%", expression)) == bounds.operations
        assert max(int(n) for n in re.findall(r"\d+(?!%|\d)", expression)) <= bounds.max_number
        assert set(re.findall(r"[-+*/%]", expression)) <= set(bounds.operators)
        assert level > 2 or value >= 0
        # a percentage as operand is in brackets
        assert set(re.findall(r"(.?)\b\d+% of", expression)) <= {"", "("}
        assert all(" = " in step for step in steps.split(", "))
        num_fractions += value.denominator > 1
    assert (num_fractions > 25) == (level >= 5)


@pytest.mark.parametrize("expression, steps", [
    ("12 + 5", ["12 + 5 = 17"]), ("17 + 8", ["8 = 3 + 5", "17 + 3 = 20", "20 + 5 = 25"]),
    ("3 + 17", ["3 + 10 = 13", "13 + 7 = 20"]), ("17 - 17", ["17 - 10 = 7", "7 - 7 = 0"]),
    ("65 - 18", ["65 - 10 = 55", "8 = 5 + 3", "55 - 5 = 50", "50 - 3 = 47"]),
    ("80 - 5", ["80 - 5 = 75"]), ("99 + 90", ["99 + 90 = 189"]),
])  # fmt: skip
def test_steps_add_tens_first_and_then_go_to_a_multiple_of_ten(expression, steps):
    assert _worked_by_tens(expression) == steps
