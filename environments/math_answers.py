r"""Finding the answer in a response to a mathematical question, and judging it as a person would.

Where a number is right, the answer must be that number: "1,000" is 1000, so is "$1000.00"; "x = 5"
and "5 dollars" are 5 (names and units aren't checked). A percent sign on one side only may be a
unit or a hundredth: 50% passes for 50 and for 0.5, and both pass for 50%. What must still be worked
out is wrong, or repeating the question would pay, and so is a rounded number. Other answers (roots,
sets, intervals, formulas) are compared as text, then by math-verify, unless they might keep it busy
for long: without a limit twenty nested fractions take it minutes and 9^{9^9} has no end, and its
time limits are signals, which reach the main thread only.

>>> find_answer(r"<answer>7</answer>? No: \boxed{\frac{1}{2}}.")
'\\frac{1}{2}'
>>> [same(answer, "1/2") for answer in (r"\frac{1}{2}", "0.50", "50%", "x = 2/4", "1 - 1/2", "0")]
[True, True, True, True, False, False]
"""

import logging
import math
import re
import threading
from fractions import Fraction
from typing import NamedTuple

LONGEST = 200  # characters of an answer
N = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
NUMBER = re.compile(
    rf"(?P<sign>[-+]?) *(?:(?P<whole>[0-9]+) +(?=[0-9]+ */))?(?P<top>{N})(?: */ *(?P<bottom>{N}))?"
    r" *(?P<percent>%|percent\b)?(?P<unit>(?: +[a-z]{2,}(?:\^?[23])?){0,4})",
    re.IGNORECASE,
)
NOT_UNITS = set(
    "and or plus minus times over pi squared cubed factorial dozen hundred thousand million "
    "billion trillion".split()
)
SPELLINGS = [  # different ways to write the same, and what has no meaning
    (r"(?<!\\)\\[!,;: ]|\\(?:left|right|displaystyle)(?![a-z])|\\?\$|~", " "),
    (r"\\%", "%"),
    (r"\{,\}", ","),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\frac *([0-9]) *([0-9])", r"\\frac{\1}{\2}"),
    (r"[−–]", "-"),
    (r"\^\{?\\circ\}?|°", ""),
]
# what math-verify is asked about: short, shallow, no command but these, only small powers
COMMANDS = set(
    "frac sqrt pi infty cup cap in text mathrm mbox cdot times pm begin end le leq ge geq lt gt "
    "ne neq emptyset mathbb".split()
)
POWER = re.compile(r"\^ *(?:[0-9a-z]|\{ *-?(?:[0-9]?[a-z]?|[0-9]/[0-9]|T|\\prime) *\})(?![0-9])")
MOST_CHARACTERS, MOST_POWERS, MOST_EXPANSION, MOST_DEPTH, MOST_DIGITS = 100, 3, 16, 4, 6
SECONDS = 2  # that math-verify may take where signals reach it, on the main thread


class Number(NamedTuple):
    value: Fraction
    is_percent: bool


def find_answer(response: str) -> str | None:
    r"""What the last <answer>..</answer> or \boxed{..} holds; None if nothing, or too much.

    >>> find_answer(r"<answer>\boxed{3}</answer>"), find_answer("<answer> </answer>")
    ('3', None)
    """
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    boxed_end, boxed = _last_boxed(response)
    if start >= 0 and end > boxed_end:
        answer = response[start + len("<answer>") : end]
        if len(answer) <= 2 * LONGEST:
            answer = _last_boxed(answer)[1] or answer
    else:
        answer = boxed
    answer = answer.strip()
    return answer if 0 < len(answer) <= LONGEST else None


def same(answer: str, truth: str) -> bool:
    """Whether `answer` says what `truth` says; never raises, whatever text `answer` is."""
    if len(answer) > LONGEST:
        return False
    expected, given = number(truth), number(answer)
    if expected is not None:
        if given is None:
            return False
        if expected.is_percent == given.is_percent:
            return expected.value == given.value
        # a percent sign on one side only: it may be a unit or a hundredth
        percent, plain = (given, expected) if given.is_percent else (expected, given)
        return plain.value in (percent.value, percent.value / 100)
    if not _as_text(answer):  # nothing but signs without meaning
        return False
    return _as_text(answer) == _as_text(truth) or _equivalent(_tidy(answer), _tidy(truth))


def number(text: str) -> Number | None:
    r"""The number that `text` is, exactly; None if it is anything else.

    >>> number("x = 12.5%")
    Number(value=Fraction(25, 2), is_percent=True)
    >>> [str(number(text).value) for text in (r"3\frac{1}{2}", "-$1,200.50 each", "5 square feet")]
    ['7/2', '-2401/2', '5']
    >>> number("2 + 2") is None
    True
    """
    name, _, text = _tidy(text).rpartition("=")
    if re.search(r"[<>!,;]|\\not|\b(?:and|or)\b", name):  # x >= 5; x = 1 or x = 2
        return None
    text = re.sub(r"\\(?:text|mathrm|mbox) *\{([^{}]*)\}", r" \1", text)
    text = re.sub(rf"\\frac *\{{ *([-+]?(?:{N})) *\}} *\{{ *({N}) *\}}", r" \1/\2", text)
    found = NUMBER.fullmatch(text.strip().rstrip(" ."))
    if found is None or NOT_UNITS & set(found["unit"].lower().split()):
        return None
    top, bottom = (
        Fraction(found[k].replace(",", "") if found[k] else 1) for k in ("top", "bottom")
    )
    if bottom == 0:
        return None
    value = int(found["whole"] or 0) + top / bottom
    return Number(-value if found["sign"] == "-" else value, found["percent"] is not None)


def _last_boxed(text: str) -> tuple[int, str]:
    r"""Where the last \boxed{..} with matching braces ends, and what it holds; or -1 and ""."""
    start = len(text)
    for _ in range(10):  # the last may be cut off, and have others before it
        start = text.rfind(r"\boxed{", 0, start)
        if start < 0:
            break
        depth, inside = 1, start + len(r"\boxed{")
        for end in range(inside, min(len(text), inside + 2 * LONGEST)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return end, text[inside:end]
    return -1, ""


def _tidy(text: str) -> str:
    for pattern, replacement in SPELLINGS:
        text = re.sub(pattern, replacement, text)
    return text.strip().rstrip(" .")


def _as_text(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf) *\{([^{}]*)\}", r"\1", _tidy(text))
    text = re.sub(r"\s", "", text).casefold()
    return text[1:-1] if re.fullmatch(r"\([a-z]\)", text) else text  # (C) is C


def _equivalent(answer: str, truth: str) -> bool:
    """Whether math-verify finds both equal; not for words, in which it sees products."""
    if re.search(r"(?<![a-z\\])[a-z]{4,}", re.sub(r"\\[a-z]+(\{[a-z]*\})?", "", truth), re.I):
        return False
    if "=" not in truth:
        answer = re.sub(r"^[a-zA-Z] *(=|\\in(?![a-z]))", "", answer)
    # what is far longer, or in other variables, isn't the same, and takes long to be told apart
    if len(answer) > 2 * len(truth) + 20 or not _variables(answer) <= _variables(truth) | set("ei"):
        return False
    if not (_is_tame(answer) and _is_tame(truth)):
        return False
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of a missing time limit
    main = threading.current_thread() is threading.main_thread()
    limit = SECONDS if main else None
    try:
        expected, given = (
            parse(f"${text}$", parsing_timeout=limit, fallback_mode="no_fallback")
            for text in (truth, answer)
        )
        return verify(expected, given, timeout_seconds=limit)
    except Exception:  # whatever it stumbles over isn't an answer
        return False


def _variables(text: str) -> set[str]:
    return set(re.findall("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)))


def _is_tame(text: str) -> bool:
    """Whether math-verify surely ends soon with `text`."""
    powers = text.count("^")
    of_brackets = re.findall(r"[)}\]] *\^ *\{? *-?([0-9])", text)
    deepest = depth = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return (
        text.isascii()
        and len(text) <= MOST_CHARACTERS
        and deepest <= MOST_DEPTH
        and powers <= MOST_POWERS
        and powers == len(POWER.findall(text))
        and math.prod(int(power) for power in of_brackets) <= MOST_EXPANSION
        and not re.search(rf"\*\*|[!_]|[0-9]{{{MOST_DIGITS + 1}}}", text)
        and set(re.findall(r"\\([A-Za-z]+)", text)) <= COMMANDS
    )
