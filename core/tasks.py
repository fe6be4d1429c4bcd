"""The tasks of each update: drawn from the seed and the update's number, without other state.

A task is an environment with a seed. The G rollouts of a task share both, so they share their
opening prompt and can be compared with each other. P tasks of an update are a list of P·G `Task`s,
one for each episode to play.
"""

import random
import statistics
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache

from core.config import Config, flag
from core.faults import UsageError
from core.metrics import is_correct, judged
from core.seeds import DEMONSTRATIONS, TASKS, derive_seed
from core.types import Rollout
from environments import rewarded
from environments.base import DEMO_SEEDS, EVAL_SEEDS, TRAIN_SEEDS, RunInfo, as_multi
from environments.plumbing.registry import Constructor, EnvSpec, begin_run, describe_error, make
from environments.plumbing.tools import schemas

# options that make a task harder
DIFFICULTIES = "difficulty level depth n_hops length".split()


@dataclass(frozen=True)
class Task:
    """The task of one episode: its environment and its seed, and the group of the episode."""

    env: EnvSpec
    seed: int
    group_id: int
    hasty: bool = False  # for a demonstration: a well-formed guess instead of a worked answer

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", EnvSpec.read(self.env))  # which may be a text


def begin(cfg: Config) -> RunInfo:
    """Tells the environments about a run, before any other use: which rows of data are held out.

    Raises UsageError for unknown environments, and for settings that do not suit these.
    """
    train_envs, eval_envs = ([*map(str, envs)] for envs in (cfg.env, cfg.eval_env or cfg.env))
    info = RunInfo(train_envs, eval_envs, cfg.num_updates, cfg.num_prompts / len(train_envs))
    begin_run(info)
    for name in ("train_difficulty", "curriculum"):
        if getattr(cfg, name) and not any(map(difficulty_key, cfg.env)):
            raise UsageError(f"{flag(name)}: no environment of --env has a difficulty")
    held_out_envs(cfg)
    if cfg.sft_steps:
        check_demonstrations(training_envs(cfg))
    return info


def train_tasks(
    envs: list[EnvSpec], seed: int, update: int, num_prompts: int, group_size: int, attempt: int = 0
) -> list[Task]:
    """The P tasks of an update, each G times in a row: [P·G]. Environments take turns.

    P is `num_prompts`, G `group_size`. A higher `attempt` draws other tasks for the same update.
    """
    rng = random.Random(derive_seed(seed, TASKS, update, attempt))
    tasks = []
    for group in range(num_prompts):
        env = envs[(update * num_prompts + group) % len(envs)]
        tasks += [Task(env, rng.choice(TRAIN_SEEDS), group)] * group_size
    return tasks


def demo_tasks(
    envs: list[EnvSpec], seed: int, step: int, batch_size: int, hasty: float
) -> list[Task]:
    """The tasks of a warm-start step, a demonstration each, which is a guess with probability
    `hasty`. Environments take turns."""
    rng = random.Random(derive_seed(seed, DEMONSTRATIONS, step))
    tasks = []
    for i in range(batch_size):
        env, task_seed = envs[(step * batch_size + i) % len(envs)], rng.choice(DEMO_SEEDS)
        tasks.append(Task(env, task_seed, i, hasty=rng.random() < hasty))
    return tasks


def eval_tasks(envs: Sequence[str | EnvSpec], num_tasks: int) -> list[Task]:
    """The held-out tasks, `num_tasks` of each environment, once each; the same in all evaluations.

    Fewer where the data of the environment has fewer rows: further seeds would repeat them.
    """
    return [
        Task(env, EVAL_SEEDS[i], group_id=e * num_tasks + i)
        for e, env in enumerate(map(EnvSpec.read, envs))
        for i in range(min(num_tasks, rewarded.num_held_out(env)))
    ]


def training_envs(cfg: Config, level: int = 0) -> list[EnvSpec]:
    """The training environments: at --train-difficulty, `level` steps of the curriculum harder."""
    return [harder(with_difficulty(env, cfg.train_difficulty), level) for env in cfg.env]


def held_out_envs(cfg: Config) -> list[EnvSpec]:
    """The evaluation environments: --eval-env, or those of --env at the training difficulty."""
    return [with_difficulty(env, 0) for env in cfg.eval_env] or training_envs(cfg)


def with_difficulty(spec: EnvSpec, difficulty: int) -> EnvSpec:
    """The spec with its difficulty option set; unchanged if `difficulty` is 0 or it has none.

    Raises UsageError for unknown names and options, and if the environment refuses their values.

    >>> str(with_difficulty(EnvSpec.read("math_qa:level=2"), 3))
    'math_qa:level=3'
    """
    key = difficulty_key(spec) if spec.values else None
    if difficulty and key:
        options = {name: value for name, value in spec.options.items() if name != key}
        spec = replace(spec, options=options | {key: str(difficulty)})
    check_builds(spec, spec.constructor)
    return spec


def harder(spec: EnvSpec, by: int) -> EnvSpec:
    """The spec `by` steps harder, or at its highest difficulty.

    >>> str(harder(EnvSpec.read("letter_counting:difficulty=2"), 1))
    'letter_counting:difficulty=3'
    >>> str(harder(EnvSpec.read("math_qa"), 99))
    'math_qa:level=6'
    """
    key = difficulty_key(spec)
    start = spec.values[key] if key and by > 0 else None
    if isinstance(start, int | float):
        with suppress(UsageError):  # beyond the highest difficulty
            for difficulty in range(int(start) + 1, int(start) + by + 1):
                spec = with_difficulty(spec, difficulty)
    return spec


def next_level(cfg: Config, level: int, rollouts: Sequence[Rollout]) -> int:
    """The level of the next update's tasks: one higher if the accuracy of these rollouts is
    --curriculum, one lower if it is half of that."""
    correct = [is_correct(rollout) for rollout in judged([*rollouts]) if not rollout.error]
    if not cfg.curriculum or not correct:
        return level
    envs, accuracy = training_envs(cfg), statistics.fmean(correct)
    can_rise = any(harder(env, level + 1) != harder(env, level) for env in envs)
    if accuracy >= cfg.curriculum and can_rise:
        return level + 1
    return max(0, level - 1) if accuracy <= cfg.curriculum / 2 else level


def check_demonstrations(envs: Sequence[EnvSpec]) -> None:
    """Raises UsageError for an environment that has no demonstrations, or fails in one."""
    for spec in envs:
        demonstration = None
        try:
            with closing(as_multi(make(spec))) as env:
                if env.agents:
                    demonstration = env.demonstrate(next(iter(env.reset(DEMO_SEEDS[0]))))
        except Exception as error:  # it would fail in every warm-start step
            raise UsageError(f"--env {spec} fails: {describe_error(error)}") from error
        if demonstration is None:
            hint = "write demonstrate(), or take --sft-steps 0"
            raise UsageError(f"--env {spec} has no demonstrations: {hint}")


def difficulty_key(spec: EnvSpec) -> str | None:
    """The option that makes the environment harder, if it has one."""
    return next((key for key in DIFFICULTIES if key in spec.parameters), None)


def is_raw(spec: EnvSpec) -> bool:
    """Whether the prompts of an environment get no chat template."""
    return spec.name == "rewarded" and bool(spec.values["raw"])


@cache
def check_builds(spec: EnvSpec, constructor: Constructor) -> None:
    """Builds the environment once. Raises UsageError if it refuses the options, or for a tool that
    cannot be called."""
    with closing(make(spec)) as env:
        schemas(env)
