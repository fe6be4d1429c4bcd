"""Selects the rollouts to train on.

A group whose rollouts all have the same return has advantages of 0, so its tokens cost time and
change nothing. Filter on the spread of the returns, not on their mean: a group of partial credit
can have a mean of 0.5 and no spread.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from core.types import Rollout, Turn, UsageError

MAX_FAILED = 0.5  # fraction of an update's episodes
EMPTY: dict[str, Any] = {"messages": [], "info": {}, "opponents": {}, "token_traces": []}


def drop_failed(rollouts: list[Rollout], say: Callable[[str], None]) -> list[Rollout]:
    """The rollouts whose environment did not fail; `say` prints a warning about the others.

    Raises UsageError if more than half failed.
    """
    if failed := [rollout for rollout in rollouts if rollout.error]:
        first = failed[0]
        warning = (f"{len(failed)} of {len(rollouts)} episodes failed; the first one, {first.env} "
                   f"with seed {first.seed}: {first.error}").replace("\n", " ")  # fmt: skip
        if len(failed) > MAX_FAILED * len(rollouts):
            raise UsageError(warning)
        say(warning)
    return [rollout for rollout in rollouts if not rollout.error]


def by_task(rollouts: list[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each task, those of all its agents, in the order of the tasks."""
    tasks: dict[tuple[str, int], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        tasks[rollout.env, rollout.seed].append(rollout)
    return list(tasks.values())


def with_spread(rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts of the tasks in which the returns of at least one group differ."""
    returns: dict[int, set[float]] = defaultdict(set)
    for rollout in rollouts:
        returns[rollout.group_id].add(rollout.episode_return)
    tasks = [t for t in by_task(rollouts) if any(len(returns[r.group_id]) > 1 for r in t)]
    return [rollout for task in tasks for rollout in task]


def keep_best(best: list[dict[str, Any]], rollouts: list[Rollout], size: int) -> list[dict]:
    """The `size` rollouts with the highest return among `best` and `rollouts`, one per task.

    Of equal returns the newer is kept. The result is plain data for a checkpoint, without messages.
    """
    new = [asdict(r) | EMPTY for r in rollouts]
    for turn in (turn for one in new for turn in one["turns"]):
        turn["kept_ids"] = None  # SFT trains the whole distribution
    first: dict[tuple[str, int, str], dict] = {}
    for one in sorted([*new, *best], key=lambda r: -sum(turn["reward"] for turn in r["turns"])):
        first.setdefault((one["env"], one["seed"], one["agent"]), one)
    return list(first.values())[:size]


def as_rollouts(best: list[dict[str, Any]]) -> list[Rollout]:
    """The result of `keep_best` as rollouts to train on."""
    return [Rollout(**(r | {"turns": [Turn(**turn) for turn in r["turns"]]})) for r in best]
