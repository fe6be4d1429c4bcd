"""The options of an environment as text: `size=4,sizes=[3, 4],start="Washington, D.C."`.

A value has the type of its option, by the option's annotation or else its default. Lists and dicts
are those of YAML, so JSON too; several words, such as `a 'b c'`, are a list of texts. Where any
type is allowed, JSON is JSON, such as true or 0.5, and all else text.
"""

import inspect
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from environments.base import UsageError

# Of a value: a text in quotes, or what stands between spaces, commas and brackets
WORD = r"""(?s)"(?:[^"\\]|\\.)*"|'[^']*'|[^\s,\[\]{}"']+"""
WORDS: dict[Any, dict[str, Any]] = {
    bool: {"true": True, "false": False},
    NoneType: {"none": None, "null": None},
}
WRONG = (ValueError, TypeError, KeyError, ArithmeticError)  # of a text that is not of the type


def key_value_pairs(text: str, subject: str) -> dict[str, str]:
    """Splits `key=value,...`. Raises UsageError, which begins with `subject`, for other texts.

    A comma begins the next option where a key and = follow; any other one belongs to the value, and
    so does one in parentheses.

    >>> key_value_pairs("sizes=[3, 4], start=Washington, D.C.", "--env")
    {'sizes': '[3, 4]', 'start': 'Washington, D.C.'}
    """
    pairs: dict[str, str] = {}
    for item in re.split(r",(?=\s*\w+\s*=)(?![^()]*\))", text) if text else []:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key in pairs:
            raise UsageError(f"{subject}: write options as key=value, each once, not {item!r}")
        pairs[key] = value
    return pairs


def split_words(text: str) -> list[str]:
    """As shlex.split, but a backslash stands for itself. Raises ValueError for an open quote.

    >>> split_words(r"C:\\me\\rewards.py:accuracy 'my rewards.py:brief'")
    ['C:\\\\me\\\\rewards.py:accuracy', 'my rewards.py:brief']
    """
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""
    return list(lexer)


def read_literal(text: str) -> Any:
    """Returns the value of a JSON text, such as a number or a boolean; any other text unchanged.

    >>> [read_literal(text) for text in ("8", "true", "False", "8x8")]
    [8, True, False, '8x8']
    """
    try:
        return json.loads({"True": "true", "False": "false"}.get(text, text))
    except (ValueError, RecursionError):
        return text


class Quoted(str):
    """A text that had quotes, so that it is no number and not several words."""


def unquoted(text: str) -> str:
    """The text in quotes, as a `Quoted`; any other text unchanged."""
    if single := re.fullmatch("'([^']*)'", text):
        return Quoted(single[1])
    with suppress(ValueError):
        return Quoted(json.loads(text)) if text.startswith('"') else text
    return text


def map_words(text: str, change: Callable[[str], str]) -> str:
    """A value with `change` applied to each text in it; one that changes gets the quotes it needs.

    A path with spaces may be the whole value, without quotes.

    >>> map_words("[a, 'b c', 3] d", lambda word: word.replace("b", "x"))
    '[a, "x c", 3] d'
    """

    def replaced(match: re.Match[str]) -> str:
        word = unquoted(match[0])
        new = change(word)
        if new == word:
            return match[0]
        return json.dumps(new, ensure_ascii=False) if re.search(r"[\s,'\[\]{}]", new) else new

    return re.sub(".+" if os.path.exists(text) else WORD, replaced, text)


class Flow(yaml.BaseLoader):
    """Reads lists and dicts of texts. `*`, `&` and `!`, which are marks in YAML, begin texts."""

    fetch_alias = fetch_anchor = fetch_tag = yaml.BaseLoader.fetch_plain

    def construct_scalar(self, node: yaml.ScalarNode) -> str:
        text = super().construct_scalar(node)
        if not text and not node.style:  # {a:1}, without a space, would be {"a:1": ""}
            raise yaml.YAMLError
        return Quoted(text) if node.style else text


def convert(text: str, parameter: inspect.Parameter) -> Any:
    """Returns a value as its parameter's type. Raises ValueError with a description of the type."""
    kind = parameter.annotation
    if kind is parameter.empty:
        default = parameter.default
        kind = str if default in (None, parameter.empty) else type(default)
        kind = Any if parameter.kind is parameter.VAR_KEYWORD else kind
    with suppress(yaml.YAMLError, RecursionError, *WRONG):
        if text.startswith(("[", "{")):
            return _as_kind(yaml.load(text, Flow), kind)  # noqa: S506  it makes texts only
    try:
        return _as_kind(unquoted(text), kind)
    except WRONG:
        if get_origin(kind) is Literal:
            raise ValueError(f"one of {', '.join(map(str, get_args(kind)))}") from None
        raise ValueError(f"of type {kind.__name__ if type(kind) is type else kind}") from None


def _as_kind(value: Any, kind: Any) -> Any:
    """A text, or a list or dict of texts, as the type `kind`. Raises one of WRONG."""
    origin, args = get_origin(kind) or kind, get_args(kind)
    if kind is Any and isinstance(value, str):
        return str(value) if isinstance(value, Quoted) else read_literal(value)
    if kind is Any:
        origin = type(value)
    if origin in (Union, UnionType):
        for member in sorted(args, key=lambda member: member is not NoneType):  # None comes first
            with suppress(*WRONG):
                return _as_kind(value, member)
        raise ValueError
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ValueError
        keys, values = args or (Any, Any)
        return {_as_kind(k, keys): _as_kind(v, values) for k, v in value.items()}
    if isinstance(origin, type) and issubclass(origin, Iterable) and origin is not str:
        return _as_items(value, origin, args)
    if not isinstance(value, str):
        raise ValueError
    if kind in WORDS:
        return WORDS[kind][value.lower()]
    if origin is Literal:
        return {str(choice): choice for choice in args}[value]
    converted = kind(value) if isinstance(kind, type) else value
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ValueError
    return converted


def _as_items(value: Any, kind: Any, args: tuple[Any, ...]) -> Any:
    """A list of texts, or a text of several words, as a list, tuple or set."""
    if isinstance(value, str):
        value = [value] if isinstance(value, Quoted) else split_words(value)
    if not isinstance(value, list):
        raise ValueError
    kinds = [args[0] if args else Any] * len(value)
    if kind is tuple and args and args[-1] is not Ellipsis:
        kinds = list(args)
    makes = kind if kind in (tuple, set, frozenset) else list
    return makes(_as_kind(*pair) for pair in zip(value, kinds, strict=True))
