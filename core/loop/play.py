"""The afternoon, 4 of 9. The rollouts of an update: tasks are drawn, played, and selected.

By default `play` only calls `collect`, which samples with the present weights.

A system that samples and trains at the same time learns from samples of older weights. To study
that, --staleness k lets the policy sample with its weights of k updates ago, so a run is as exact,
seeded and resumable as with k = 0. The importance weights (algorithms/off_policy.py) then correct
for the age too, and the metrics gap/* measure it.

With --overlap a thread collects the next update's rollouts while an update trains, from a server
(--sampler server) that has the adapters from before the update. The metrics are those of
--staleness 1, if the server repeats its answers. Saves at most the shorter of the times of both.
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
        collected = run.ahead.pop().result() if run.ahead else collect(run, update)
    run.sampled_at = perf_counter()
    sampled, selected, run.canary = collected
    if run.cfg.overlap and update < run.cfg.num_updates:
        run.info.updates_done = update  # when the next one begins
        # before the thread starts, as policy and server differ once this update takes a step
        next_canary = canary.compare(run.policy, run.sampler, run.canary[1])
        run.ahead.append(in_thread(lambda: collect(run, update + 1, next_canary)))
    return sampled, selected


def collect(run: Run, update: int, compared: Canary | None = None) -> Collected:
    """Samples G rollouts for each of P tasks. Before that, compares the weights of the sampler with
    the policy's; `compared`: the result, if the caller has done so. Raises Stopped after Ctrl-C.
    Changes nothing in `run`, so --overlap may call this in a thread.

    Not trained on: rollouts whose environment failed and, with --filter-groups n, tasks whose
    rollouts all earned the same; up to n more rounds draw other tasks.
    """
    cfg, check = run.cfg, run.interrupt.check_alone
    envs = tasks.training_envs(cfg, run.progress["level"])
    sampled: list[Rollout] = []
    selected: list[Rollout] = []
    canary_result: Canary = compared or ({}, {})
    for attempt in range(1 + cfg.filter_groups):
        missing = cfg.num_prompts - len(selection.by_task(selected))
        if missing == 0:
            break
        # G copies of each task: the same environment and seed
        copies = tasks.train_tasks(envs, cfg.seed, update, missing, cfg.group_size, attempt)
        seed = derive_seed(cfg.seed, SAMPLING, update, attempt)
        params = params_of(cfg, seed)
        # `with run.sampler` copies LoRA adapters to vLLM, where it samples
        with run.display.phase("rollouts", cfg.max_tokens, check=check) as advance, run.sampler:
            if attempt == 0 and compared is None:
                before = run.progress.get("canary", {})
                canary_result = canary.compare(run.policy, run.sampler, before, check)
            rollouts = run.collector.collect(copies, run.sampler, params, advance)
        for rollout in rollouts:
            rollout.group_id += len(sampled)  # so that no two rounds share a group
        sampled += rollouts
        usable = selection.drop_failed(rollouts, run.say)
        if update == run.first_update:  # off: --algo sdpo, which needs feedback
            selection.check_feedback(cfg, usable)
        if update == 1 and attempt == 0:
            canary_result[0].update(probes.judged_again(cfg, run.collector, usable))
        selected += selection.with_spread(cfg, usable) if cfg.filter_groups else usable
    if not selected:
        run.say(f"update {update}: no gradient step: no usable rollout, or only equal returns")
    return sampled, selected, canary_result


@contextmanager
def older_weights(run: Run) -> Iterator[None]:
    """Inside, the policy has its weights of --staleness updates ago, or at first its first ones.

    `run.older` has the weights of that many updates, the oldest first. The present ones join it,
    unless the sampling fails. If `run.ahead` has the rollouts, the policy keeps its weights.
    """
    if not run.cfg.staleness:
        yield
        return
    weights = run.policy.trainable()
    samples = not run.ahead
    with borrowed(weights) as present:
        if samples:
            copy_weights(run.older[0] if run.older else present, weights)
            run.sampler.sync()
        yield
    if samples:
        run.sampler.sync()
    run.older.append(present)
