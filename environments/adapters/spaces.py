"""Gymnasium's spaces as text: what an action may be, and a JSON value as an action.

The actions of Box(-1, 1, (2,)) are described as `[-1 to 1, -1 to 1]`, and `Slowly. {"action": [0.5,
0]}` is a response with one of them.
"""

import json
import string
from contextlib import suppress
from typing import Any

import numpy as np

from environments.base import UsageError
from environments.parsing import integer, read_action
from environments.plumbing.installed import import_library

PRINTABLE = {*string.ascii_letters, *string.digits, *string.punctuation, " "}
MAX_NUMBERS = 1000  # in an observation; more is an image
MAX_SPELLED = 16  # numbers that `describe` lists one by one


def describe(space: Any) -> str:
    """Returns the JSON values that are in an action space. Raises UsageError for other spaces."""
    spaces = import_library("gymnasium").spaces
    if isinstance(space, spaces.Discrete):
        return f"{space.start} to {space.start + space.n - 1}"
    if isinstance(space, spaces.MultiDiscrete):
        return _describe_array(space.start, space.start + space.nvec - 1)
    if isinstance(space, spaces.MultiBinary):
        return _describe_array(np.zeros(space.shape, int), np.ones(space.shape, int))
    if isinstance(space, spaces.Box):
        return _describe_array(space.low, space.high)
    if isinstance(space, spaces.Text):
        least = f"{space.min_length} to " if space.min_length else "at most "
        restricted = not space.character_set >= PRINTABLE
        return (f"a text of {least}{space.max_length} characters"
                f"{f' of {space.characters[:MAX_SPELLED * 8]}' if restricted else ''}")  # fmt: skip
    if isinstance(space, spaces.Dict):
        return f"{{{', '.join(f'{json.dumps(k)}: {describe(s)}' for k, s in space.items())}}}"
    raise UsageError(f"actions of the space {space} are not read from text: words=module:GAME can")


def read_json_action(space: Any, response: str) -> Any:
    """Returns the last action of `space` in {"action": ..} or <action>..</action>, else None; where
    actions are texts, else the whole response, if it is one."""

    def convert(value: Any) -> Any:
        action = to_action(space, value)
        if action is None and isinstance(value, str):  # between tags
            with suppress(ValueError, RecursionError):
                action = to_action(space, json.loads(value))
        return None if action is None else (action,)  # an array has no truth value

    found = read_action(response, "action", convert)
    if found is None:
        return to_action(space, response.strip()) if is_text(space) else None
    return found[0]


def is_text(space: Any) -> bool:
    """Whether the actions of a space are texts."""
    return isinstance(space, import_library("gymnasium").spaces.Text)


def to_action(space: Any, value: Any) -> Any:
    """Returns a JSON value as an element of `space`; None if it is not one."""
    spaces = import_library("gymnasium").spaces
    if isinstance(space, spaces.Discrete):
        return integer(int(space.start), int(space.start + space.n - 1))(value)
    if isinstance(space, spaces.Text):
        return value if space.contains(value) else None
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or value.keys() != space.keys():
            return None
        named = {key: to_action(part, value[key]) for key, part in space.items()}
        return None if any(part is None for part in named.values()) else named
    return _to_array(space, value)


def as_element(space: Any, action: Any) -> Any:
    """Returns an action that a `Game` read as an element of `space`; None if it is not one."""
    return action if space.contains(action) else to_action(space, _plain(action))


def to_json(action: Any) -> str:
    """Returns an action as JSON, which `read_json_action` reads."""
    return json.dumps({"action": action}, default=_plain, ensure_ascii=False)


def check_observations(space: Any, name: str) -> None:
    """Raises UsageError if observations of `space` are images."""
    spaces = import_library("gymnasium").spaces
    parts = [space]
    while parts:
        part = parts.pop()
        if isinstance(part, spaces.Dict):
            parts += part.spaces.values()
        elif isinstance(part, spaces.Tuple):
            parts += part.spaces
        elif isinstance(part, spaces.Box) and np.prod(part.shape) > MAX_NUMBERS:
            size = "x".join(map(str, part.shape))
            raise UsageError(f"{name} observes images ({size} numbers), which a language model "
                             "cannot read; words=module:GAME can tell them as text")  # fmt: skip


def _plain(value: Any) -> Any:
    """Arrays and numbers of NumPy, also within dicts, as JSON has them."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _to_array(space: Any, value: Any) -> Any:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError, RecursionError):  # ragged, or nested too deeply
        return None
    whole = "iu" if np.issubdtype(space.dtype, np.integer) else "iuf"
    if array.dtype.kind not in whole or array.size != np.prod(space.shape):
        return None
    if array.shape != space.shape and array.ndim > 0:  # one number may stand for [number]
        return None
    with np.errstate(over="ignore"):
        action = array.astype(space.dtype).reshape(space.shape)
    if whole == "iu" and not np.array_equal(action, array.reshape(space.shape)):
        return None  # a smaller integer type wraps around
    return action if np.all(np.isfinite(action)) and space.contains(action) else None


def _describe_array(low: Any, high: Any) -> str:
    """Returns the ranges of an array as nested lists, or its shape and range if it is large."""
    low, high = np.asarray(low), np.asarray(high)
    if low.size > MAX_SPELLED:
        return f"{low.shape} numbers, {_range(low.min(), high.max())}"
    if low.ndim == 0:
        return _range(low, high)
    return f"[{', '.join(_describe_array(a, b) for a, b in zip(low, high, strict=True))}]"


def _range(low: Any, high: Any) -> str:
    bounds = [None if abs(bound) > 1e30 else f"{bound:g}" for bound in (low, high)]
    if bounds == [None, None]:
        return "any number"
    if bounds[0] is None:
        return f"at most {bounds[1]}"
    return f"at least {bounds[0]}" if bounds[1] is None else f"{bounds[0]} to {bounds[1]}"
