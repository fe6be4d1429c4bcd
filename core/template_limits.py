"""Limits for what one operation of a chat template may make.

A time limit cannot interrupt C code, so `{{ 10 ** 10 ** 9 }}` or `{{ "a" * 10 ** 10 }}` would hold
the process, or fill its memory. transformers renders templates in jinja2's sandbox; this sandbox
refuses an operation that takes or makes more than MAX_SIZE characters, before it computes it. A
list that contains the same list many times counts as what it becomes as a text.
"""

import functools
import re
from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers.utils import chat_template_utils

MAX_BITS = 1 << 16  # of an integer
MAX_SIZE = 1 << 24  # characters of a text, or of all texts in a list
MAX_NUMBER = 1 << 20  # widths, precisions and counts
FILTERS = {"batch", "center", "round", "slice", "truncate"}  # whose numbers are such
METHODS = {"center", "ljust", "rjust", "zfill"}
MULTIPLYING = {"indent", "tojson", "urlize", "wordwrap"}  # filters that repeat an argument
REFUSED = {"encode", "expandtabs", "maketrans", "to_bytes", "translate"}  # methods without a use
PARTS = (list, tuple, set, KeysView, ValuesView, ItemsView)


class _Generator(CodeGenerator):
    """Compiles `a ~ b` to a call of `LimitedEnvironment.join`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers with these limits. Raises OverflowError for what exceeds them."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _Generator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.finalize = _checked  # each output, before it becomes a text

    def from_string(self, *args: Any, **kwargs: Any) -> Any:
        """The template; its filters, to which transformers has added its own, get limits."""
        for name, function in self.filters.items():
            self.filters[name] = _limited(name, function)
        return super().from_string(*args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left` operator `right`."""
        if operator == "%":
            if isinstance(left, str):
                _check_format(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits, more = left.bit_length(), right.bit_length()
            if operator == "**":
                _check(bits > 1 and bits * right > MAX_BITS)
            else:
                _check(bits + more > MAX_BITS)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    _check(_size(value) * times > MAX_SIZE)
        else:
            _checked((left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """`__obj`, a function or a method, with these arguments."""
        name = getattr(__obj, "__name__", "")
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        _checked((args, kwargs))
        _check(name in REFUSED)
        if name in METHODS:
            _check_numbers([*args, *kwargs.values()])
        elif isinstance(text, str) and name == "replace":
            _check_replace(text, *args, **kwargs)
        elif isinstance(text, str) and name == "join":
            args = tuple([*part] if isinstance(part, Iterable) else part for part in args)
            _check_join(args[0] if args else (), text)
        elif isinstance(text, str) and name in ("format", "format_map"):
            _check_format(text, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # type: ignore[override]
        """The pieces of the output as one text."""
        kept, size = [], 0
        for piece in pieces:
            size += len(piece)
            _check(size > MAX_SIZE)
            kept.append(piece)
        return "".join(kept)

    @staticmethod
    def join(values: tuple[Any, ...]) -> str:
        """The values as one text: the operator `~`."""
        return "".join(map(str, _checked(values)))


def install() -> None:
    """Lets transformers render chat templates in a LimitedEnvironment."""
    chat_template_utils.ImmutableSandboxedEnvironment = LimitedEnvironment  # type: ignore[misc]
    chat_template_utils._compile_jinja_template.cache_clear()


def _check(exceeds: bool) -> None:
    if exceeds:
        raise OverflowError("an operation whose result is too large")


def _checked(value: Any) -> Any:
    _check(_size(value) > MAX_SIZE)
    return value


def _size(value: Any, known: dict[int, Any] | None = None) -> int:
    """About the length of `value` as a text. What a list contains twice counts twice.

    `known`: sizes by id, with the objects, so that their ids stay theirs.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 3
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)][0]
    parts: Any = ()
    if isinstance(value, Namespace):
        parts = [value._Namespace__attrs]  # type: ignore[attr-defined]
    elif isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, PARTS):
        parts = [*value]
    known[id(value)] = 0, value  # it may contain itself
    known[id(value)] = 1 + len(parts) + sum(_size(part, known) for part in parts), (value, parts)
    return known[id(value)][0]


def _check_numbers(values: Iterable[Any]) -> None:
    _check(any(isinstance(value, int) and abs(value) > MAX_NUMBER for value in values))


def _check_format(text: Any, *values: Any, **named: Any) -> None:
    """A width or precision may be in the format, or in the values where the format refers to it."""
    text, given = str(text), (*values, named)
    fields = text.count("%") + text.count("{")
    numbers = [int(number[:9]) for number in re.findall("[0-9]+", text)]
    _check(sum(numbers) + fields * _size(given) > MAX_SIZE)
    if re.search(r"%[^%a-zA-Z]*\*|:[^}]*{", text):
        for value in given:
            parts = value.values() if isinstance(value, dict) else value
            parts = parts if isinstance(value, dict | tuple | list) else [value]
            _check_numbers(fields * p if isinstance(p, int) else p for p in parts)


def _check_replace(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    _check(text.count(old) * len(new) > MAX_SIZE)


def _check_join(parts: Any, d: Any = "", *_: Any, **__: Any) -> None:
    _check(_size(parts) + len(parts) * len(str(d)) > MAX_SIZE)


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with checks of its value and of its other arguments."""

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        start = 1 if hasattr(function, "jinja_pass_arg") else 0  # after the environment
        value, *others = args[start:]
        others += kwargs.values()
        _checked((value, others))
        if name in FILTERS:
            _check_numbers(others)
        elif name in MULTIPLYING:
            counts = [abs(o) if isinstance(o, int) else _size(o) for o in others]
            _check(_size(value) * max(counts, default=1) > MAX_SIZE)
        elif name == "sum":  # of lists takes the square of their number
            _check(any(isinstance(other, PARTS) for other in others))
        elif name == "join":
            value = [*value]
            args = (*args[:start], value, *args[start + 1 :])
            _check_join(value, *others)
        elif name in ("replace", "format"):
            (_check_replace if name == "replace" else _check_format)(*args[start:], **kwargs)
        return function(*args, **kwargs)

    return limited
