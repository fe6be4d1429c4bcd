"""Selects the rollouts to train on.

A group whose rollouts all have the same return has advantages of 0. Its tokens have no gradient,
but count in the number that divides the loss: in update 20 of the default run 2,160 tokens, of
which 337 have an advantage. TRL does the same; DAPO replaces such groups (--filter-groups); Dr.
GRPO divides by a constant. Filter on the spread of the returns, not on their mean: a group of
partial credit can have a mean of 0.5 and no spread.
"""

from collections import Counter, defaultdict
from collections.abc import Callable

from algorithms.tokens import group_mean, minus, turns_of
from core.batching import shape_rewards, to_tokens
from core.config import Config, needs
from core.faults import EpisodesFailed, UsageError
from core.types import Rollout

MAX_FAILED = 0.5  # fraction of an update's episodes


def drop_failed(rollouts: list[Rollout], say: Callable[[str], None]) -> list[Rollout]:
    """The rollouts that have a reward; `say` prints a warning about those whose environment failed.

    Raises EpisodesFailed if more than half failed.
    """
    usable = [rollout for rollout in rollouts if not rollout.error]
    if failed := [rollout for rollout in rollouts if has_failed(rollout)]:
        first, count = failed[0], num_episodes(failed)
        total = count + num_episodes([r for r in rollouts if not has_failed(r)])
        example = f"{first.env} with seed {first.seed}: {first.error}".replace("\n", " ")
        warning = f"{count} of {total} episodes failed; the first one, {example}"
        if count > MAX_FAILED * total:
            raise EpisodesFailed(warning)
        say(warning)
    return usable


def has_failed(rollout: Rollout) -> bool:
    """Whether the environment failed; a rollout without a judgement has not failed."""
    return bool(rollout.error) and not rollout.no_reward


def check_feedback(cfg: Config, rollouts: list[Rollout]) -> None:
    """Raises UsageError if the algorithm learns from feedback and an environment gives none."""
    with_feedback = {r.env for r in rollouts if any(turn.feedback_ids for turn in r.turns)}
    without = {r.env for r in rollouts} - with_feedback
    if "feedback" in needs(cfg) and without:
        fault = "never says what would have been right; add demonstrate() or Step(feedback=..)"
        raise UsageError(f"--algo {cfg.algo}: {min(without)} {fault}")


def num_episodes(rollouts: list[Rollout]) -> int:
    """The number of episodes of these rollouts; each has at most one rollout of an agent."""
    return sum(max(Counter(r.agent for r in task).values()) for task in by_task(rollouts))


def by_task(rollouts: list[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each task, those of all its agents, in the order of the tasks."""
    tasks: dict[tuple[str, int], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        tasks[rollout.env, rollout.seed].append(rollout)
    return list(tasks.values())


def with_spread(cfg: Config, rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts of the tasks in which the returns of at least one group differ."""
    alive = groups_with_spread(cfg, rollouts)
    tasks = [task for task in by_task(rollouts) if any(r.group_id in alive for r in task)]
    return [rollout for task in tasks for rollout in task]


def groups_with_spread(cfg: Config, rollouts: list[Rollout]) -> set[int]:
    """The groups in which the discounted returns of some turn differ."""
    batch = to_tokens(rollouts)
    shape_rewards(cfg, batch)
    turns = turns_of(batch)
    groups = batch.group[turns.last_token]  # [K], K turns
    differs = minus(turns.returns, group_mean(turns.returns, turns.peers)) != 0
    return set(groups[differs].tolist())
