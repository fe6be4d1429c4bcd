"""Held-out evaluation: the same tasks every time, greedy decoding, accuracy with its interval.

`Evaluator` (core/loop/evaluator.py) samples the rollouts, shows the lines and logs the metrics. An
episode whose environment failed counts as wrong, but one that raised EnvFailure, or that the server
of --sampler openai did not answer, is left out. core/README.md says what each metric means.
"""

import itertools
import json
import statistics
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from core import metrics
from core.config import Config
from core.metrics import Tasks
from core.pool import is_program
from core.results import accuracy_of
from core.sampler import SamplingParams
from core.seeds import EVALUATION, derive_seed
from core.selection import num_episodes
from core.tasks import Task, eval_tasks, held_out_envs
from core.types import Rollout
from environments.base import PLAYER, Env
from environments.plumbing.registry import EnvSpec, make


def held_out_tasks(cfg: Config) -> list[Task]:
    """The tasks of every evaluation of a run."""
    envs = held_out_envs(cfg.eval_env, cfg.env, cfg.train_difficulty)
    return eval_tasks(envs, cfg.eval_num_tasks)


def accuracy_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Accuracy, return and length by environment, from one greedy rollout of each task."""
    failed: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.error:
            failed[rollout.env].append(rollout)
    counted = played(rollouts)
    found = metrics.eval_metrics(counted, metrics.distinct_tasks(counted))
    return found | {f"eval/{env}/failed": num_episodes(own) for env, own in failed.items()}


def accuracy_lines(rollouts: list[Rollout], found: dict[str, float]) -> list[str]:
    """The accuracy of each environment, and with several agents of each agent, as text."""
    seats = metrics.by_seat(played(rollouts))
    return [f"{accuracy_of(seat, found)}  {seat}" for seat in seats]


def few_tasks_lines(rollouts: list[Rollout], found: dict[str, float]) -> list[str]:
    """Which evaluations have fewer tasks or openings than episodes, as text."""
    notes = {
        seat: metrics.few_tasks(seat, found, len({rollout.seed for rollout in own}))
        for seat, own in metrics.by_seat(played(rollouts)).items()
    }
    return [f"{seat}: {note}" for seat, note in notes.items() if note]


def left_out_lines(found: dict[str, float], k: int) -> list[str]:
    """How many tasks `pass_at_k` left out, as text."""
    return [
        f"pass@{k} leaves out {count} tasks of {name.split('/', 1)[1].rpartition('/')[0]}: fewer "
        f"than {k} of their samples were played"
        for name, count in found.items()
        if name.endswith("/pass_at_k_left_out")
    ]


def changed_lines(found: dict[str, float]) -> list[str]:
    """How many tasks are others than in the first evaluation, as text."""
    return [
        f"{name.split('/', 1)[1].rpartition('/')[0]}: {count} tasks begin otherwise than in the "
        "first evaluation, as after a change of the data: a p-value compares the others alone"
        for name, count in found.items()
        if name.endswith("/changed")
    ]


def repeated_tasks(cfg: Config, tasks: list[Task]) -> tuple[list[Task], SamplingParams]:
    """The tasks of --eval-samples, and how to sample them: the same in every evaluation."""
    params = SamplingParams(
        cfg.max_tokens, cfg.temperature, cfg.top_p, cfg.top_k, derive_seed(cfg.seed, EVALUATION)
    )
    return [task for task in tasks for _ in range(cfg.eval_samples)], params


def pass_at_k(greedy: list[Rollout], sampled: list[Rollout], k: int) -> dict[str, float]:
    """pass@1 and pass@k of the samples of `repeated_tasks`."""
    return metrics.pass_at_k(played(greedy), played(sampled), k)


def played(rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts without those that raised EnvFailure, which says nothing about the policy."""
    return [rollout for rollout in rollouts if not rollout.env_failure]


def comparisons(
    progress: dict[str, Any],
    rollouts: list[Rollout],
    tasks: Sequence[Task],
    play_trivial: Callable[[list[Task]], list[Rollout]],
) -> dict[str, float]:
    """The p-value against the first evaluation, and the accuracy of the trivial baseline.

    For each environment. `progress` keeps the first evaluation and the baseline, which is always
    the same; it is left out for an environment that has none.
    """
    results: dict[str, float] = {}
    counted = played(rollouts)
    distinct = metrics.distinct_tasks(counted)
    trivial = progress.setdefault("trivial", {})
    for env in dict.fromkeys(task.env.short for task in tasks):
        own = [rollout for rollout in counted if rollout.env == env]
        if not own:
            continue
        now = {f"{r.seed} {r.agent}": metrics.is_correct(r) for r in own}
        first = progress.setdefault("first_correct", {}).setdefault(env, now)
        begins = {f"{r.seed} {r.agent}": c for r in own if (c := opening_checksum(r))}
        begun = progress.setdefault("first_openings", {}).setdefault(env, begins)
        changed = {key for key in begins if begun.get(key, begins[key]) != begins[key]}
        if changed:
            results[f"eval/{env}/changed"] = len(changed)
        first = {key: correct for key, correct in first.items() if key not in changed}
        for seat, episodes in metrics.by_seat(own).items() if first else ():  # nothing to compare
            results[f"eval/{seat}/p_value"] = p_value(episodes, first, distinct)
        if env not in trivial:
            mine = [t for t in tasks if t.env.short == env and (env, t.seed) in distinct]
            trivial[env] = trivial_accuracy(mine, distinct, play_trivial)
        if trivial[env] is not None:
            results[f"eval/{env}/trivial"] = trivial[env]
    return results


def forget_edited(files: dict[str, dict[str, str]], progress: dict[str, Any]) -> str:
    """Which files of the environments were edited since the checkpoint, as text; "": none.

    `files`: the checksums of each environment's files, which `progress` keeps. Environments with
    edited files are not compared with their first evaluation any more.
    """
    now = {name: checksum for own in files.values() for name, checksum in own.items()}
    before = progress.get("files", now)
    edited = [name for name in now if before.get(name, now[name]) != now[name]]
    progress["files"] = now
    for env in [EnvSpec(env).short for env, own in files.items() if own.keys() & {*edited}]:
        progress.setdefault("first_correct", {})[env] = {}
        progress.setdefault("trivial", {}).pop(env, None)
    if not edited:
        return ""
    return (f"{', '.join(edited)} changed since update {progress['update']}: numbers before and "
            "after are of different rewards or tasks, and no p-value compares them")  # fmt: skip


def opening_checksum(rollout: Rollout) -> int:
    """Of the messages with which the environment opened the episode; 0: others had a part in them.

    Other agents have, in games, and agent programs, which may write the time into a prompt.
    """
    if rollout.agent != PLAYER or is_program(EnvSpec(rollout.env)):
        return 0
    opening = itertools.takewhile(lambda m: m["role"] != "assistant", rollout.messages)
    return zlib.crc32(json.dumps([*opening], sort_keys=True).encode())


def p_value(rollouts: list[Rollout], first: dict[str, bool], distinct: Tasks) -> float:
    """McNemar's p-value against the first evaluation, on the tasks that both have played.

    `first`: whether the episode of "<seed> <agent>" was correct then.
    """
    both = [r for r in rollouts if f"{r.seed} {r.agent}" in first]
    before = metrics.task_means(both, distinct, lambda r: first[f"{r.seed} {r.agent}"])
    after = metrics.task_means(both, distinct, metrics.is_correct)
    changes = [after[task] - before[task] for task in before]
    return metrics.mcnemar(lost=sum(c < 0 for c in changes), won=sum(c > 0 for c in changes))


def trivial_accuracy(
    tasks: list[Task], distinct: Tasks, play_trivial: Callable[[list[Task]], list[Rollout]]
) -> float | None:
    """The accuracy of the environment's trivial baseline on these tasks; None if it has none."""
    with closing(make(tasks[0].env)) as env:
        if not isinstance(env, Env) or type(env).trivial is Env.trivial:
            return None
    episodes = played(play_trivial(tasks))
    return statistics.fmean(metrics.task_means(episodes, distinct, metrics.is_correct).values())
