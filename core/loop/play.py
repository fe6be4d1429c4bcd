"""The afternoon, 4 of 9. The rollouts of an update: tasks are drawn, played, and selected.

By default `play` is `collect` with the present weights.

A system that samples and trains at the same time learns from samples of older weights. To study
that, --staleness k gives the policy its weights of k updates ago back while it samples, so a run is
as exact, seeded and resumable as with k = 0. The importance weights (algorithms/off_policy.py) then
correct for the age too, and gap/* measures it.

With --overlap a thread collects the next update's rollouts while an update trains, with the
adapters that the server of --sampler server has: those from before the update. The metrics are
those of --staleness 1, to the bit where the server's answers are, in less time: at most the shorter
of sampling and training is saved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from core import canary, probes, selection, tasks
from core.calls import in_thread
from core.canary import Canary
from core.loop.run import Collected, Run
from core.policy import borrowed, copy_weights
from core.sampler import params_of
from core.seeds import SAMPLING, derive_seed
from core.types import Rollout


def play(run: Run, update: int) -> tuple[list[Rollout], list[Rollout]]:
    """The rollouts of this update: all that were sampled, and those to train on."""
    with older_weights(run):  # off: --staleness
        found = run.ahead.pop().result() if run.ahead else collect(run, update)
    run.sampled_at = perf_counter()
    sampled, trained, run.canary = found
    if run.cfg.overlap and update < run.cfg.num_updates:
        run.info.updates_done = update  # when the next one begins
        # now, as the policy has the weights of the server until its next step
        compared = canary.compare(run.policy, run.sampler, run.canary[1])
        run.ahead.append(in_thread(lambda: collect(run, update + 1, compared)))
    return sampled, trained


def collect(run: Run, update: int, compared: Canary | None = None) -> Collected:
    """Samples G rollouts for each of P tasks. First it checks that sampler and policy have the same
    weights, unless `compared` says so. Raises Stopped after Ctrl-C. It changes nothing in `run`, so
    --overlap may call it in a thread.

    Not trained on: rollouts whose environment failed and, with --filter-groups n, tasks whose
    rollouts all earned the same; up to n more rounds draw others.
    """
    cfg, check = run.cfg, run.interrupt.check_alone
    envs = tasks.training_envs(cfg, run.progress["level"])
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
                before = run.progress.get("canary", {})
                found = canary.compare(run.policy, run.sampler, before, check)
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
    return sampled, kept, found


@contextmanager
def older_weights(run: Run) -> Iterator[None]:
    """Inside, the policy has its weights of --staleness updates ago, or at first its first ones.

    `run.older` has those of as many updates, the oldest first; these join it, unless the sampling
    fails. With `run.ahead` nothing is sampled here, and the policy keeps its weights.
    """
    if not run.cfg.staleness:
        yield
        return
    weights, samples = run.policy.trainable(), not run.ahead
    with borrowed(weights) as present:
        if samples:
            copy_weights(run.older[0] if run.older else present, weights)
            run.sampler.sync()
        yield
    if samples:
        run.sampler.sync()
    run.older.append(present)
