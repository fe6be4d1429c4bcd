"""Which tasks are played: drawn anew for each update from the seed and its number, no other state.

Each of the P tasks of an update is one environment and one seed; its G rollouts share both, so they
share their opening prompt and can be compared.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from core.types import UsageError
from environments.base import DEMO_SEEDS, EVAL_SEEDS, TRAIN_SEEDS, Env, accepts, make


@dataclass(frozen=True)
class Task:
    """One episode to play: an environment spec, the seed that decides it, the group it is of."""

    env: str
    seed: int
    group_id: int
    hasty: bool = False  # for a demonstration: show the well-formed guess, not the work


def train_tasks(
    envs: Sequence[str], seed: int, update: int, num_prompts: int, group_size: int
) -> list[Task]:
    """The P·G tasks of an update, groups side by side; environments take turns.

    >>> [t.group_id for t in train_tasks(["letter_counting"], 0, 1, num_prompts=2, group_size=3)]
    [0, 0, 0, 1, 1, 1]
    """
    rng = random.Random(f"train {seed} {update}")  # a text seed gives the same on any machine
    tasks = []
    for group in range(num_prompts):
        env = envs[(update * num_prompts + group) % len(envs)]
        tasks += [Task(env, rng.choice(TRAIN_SEEDS), group)] * group_size
    return tasks


def demo_tasks(
    envs: Sequence[str], seed: int, step: int, batch_size: int, hasty: float
) -> list[Task]:
    """The demonstrations of a warm-start step; a share `hasty` of them, by chance, only guess."""
    rng = random.Random(f"demo {seed} {step}")
    return [
        Task(envs[i % len(envs)], rng.choice(DEMO_SEEDS), i, hasty=rng.random() < hasty)
        for i in range(batch_size)
    ]


def eval_tasks(envs: Sequence[str], num_tasks: int) -> list[Task]:
    """The held-out tasks, the same in every evaluation of every run; `num_tasks` of each env."""
    return [
        Task(env, EVAL_SEEDS[i], group_id=e * num_tasks + i)
        for e, env in enumerate(envs)
        for i in range(num_tasks)
    ]


def with_difficulty(spec: str, difficulty: int) -> str:
    """The spec with `difficulty` set, if that isn't 0 and the environment has such an option.

    >>> with_difficulty("letter_counting", 6)
    'letter_counting:difficulty=6'
    """
    make(spec)  # an unknown name or key is refused before anything else
    if difficulty == 0 or not accepts(spec, "difficulty"):
        return spec
    name, _, options = spec.partition(":")
    kept = [o for o in options.split(",") if o and o.partition("=")[0].strip() != "difficulty"]
    spec = f"{name}:{','.join([*kept, f'difficulty={difficulty}'])}"
    make(spec)
    return spec


def check_demonstrations(envs: Sequence[str]) -> None:
    """Raise UsageError for an environment that can't show how it is done."""
    for spec in envs:
        env = make(spec)
        if isinstance(env, Env):
            env.reset(DEMO_SEEDS[0])
        if not isinstance(env, Env) or env.demonstrate() is None:
            raise UsageError(f"--env {spec} has no demonstrations: take --sft-steps 0")
