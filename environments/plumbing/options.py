"""The options of an environment as text: `size=4,sizes=[3, 4],start="Washington, D.C."`.

A value has the type of its option, by the option's annotation or else its default. Lists and dicts
are written as in YAML, so as in JSON too; words, such as `a 'b c'` or `a, b`, are a list of texts.
Where any type is allowed, JSON such as true or 0.5 is read as JSON, and anything else is a text.
"""

import inspect
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from environments.base import UsageError

WORDS: dict[Any, dict[str, Any]] = {
    bool: {"true": True, "false": False},
    NoneType: {"none": None, "null": None},
}
WRONG = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, yaml.YAMLError)


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


def split_words(text: str, separators: str = "") -> list[str]:
    """As shlex.split, but a backslash is itself. Raises ValueError for an open quote.

    >>> split_words(r"C:\\me\\rewards.py:accuracy 'my rewards.py:brief'")
    ['C:\\\\me\\\\rewards.py:accuracy', 'my rewards.py:brief']
    """
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""
    lexer.whitespace += separators
    return list(lexer)


def read_literal(text: str) -> Any:
    """The value of a JSON text, also of a list or dict as YAML writes it; any other text unchanged.

    >>> [read_literal(text) for text in ("8", "true", "False", "8x8", "[a, {b: 1}]")]
    [8, True, False, '8x8', ['a', {'b': 1}]]
    """
    with suppress(ValueError):
        return json.loads({"True": "true", "False": "false"}.get(text, text))
    with suppress(yaml.YAMLError):
        return yaml.safe_load(text) if text.startswith(("[", "{")) else text
    return text


def unquoted(text: str) -> str:
    """The text in quotes; any other text unchanged."""
    match = re.fullmatch(r"""(?s)"([^"]*)"|'([^']*)'""", text)
    return match[match.lastindex or 0] if match else text


def convert(text: str, parameter: inspect.Parameter) -> Any:
    """Returns a value as its parameter's type. Raises ValueError with a description of the type."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        default = parameter.default
        annotation = str if default in (None, parameter.empty) else type(default)
        if parameter.kind is parameter.VAR_KEYWORD:
            annotation = Any
    try:
        return _cast(text, annotation)
    except WRONG:
        if get_origin(annotation) is Literal:
            raise ValueError(f"one of {', '.join(map(str, get_args(annotation)))}") from None
        name = annotation.__name__ if type(annotation) is type else annotation
        raise ValueError(f"of type {name}") from None


def _cast(text: Any, annotation: Any) -> Any:
    """A text, or a list or dict of texts, as a type. Raises one of WRONG."""
    origin, args = get_origin(annotation) or annotation, get_args(annotation)
    if annotation is Any:
        return read_literal(text) if isinstance(text, str) else text
    if annotation in WORDS:
        return WORDS[annotation][text.lower()]
    if origin is Literal:
        return {str(choice): choice for choice in args}[text]
    if origin in (Union, UnionType):
        for member in sorted(args, key=lambda member: member is not NoneType):  # None comes first
            with suppress(*WRONG):
                return _cast(text, member)
        raise ValueError
    if isinstance(origin, type) and issubclass(origin, Mapping):
        keys, values = args or (Any, Any)
        return {_cast(key, keys): _cast(value, values) for key, value in _parts(text).items()}
    if isinstance(origin, type) and issubclass(origin, Iterable) and origin is not str:
        is_words = isinstance(text, str) and text[:1] != "["
        items = split_words(text, ",") if is_words else _parts(text)
        types = [args[0] if args else Any] * len(items)
        if origin is tuple and args[1:] and args[1] is not Ellipsis:
            types = [*args]
        make = origin if origin in (tuple, set) else list
        return make(_cast(*pair) for pair in zip(items, types, strict=True))
    value = annotation(unquoted(text)) if isinstance(annotation, type) else unquoted(text)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    return value


def _parts(text: Any) -> Any:
    """Reads YAML with each scalar as text; a list or dict, a part of such YAML, is returned."""
    return yaml.load(text, yaml.BaseLoader) if isinstance(text, str) else text  # noqa: S506
