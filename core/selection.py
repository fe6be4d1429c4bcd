"""Which rollouts are learnt from: not the failed, perhaps none without spread, the best twice.

A group whose rollouts were all paid alike has advantages of 0: its tokens cost time and teach
nothing. Whether it is right or wrong says nothing of that; only its spread does.
"""

from collections import defaultdict
from dataclasses import asdict
from typing import Any

from core.types import Rollout, Turn, UsageError

MOST_FAILED = 0.5  # of an update's episodes; more than that, and the environment is to be mended


def without_failed(rollouts: list[Rollout]) -> tuple[list[Rollout], list[str]]:
    """The rollouts to learn from, and what to tell the person of those whose environment failed.

    Raises UsageError when more than a half failed.
    """
    failed = [r for r in rollouts if r.error]
    if not failed:
        return rollouts, []
    told = f"{len(failed)} of {len(rollouts)} episodes failed; the first, of {failed[0].env} with "
    told += f"seed {failed[0].seed}: {failed[0].error}".replace("\n", " ")
    if len(failed) > MOST_FAILED * len(rollouts):
        raise UsageError(told)
    return [r for r in rollouts if not r.error], [told]


def by_task(rollouts: list[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each task, all its seats and tries, in the order in which tasks came."""
    tasks: dict[tuple[str, int], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        tasks[rollout.env, rollout.seed].append(rollout)
    return list(tasks.values())


def with_spread(rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts of the tasks in which some group was not paid alike throughout."""
    returns: dict[int, set[float]] = defaultdict(set)
    for rollout in rollouts:
        returns[rollout.group_id].add(rollout.episode_return)
    return [
        rollout
        for task in by_task(rollouts)
        if any(len(returns[r.group_id]) > 1 for r in task)
        for rollout in task
    ]


def keep_best(best: list[dict[str, Any]], rollouts: list[Rollout], size: int) -> list[dict]:
    """The `size` rollouts of highest return among the kept and the new, at most one a task.

    Of equal ones the newer is kept. What is kept is plain data, for a checkpoint: a rollout without
    its messages, which only people read.
    """
    new = [asdict(r) | {"messages": [], "info": {}, "token_traces": []} for r in rollouts]
    first: dict[tuple[str, int, str], dict] = {}
    for one in sorted([*new, *best], key=lambda r: -sum(turn["reward"] for turn in r["turns"])):
        first.setdefault((one["env"], one["seed"], one["agent"]), one)
    return list(first.values())[:size]


def as_rollouts(kept: list[dict[str, Any]]) -> list[Rollout]:
    """What `keep_best` kept, to train on."""
    return [Rollout(**(r | {"turns": [Turn(**turn) for turn in r["turns"]]})) for r in kept]
