"""The command line: flags over a config.yaml over the defaults; a run's settings as YAML."""

import dataclasses
import difflib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import tyro
import yaml

from core.types import Fault, Stopped, UsageError

T = TypeVar("T")
RANK_0_FIRST = 2  # seconds
FREE_ON_RESUME = {
    *("num_updates", "save_every", "track", "stop_on", "resume", "config", "run_name", "cache"),
    # these change a sum's rounding, and may have to
    *("max_tokens_per_micro_batch", "gradient_checkpointing", "gpu_memory_utilization"),
}
KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
ELSEWHERE = {  # what other programs call them
    "learning-rate": "--lr", "model": "--model-id", "steps": "--num-updates", "beta": "--kl-coef",
    "batch-size": "--num-prompts", "num-generations": "--group-size", "rank": "--lora-rank",
    "max-new-tokens": "--max-tokens", "output-dir": "--run-name", "environment": "--env",
}  # fmt: skip
DASHES = "-\u2013\u2014"  # as a text processor writes them
LONGEST = 80  # characters of a wrong value that are shown


def parse(cls: type[T], args: list[str]) -> T:
    """The settings that `args` ask for. --config or --resume give the values that no flag gives.

    Raises UsageError for a flag or a value that isn't known, for a bad file, and for a --resume
    with other settings than the run's; --help ends the program, with code 0.
    """
    config, resume = _value_of("--config", args), _value_of("--resume", args)
    if config and resume:
        raise UsageError("give --config or --resume, not both: a resumed run has its own config")
    if not config and not resume:
        return _from_flags(cls, args)
    file = Path(resume, "config.yaml") if resume else Path(str(config))
    if not _is_file(file):
        what = "not a run folder (it has no config.yaml)" if resume else "no such file"
        if config and _is_file(file / "config.yaml"):
            what = f"a folder; take {file / 'config.yaml'}"
        raise UsageError(f"{'--resume' if resume else '--config'} {resume or config}: {what}")
    base = from_yaml(cls, file)
    chosen = _from_flags(cls, args, default=base)
    if resume:
        for key, was, now in _differences(base, chosen):
            if key not in FREE_ON_RESUME:
                raise UsageError(f"--resume {resume}: {key} is {was} in this run, not {now}")
    return chosen


def run(cls: type[T], main: Callable[[T], int], args: list[str]) -> int:
    """`main` with the settings that `args` ask for; bad input is one line and exit code 2."""
    try:
        return main(parse(cls, args))
    except (UsageError, Fault) as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(RANK_0_FIRST)  # which ends us, if the mistake is everybody's
        print(f"train.py: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except Stopped as stopped:
        print(f"train.py: {one_line(stopped)}")
        return 130
    except KeyboardInterrupt:  # before there was anything to save, or for the second time
        return 130


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks and whatever else a terminal would act on.

    >>> one_line(UsageError("two\\nlines, one \\x1b[31mred"))
    'two lines, one [31mred'
    """
    return " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())


def answer_at_once(cls: type[T], args: list[str]) -> None:
    """End the program for --help and for what `parse` refuses; otherwise do nothing."""
    if code := run(cls, lambda _: 0, args):
        sys.exit(code)


def from_yaml(cls: type[T], file: Path) -> T:
    """Read settings that `to_dict` wrote; checked by type, as the same flags would be."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: can't be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise UsageError(f"{file}: not YAML{line}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: bytes, or no such day
        raise UsageError(f"{file}: not YAML in UTF-8") from None
    if not isinstance(values, dict):
        raise UsageError(f"{file}: not a config; it should have lines like `algo: grpo`")
    try:
        return _from_flags(cls, list(_as_flags(cls, values)))
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def to_dict(config: Any, algorithms: Iterable[str]) -> dict[str, Any]:
    """The settings as plain values, without the options of algorithms that aren't used."""
    values = dataclasses.asdict(config)
    for name in algorithms:
        if name != values["algo"]:
            values.pop(name, None)
    for name in ("config", "resume", "run_name"):  # how they were given, not settings
        values.pop(name)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _from_flags(cls: type[T], args: list[str], **default: Any) -> T:
    """What tyro reads; what it refuses, in a box of several lines, is a UsageError of one.

    Of a flag that is given twice, the last counts.
    """
    if {"--help", "-h"} & set(args):
        return tyro.cli(cls, args=args, **default)
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            chosen, unknown = tyro.cli(cls, args=args, return_unknown_args=True, **default)
    except SystemExit as end:
        if not end.code:  # something else was asked for, and done
            raise
        problem = _refused(_flags(cls), args, box.getvalue())
    else:
        if not unknown:
            return chosen
        problem = _unknown(_flags(cls), args, unknown[0])
    raise UsageError(f"{problem}; see python train.py --help")


def _flags(cls: Any, prefix: str = "--") -> dict[str, Any]:
    """Every flag and its type, `--no-..` among them."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name = field.name.replace("_", "-")
        if dataclasses.is_dataclass(field.type):
            found |= _flags(field.type, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = field.type
            found |= {f"{prefix}no-{name}": bool} if field.type is bool else {}
    return found


def _refused(flags: dict[str, Any], args: list[str], box: str) -> str:
    """What is wrong with a value: of tyro's box the flag alone is taken, where it names one."""
    text = re.sub("[\u2500-\u257f]", " ", box)
    found = re.search(r"(?:argument '|parsing )(--[\w.-]+)", text)
    if found is None or found[1] not in flags:
        return " ".join(text.partition("For full helptext")[0].split())
    flag, kind = found[1], flags[found[1]]
    if (value := _value_of(flag, args)) is None:
        return f"{flag} has no value; it takes {_takes(kind)}"
    near = difflib.get_close_matches(value.lower(), _choices(kind), n=1)
    return f"{flag} is {_takes(kind)}, not {_shown(value)}{_perhaps(near)}"


def _unknown(flags: dict[str, Any], args: list[str], token: str) -> str:
    """What is wrong with a token that belongs to no flag."""
    name = token.partition("=")[0]
    if name and name[0] in DASHES:
        return f"there is no flag {_shown(name)}{_perhaps(_near(name, flags))}"
    owners = [""]  # the flags so far; the last one has its value, or takes none
    for arg in args[: args.index(token)] if token in args else args:
        owners += [arg.partition("=")[0].replace("_", "-")] if arg.startswith("--") else []
    owner = owners[-1]
    if flags.get(owner) is bool:
        return f"{owner} takes no value, so {_shown(token)} is too much"
    if owner:
        return f"{owner} takes one value, so {_shown(token)} is too much"
    return f"{_shown(token)} belongs to no flag{_perhaps(_near(name, flags))}"


def _near(name: str, flags: Iterable[str]) -> list[str]:
    """The flags that somebody may have meant by `name`."""
    bare = name.lstrip(DASHES).lower().replace("_", "-")
    if bare in ELSEWHERE:
        return [ELSEWHERE[bare]]
    ends = [flag for flag in flags if flag.endswith(f".{bare}")]
    return ends or difflib.get_close_matches(f"--{bare}", flags, n=1, cutoff=0.7)


def _perhaps(near: list[str]) -> str:
    return f"; perhaps you meant {' or '.join(near)}" if near else ""


def _choices(kind: Any) -> list[str]:
    """The words that a Literal allows; of a union, those of its parts."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [choice for part in get_args(kind) for choice in _choices(part)]


def _takes(kind: Any) -> str:
    """What a flag of that type takes, in words.

    >>> _takes(float | None), _takes(Literal["on", "off", "auto"])
    ('a number', 'on, off or auto')
    """
    if choices := _choices(kind):
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    return next(words for of, words in KINDS.items() if of is kind or of in get_args(kind))


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return repr(text if len(text) <= LONGEST else f"{text[:LONGEST]}..")


def _as_flags(cls: Any, values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """`{"lr": 0.1, "grpo": {"clip_high": 0.3}}` as `--lr=0.1 --grpo.clip-high=0.3`."""
    fields = {f.name: f.type for f in dataclasses.fields(cls)}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in fields:
            near = [f.lstrip("-").replace("-", "_") for f in _near(name, _flags(cls))]
            raise UsageError(f"unknown setting {name}{_perhaps(near)}")
        kind, flag = fields[key], f"--{name}".replace("_", "-")
        if name in ("config", "resume"):
            raise UsageError(f"{name} is given on the command line, not in a file")
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, dict):
                raise UsageError(f"{name} has settings of its own, in lines below it")
            yield from _as_flags(kind, value, f"{name}.")
        elif isinstance(value, dict):
            raise UsageError(f"{name} has no settings of its own")
        elif kind is bool and isinstance(value, bool):
            yield flag if value else f"--{prefix}no-{key}".replace("_", "-")
        elif get_origin(kind) is tuple:
            texts = value if isinstance(value, list) else [value]
            if wrong := [t for t in texts if not isinstance(t, str) or t.startswith("-")]:
                raise UsageError(f"{name} is a list of texts, {_shown(wrong[0])} is not one")
            yield from (flag, *texts)
        else:
            yield f"{flag}={_scalar(name, kind, value)}"


def _scalar(name: str, kind: Any, value: Any) -> Any:
    """The value as the command line has it; UsageError for what that couldn't tell from text."""
    if isinstance(value, bool) and "off" in _choices(kind):  # YAML takes on and off for booleans
        return "on" if value else "off"
    none = value is None and type(None) not in get_args(kind)
    if none or kind is bool or isinstance(value, (bool, list)):
        what = "empty" if value is None else "a list" if isinstance(value, list) else _shown(value)
        raise UsageError(f"{name} is {_takes(kind)}, not {what}")
    return value


def _value_of(flag: str, args: list[str]) -> str | None:
    """What follows the flag, the last time it is given; None: nothing, or another flag."""
    found = None
    for arg, following in zip(args, [*args[1:], "--"], strict=False):
        name, equals, value = arg.partition("=")
        if arg.startswith("--") and name.replace("_", "-") == flag:
            found = value if equals else None if following.startswith("--") else following
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _differences(before: Any, after: Any, prefix: str = "") -> Any:
    for f in dataclasses.fields(before):
        was, now = getattr(before, f.name), getattr(after, f.name)
        if dataclasses.is_dataclass(was):
            yield from _differences(was, now, f"{prefix}{f.name}.")
        elif was != now:
            yield f"{prefix}{f.name}", was, now
