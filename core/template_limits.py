"""Limits for what one operation of a chat template may make.

A time limit cannot interrupt C code, so `{{ 10 ** 10 ** 9 }}` or `{{ "a" * 10 ** 10 }}` would hold
the process, or fill its memory. transformers renders templates in jinja2's sandbox; this sandbox
refuses an operation whose result multiplies, before it computes it. Operations that at most double
what they are given (`+`, `~`) are left to the time limit.
"""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MAX_BITS = 1 << 16  # of an integer
MAX_SIZE = 1 << 28  # characters of a text, items of a list
MAX_NUMBER = 1 << 20  # widths, precisions and counts
SIZED = {"batch", "center", "indent", "round", "slice", "truncate", "wordwrap", "urlize"}
METHODS = {"center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"}
LONG_NUMBER = re.compile(r"\d{7}")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers with these limits. Raises OverflowError for what exceeds them."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in SIZED:
            self.filters[name] = _with_small_numbers(self.filters[name])
        for name, check in (("join", _check_join), ("replace", _check_replace),
                            ("format", _check_format)):  # fmt: skip
            self.filters[name] = _checked(self.filters[name], check)

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
                if isinstance(times, int) and hasattr(value, "__len__"):
                    _check(len(value) * times > MAX_SIZE)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """`__obj`, a function or a method, with these arguments."""
        name = getattr(__obj, "__name__", "")
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
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


def install() -> None:
    """Lets transformers render chat templates in a LimitedEnvironment."""
    chat_template_utils.ImmutableSandboxedEnvironment = LimitedEnvironment  # type: ignore[misc]
    chat_template_utils._compile_jinja_template.cache_clear()


def _check(exceeds: bool) -> None:
    if exceeds:
        raise OverflowError("an operation whose result is too large")


def _check_numbers(values: Iterable[Any]) -> None:
    _check(any(isinstance(value, int) and abs(value) > MAX_NUMBER for value in values))


def _check_format(text: Any, *values: Any, **named: Any) -> None:
    """A width or precision may be in the format, or in the values where the format refers to it."""
    text = str(text)
    _check(LONG_NUMBER.search(text) is not None)
    if re.search(r"%[^%a-zA-Z]*\*|:[^}]*{", text):
        for value in (*values, named):
            parts = value.values() if isinstance(value, dict) else value
            _check_numbers(parts if isinstance(value, dict | tuple | list) else [value])


def _check_replace(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    _check(text.count(old) * len(new) > MAX_SIZE)


def _check_join(parts: Any, d: Any = "", *_: Any, **__: Any) -> None:
    sizes = [len(part) if isinstance(part, str) else 0 for part in parts]
    _check(sum(sizes) + len(sizes) * len(str(d)) > MAX_SIZE)


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with a check of all but the value, which may be a large number."""

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        start = 2 if hasattr(function, "jinja_pass_arg") else 1  # after the environment
        _check_numbers([*args[start:], *kwargs.values()])
        return function(*args, **kwargs)

    return limited


def _checked(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        start = 1 if hasattr(function, "jinja_pass_arg") else 0
        value = args[start]
        if check is _check_join:
            value = [*value]
            args = (*args[:start], value, *args[start + 1 :])
        check(*args[start:], **kwargs)
        return function(*args, **kwargs)

    return limited
