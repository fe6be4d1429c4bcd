"""The command line: flags over a config.yaml over the defaults; a run's settings as YAML."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml

from core.types import Fault, UsageError

T = TypeVar("T")
RANK_0_FIRST = 2  # seconds
FREE_ON_RESUME = {
    *("num_updates", "save_every", "track", "stop_on", "resume", "config", "run_name", "cache"),
    # these change a sum's rounding, and may have to
    *("max_tokens_per_micro_batch", "gradient_checkpointing", "gpu_memory_utilization"),
}


def parse(cls: type[T], args: list[str]) -> T:
    """The settings that `args` ask for. --config or --resume give the values that no flag gives.

    Raises UsageError for a bad file, or a --resume with other settings than the run's; tyro itself
    ends the program with code 2 for a flag or a value that it doesn't know.
    """
    config, resume = _value_of("--config", args), _value_of("--resume", args)
    if config and resume:
        raise UsageError("give --config or --resume, not both: a resumed run has its own config")
    if not config and not resume:
        return tyro.cli(cls, args=args)
    file = Path(resume, "config.yaml") if resume else Path(str(config))
    if not file.is_file():
        what = "not a run folder (it has no config.yaml)" if resume else "no such file"
        raise UsageError(f"{'--resume' if resume else '--config'} {resume or config}: {what}")
    base = from_yaml(cls, file)
    chosen = tyro.cli(cls, args=args, default=base)
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
        print(f"train.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:  # before there was anything to save, or for the second time
        return 130


def answer_at_once(cls: type[T], args: list[str]) -> None:
    """End the program for --help and for what `parse` refuses; otherwise do nothing."""
    if code := run(cls, lambda _: 0, args):
        sys.exit(code)


def from_yaml(cls: type[T], file: Path) -> T:
    """Read settings that `to_dict` wrote; checked by type, as the same flags would be."""
    try:
        values = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UsageError(f"{file}: not YAML") from None
    if not isinstance(values, dict):
        raise UsageError(f"{file}: not a config; it should have lines like `algo: grpo`")
    flags = list(_as_flags(cls, values, str(file)))
    return tyro.cli(cls, args=flags)


def to_dict(config: Any, algorithms: dict[str, Any]) -> dict[str, Any]:
    """The settings as plain values, without the options of algorithms that aren't used."""
    values = dataclasses.asdict(config)
    for name in algorithms:
        if name != values["algo"]:
            values.pop(name, None)
    for name in ("config", "resume", "run_name"):  # how they were given, not settings
        values.pop(name)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _as_flags(cls: Any, values: dict[str, Any], file: str, prefix: str = "") -> Any:
    """`{"lr": 0.1, "grpo": {"clip_high": 0.3}}` as `--lr 0.1 --grpo.clip-high 0.3`."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key, value in values.items():
        if key not in fields:
            raise UsageError(f"{file}: unknown setting {prefix}{key}")
        if isinstance(value, dict):
            inner = fields[key].type
            if not dataclasses.is_dataclass(inner):
                raise UsageError(f"{file}: {prefix}{key} has no settings of its own")
            yield from _as_flags(inner, value, file, f"{prefix}{key}.")
        elif isinstance(value, bool):
            yield f"--{prefix}{'' if value else 'no-'}{key}".replace("_", "-")
        else:
            yield f"--{prefix}{key}".replace("_", "-")
            yield from map(str, value if isinstance(value, list) else [value])


def _value_of(flag: str, args: list[str]) -> str | None:
    for i, arg in enumerate(args):
        if arg.startswith(f"{flag}="):
            return arg.partition("=")[2]
        if arg == flag and i + 1 < len(args):
            return args[i + 1]
    return None


def _differences(before: Any, after: Any, prefix: str = "") -> Any:
    for f in dataclasses.fields(before):
        was, now = getattr(before, f.name), getattr(after, f.name)
        if dataclasses.is_dataclass(was):
            yield from _differences(was, now, f"{prefix}{f.name}.")
        elif was != now:
            yield f"{prefix}{f.name}", was, now
