"""Plays the held-out tasks, shows what came out, and logs the first rollouts.

core/evaluation.py computes the metrics, and says what they mean.
"""

from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from core import evaluation, probes
from core.config import Config
from core.episodes import RolloutCollector
from core.files.run_log import RunLog
from core.sampler import Sampler, SamplingParams
from core.selection import drop_failed
from core.tasks import eval_tasks, held_out_envs
from core.terminal.console import Display

LOGGED_ROLLOUTS = 8  # of each environment, in rollouts.jsonl; all with --sampler openai


@dataclass
class Evaluator:
    """What an evaluation needs; `progress` keeps the first one, for the p-values of later ones."""

    cfg: Config
    collector: RolloutCollector
    sampler: Sampler
    run_log: RunLog
    display: Display
    progress: dict[str, Any]

    def evaluate(self, update: int) -> dict[str, float]:
        """The metrics of one greedy rollout for each held-out task."""
        cfg = self.cfg
        if cfg.eval_num_tasks == 0:
            return {}
        started = perf_counter()
        envs = held_out_envs(cfg.eval_env, cfg.env, cfg.train_difficulty)
        held_out = eval_tasks(envs, cfg.eval_num_tasks)
        greedy = SamplingParams(cfg.max_tokens, temperature=0.0, stop=cfg.stop)
        with self.display.phase("evaluation", cfg.max_tokens) as advance, self.sampler:
            rollouts = self.collector.collect(held_out, self.sampler, greedy, advance)
        on_server = cfg.sampler == "openai"
        for env in dict.fromkeys(rollout.env for rollout in rollouts):
            own = [rollout for rollout in rollouts if rollout.env == env]
            self.run_log.log_rollouts("eval", update, own if on_server else own[:LOGGED_ROLLOUTS])
        drop_failed(rollouts, self.display.say)  # warns; raises if over half failed
        play_trivial = partial(self.collector.demonstrate, trivial=True)
        results = evaluation.accuracy_metrics(rollouts) | evaluation.comparisons(
            self.progress, rollouts, held_out, cfg.eval_num_tasks, play_trivial
        )
        if not on_server:
            results |= probes.of_greedy(self.collector.policy, evaluation.played(rollouts))
        for line in evaluation.lines_about(results, update):
            self.display.say(line)
        return results | {"time/eval_s": perf_counter() - started}
