"""The afternoon, 4 of 9. The rollouts of an update: tasks are drawn, played, and selected.

By default `play` is `collect` with the present weights. With --staleness k the weights of k updates
ago sample; with --overlap a thread has done so while the update before trained.
"""

import statistics
from dataclasses import replace
from functools import partial
from time import perf_counter

from core import observations, selection, tasks
from core.loop.run import Run
from core.metrics import is_correct
from core.run.staleness import older_weights
from core.sampler import SamplingParams
from core.seeds import SAMPLING, derive_seed
from core.types import Played, Rollout
from environments import rewarded


def play(run: Run, update: int) -> Played:
    """The rollouts of this update: all that were sampled, and those to train on.

    With --curriculum they decide the level of the next update's tasks.
    """
    with older_weights(run.policy, run.sampler, run.older, run.ahead.started):
        played = _take_ahead(run) or collect(run, update)
    if run.cfg.overlap and update < run.cfg.num_updates:
        _play_ahead(run, update + 1)
    run.next_level = _next_level(run, played.sampled)
    return played


def collect(run: Run, update: int) -> Played:
    """Samples G rollouts for each of P tasks with the weights that the policy has here.

    Not trained on: rollouts whose environment failed and, with --filter-groups n, tasks with equal
    returns in each group, which up to n more rounds replace.
    """
    cfg = run.cfg
    envs = tasks.training_envs(cfg.env, cfg.train_difficulty, run.progress["level"])
    sampled: list[Rollout] = []
    kept: list[Rollout] = []
    for attempt in range(1 + cfg.filter_groups):
        missing = cfg.num_prompts - len(selection.by_task(kept))
        if missing == 0:
            break
        # G copies of each task: the same environment and seed, the same group_id
        drawn = tasks.train_tasks(envs, cfg.seed, update, missing, cfg.group_size, attempt)
        seed = derive_seed(cfg.seed, SAMPLING, update, attempt)
        params = SamplingParams(cfg.max_tokens, cfg.temperature, cfg.top_p, cfg.top_k, seed)
        with run.display.phase("rollouts", cfg.max_tokens) as phase, run.sampler:
            on_progress = phase.tick_and(run.interrupt.check_alone)
            if attempt == 0:
                run.compare_weights()  # the sampler's with the policy's: logs gap/canary
            fresh = run.collector.collect(drawn, run.sampler, params, on_progress)
        for rollout in fresh:
            rollout.group_id += len(sampled)  # so that no two rounds share a group
        sampled += fresh
        usable = selection.drop_failed(fresh, run.say)
        if update == 1 or "changed_settings" in run.notes:
            selection.check_reward_parts(cfg, usable)
            selection.check_feedback(cfg, usable)
            observations.check(cfg, run.policy.tokenizer, usable, run.say)
        kept += selection.with_spread(cfg, usable) if cfg.filter_groups else usable
    if not kept:
        run.say(f"update {update}: no gradient step: no usable rollout, or only equal returns")
    run.sampled_at = perf_counter()
    return Played(sampled, kept)


def _next_level(run: Run, sampled: list[Rollout]) -> int:
    """The level of the next update's tasks: harder or easier, if this one's accuracy says so."""
    cfg, level = run.cfg, run.progress["level"]
    correct = [is_correct(rollout) for rollout in sampled if not rollout.error]
    if not cfg.curriculum or not correct:
        return level
    envs = tasks.training_envs(cfg.env, cfg.train_difficulty)
    return tasks.next_level(envs, level, statistics.fmean(correct), cfg.curriculum)


def _play_ahead(run: Run, update: int) -> None:
    """Lets a thread collect the next update's rollouts with the present weights."""
    weights = run.older[-1]  # they joined it in this update
    policy = run.ahead.policy_with(weights, run.policy)
    rewarded.STATE.global_step = run.next_update  # updates complete when the next begins
    progress = {**run.progress, "canary": run.canary[1]}  # as the update before leaves it
    run.seen_ahead = replace(
        run, policy=policy, sampler=run.sampler.ahead(policy), progress=progress,
        interrupt=run.ahead, seen_ahead=None,
    )  # fmt: skip
    run.ahead.start(partial(collect, run.seen_ahead, update))


def _take_ahead(run: Run) -> Played | None:
    """What the thread has collected, or None if none was started. Raises what it raised."""
    played = run.ahead.take()
    if played and run.seen_ahead:
        run.canary, run.sampled_at = run.seen_ahead.canary, perf_counter()
    return played
