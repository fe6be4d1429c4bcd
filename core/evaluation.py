"""Held-out evaluation: always the same tasks, greedily, with an interval."""

import time
from typing import Any

from core import metrics
from core.run import Run
from core.sampler import SamplingParams
from core.tasks import Task


def evaluate(cfg: Any, run: Run, held_out: list[Task], update: int) -> dict[str, float]:
    """Play the held-out tasks greedily; log the first ones; return accuracy with its interval."""
    started = time.perf_counter()
    params = SamplingParams(cfg.max_tokens, temperature=0.0)
    with run.display.phase("evaluation", cfg.max_tokens) as phase, run.sampler:
        watch = phase.tick_and(lambda: phase.show(run.sampler.latest))
        rollouts = run.batched_env.collect(held_out, run.sampler, params, watch)
    run.drop_failed(rollouts)  # a failed one counts as wrong
    run.log.log_rollouts("eval", update, rollouts[:8])  # enough to see
    found = metrics.eval_metrics(rollouts)
    for env in dict.fromkeys(task.env for task in held_out):
        line = metrics.describe(env, found)
        run.display.say(f"held-out accuracy at update {update}: {line}  {env}")
    return found | {"time/eval_s": time.perf_counter() - started}
