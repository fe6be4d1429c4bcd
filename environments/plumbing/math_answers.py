r"""Finds the answer in a response to a mathematical question and compares it with the solution.

A numeric solution needs an equal number, in any of the usual notations: "1,000" and "$1000.00" are
1000; "x = 5" and "5 dollars" are 5 (names and units are not checked). A percent sign on one side
only is read as a unit or as a hundredth: the solution 50% accepts "50" and "0.5", and the solutions
50 and 0.5 accept "50%". An unevaluated expression is wrong (otherwise a copy of the question would
be right), and so is a rounded number. Words are compared as text, and every other solution (roots,
sets, intervals, formulas) by math-verify, within two seconds.

>>> find_answer(r"<answer>7</answer>? No: \boxed{\frac{1}{2}}.")
'\\frac{1}{2}'
>>> [is_equal(x, "1/2") for x in (r"\frac{1}{2}", "0.50", "50%", "x = 2/4", "1 - 1/2", "0")]
[True, True, True, True, False, False]
"""

import logging
import re
import threading
from fractions import Fraction
from typing import Any

MAX_ANSWER = 200  # characters
LIMIT = 2  # seconds of math-verify, which has no limit outside the main thread
UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
NUMBER = re.compile(
    rf"(?P<sign>[-+]?) *(?:(?P<whole>[0-9]+) +(?=[0-9]+ */))?"
    rf"(?P<top>{UNSIGNED})(?: */ *(?P<bottom>{UNSIGNED}))?"
    r" *(?P<percent>%|percent\b)?(?P<unit>(?: +[a-z]{2,}(?:\^?(?:[23²³]|\{[23]\}))?){0,4})",
    re.IGNORECASE,
)
NOT_UNITS = set(
    "and or plus minus times over pi squared cubed factorial dozen hundred thousand million "
    "billion trillion".split()
)
NOTATION = [  # pattern, replacement: unifies notations
    # spaces in a number: 10,\!000 and 10\,000
    (r"(?<!\\)\\! *|(?<=[0-9])(?:\\[,;: ]|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9/]))", ""),
    (r"(?<!\\)\\[][(),;: ]|\\?\$|~|[\u00a0\u2009\u202f]", " "),
    (r"\\(?:left|right|displaystyle)(?![a-z])", " "), (r"\\%", "%"), (r"\{,\}", ","),
    (r"[−–]", "-"), (r"\^\{?\\circ\}?|°", ""), (r"\\[dt]frac", r"\\frac"),
    (r"\\(?:text|mathrm|mbox|textbf) *\{([^{}]*)\}", r" \1"),
    (r"\\frac *([0-9])", r"\\frac{\1}"), (r"(\\frac *\{[^{}]*\}) *([0-9])", r"\1{\2}"),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi"),
]  # fmt: skip
FRACTION = rf"\\frac *\{{ *([-+]?(?:{UNSIGNED})) *\}} *\{{ *({UNSIGNED}) *\}}"


def find_answer(response: str) -> str | None:
    r"""Returns the content of the last <answer>..</answer> or \boxed{..}.

    None if there is none, or if it is empty or has more than 200 characters.

    >>> find_answer(r"<answer>\boxed{3}</answer>"), find_answer("<answer> </answer>")
    ('3', None)
    """
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    boxed_end, answer = _last_boxed(response)
    if start >= 0 and end > boxed_end:
        answer = response[start + len("<answer>") : end]
        answer = _last_boxed(answer)[1] or answer
    answer = answer.strip()
    return answer if 0 < len(answer) <= MAX_ANSWER else None


def is_equal(answer: str, solution: str) -> bool:
    """Whether `answer` equals `solution`. Accepts any text; never raises."""
    if len(answer) > MAX_ANSWER:
        return False
    expected, values = parse_number(solution), parse_number(answer)
    if expected and values and len(expected) == len(values):
        return expected[0] == values[0]
    if expected:
        return values is not None and not {*expected}.isdisjoint(values)
    answer_text, solution_text = _plain(answer), _plain(solution)
    has_words = re.search("[a-z]{4}", re.sub(r"\\[a-z]+(\{[a-z]*\})?", "", solution_text))
    if answer_text in ("", solution_text) or has_words or "dots" in solution_text:
        return answer_text == solution_text
    return _verify(_unify(answer), _unify(solution))


def parse_number(text: str) -> tuple[Fraction, ...] | None:
    r"""Returns the exact number that `text` states, and the hundredth of a percentage, which it may
    be instead; None if `text` is anything but one number.

    >>> [[*map(str, parse_number(x))] for x in ("x = 12.5%", r"3\frac{1}{2}", "-$1,200.50 each")]
    [['25/2', '1/8'], ['7/2'], ['-2401/2']]
    >>> parse_number("2 + 2") is None
    True
    """
    name, _, text = _unify(text).rpartition("=")
    if re.search(r"[<>!,;]|\\not|\b(?:and|or)\b", name):  # x >= 5; x = 1 or x = 2
        return None
    match = NUMBER.fullmatch(re.sub(FRACTION, r" \1/\2", text).strip())
    if match is None or NOT_UNITS & set(match["unit"].lower().split()):
        return None
    top = Fraction(match["top"].replace(",", ""))
    bottom = Fraction((match["bottom"] or "1").replace(",", ""))
    if bottom == 0:
        return None
    value = int(match["whole"] or 0) + top / bottom
    value = -value if match["sign"] == "-" else value
    return (value, value / 100) if match["percent"] else (value,)


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


def _plain(text: str) -> str:
    text = re.sub(r"\s", "", _unify(text)).casefold()
    return text[1:-1] if re.fullmatch(r"\([a-z]\)", text) else text  # (C) is C


def _verify(answer: str, solution: str) -> bool:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    limit = LIMIT if threading.current_thread() is threading.main_thread() else None
    try:
        options: Any = {"parsing_timeout": limit, "fallback_mode": "no_fallback"}
        expected, parsed = parse(f"${solution}$", **options), parse(f"${answer}$", **options)
        # 50 digits of a float, so that no two values are equal because they are rounded
        if not verify(expected, parsed, float_rounding=50, timeout_seconds=limit):
            return False
        x, y = expected[0], parsed[0]
        if not (getattr(x, "is_number", False) and getattr(y, "is_number", False)):
            return True
        return x == y or bool(abs((x / y).evalf() - 1) < 1e-9)  # in case both are rounded to 0
    except Exception:  # math-verify cannot parse the answer
        return False
