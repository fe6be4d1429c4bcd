"""The options of an environment as text: `size=4,sizes=[3, 4],start="Washington, D.C."`.

A value has the type of its option, by the option's annotation or else its default. Lists and dicts
are those of YAML, so JSON too; several words, such as `a 'b c'`, are a list of texts. A text with a
comma is quoted. Where any type is allowed, JSON is JSON, such as true or 0.5, and all else text.
"""

import inspect
import json
import math
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from environments.base import UsageError

QUOTED = r'"(?:[^"\\]|\\.)*"|\'[^\']*\''
# What may contain commas, a text in quotes at the start of a word and a pair of brackets; commas
PARTS = re.compile(rf"(?<![^\s=\[{{:,])(?:{QUOTED})(?=[\s,:\]}}]|$)|[\[\]{{}},]", re.DOTALL)
AS_PYTHON = {"true": "True", "false": "False", "none": "None", "null": "None"}  # for tyro
KINDS = {int: "an integer", float: "a number", bool: "true or false"}


def key_value_pairs(text: str, subject: str) -> dict[str, str]:
    """Splits `key=value,...`. Raises UsageError, which begins with `subject`, for other texts.

    A value may contain commas in quotes and in brackets, and keeps both.

    >>> key_value_pairs('sizes=[3, 4], start="Washington, D.C."', "--env")
    {'sizes': '[3, 4]', 'start': '"Washington, D.C."'}
    """
    pairs: dict[str, str] = {}
    for item in split_commas(text) if text else []:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not item.strip():
            raise UsageError(f"{subject}: remove the extra comma")
        if not equals:
            raise UsageError(f"{subject}: write options as key=value, not {key!r}; a list as "
                             "sizes=[3, 4]")  # fmt: skip
        if key in pairs:
            raise UsageError(f"{subject}: the key {key!r} is given twice")
        pairs[key] = value
    return pairs


def split_commas(text: str) -> list[str]:
    """Splits at the commas outside quotes and brackets. A bracket without its other is a text.

    >>> split_commas("desc=[[1, 2], {a: 3}],smile=:[,x=1")
    ['desc=[[1, 2], {a: 3}]', 'smile=:[', 'x=1']
    """
    parts = list(PARTS.finditer(text))
    ends: dict[int, int] = {}  # of the brackets that have another
    open_brackets = []
    for part in parts:
        if part[0] in "[{":
            open_brackets.append(part.start())
        elif part[0] in "]}" and open_brackets:
            ends[open_brackets.pop()] = part.end()
    items, start, end = [], 0, 0
    for part in parts:
        if part.start() >= end and part[0] == ",":
            items.append(text[start : part.start()])
            start = part.end()
        end = max(end, ends.get(part.start(), 0))
    return [*items, text[start:]]


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
    """A text of a list or dict that has quotes, so that it is no number."""


class Flow(yaml.BaseLoader):
    """Reads lists and dicts of texts. `*`, `&` and `!`, which are marks in YAML, begin texts."""

    fetch_alias = fetch_anchor = fetch_tag = yaml.BaseLoader.fetch_plain

    def construct_scalar(self, node: yaml.ScalarNode) -> str:
        text = super().construct_scalar(node)
        if not text and not node.style:  # {a:1}, without a space, would be {"a:1": ""}
            raise yaml.YAMLError
        return Quoted(text) if node.style else text


def read_structure(text: str) -> Any:
    """The list or dict of a text in brackets, with texts in it; None for any other text."""
    with suppress(yaml.YAMLError, ValueError, RecursionError):
        if text.startswith(("[", "{")):
            found = yaml.load(text, Flow)  # noqa: S506  it makes texts only
            return found if isinstance(found, list | dict) else None
    return None


def read_values(structure: Any) -> Any:
    """A structure with JSON's numbers, true, false and null where its texts have no quotes."""
    if isinstance(structure, list):
        return [read_values(value) for value in structure]
    if isinstance(structure, dict):
        return {read_values(key): read_values(value) for key, value in structure.items()}
    return str(structure) if isinstance(structure, Quoted) else read_literal(structure)


def unquoted(text: str) -> str:
    """The text in quotes; any other text unchanged."""
    if single := re.fullmatch("'([^']*)'", text):
        return single[1]
    with suppress(ValueError):
        return str(json.loads(text)) if text.startswith('"') else text
    return text


def convert(text: str, parameter: inspect.Parameter) -> Any:
    """Returns a value as its parameter's type; for a type without a text form the text itself.

    Raises ValueError with a description of the type.
    """
    kind = parameter.annotation
    if kind is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
        has_type = parameter.default not in (None, parameter.empty)
        kind = type(parameter.default) if has_type else str
    elif kind is parameter.empty:
        kind = Any
    structure = read_structure(text)
    if structure is None or not _takes_structures(kind):
        return _convert_text(unquoted(text), kind, quoted=unquoted(text) != text)
    try:
        return _convert_structure(structure, kind)
    except ValueError:
        raise ValueError(_describe_kind(kind)) from None


def _takes_structures(kind: Any) -> bool:
    """Whether a value of this type may be a list or a dict."""
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        return any(map(_takes_structures, get_args(kind)))
    is_iterable = isinstance(origin, type) and issubclass(origin, Iterable)
    return kind is Any or (is_iterable and origin is not str)


def _convert_structure(structure: Any, kind: Any) -> Any:
    """Returns a list or dict of texts, or a text in one, as the type `kind`. Raises ValueError."""
    origin, args = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return read_values(structure)
    if origin in (Union, UnionType):
        for member in args:
            with suppress(ValueError):
                return _convert_structure(structure, member)
        raise ValueError
    if not _takes_structures(kind):
        if not isinstance(structure, str):
            raise ValueError
        return _convert_text(str(structure), kind, quoted=isinstance(structure, Quoted))
    if isinstance(structure, dict) and issubclass(dict, origin):
        keys, values = args or (Any, Any)
        return {_convert_structure(k, keys): _convert_structure(v, values)
                for k, v in structure.items()}  # fmt: skip
    makes = origin if origin in (tuple, set, frozenset) else list
    if not issubclass(makes, origin) and not issubclass(dict, origin):
        return read_values(structure)  # such as an array
    if not isinstance(structure, list) or not issubclass(makes, origin):
        raise ValueError
    kinds = [args[0] if args else Any] * len(structure)
    if origin is tuple and args and args[-1] is not Ellipsis:
        kinds = list(args)
    return makes(_convert_structure(*pair) for pair in zip(structure, kinds, strict=True))


def _convert_text(text: str, kind: Any, quoted: bool) -> Any:
    """Returns a text as the type `kind`; a `quoted` one is one word. Raises ValueError."""
    if kind is Any:
        return text if quoted else read_literal(text)
    spec = _text_form(kind)
    if not isinstance(spec, PrimitiveConstructorSpec):
        return text
    words = [text] if spec.nargs == 1 or quoted else split_words(text)
    for choice in (words, [AS_PYTHON.get(word.lower(), word) for word in words]):
        if spec.choices is None or set(choice) <= set(spec.choices):
            with suppress(ValueError, IndexError, AssertionError):
                value = spec.instance_from_str(choice)
                if not isinstance(value, float) or math.isfinite(value):
                    return value
    choices = f"one of {', '.join(spec.choices)}" if spec.choices else _describe_kind(kind)
    raise ValueError(KINDS.get(kind, choices))


def _text_form(kind: Any) -> Any:
    return ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))


def _describe_kind(kind: Any) -> str:
    return KINDS.get(kind, f"of type {kind.__name__ if type(kind) is type else kind}")
