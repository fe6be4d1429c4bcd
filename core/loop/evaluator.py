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
from core.metrics import by_seat, opening_of
from core.sampler import Sampler, SamplingParams
from core.selection import drop_failed
from core.tasks import Task, eval_tasks, held_out_envs
from core.terminal.console import Display
from core.types import Rollout

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
        rollouts = self._play(held_out, greedy)
        logged = [
            rollout
            for env in dict.fromkeys(rollout.env for rollout in rollouts)
            for rollout in [r for r in rollouts if r.env == env][:LOGGED_ROLLOUTS]
        ]
        on_server = cfg.sampler == "openai"
        self.run_log.log_rollouts("eval", update, rollouts if on_server else logged)
        drop_failed(rollouts, self.display.say)  # warns; raises if over half failed
        results, counted = evaluation.accuracy_metrics(rollouts), evaluation.played(rollouts)
        results |= evaluation.of_answers(self.progress, rollouts, envs, cfg.eval_num_tasks)
        openings = {hash(opening_of(rollout)) for rollout in rollouts}
        known = {*self.progress.setdefault("seen_openings", [])}
        followed = {*self.progress.get("held_out_openings", [])}  # `note_trained` looked for them
        self.progress["held_out_openings"] = sorted(followed | openings)
        for env, own in by_seat(counted).items():
            begun = [hash(opening_of(rollout)) for rollout in own]
            if seen := [opening in known for opening in begun if opening in followed]:
                results[f"eval/{env}/seen"] = sum(seen) / len(seen)
        play_trivial = partial(self.collector.demonstrate, trivial=True)
        results |= evaluation.comparisons(self.progress, counted, held_out, play_trivial)
        if not on_server:
            results |= probes.of_greedy(self.collector.policy, counted)
        for line in evaluation.lines_about(counted, results, update):
            self.display.say(line)
        return results | {"time/eval_s": perf_counter() - started}

    def note_trained(self, rollouts: list[Rollout]) -> None:
        """Keeps which first prompts of the held-out tasks were those of training, too."""
        held_out, seen = ({*self.progress.get(name, [])}
                          for name in ("held_out_openings", "seen_openings"))  # fmt: skip
        trained = {hash(prompt) for rollout in rollouts if (prompt := opening_of(rollout))}
        self.progress["seen_openings"] = sorted(seen | trained & held_out)

    def _play(self, held_out: list[Task], params: SamplingParams) -> list[Rollout]:
        """One rollout per task and agent."""
        with self.display.phase("evaluation", params.max_tokens) as advance, self.sampler:
            return self.collector.collect(held_out, self.sampler, params, advance)
