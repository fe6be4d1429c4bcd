"""Held-out evaluation: the same tasks every time, greedy decoding, accuracy with its interval.

`Evaluator` (core/loop/evaluator.py) samples the rollouts, shows the lines and logs the metrics. An
episode whose environment failed counts as wrong, but one that raised EnvFailure, or that the server
of --sampler openai did not answer, is left out. core/README.md says what each metric means.
"""

import itertools
import json
import statistics
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from core import metrics
from core.metrics import Tasks
from core.pool import is_program
from core.results import accuracy_of, never_right, return_of
from core.selection import has_failed, num_episodes
from core.tasks import Task
from core.types import Rollout
from environments import rewarded
from environments.base import PLAYER, Env
from environments.plumbing.registry import EnvSpec, make


def accuracy_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Accuracy, return and length by environment, from one greedy rollout of each task."""
    counted = played(rollouts)
    found = metrics.eval_metrics(counted, metrics.distinct_tasks(counted))
    failed = [*filter(has_failed, rollouts)]
    for env in dict.fromkeys(rollout.env for rollout in failed):
        found[f"eval/{env}/failed"] = num_episodes([r for r in failed if r.env == env])
    return found


def of_answers(
    progress: dict[str, Any], rollouts: list[Rollout], envs: Sequence[EnvSpec], num_tasks: int
) -> dict[str, float]:
    """How many tasks of each environment should have been played and were, and the fraction of
    answers that are those of the first evaluation, which `progress` keeps."""
    found: dict[str, float] = {}
    first = progress.setdefault("first_answers", {})
    for env in envs:
        own = [r for r in rollouts if r.env == env.short]
        now = {f"{r.seed} {r.agent}": hash(tuple(tuple(t.completion_ids) for t in r.turns))
               for r in own if not r.error}  # fmt: skip
        before = first.setdefault(env.short, now)
        if before is not now and (both := before.keys() & now.keys()):
            same = sum(before[key] == now[key] for key in both)
            found[f"eval/{env.short}/same_answers"] = same / len(both)
        if all(r.agent == PLAYER for r in own):  # others may end an episode before it acts
            found[f"eval/{env.short}/asked"] = min(num_tasks, rewarded.num_held_out(env))
            found[f"eval/{env.short}/played"] = len({r.seed for r in own})
    return found


def lines_about(counted: list[Rollout], found: dict[str, float], update: int) -> list[str]:
    """What the metrics say, as text: of each environment, and with several agents of each agent.

    `counted`: the rollouts that were `played`.
    """
    lines = []
    for seat in metrics.by_seat(counted):
        line = f"held-out accuracy at update {update}: {accuracy_of(seat, found)}  {seat}"
        lines.append(line)
        if never_right(seat, [found]):
            lines[-1] += f"  mean return {return_of(seat, found)}"
    return lines


def played(rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts without those that raised EnvFailure, which says nothing about the policy."""
    return [rollout for rollout in rollouts if not rollout.env_failure]


def comparisons(
    progress: dict[str, Any],
    counted: list[Rollout],
    tasks: Sequence[Task],
    play_trivial: Callable[[list[Task]], list[Rollout]],
) -> dict[str, float]:
    """The p-value against the first evaluation, on the tasks that both have played, and the
    accuracy of the trivial baseline.

    For each environment. `progress` keeps the first evaluation and the baseline, which is always
    the same; it is left out for an environment that has none.
    """
    results: dict[str, float] = {}
    distinct = metrics.distinct_tasks(counted)
    trivial = progress.setdefault("trivial", {})
    for env, spec in {task.env.short: task.env for task in tasks}.items():
        own = [rollout for rollout in counted if rollout.env == env]
        if not own:
            continue
        keys = {id(r): key_of(r, is_program(spec)) for r in own}
        now = {keys[id(r)]: metrics.is_correct(r) for r in own}
        first = progress.setdefault("first_correct", {}).setdefault(env, now)
        for seat, episodes in metrics.by_seat(own).items():
            both = [r for r in episodes if keys[id(r)] in first]
            solved = {id(r): float(first[keys[id(r)]]) for r in both}
            before = metrics.task_means(both, distinct, partial(_looked_up, solved))
            after = metrics.task_means(both, distinct, metrics.is_correct)
            changes = [after[task] - before[task] for task in before]
            if both:
                lost, won = sum(c < 0 for c in changes), sum(c > 0 for c in changes)
                results[f"eval/{seat}/p_value"] = metrics.mcnemar(lost, won)
        if env not in trivial:
            mine = [t for t in tasks if t.env.short == env and (env, t.seed) in distinct]
            trivial[env] = trivial_accuracy(mine, distinct, play_trivial)
        if trivial[env] is not None:
            results[f"eval/{env}/trivial"] = trivial[env]
    return results


def key_of(rollout: Rollout, shows_time: bool) -> str:
    """Names the task and the agent of a rollout. If data has changed, a task begins with other
    messages, and is another one; but in games other agents have a part in how an episode begins,
    and programs may show the time."""
    key = f"{rollout.seed} {rollout.agent}"
    if rollout.agent != PLAYER or shows_time:
        return key
    opening = itertools.takewhile(lambda m: m["role"] != "assistant", rollout.messages)
    return f"{key} {zlib.crc32(json.dumps([*opening], sort_keys=True).encode())}"


def trivial_accuracy(
    tasks: list[Task], distinct: Tasks, play_trivial: Callable[[list[Task]], list[Rollout]]
) -> float | None:
    """The accuracy of the environment's trivial baseline on these tasks; None if it has none."""
    with closing(make(tasks[0].env)) as env:
        if not isinstance(env, Env) or type(env).trivial is Env.trivial:
            return None
    episodes = played(play_trivial(tasks))
    return statistics.fmean(metrics.task_means(episodes, distinct, metrics.is_correct).values())


def _looked_up(values: dict[int, float], rollout: Rollout) -> float:
    return values[id(rollout)]
