"""Reading an action out of free text, and what an unreadable one costs.

Policies reason before they act, quote the rules and correct themselves. So an action may stand
anywhere, and the last well-formed one counts: as the value of `key` in a JSON object, else between
`<key>` tags, else by a plain pattern.

>>> read_action('I could {"move": 3} but {"move": 5} wins', "move", whole_number(0, 8))
5
>>> read_action("<move>3</move> no, <move>9</move>", "move", whole_number(0, 8))
3
>>> read_action("my move is 4.", "move", whole_number(0, 8), plain=r"move is (\\d+)")
4
>>> read_action("I resign", "move", whole_number(0, 8)) is None
True
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from core.types import Message
from environments.base import Step

Action = TypeVar("Action")
LONGEST = 10_000  # characters from the end that are read: an action is said last
MOST = 50  # candidates of a kind that are tried


def read_action(
    response: str,
    key: str,
    convert: Callable[[Any], Action | None],
    plain: str | None = None,
) -> Action | None:
    """The last well-formed action in `response`; None if there is none.

    `convert` takes what was found (a JSON value, or text) and returns the action, or None for what
    can't be one; it must not raise. `plain` is a pattern whose first group is the action.
    """
    text = response[-LONGEST:]
    for candidates in (_from_json(text, key), _from_tags(text, key), _from_pattern(text, plain)):
        for candidate in candidates:
            action = convert(candidate)
            if action is not None:
                return action
    return None


def whole_number(least: int, most: int) -> Callable[[Any], int | None]:
    """A converter for whole numbers of a range; "3" is one, 3.0 and True are not."""

    def convert(value: Any) -> int | None:
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value.strip()):
            value = int(value)
        return value if type(value) is int and least <= value <= most else None

    return convert


def one_of(*words: str) -> Callable[[Any], str | None]:
    """A converter for words of a list, in any case, quotes and full stops aside."""
    known = {word.lower(): word for word in words}

    def convert(value: Any) -> str | None:
        if not isinstance(value, str):
            return None
        return known.get(value.strip().strip("\"'`.!").lower())

    return convert


class Retries:
    """How often an episode forgives an action that can't be read or isn't allowed.

    >>> retries = Retries(limit=1, penalty=0.1)
    >>> first, second = retries.refuse("Name a cell."), retries.refuse("Name a cell.")
    >>> (first.reward, first.done), (second.reward, second.done)
    ((-0.1, False), (-1.0, True))
    """

    def __init__(self, limit: int = 2, penalty: float = 0.1, final: float = -1.0):
        self.left = limit
        self.penalty = penalty
        self.final = final

    def refuse(self, hint: str, **info: Any) -> Step:
        """The step that an invalid action earns: a hint and a penalty, or the end."""
        if self.left == 0:
            return Step(None, self.final, True, {"correct": False, "invalid": True, **info})
        self.left -= 1
        return Step(user(hint), -self.penalty, False, {"correct": False, "invalid": True, **info})


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def _from_json(text: str, key: str) -> Iterator[Any]:
    """Values of `key` in JSON objects, the last first."""
    decoder = json.JSONDecoder()
    start = len(text)
    for _ in range(MOST):
        start = text.rfind("{", 0, start)
        if start < 0:
            return
        try:
            found, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and key in found:
            yield found[key]


def _from_tags(text: str, key: str) -> Iterator[str]:
    opening, closing = f"<{key}>", f"</{key}>"
    end = len(text)
    for _ in range(MOST):
        end = text.rfind(closing, 0, end)
        start = text.rfind(opening, 0, max(end, 0))
        if start < 0:
            return
        yield text[start + len(opening) : end].strip()


def _from_pattern(text: str, plain: str | None) -> Iterator[str]:
    if plain is not None:
        found = [match[1] for match in re.finditer(plain, text[-2000:], re.IGNORECASE)]
        yield from reversed(found[-MOST:])
