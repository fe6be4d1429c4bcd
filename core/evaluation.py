"""Held-out evaluation: the same tasks every time, greedy decoding, accuracy with its interval."""

import statistics
import time

from core import metrics, selection, tasks
from core.config import Config
from core.run import Run
from core.sampler import SamplingParams
from environments import make
from environments.base import Env

LOGGED_ROLLOUTS = 8  # of each evaluation, in rollouts.jsonl


def evaluate(cfg: Config, run: Run, update: int) -> dict[str, float]:
    """Samples one greedy rollout for each held-out task. Returns the metrics by name.

    An episode whose environment failed counts as wrong. `eval/<env>/trivial` is the accuracy of the
    environment's trivial player on the same tasks.
    """
    if cfg.eval_num_tasks == 0:
        return {}
    envs = tasks.held_out_envs(cfg.eval_env, cfg.env, cfg.train_difficulty)
    held_out = tasks.eval_tasks(envs, cfg.eval_num_tasks)
    started = time.perf_counter()
    params = SamplingParams(cfg.max_tokens, temperature=0.0)
    with run.display.phase("evaluation", cfg.max_tokens) as phase, run.sampler:
        rollouts = run.collector.collect(
            held_out, run.sampler, params, lambda: phase.advance(run.sampler.latest, quiet=True)
        )
    selection.drop_failed(rollouts, run.say)  # warns about failed ones
    run.run_log.log_rollouts("eval", update, rollouts[:LOGGED_ROLLOUTS])
    results = metrics.eval_metrics(rollouts)
    for env in envs:
        episodes = sum(rollout.env == env for rollout in rollouts)
        right = {f"{r.seed} {r.agent}" for r in rollouts if r.env == env and r.info.get("correct")}
        first = run.progress.setdefault("first_evaluation", {}).setdefault(env, sorted(right))
        results[f"eval/{env}/p_value"] = metrics.mcnemar(set(first), right)
        trivial = run.progress.setdefault("trivial", {})
        if env not in trivial:
            trivial[env] = trivial_accuracy(run, [task for task in held_out if task.env == env])
        if trivial[env] is not None:
            results[f"eval/{env}/trivial"] = trivial[env]
        openings = results[f"eval/{env}/openings"]
        few = f"  ({episodes} episodes from {openings} openings)" if openings < episodes else ""
        if openings == 1 < episodes:
            few = f"  ({episodes} episodes of one task, which is also that of training)"
        line = f"held-out accuracy at update {update}: {metrics.describe(env, results)}  {env}"
        run.say(line + few)
    return results | {"time/eval_s": time.perf_counter() - started}


def trivial_accuracy(run: Run, held_out: list[tasks.Task]) -> float | None:
    """The accuracy of the environment's trivial player; None if it has none."""
    env = make(held_out[0].env)
    if not isinstance(env, Env) or type(env).trivial is Env.trivial:
        return None
    rollouts = run.collector.demonstrate(held_out, trivial=True)
    return statistics.fmean(bool(rollout.info.get("correct")) for rollout in rollouts)
