r"""Finds the answer in a response to a mathematical question and compares it with the solution.

A numeric solution needs an equal number, in any of the usual notations: "1,000" and "$1000.00" are
1000; "x = 5" and "5 dollars" are 5 (names and units are not checked). A percent sign on one side
only is read as a unit or as a hundredth: the solution 50% accepts "50" and "0.5", and the solutions
50 and 0.5 accept "50%". An unevaluated expression is wrong (otherwise a copy of the question would
be right), and so is a rounded number.

Every other solution (roots, sets, intervals, formulas) is compared as text, then by math-verify.
math-verify can run for minutes or forever: on twenty nested fractions or on 9^{9^9}. Its time limit
works on the main thread only, and environments run in others. Expressions that are long, deep or
have high powers are therefore compared as text only.

>>> find_answer(r"<answer>7</answer>? No: \boxed{\frac{1}{2}}.")
'\\frac{1}{2}'
>>> [is_equal(x, "1/2") for x in (r"\frac{1}{2}", "0.50", "50%", "x = 2/4", "1 - 1/2", "0")]
[True, True, True, True, False, False]
"""

import logging
import math
import re
from fractions import Fraction
from typing import NamedTuple

MAX_ANSWER = 200  # characters
UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
NUMBER = re.compile(
    rf"(?P<sign>[-+]?) *(?:(?P<whole>[0-9]+) +(?=[0-9]+ */))?"
    rf"(?P<top>{UNSIGNED})(?: */ *(?P<bottom>{UNSIGNED}))?"
    r" *(?P<percent>%|percent\b)?(?P<unit>(?: +[a-z]{2,}(?:\^?[23])?){0,4})",
    re.IGNORECASE,
)
NOT_UNITS = set(
    "and or plus minus times over pi squared cubed factorial dozen hundred thousand million "
    "billion trillion".split()
)
NOTATION = [  # pattern, replacement: removes LaTeX spacing and unifies notations
    (r"(?<!\\)\\[!,;: ]|\\(?:left|right|displaystyle)(?![a-z])|\\?\$|~", " "),
    (r"\\%", "%"),
    (r"\{,\}", ","),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\frac *([0-9]) *([0-9])", r"\\frac{\1}{\2}"),
    (r"[−–]", "-"),
    (r"\^\{?\\circ\}?|°", ""),
]
# Limits of the expressions that math-verify receives: they keep its run time short.
COMMANDS = set(
    "frac sqrt pi infty cup cap in text mathrm mbox cdot times pm begin end le leq ge geq lt gt "
    "ne neq emptyset mathbb".split()
)
POWER = re.compile(r"\^ *(?:[0-9a-z]|\{ *-?(?:[0-9]?[a-z]?|[0-9]/[0-9]|T|\\prime) *\})(?![0-9])")
MAX_CHARACTERS, MAX_POWERS, MAX_EXPANSION, MAX_DEPTH, MAX_DIGITS = 100, 3, 16, 4, 6


class Number(NamedTuple):
    value: Fraction
    is_percent: bool


def find_answer(response: str) -> str | None:
    r"""Returns the content of the last <answer>..</answer> or \boxed{..}.

    None if there is none, or if it is empty or has more than 200 characters.

    >>> find_answer(r"<answer>\boxed{3}</answer>"), find_answer("<answer> </answer>")
    ('3', None)
    """
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    boxed_end, boxed = _last_boxed(response)
    if start >= 0 and end > boxed_end:
        answer = response[start + len("<answer>") : end]
        if len(answer) <= 2 * MAX_ANSWER:
            answer = _last_boxed(answer)[1] or answer
    else:
        answer = boxed
    answer = answer.strip()
    return answer if 0 < len(answer) <= MAX_ANSWER else None


def is_equal(answer: str, solution: str) -> bool:
    """Whether `answer` equals `solution`. Accepts any text; never raises."""
    if len(answer) > MAX_ANSWER:
        return False
    expected, given = parse_number(solution), parse_number(answer)
    if expected is not None:
        if given is None:
            return False
        if expected.is_percent == given.is_percent:
            return expected.value == given.value
        percent, plain = (given, expected) if given.is_percent else (expected, given)
        return plain.value in (percent.value, percent.value / 100)
    text = _plain_text(answer)
    if not text:
        return False
    return text == _plain_text(solution) or _verify(_unify(answer), _unify(solution))


def parse_number(text: str) -> Number | None:
    r"""Returns the exact number that `text` states; None if `text` is anything but one number.

    >>> parse_number("x = 12.5%")
    Number(value=Fraction(25, 2), is_percent=True)
    >>> [str(parse_number(x).value) for x in (r"3\frac{1}{2}", "-$1,200.50 each", "5 square feet")]
    ['7/2', '-2401/2', '5']
    >>> parse_number("2 + 2") is None
    True
    """
    name, _, text = _unify(text).rpartition("=")
    if re.search(r"[<>!,;]|\\not|\b(?:and|or)\b", name):  # x >= 5; x = 1 or x = 2
        return None
    text = re.sub(r"\\(?:text|mathrm|mbox) *\{([^{}]*)\}", r" \1", text)
    fraction = rf"\\frac *\{{ *([-+]?(?:{UNSIGNED})) *\}} *\{{ *({UNSIGNED}) *\}}"
    text = re.sub(fraction, r" \1/\2", text)
    match = NUMBER.fullmatch(text.strip().rstrip(" ."))
    if match is None or NOT_UNITS & set(match["unit"].lower().split()):
        return None
    top = Fraction(match["top"].replace(",", ""))
    bottom = Fraction((match["bottom"] or "1").replace(",", ""))
    if bottom == 0:
        return None
    value = int(match["whole"] or 0) + top / bottom
    return Number(-value if match["sign"] == "-" else value, match["percent"] is not None)


def _last_boxed(text: str) -> tuple[int, str]:
    r"""Returns the end and the content of the last complete \boxed{..}; (-1, "") without one."""
    start = len(text)
    for _ in range(10):  # the last ones may be incomplete
        start = text.rfind(r"\boxed{", 0, start)
        if start < 0:
            break
        depth, inside = 1, start + len(r"\boxed{")
        for end in range(inside, min(len(text), inside + 2 * MAX_ANSWER)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return end, text[inside:end]
    return -1, ""


def _unify(text: str) -> str:
    for pattern, replacement in NOTATION:
        text = re.sub(pattern, replacement, text)
    return text.strip().rstrip(" .")


def _plain_text(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf) *\{([^{}]*)\}", r"\1", _unify(text))
    text = re.sub(r"\s", "", text).casefold()
    return text[1:-1] if re.fullmatch(r"\([a-z]\)", text) else text  # (C) is C


def _verify(answer: str, solution: str) -> bool:
    """Whether math-verify finds both equal. False for words, which it would read as products."""
    if re.search(r"(?<![a-z\\])[a-z]{4,}", re.sub(r"\\[a-z]+(\{[a-z]*\})?", "", solution), re.I):
        return False
    if "=" not in solution:
        answer = re.sub(r"^[a-zA-Z] *(=|\\in(?![a-z]))", "", answer)
    # A much longer answer, or one with other variables, is wrong and slow to verify.
    if len(answer) > 2 * len(solution) + 20:
        return False
    if not _variables(answer) <= _variables(solution) | set("ei"):
        return False
    if not (_is_fast_to_verify(answer) and _is_fast_to_verify(solution)):
        return False
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # silence "no time limit"
    try:
        expected, given = (
            parse(f"${text}$", parsing_timeout=None, fallback_mode="no_fallback")
            for text in (solution, answer)
        )
        return verify(expected, given, timeout_seconds=None)
    except Exception:  # math-verify cannot parse the answer
        return False


def _variables(text: str) -> set[str]:
    return set(re.findall("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)))


def _is_fast_to_verify(text: str) -> bool:
    """Whether `text` is within the limits that keep math-verify's run time short."""
    powers = text.count("^")
    powers_of_brackets = re.findall(r"[)}\]] *\^ *\{? *-?([0-9])", text)
    deepest = depth = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return (
        text.isascii()
        and len(text) <= MAX_CHARACTERS
        and deepest <= MAX_DEPTH
        and powers <= MAX_POWERS
        and powers == len(POWER.findall(text))
        and math.prod(int(power) for power in powers_of_brackets) <= MAX_EXPANSION
        and not re.search(rf"\*\*|[!_]|[0-9]{{{MAX_DIGITS + 1}}}", text)
        and set(re.findall(r"\\([A-Za-z]+)", text)) <= COMMANDS
    )
