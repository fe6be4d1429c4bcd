"""Held-out evaluation: the same tasks every time, greedy decoding, accuracy with its interval."""

import statistics
import time
from collections import Counter
from contextlib import closing

from core import metrics, selection, tasks
from core.config import Config
from core.run.open import Run
from core.sampler import SamplingParams
from core.seeds import EVALUATION, derive_seed
from core.types import Rollout, Stopped
from environments.base import Env
from environments.registry import make, short

LOGGED_ROLLOUTS = 8  # of each evaluation, in rollouts.jsonl; all with --sampler openai


def evaluate(cfg: Config, run: Run, update: int) -> dict[str, float]:
    """Samples one greedy rollout for each held-out task. Returns the metrics by name.

    An episode whose environment failed counts as wrong, but one that raised EnvFailure, or that the
    server of --sampler openai did not answer, is left out. core/README.md says what each metric
    means. Ctrl-C ends an evaluation of --sampler openai: it logs the finished episodes, then raises
    Stopped.
    """
    if cfg.eval_num_tasks == 0:
        return {}
    started = time.perf_counter()
    envs = tasks.held_out_envs(cfg.eval_env, cfg.env, cfg.train_difficulty)
    held_out = tasks.eval_tasks(envs, cfg.eval_num_tasks)
    rollouts = sample(run, held_out, SamplingParams(cfg.max_tokens, temperature=0.0))
    on_server = cfg.sampler == "openai"
    stopped = on_server and run.interrupt.requested
    run.run_log.log_rollouts("eval", update, rollouts[: None if on_server else LOGGED_ROLLOUTS])
    if not stopped:
        selection.drop_failed(rollouts, run.say)  # warns; raises if over half failed
    failed = Counter(rollout.env for rollout in rollouts if rollout.error)
    rollouts = played(rollouts)
    distinct = metrics.distinct_tasks(rollouts)
    results = metrics.eval_metrics(rollouts, distinct)
    results |= {f"eval/{env}/failed": count for env, count in failed.items()}
    if cfg.eval_samples and not stopped:
        repeated = [task for task in held_out for _ in range(cfg.eval_samples)]
        seed = derive_seed(cfg.seed, EVALUATION)  # the same in every evaluation
        params = SamplingParams(cfg.max_tokens, cfg.temperature, cfg.top_p, cfg.top_k, seed)
        sampled = [r for r in played(sample(run, repeated, params)) if (r.env, r.seed) in distinct]
        results |= metrics.pass_at_k(sampled, distinct)
    for env in map(short, envs):
        episodes = [rollout for rollout in rollouts if rollout.env == env]
        if not episodes:
            continue
        if not stopped:
            results |= comparisons(run, held_out, env, episodes, distinct)
        for seat, own in metrics.by_seat(episodes).items():
            accuracy = metrics.describe(seat, results)
            few = metrics.few_tasks(seat, results, len({rollout.seed for rollout in own}))
            run.say(f"held-out accuracy at update {update}: {accuracy}  {seat}{few}")
    if stopped:
        run.log(update, results, [])
        raise Stopped
    return results | {"time/eval_s": time.perf_counter() - started}


def played(rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts without those that raised EnvFailure, which says nothing about the policy."""
    return [rollout for rollout in rollouts if not rollout.env_failure]


def sample(run: Run, held_out: list[tasks.Task], params: SamplingParams) -> list[Rollout]:
    """One rollout per task and agent."""
    with run.display.phase("evaluation", params.max_tokens) as phase, run.sampler:

        def on_progress() -> None:
            phase.advance(run.sampler.latest, quiet=True)
            if run.interrupt.requested:
                run.sampler.stop()

        return run.collector.collect(held_out, run.sampler, params, on_progress)


def comparisons(
    run: Run,
    held_out: list[tasks.Task],
    env: str,
    rollouts: list[Rollout],
    distinct: metrics.Tasks,
) -> dict[str, float]:
    """The p-value against the first evaluation, and the accuracy of the trivial baseline.

    Both use the held-out tasks of `env`. The accuracy is left out if it has no trivial baseline.
    """
    now = {f"{r.seed} {r.agent}": metrics.is_correct(r) for r in rollouts}
    first = run.progress.setdefault("first_correct", {}).setdefault(env, now)
    results = {}
    for seat, episodes in metrics.by_seat(rollouts).items():
        both = [r for r in episodes if f"{r.seed} {r.agent}" in first]
        before = metrics.task_means(both, distinct, lambda r: first[f"{r.seed} {r.agent}"])
        after = metrics.task_means(both, distinct, metrics.is_correct)
        lost, won = ({t for t in before if sign * (after[t] - before[t]) > 0} for sign in (-1, 1))
        results[f"eval/{seat}/p_value"] = metrics.mcnemar(lost, won)
    trivial = run.progress.setdefault("trivial", {})  # the same in every evaluation
    if env not in trivial:
        mine = [t for t in held_out if short(t.env) == env and (env, t.seed) in distinct]
        trivial[env] = trivial_accuracy(run, mine, distinct)
    if trivial[env] is not None:
        results[f"eval/{env}/trivial"] = trivial[env]
    return results


def trivial_accuracy(run: Run, held_out: list[tasks.Task], distinct: metrics.Tasks) -> float | None:
    """The accuracy of the environment's trivial baseline on these tasks; None if it has none."""
    with closing(make(held_out[0].env)) as env:
        if not isinstance(env, Env) or type(env).trivial is Env.trivial:
            return None
    episodes = played(run.collector.demonstrate(held_out, trivial=True))
    return statistics.fmean(metrics.task_means(episodes, distinct, metrics.is_correct).values())
