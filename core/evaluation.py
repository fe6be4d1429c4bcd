"""Held-out evaluation: the same tasks every time, greedy decoding, accuracy with its interval."""

import statistics
import time

from core import metrics, selection, tasks
from core.config import Config
from core.run import Run
from core.sampler import SamplingParams
from core.seeds import EVALUATION, derive_seed
from core.types import Rollout
from environments.base import Env
from environments.registry import make

LOGGED_ROLLOUTS = 8  # of each evaluation, in rollouts.jsonl


def evaluate(cfg: Config, run: Run, update: int) -> dict[str, float]:
    """Samples one greedy rollout for each held-out task. Returns the metrics by name.

    An episode whose environment failed counts as wrong. core/README.md says what each metric means.
    """
    if cfg.eval_num_tasks == 0:
        return {}
    started = time.perf_counter()
    envs = tasks.held_out_envs(cfg.eval_env, cfg.env, cfg.train_difficulty)
    held_out = tasks.eval_tasks(envs, cfg.eval_num_tasks)
    rollouts = sample(run, held_out, SamplingParams(cfg.max_tokens, temperature=0.0))
    selection.drop_failed(rollouts, run.say)  # warns; raises if over half failed
    run.run_log.log_rollouts("eval", update, rollouts[:LOGGED_ROLLOUTS])
    results = metrics.eval_metrics(rollouts)
    if cfg.eval_samples:
        repeated = [task for task in held_out for _ in range(cfg.eval_samples)]
        seed = derive_seed(cfg.seed, EVALUATION)  # the same in every evaluation
        params = SamplingParams(cfg.max_tokens, cfg.temperature, cfg.top_p, cfg.top_k, seed)
        results |= metrics.pass_at_k(sample(run, repeated, params))
    for env in envs:
        results |= comparisons(run, held_out, env, [r for r in rollouts if r.env == env])
        line = f"held-out accuracy at update {update}: {metrics.describe(env, results)}  {env}"
        run.say(line + metrics.few_openings(env, results, len(held_out) // len(envs)))
    return results | {"time/eval_s": time.perf_counter() - started}


def sample(run: Run, held_out: list[tasks.Task], params: SamplingParams) -> list[Rollout]:
    """One rollout per task and agent."""
    with run.display.phase("evaluation", params.max_tokens) as phase, run.sampler:
        return run.collector.collect(
            held_out, run.sampler, params, lambda: phase.advance(run.sampler.latest, quiet=True)
        )


def comparisons(
    run: Run, held_out: list[tasks.Task], env: str, rollouts: list[Rollout]
) -> dict[str, float]:
    """The p-value against the first evaluation, and the accuracy of the trivial baseline.

    Both use the held-out tasks of `env`. The accuracy is left out if it has no trivial baseline.
    """
    right = {f"{r.seed} {r.agent}" for r in rollouts if r.info.get("correct")}
    first = run.progress.setdefault("first_evaluation", {}).setdefault(env, sorted(right))
    results = {f"eval/{env}/p_value": metrics.mcnemar(set(first), right)}
    trivial = run.progress.setdefault("trivial", {})  # the same in every evaluation
    if env not in trivial:
        trivial[env] = trivial_accuracy(run, [task for task in held_out if task.env == env])
    if trivial[env] is not None:
        results[f"eval/{env}/trivial"] = trivial[env]
    return results


def trivial_accuracy(run: Run, held_out: list[tasks.Task]) -> float | None:
    """The accuracy of the environment's trivial baseline on these tasks; None if it has none."""
    env = make(held_out[0].env)
    if not isinstance(env, Env) or type(env).trivial is Env.trivial:
        return None
    played = run.collector.demonstrate(held_out, trivial=True)
    return statistics.fmean(bool(rollout.info.get("correct")) for rollout in played)
