"""The afternoon, 4 of 9. The rollouts of an update: tasks are drawn, played, and selected.

By default `play` is `collect` with the present weights. With --staleness k the weights of k updates
ago sample; with --overlap a server has done so while the update before trained.
"""

import statistics
from collections.abc import Callable
from time import perf_counter

from core import canary, probes, selection, tasks
from core.canary import Canary
from core.loop.run import Run
from core.loop.staleness import older_weights
from core.metrics import is_correct
from core.sampler import params_of
from core.seeds import SAMPLING, derive_seed
from core.types import Played, Rollout


def play(run: Run, update: int) -> Played:
    """The rollouts of this update: all that were sampled, and those to train on.

    Without --staleness, --overlap and --curriculum this is `collect`.
    """
    check = run.interrupt.check_alone  # for Ctrl-C
    with older_weights(run.policy, run.sampler, run.older, run.ahead.playing is not None):
        found = run.ahead.take() or collect(run, update, check)
        run.sampled_at = perf_counter()
    played, run.canary = found
    if run.cfg.overlap and update < run.cfg.num_updates:
        run.info.updates_done = update  # when the next one begins
        # now, as the policy has the weights of the server until its next step
        compared = canary.compare(run.policy, run.sampler, run.canary[1])
        run.ahead.start(lambda: collect(run, update + 1, check, compared))
    run.next_level = _next_level(run, played.sampled)
    return played


def collect(
    run: Run, update: int, check: Callable[[], None], compared: Canary | None = None
) -> tuple[Played, Canary]:
    """Samples G rollouts for each of P tasks. First it checks that sampler and policy have the same
    weights, unless `compared` says so. `check()` raises Stopped after Ctrl-C. It changes nothing in
    `run`, so --overlap may call it in a thread.

    Not trained on: rollouts whose environment failed and, with --filter-groups n, tasks whose
    rollouts all earned the same; up to n more rounds draw others.
    """
    cfg = run.cfg
    envs = tasks.training_envs(cfg.env, cfg.train_difficulty, run.progress["level"])
    sampled: list[Rollout] = []
    kept: list[Rollout] = []
    found: Canary = compared or ({}, {})
    for attempt in range(1 + cfg.filter_groups):
        missing = cfg.num_prompts - len(selection.by_task(kept))
        if missing == 0:
            break
        # G copies of each task: the same environment and seed
        drawn = tasks.train_tasks(envs, cfg.seed, update, missing, cfg.group_size, attempt)
        seed = derive_seed(cfg.seed, SAMPLING, update, attempt)
        params = params_of(cfg, seed)
        with run.display.phase("rollouts", cfg.max_tokens, check=check) as advance, run.sampler:
            if attempt == 0 and compared is None:
                found = canary.compare(run.policy, run.sampler, run.canary[1], check)
            fresh = run.collector.collect(drawn, run.sampler, params, advance)
        for rollout in fresh:
            rollout.group_id += len(sampled)  # so that no two rounds share a group
        sampled += fresh
        usable = selection.drop_failed(fresh, run.say)
        if update == run.first_update:  # has the algorithm what it needs?
            selection.check_feedback(cfg, usable)
        if update == 1 and attempt == 0:
            found[0].update(probes.judged_again(cfg, run.collector, usable))
        kept += selection.with_spread(cfg, usable) if cfg.filter_groups else usable
    if not kept:
        run.say(f"update {update}: no gradient step: no usable rollout, or only equal returns")
    return Played(sampled, kept), found


def _next_level(run: Run, sampled: list[Rollout]) -> int:
    """The level of the next update's tasks: harder or easier, if this one's accuracy says so."""
    cfg, level = run.cfg, run.progress["level"]
    correct = [is_correct(rollout) for rollout in sampled if not rollout.error]
    if not cfg.curriculum or not correct:
        return level
    envs = tasks.training_envs(cfg.env, cfg.train_difficulty)
    return tasks.next_level(envs, level, statistics.fmean(correct), cfg.curriculum)
