"""Held-out evaluation: the same tasks every time, greedy decoding, accuracy with its interval.

`Run.evaluate` (core/loop/run.py) samples the rollouts, shows the lines and logs the metrics. An
episode whose environment failed counts as wrong, but one that raised EnvFailure, or that the server
of --sampler openai did not answer, is left out. core/README.md says what each metric means.
"""

import itertools
import json
import math
import statistics
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import closing
from typing import Any

import torch

from core.metrics import is_correct, judged, opening_of
from core.pool import is_program
from core.results import accuracy_of, evaluated, mcnemar, never_right, return_of
from core.selection import has_failed, num_episodes
from core.tasks import Task
from core.types import Rollout
from environments import rewarded
from environments.base import PLAYER, Env
from environments.plumbing.registry import make

SAME = 1e-6  # difference of two returns that rounding explains
Tasks = dict[tuple[str, int], Hashable]  # (environment, seed) -> task


def played(rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts without those that raised EnvFailure, which says nothing about the policy."""
    return [rollout for rollout in rollouts if not rollout.env_failure]


def accuracy_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Accuracy and mean return over tasks with their 95% intervals, and length, by environment and
    seat, from one greedy rollout of each task.

    The interval of the return is NaN if the returns have no spread (a single task, or all equal),
    as the error of their mean is unknown then.
    """
    counted, metrics = played(rollouts), dict[str, float]()
    tasks = distinct_tasks(counted)
    for seat, episodes in by_seat(counted).items():
        verdicts = judged(episodes)
        correct = task_means(tasks, verdicts, map(is_correct, verdicts)).values()
        if correct:
            metrics[f"eval/{seat}/accuracy"] = sum(correct) / len(correct)
            low, high = wilson(sum(correct), len(correct))
            metrics |= {f"eval/{seat}/ci_low": low, f"eval/{seat}/ci_high": high}
        by_task = task_means(tasks, episodes, (r.episode_return for r in episodes))
        returns = torch.tensor([*by_task.values()], dtype=torch.float64)
        has_spread = len(returns.unique()) > 1
        error = 1.96 * returns.std().item() / math.sqrt(len(returns)) if has_spread else math.nan
        metrics |= {
            f"eval/{seat}/return_mean": returns.mean().item(),
            f"eval/{seat}/return_low": returns.mean().item() - error,
            f"eval/{seat}/return_high": returns.mean().item() + error,
            f"eval/{seat}/tokens_mean": statistics.fmean(r.num_tokens for r in episodes),
            f"eval/{seat}/tasks": len(by_task),
            f"eval/{seat}/openings": len({*map(opening_of, episodes)}),
        }
        for key, name in (("lenient", "lenient"), ("tool_calls", "called")):
            if any(key in r.info for r in episodes):
                means = task_means(tasks, episodes, (bool(r.info.get(key)) for r in episodes))
                metrics[f"eval/{seat}/{name}"] = statistics.fmean(means.values())
    failed = [*filter(has_failed, rollouts)]
    for env in dict.fromkeys(rollout.env for rollout in failed):
        metrics[f"eval/{env}/failed"] = num_episodes([r for r in failed if r.env == env])
    return metrics


def comparisons(
    progress: dict[str, Any],
    rollouts: list[Rollout],
    tasks: Sequence[Task],
    num_tasks: int,
    play_trivial: Callable[[list[Task]], list[Rollout]],
) -> dict[str, float]:
    """Metrics that compare an evaluation with the first one, with training and with the trivial
    baseline; `progress` stores the first one.

    By environment: how many of the `num_tasks` tasks there are and were played, the fraction of
    answers that are those of the first evaluation, the accuracy of the trivial baseline where there
    is one; by seat also the fraction of openings that training has had, and the p-value against the
    first evaluation, on the tasks that both have played.
    """
    results: dict[str, float] = {}
    counted = played(rollouts)
    distinct = distinct_tasks(counted)
    trivial, openings = progress.setdefault("trivial", {}), progress.setdefault("openings_seen", {})
    for env, spec in {task.env.short: task.env for task in tasks}.items():
        of_env = [rollout for rollout in rollouts if rollout.env == env]
        if all(r.agent == PLAYER for r in of_env):  # other agents may end it before the policy acts
            results[f"eval/{env}/asked"] = min(num_tasks, rewarded.num_held_out(spec))
            results[f"eval/{env}/played"] = len({r.seed for r in of_env})
        of_env = played(of_env)
        if not of_env:
            continue
        keys = {id(r): key_of(r, is_program(spec)) for r in of_env}
        answers = {keys[id(r)]: answer_hash(r) for r in of_env if not r.error}
        first_answers = progress.setdefault("first_answers", {}).setdefault(env, answers)
        common = first_answers.keys() & answers.keys()
        if first_answers is not answers and common:
            same = statistics.fmean(first_answers[key] == answers[key] for key in common)
            results[f"eval/{env}/same_answers"] = same
        correct = {keys[id(r)]: is_correct(r) for r in judged(of_env)}
        first = progress.setdefault("first_correct", {}).setdefault(env, correct)
        returns = {keys[id(r)]: r.episode_return for r in of_env}
        first_returns = progress.setdefault("first_returns", {}).setdefault(env, returns)
        for seat, episodes in by_seat(of_env).items():
            trained_on = [openings[key] for key in map(opening_key, episodes) if key in openings]
            if trained_on:
                results[f"eval/{seat}/seen"] = statistics.fmean(trained_on)
            again = [r for r in judged(episodes) if keys[id(r)] in first]
            if not again:
                continue
            correct_before = [float(first[keys[id(r)]]) for r in again]
            lost, won = changes(distinct, again, correct_before, map(is_correct, again))
            results[f"eval/{seat}/p_value"] = mcnemar(lost, won)
            if not won and not any(correct_before):
                before = [first_returns.get(keys[id(r)], r.episode_return) for r in again]
                fell, rose = changes(distinct, again, before, [r.episode_return for r in again])
                results |= {f"eval/{seat}/return_fell": fell, f"eval/{seat}/return_rose": rose}
        if env not in trivial:
            env_tasks = [t for t in tasks if t.env.short == env and (env, t.seed) in distinct]
            trivial[env] = trivial_accuracy(env_tasks, distinct, play_trivial)
        if trivial[env] is not None:
            results[f"eval/{env}/trivial"] = trivial[env]
    for rollout in rollouts:
        openings.setdefault(opening_key(rollout), False)
    return results


def note_trained(progress: dict[str, Any], rollouts: list[Rollout]) -> None:
    """Marks in `progress` the first prompts of held-out tasks that training rollouts have, too."""
    openings = progress.get("openings_seen", {})
    trained_on = {opening_key(rollout) for rollout in rollouts if rollout.turns}
    openings.update(dict.fromkeys(trained_on & openings.keys(), True))


def lines_about(results: dict[str, float], update: int) -> list[str]:
    """The accuracy as a line of text for each environment, and, of several, for each agent."""
    lines = []
    when = f"at update {update}" if update else "before RL (greedy; training samples its answers)"
    for seat in evaluated(results):
        line = f"held-out accuracy {when}: {accuracy_of(seat, results)}  {seat}"
        earned = f"  mean return {return_of(seat, results)}" * never_right(seat, [results])
        lines.append(line + earned)
    return lines


def distinct_tasks(rollouts: list[Rollout]) -> Tasks:
    """The task of each (environment, seed); evaluations count each task once.

    Seeds with the same opening prompts are one task. But if an environment gives two equal
    beginnings of an episode, responses included, different continuations, then its seeds decide
    more than the opening, such as the moves of others: each of its seeds is a task.
    """
    openings: dict[tuple[str, int], list[Hashable]] = defaultdict(list)
    continuations: dict[int, tuple] = {}  # of each beginning
    seeds_differ = set()
    for rollout in rollouts:
        env, turns = rollout.env, rollout.turns
        # without a turn the environment has failed, and the opening is unknown
        openings[env, rollout.seed].append(opening_of(rollout) if turns else rollout.seed)
        if rollout.error:
            continue
        beginning = hash((env, rollout.agent))
        for turn, following in itertools.zip_longest(turns, turns[1:]):
            beginning = hash((beginning, tuple(turn.prompt_ids), tuple(turn.completion_ids)))
            end = following.prompt_ids if following else is_correct(rollout)
            continuation = (turn.reward, end)
            if continuations.setdefault(beginning, continuation) != continuation:
                seeds_differ.add(env)
    return {
        (env, seed): seed if env in seeds_differ else tuple(prompts)
        for (env, seed), prompts in openings.items()
    }


def by_seat(rollouts: list[Rollout]) -> dict[str, list[Rollout]]:
    """Rollouts by seat: each environment, and with several agents also each env/agent."""
    seats: dict[str, list[Rollout]] = defaultdict(list)
    agents: dict[str, set[str]] = defaultdict(set)
    for rollout in rollouts:
        agents[rollout.env].add(rollout.agent)
    for rollout in rollouts:
        seats[rollout.env].append(rollout)
        if len(agents[rollout.env]) > 1:
            seats[f"{rollout.env}/{rollout.agent}"].append(rollout)
    return seats


def task_means(
    tasks: Tasks, rollouts: list[Rollout], values: Iterable[float]
) -> dict[Hashable, float]:
    """The mean of the values of the rollouts of each task."""
    columns: dict[Hashable, list[float]] = defaultdict(list)
    for rollout, value in zip(rollouts, values, strict=True):
        columns[tasks[rollout.env, rollout.seed]].append(value)
    return {task: statistics.fmean(column) for task, column in columns.items()}


def changes(
    tasks: Tasks, rollouts: list[Rollout], before: Iterable[float], after: Iterable[float]
) -> tuple[int, int]:
    """On how many tasks the mean of `after` is lower than that of `before`, and higher."""
    old, new = (task_means(tasks, rollouts, values) for values in (before, after))
    differences = [new[task] - old[task] for task in old]
    return sum(d < -SAME for d in differences), sum(d > SAME for d in differences)


def opening_key(rollout: Rollout) -> str:
    """A name of the first prompt of an episode, for use as a key in JSON."""
    return str(hash(opening_of(rollout)))


def answer_hash(rollout: Rollout) -> int:
    return hash(tuple(tuple(turn.completion_ids) for turn in rollout.turns))


def key_of(rollout: Rollout, shows_time: bool) -> str:
    """A name of the task and the agent of a rollout. It has a checksum of the first messages, as
    data may change; but not in games, where other agents may act first, nor where `shows_time`."""
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
    episodes = judged(played(play_trivial(tasks)))
    correct = task_means(distinct, episodes, map(is_correct, episodes))
    return statistics.fmean(correct.values()) if correct else None


def wilson(successes: float, total: int, z: float = 1.96) -> tuple[float, float]:
    """95% Wilson interval of a proportion (Wilson 1927), which also holds near 0 and 1."""
    p = successes / total
    scale = 1 + z * z / total
    middle = (p + z * z / (2 * total)) / scale
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)
