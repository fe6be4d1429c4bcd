"""`make("name:key=value,...")` builds an environment; `register("name")` adds one.

The table maps each name to "module:class". The module is imported when the environment is first
used, so the libraries of the other environments are not loaded.

>>> make("letter_counting:difficulty=2").reset(seed=7)[0]["role"]
'user'
"""

import difflib
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

from core.types import UsageError
from environments.base import Env, MultiAgentEnv

Constructor = Callable[..., Env | MultiAgentEnv]
C = TypeVar("C", bound=Constructor)

ENVIRONMENTS: dict[str, str | Constructor] = {
    "alphabet_sort": "environments.alphabet_sort:AlphabetSort",
    "connect4": "environments.connect4:ConnectFour",
    "countdown": "environments.countdown:Countdown",
    "gymnasium": "environments.adapters.gymnasium:Gymnasium",
    "iterated_game": "environments.iterated_game:iterated_game",
    "letter_counting": "environments.letter_counting:LetterCounting",
    "math_qa": "environments.math_qa:MathQA",
    "openenv": "environments.adapters.openenv:OpenEnv",
    "reasoning_gym": "environments.adapters.reasoning_gym:ReasoningGym",
    "remote": "environments.adapters.remote:Remote",
    "reverse": "environments.reverse:Reverse",
    "reverse_echo": "environments.reverse:ReverseEcho",
    "reward_hacking": "environments.reward_hacking:RewardHacking",
    "snake": "environments.snake:Snake",
    "textarena": "environments.adapters.textarena:TextArena",
    "textworld": "environments.adapters.textworld:TextWorld",
    "tic_tac_toe": "environments.tic_tac_toe:tic_tac_toe",
    "wikipedia_maze": "environments.wikipedia_maze:WikipediaMaze",
}


def register(name: str) -> Callable[[C], C]:
    """Class decorator: registers a class, or a function that returns an environment, under `name`.

    >>> from environments.base import Step
    >>> @register("silence")
    ... class Silence(Env):
    ...     def reset(self, seed):
    ...         return [{"role": "user", "content": "Say nothing."}]
    ...     def step(self, response):
    ...         return Step(message=None, reward=float(response == ""), done=True)
    >>> make("silence").step("").reward
    1.0
    >>> del ENVIRONMENTS["silence"]
    """

    def add(constructor: C) -> C:
        ENVIRONMENTS[name] = constructor
        return constructor

    return add


def list_envs() -> list[str]:
    """Returns the names of all environments, sorted."""
    return sorted(ENVIRONMENTS)


def make(spec: str) -> Env | MultiAgentEnv:
    """Builds an environment from `name[:key=value,...]`.

    Raises UsageError for an unknown name or key, and for a value that the option's type or the
    environment does not allow.
    """
    options = options_of(spec)
    try:
        return constructor(spec)(**options)
    except UsageError as error:
        raise UsageError(f"--env {spec}: {error}") from None
    except (ValueError, OSError) as error:  # raised by a library that received the value
        raise UsageError(f"--env {spec}: {type(error).__name__}: {error}") from error


def accepts(spec: str, key: str) -> bool:
    """Whether the environment named in `spec` has an option `key`."""
    return key in inspect.signature(constructor(spec)).parameters


def options_of(spec: str) -> dict[str, Any]:
    """Returns every option of the environment with its value: from `spec`, else its default.

    Raises UsageError for an unknown name or key, a missing or repeated key, and a value of the
    wrong type.

    >>> options_of("reverse:length=7")
    {'kind': 'words', 'turns': 3, 'length': 7}
    """
    parameters = inspect.signature(constructor(spec), eval_str=True).parameters
    given: dict[str, Any] = {}
    for key, value in key_value_pairs(spec.partition(":")[2], f"--env {spec}").items():
        if key not in parameters:
            names = ", ".join(parameters) or "none"
            raise UsageError(f"--env {spec}: unknown key {key!r}; available keys: {names}")
        given[key] = _convert(spec, key, value, parameters[key].annotation)
    missing = [k for k, p in parameters.items() if p.default is p.empty and k not in given]
    if missing:
        raise UsageError(f"--env {spec}: set {', '.join(f'{key}=..' for key in missing)}")
    return {key: given.get(key, p.default) for key, p in parameters.items()}


def key_value_pairs(text: str, subject: str) -> dict[str, str]:
    """Splits `key=value,...`. Raises UsageError, which begins with `subject`, for other texts.

    >>> key_value_pairs("length=7, turns=2", "--env")
    {'length': '7', 'turns': '2'}
    """
    pairs: dict[str, str] = {}
    for item in text.split(",") if text else ():
        if not item.strip():
            raise UsageError(f"{subject}: remove the extra comma")
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise UsageError(f"{subject}: write options as key=value, not {item!r}")
        if key in pairs:
            raise UsageError(f"{subject}: the key {key!r} is given twice")
        pairs[key] = value
    return pairs


def constructor(spec: str) -> Constructor:
    """Returns the class or function that builds the environment named in `spec`.

    Raises UsageError for an unknown name.
    """
    name = spec.partition(":")[0]
    if name not in ENVIRONMENTS:
        similar = difflib.get_close_matches(name.strip().lower(), list_envs(), n=1)
        hint = f"did you mean {similar[0]}? " if similar else ""
        names = ", ".join(list_envs())
        raise UsageError(f"unknown environment {name!r}; {hint}available: {names}")
    entry = ENVIRONMENTS[name]
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        return getattr(importlib.import_module(module), attribute)
    return entry


def _convert(spec: str, key: str, text: str, annotation: Any) -> Any:
    if annotation is bool:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"--env {spec}: {key} must be true or false, not {text!r}")
        return text.lower() == "true"
    if annotation not in (int, float):
        return text
    try:
        value = annotation(text)
        if math.isfinite(value):
            return value
    except ValueError:
        pass
    kind = "an integer" if annotation is int else "a number"
    raise UsageError(f"--env {spec}: {key} must be {kind}, not {text!r}")
