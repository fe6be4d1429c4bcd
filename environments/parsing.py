"""Reads an action from a response, and limits the retries after invalid actions.

A policy reasons before it acts: it quotes the rules, considers moves and corrects itself. The
action may therefore appear anywhere in the response, and the last well-formed one counts.
`read_action` looks for a JSON object with `key`, then for `<key>..</key>`, then for a pattern.

>>> read_action('I could {"move": 3} but {"move": 5} wins', "move", integer(0, 8))
5
>>> read_action("<move>3</move> no, <move>9</move>", "move", integer(0, 8))
3
>>> read_action("my move is 4.", "move", integer(0, 8), plain=r"move is (\\d+)")
4
>>> read_action("I resign", "move", integer(0, 8)) is None
True
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from environments.base import Message, Step

Action = TypeVar("Action")
MAX_CHARACTERS = 10_000  # only the end of a longer response is searched
MAX_PLAIN_CHARACTERS = 2_000  # the same for the plain pattern
MAX_OBJECTS = 50  # openings of a JSON object that are tried
RETRIES, PENALTY = 2, 0.1  # after invalid actions


def read_action(
    response: str, key: str, convert: Callable[[Any], Action | None], plain: str | None = None
) -> Action | None:
    """Returns the last well-formed action in `response`; None if there is none.

    `convert` receives a candidate (a JSON value or a text) and returns the action, or None if the
    candidate is not a valid action; it must not raise. `plain` is a regular expression whose first
    group is the action.
    """
    text = response[-MAX_CHARACTERS:]
    in_json = (json_object[key] for json_object in json_objects(text) if key in json_object)
    for candidates in (in_json, _tagged(text, key), _matches(text, plain)):
        for candidate in candidates:
            action = convert(candidate)
            if action is not None:
                return action
    return None


def json_objects(response: str) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects in the end of a response, the last first, also nested ones."""
    text, decoder = response[-MAX_CHARACTERS:], json.JSONDecoder()
    start = len(text)
    for _ in range(MAX_OBJECTS):
        start = text.rfind("{", 0, start)
        if start < 0:
            return
        with suppress(ValueError, RecursionError):
            yield decoder.raw_decode(text, start)[0]


def integer(low: int, high: int) -> Callable[[Any], int | None]:
    """Returns a converter for integers in low..high. It accepts 3 and "3", not 3.0 or True."""

    def convert(value: Any) -> int | None:
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value.strip()):
            value = int(value)
        return value if type(value) is int and low <= value <= high else None

    return convert


def one_of(*words: str) -> Callable[[Any], str | None]:
    """Returns a converter for a fixed set of words. It ignores case, quotes and punctuation."""
    by_lower_case = {word.lower(): word for word in words}

    def convert(value: Any) -> str | None:
        if not isinstance(value, str):
            return None
        return by_lower_case.get(value.strip().strip("\"'`.!").lower())

    return convert


class Retries:
    """Limits the invalid actions of an episode: two retries, then the episode ends.

    >>> retries = Retries()
    >>> [(step.reward, step.done) for step in map(retries.refuse, ["Name a cell."] * 3)]
    [(-0.1, False), (-0.1, False), (-1.0, True)]
    """

    def __init__(self, final: float = -1.0):
        self.left, self.final = RETRIES, final

    def refuse(self, hint: str, **info: Any) -> Step:
        """Returns the step for an invalid action.

        With a retry left: the message `hint` and the reward -0.1. Otherwise: the end of the episode
        with the reward `final`.
        """
        if self.left == 0:
            return Step(None, self.final, True, {"correct": False, "invalid": True, **info})
        self.left -= 1
        return Step(user(hint), -PENALTY, False, {"correct": False, "invalid": True, **info})


def prefill_of(messages: list[Message]) -> str:
    """The text of the assistant with which opening messages end, which the policy continues."""
    return messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else ""


def user(content: str) -> Message:
    """Returns a user message."""
    return {"role": "user", "content": content}


def _tagged(text: str, key: str) -> Iterator[str]:
    """Yields the texts between `<key>` and `</key>`, the last first."""
    opening, closing = f"<{key}>", f"</{key}>"
    end = text.rfind(closing)
    while (start := text.rfind(opening, 0, max(end, 0))) >= 0:
        yield text[start + len(opening) : end].strip()
        end = text.rfind(closing, 0, end)


def _matches(text: str, pattern: str | None) -> Iterator[str]:
    """Yields the first groups of the matches of `pattern`, the last first."""
    if pattern is not None:
        matches = re.finditer(pattern, text[-MAX_PLAIN_CHARACTERS:], re.IGNORECASE)
        yield from reversed([match[1] for match in matches])
