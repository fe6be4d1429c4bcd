"""Which tasks are played: drawn anew for each update from the seed and its number, no other state.

Each of the P tasks of an update is one environment and one seed; its G rollouts share both, so they
share their opening prompt and can be compared.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from core.types import UsageError
from environments.base import DEMO_SEEDS, EVAL_SEEDS, TRAIN_SEEDS, Env
from environments.registry import accepts, make, options_of

DIFFICULTIES = ("difficulty", "level", "n_hops", "length")  # the key that makes a task harder


@dataclass(frozen=True)
class Task:
    """One episode to play: an environment spec, the seed that decides it, the group it is of."""

    env: str
    seed: int
    group_id: int
    hasty: bool = False  # for a demonstration: show the well-formed guess, not the work


def train_tasks(
    envs: Sequence[str], seed: int, update: int, num_prompts: int, group_size: int, attempt: int = 0
) -> list[Task]:
    """The P·G tasks of an update, groups side by side; environments take turns.

    `attempt` draws other tasks for the same update.

    >>> [t.group_id for t in train_tasks(["letter_counting"], 0, 1, num_prompts=2, group_size=3)]
    [0, 0, 0, 1, 1, 1]
    """
    again = f" {attempt}" if attempt else ""
    rng = random.Random(f"train {seed} {update}{again}")  # a text seed: the same on any machine
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
    """The spec at that difficulty, if it isn't 0 and the environment has such a key.

    >>> with_difficulty("letter_counting", 6), with_difficulty("math_qa:level=2", 3)
    ('letter_counting:difficulty=6', 'math_qa:level=3')
    """
    make(spec)  # an unknown name or key is refused before anything else
    key = difficulty_key(spec)
    if difficulty == 0 or key is None:
        return spec
    name, _, options = spec.partition(":")
    kept = [o for o in options.split(",") if o and o.partition("=")[0].strip() != key]
    spec = f"{name}:{','.join([*kept, f'{key}={difficulty}'])}"
    make(spec)
    return spec


def harder(spec: str, by: int) -> str:
    """The spec that many steps harder, or as hard as it gets.

    >>> harder("letter_counting:difficulty=2", 1), harder("math_qa", 99), harder("tic_tac_toe", 1)
    ('letter_counting:difficulty=3', 'math_qa:level=6', 'tic_tac_toe')
    """
    key = difficulty_key(spec)
    if key is None or by == 0:
        return spec
    start = int(options_of(spec)[key])
    for difficulty in range(start + 1, start + by + 1):
        try:
            spec = with_difficulty(spec, difficulty)
        except UsageError:  # there is none so hard
            break
    return spec


def next_step(envs: Sequence[str], step: int, success: float, aim: float) -> int:
    """The curriculum: one step harder once a share `aim` is right, one back at half of it.

    >>> [next_step(["math_qa"], step, s, aim=0.8) for step, s in ((0, 0.9), (3, 0.5), (3, 0.3))]
    [1, 3, 2]
    """
    if success >= aim and any(harder(e, step + 1) != harder(e, step) for e in envs):
        return step + 1
    return max(0, step - 1) if success <= aim / 2 else step


def check_demonstrations(envs: Sequence[str]) -> None:
    """Raise UsageError for an environment that can't show how it is done."""
    for spec in envs:
        env = make(spec)
        if not isinstance(env, Env) or _first_demonstration(spec, env) is None:
            raise UsageError(f"--env {spec} has no demonstrations: take --sft-steps 0")


def difficulty_key(spec: str) -> str | None:
    """The key by which the environment gets harder, if it has one."""
    return next((key for key in DIFFICULTIES if accepts(spec, key)), None)


def _first_demonstration(spec: str, env: Env) -> str | None:
    try:
        env.reset(DEMO_SEEDS[0])
        return env.demonstrate()
    except UsageError as error:
        raise UsageError(f"--env {spec}: {error}") from None
    except Exception as error:  # then it would fail in every warm-start step
        raise UsageError(f"--env {spec} fails: {type(error).__name__}: {error}") from error
