"""Finding an answer in a response and comparing it with the solution."""

from fractions import Fraction

import pytest
from conftest import needs

from environments.plumbing.math_answers import find_answer, is_equal, parse_number


@pytest.mark.parametrize("response, answer", [
    ("<answer> 5\n</answer> I think", "5"), (r"\boxed{\frac{1}{2}} ", r"\frac{1}{2}"),
    (r"<answer>4</answer> no, \boxed{5}", "5"), (r"\boxed{4} no, <answer>5</answer>", "5"),
    (r"<answer>\boxed{5}</answer>", "5"), ("<answer>4</answer><answer>5</answer> <answer>", "5"),
    (r"\boxed{5} and then \boxed{6", "5"), ("<answer>5", None), ("5", None),
    ("<answer>5</answer> or <answer> \n </answer>", None),
])  # fmt: skip
def test_find_answer_returns_the_last_complete_answer(response, answer):
    assert find_answer(response) == answer


@pytest.mark.parametrize("text, value", [
    ("+18", 18), ("− 18", -18), ("018", 18), ("18.", 18), (".5", Fraction(1, 2)),
    ("1{,}000", 1000), ("1,234,567.50", Fraction(2469135, 2)), (r"\$18.00", 18), ("$18$", 18),
    ("18 miles per hour", 18), (r"18\text{ cm}^2", 18), (r"18 cm^{2}", 18), ("18 cm³", 18),
    (r"90^\circ", 90), ("2 + 3 = 5", 5), (r"\( 5 \)", 5), (r"\[\frac{12}5\]", Fraction(12, 5)),
    ("2 / 4", Fraction(1, 2)), (r"\frac12", Fraction(1, 2)), (r"\frac1{12}", Fraction(1, 12)),
    (r"-3\frac{1}{2}", Fraction(-7, 2)), (r"10,\!000", 10000), (r"1\,234", 1234),
    ("10\u2009000", 10000), (r"10,\! 000", 10000), (r"-1\;234\;567", -1234567),
    ("18\u202fcm", 18),
])  # fmt: skip
def test_parse_number_reads_the_usual_notations(text, value):
    assert parse_number(text) == (value,)


def test_parse_number_rejects_expressions_words_and_several_numbers():
    texts = (
        "||.|-|x|2 + 2|6*3|1/0|1,00|3 4|18 or 19|18, 19|5 pi|5x|5 x|5 million|5!|5^2|5\\pi|%|50%%"
        "|\\sqrt{4}|1,\\,200|x >= 5|x != 5|x = 1, y = 2|x = 1 or x = 2|x \\not= 5|1e3|9**9**9|٣"
        "|1\\,2345|five|inf|nan|5 squared|1.2.3|--5|0x10|1/2/3|\ud800"
    ).split("|")
    assert [text for text in texts if parse_number(text) is not None] == []


def test_a_percent_sign_on_one_side_is_a_unit_or_a_hundredth():
    assert parse_number("50%") == parse_number(r"50\%") == parse_number("50 percent") == (50, 0.5)
    assert is_equal("50%", "50") and is_equal("50%", "0.5") and is_equal("50%", "1/2")
    assert is_equal("50", r"50\%") and is_equal("0.5", r"50\%")
    assert not is_equal("5000%", r"50\%") and not is_equal("0.5%", "50")


@needs("envs", "math_verify")
@pytest.mark.parametrize("answer, solution, equal", [
    ("0.333333", "1/3", False),  # rounded
    ("12 + 6", "18", False),  # not evaluated
    ("17, 18", "18", False), ("", "0", False), (r"2^{1/2}", r"\sqrt{2}", True),
    (r"1/\sqrt{3}", r"\frac{\sqrt{3}}{3}", True), (r"x = 5 \pi", r"5\pi", True),
    ("5", r"5\pi", False), ("(x+1)^2", "x^2+2x+1", True), ("(2, 1)", "(1,2)", False),
    ("[0,1)", r"\left[0,1\right)", True), ("(0,1)", "[0,1)", False), ("2, 1", r"\{1,2\}", True),
    ("C", r"\text{(C)}", True), ("dayMon", r"\text{Monday}", False),
    ("2", "x = 1, y = 2", False), ("y=2, x=1", "x=1, y=2", True),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}", False), ("pi/2", r"\dfrac{\pi}{2}", True),
    (r"\frac{1}{2006!}", r"\frac{1}{2004!}", False), (r"e^{16}-1", "-1+e^{16}", True),
    (r"1 + \frac{1}{\mathrm{e}}", r"1 - \frac{1}{\mathrm{e}}", False), ("1,2", "1, 2, 3", False),
    (r"1, 3, \ldots, 2n-1", r"1, 2, \ldots, n", False), ("9^{9^9}", r"\sqrt{2}", False),
])  # fmt: skip
def test_is_equal_compares_numbers_texts_and_formulas(answer, solution, equal):
    assert is_equal(answer, solution) is equal
