"""The tasks of each update: drawn from the seed and the update's number, without other state.

A task is an environment and a seed. The G rollouts of a task share both, so they share their
opening prompt and can be compared with each other.
"""

import random
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache

from core.seeds import DEMONSTRATIONS, TASKS, derive_seed
from core.types import UsageError
from environments import rewarded
from environments.base import DEMO_SEEDS, EVAL_SEEDS, TRAIN_SEEDS, as_multi, restored_torch
from environments.options import key_value_pairs
from environments.registry import (
    Constructor,
    accepts,
    constructor,
    describe_error,
    make,
    options_of,
    split_spec,
)
from environments.tools import schemas

# options that make a task harder
DIFFICULTIES = "difficulty level depth n_hops length".split()


@dataclass(frozen=True)
class Task:
    """One episode: the spec of its environment, the seed that decides it, and its group."""

    env: str
    seed: int
    group_id: int
    hasty: bool = False  # for a demonstration: a well-formed guess instead of a worked answer


def train_tasks(
    envs: Sequence[str], seed: int, update: int, num_prompts: int, group_size: int, attempt: int = 0
) -> list[Task]:
    """The P·G tasks of an update, group by group; environments take turns.

    A higher `attempt` draws other tasks for the same update.
    """
    rng = random.Random(derive_seed(seed, TASKS, update, attempt))
    tasks = []
    for group in range(num_prompts):
        env = envs[(update * num_prompts + group) % len(envs)]
        tasks += [Task(env, rng.choice(TRAIN_SEEDS), group)] * group_size
    return tasks


def demo_tasks(envs: list[str], seed: int, step: int, batch_size: int, hasty: float) -> list[Task]:
    """The demonstrations of a warm-start step; each is a hasty guess with probability `hasty`."""
    rng = random.Random(derive_seed(seed, DEMONSTRATIONS, step))
    return [
        Task(envs[i % len(envs)], rng.choice(DEMO_SEEDS), i, hasty=rng.random() < hasty)
        for i in range(batch_size)
    ]


def eval_tasks(envs: Sequence[str], num_tasks: int) -> list[Task]:
    """The held-out tasks, `num_tasks` of each environment; every evaluation has the same.

    Fewer where the data of the environment has fewer rows: further seeds would repeat them.
    """
    return [
        Task(env, EVAL_SEEDS[i], group_id=e * num_tasks + i)
        for e, env in enumerate(envs)
        for i in range(min(num_tasks, rewarded.num_held_out(env)))
    ]


def training_envs(envs: Sequence[str], difficulty: int, level: int = 0) -> list[str]:
    """The specs to train on: at `difficulty` (0: unchanged), `level` curriculum steps harder."""
    return [harder(with_difficulty(spec, difficulty), level) for spec in envs]


def held_out_envs(eval_envs: Sequence[str], envs: Sequence[str], difficulty: int) -> list[str]:
    """The specs to evaluate on: --eval-env, or those of --env at the training difficulty."""
    return [with_difficulty(spec, 0) for spec in eval_envs] or training_envs(envs, difficulty)


def with_difficulty(spec: str, difficulty: int) -> str:
    """The spec with its difficulty option set; unchanged if `difficulty` is 0 or it has none.

    >>> with_difficulty("letter_counting", 6), with_difficulty("math_qa:level=2", 3)
    ('letter_counting:difficulty=6', 'math_qa:level=3')
    """
    options_of(spec)  # refuses unknown names and options
    key = difficulty_key(spec)
    if difficulty and key:
        name, options = split_spec(spec)
        pairs = key_value_pairs(options, spec)
        pairs.pop(key, None)
        pairs[key] = str(difficulty)
        spec = f"{name}:{','.join(f'{k}={v}' for k, v in pairs.items())}"
    _check(spec, constructor(spec))
    return spec


def harder(spec: str, by: int) -> str:
    """The spec `by` steps harder, or at its highest difficulty.

    >>> harder("letter_counting:difficulty=2", 1), harder("math_qa", 99), harder("tic_tac_toe", 1)
    ('letter_counting:difficulty=3', 'math_qa:level=6', 'tic_tac_toe')
    """
    key = difficulty_key(spec)
    start = options_of(spec)[key] if key and by > 0 else None
    if isinstance(start, int | float):
        with suppress(UsageError):  # beyond the highest difficulty
            for difficulty in range(int(start) + 1, int(start) + by + 1):
                spec = with_difficulty(spec, difficulty)
    return spec


def next_level(envs: Sequence[str], level: int, accuracy: float, target: float) -> int:
    """The curriculum: one level up at an accuracy of `target`, one level down at half of it."""
    if accuracy >= target and any(harder(e, level + 1) != harder(e, level) for e in envs):
        return level + 1
    return max(0, level - 1) if accuracy <= target / 2 else level


@restored_torch()
def check_demonstrations(envs: Sequence[str]) -> None:
    """Raises UsageError for an environment that has no demonstrations, or fails in one."""
    for spec in envs:
        demonstration = None
        try:
            with closing(as_multi(make(spec))) as env:
                if env.agents:
                    demonstration = env.demonstrate(next(iter(env.reset(DEMO_SEEDS[0]))))
        except UsageError as error:
            raise UsageError(f"--env {spec}: {error}") from None
        except Exception as error:  # it would fail in every warm-start step
            raise UsageError(f"--env {spec} fails: {describe_error(error)}") from error
        if demonstration is None:
            raise UsageError(f"--env {spec} has no demonstrations: take --sft-steps 0")


def difficulty_key(spec: str) -> str | None:
    """The option that makes the environment harder, if it has one."""
    return next((key for key in DIFFICULTIES if accepts(spec, key)), None)


def has_tools(spec: str) -> bool:
    """Whether the environment has tools. Raises UsageError if it refuses `spec`."""
    return _check(spec, constructor(spec))


@cache
def _check(spec: str, constructor: Constructor) -> bool:
    """As `has_tools`; builds the environment once per `constructor`."""
    with closing(make(spec)) as env:
        try:
            return bool(schemas(env))
        except UsageError as error:
            raise UsageError(f"--env {spec}: {error}") from None
