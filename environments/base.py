"""The interface of two methods, and `make("name:key=value,...")`.

An environment pays for text. `reset(seed)` returns the opening messages, `step(response)` the
reward and the next message. The seed decides the whole task, on any machine, so that a group of
rollouts can share one task and a run can be repeated.

Seeds come from three ranges that don't meet, so nothing that is evaluated was trained on:

>>> [TRAIN_SEEDS.start, DEMO_SEEDS.start, EVAL_SEEDS.start]
[0, 1000000000, 1500000000]
>>> make("letter_counting:difficulty=2").reset(seed=7)[0]["role"]
'user'
"""

import difflib
import inspect
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from core.types import Message, UsageError

TRAIN_SEEDS = range(0, 1_000_000_000)
DEMO_SEEDS = range(1_000_000_000, 1_500_000_000)
EVAL_SEEDS = range(1_500_000_000, 2_000_000_000)


@dataclass(frozen=True)
class Step:
    """What one response brought: the next message (None at the end), reward, done, and details.

    `info["correct"]` (bool) says whether the task was solved, apart from any partial credit;
    other numbers in `info` are averaged into the metrics as `info/<key>`. A `fresh` message stands
    alone: it opens a new context, in which the policy sees nothing of the turns before.
    """

    message: Message | None
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict)
    fresh: bool = False


class Env(ABC):
    """A task for one player."""

    @abstractmethod
    def reset(self, seed: int) -> list[Message]:
        """Start the episode that `seed` names; return its opening messages."""

    @abstractmethod
    def step(self, response: str) -> Step:
        """Take the policy's response, whatever text it is; never raise because of it."""

    def demonstrate(self, hasty: bool = False) -> str | None:
        """A correct, worked response to the present state; `hasty`: a well-formed guess.

        None where the environment can't show one.
        """
        return None


class MultiAgentEnv(ABC):
    """A task for several players at once; agents absent from a dict are not asked to act."""

    @abstractmethod
    def reset(self, seed: int) -> dict[str, list[Message]]:
        """Start the episode; return the opening messages of the agents that act first."""

    @abstractmethod
    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        """Take one response from each agent asked; return a Step for each agent concerned.

        A Step with `message` asks that agent to act next; `done` ends its episode.
        """

    def guess(self, agent: str, rng: random.Random) -> str | None:
        """A random player's well-formed response for an agent that is asked; None: unknown."""
        return None


_REGISTRY: dict[str, Callable[..., Env | MultiAgentEnv]] = {}


def register(name: str) -> Callable:
    """Class decorator: make an environment known to `make` under `name`."""

    def add(cls: Callable[..., Env | MultiAgentEnv]):
        _REGISTRY[name] = cls
        return cls

    return add


def list_envs() -> list[str]:
    """The registered names, sorted."""
    return sorted(_REGISTRY)


def accepts(spec: str, key: str) -> bool:
    """Whether the environment that `spec` names has an option `key`."""
    return key in inspect.signature(constructor(spec)).parameters


def options_of(spec: str) -> dict[str, Any]:
    """Every option of the environment and its value: as `spec` gives it, or its default.

    Raises UsageError, in one line, for an unknown name or key or a value of the wrong type.

    >>> options_of("reverse:length=7")
    {'kind': 'words', 'turns': 3, 'length': 7}
    """
    parameters = inspect.signature(constructor(spec), eval_str=True).parameters
    options: dict[str, Any] = {}
    given = spec.partition(":")[2]
    for item in given.split(",") if given else ():
        if not item.strip():
            raise UsageError(f"--env {spec}: there is a comma too many")
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals:
            raise UsageError(f"--env {spec}: write options as key=value, not {item!r}")
        if key not in parameters:
            known = ", ".join(parameters) or "none"
            raise UsageError(f"--env {spec}: unknown key {key!r}; it has: {known}")
        if key in options:
            raise UsageError(f"--env {spec}: the key {key!r} is given twice")
        options[key] = _convert(spec, key, text, parameters[key].annotation)
    needed = [k for k, p in parameters.items() if p.default is p.empty and k not in options]
    if needed:
        raise UsageError(f"--env {spec}: it needs {', '.join(f'{key}=..' for key in needed)}")
    return {k: options.get(k, p.default) for k, p in parameters.items()}


def make(spec: str) -> Env | MultiAgentEnv:
    """Build an environment from `name[:key=value,...]`; values are read by the option's type.

    Raises UsageError as `options_of` does, or as the environment itself refuses a value.
    """
    options = options_of(spec)
    try:
        return constructor(spec)(**options)
    except UsageError as error:
        raise UsageError(f"--env {spec}: {error}") from None
    except (ValueError, OSError) as error:  # of a library that was given the value
        raise UsageError(f"--env {spec}: {type(error).__name__}: {error}") from error


def constructor(spec: str) -> Callable[..., Env | MultiAgentEnv]:
    """What `spec` names: a class, or a function that picks one."""
    name = spec.partition(":")[0]
    if name not in _REGISTRY:
        near = difflib.get_close_matches(name.strip().lower(), list_envs(), n=1)
        hint = f"perhaps you meant {near[0]}; " if near else ""
        known = ", ".join(list_envs())
        raise UsageError(f"unknown environment {name!r}; {hint}there are: {known}")
    return _REGISTRY[name]


def _convert(spec: str, key: str, text: str, annotation: Any) -> Any:
    if annotation is bool:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"--env {spec}: {key} is true or false, not {text!r}")
        return text.lower() == "true"
    if annotation not in (int, float):
        return text
    try:
        value = annotation(text)
        if math.isfinite(value):
            return value
    except ValueError:
        pass
    kind = "a whole number" if annotation is int else "a number"
    raise UsageError(f"--env {spec}: {key} is {kind}, not {text!r}")
