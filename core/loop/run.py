"""A run, as the loop of train.py sees it: its state, and what happens between two updates."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any

from core import diagnostics, distributed, evaluation, memory, probes, tasks
from core.algorithm import Algorithm
from core.batching import Batch
from core.canary import Canary
from core.config import Config, needs
from core.episodes import RolloutCollector
from core.faults import EpisodesFailed, Fault, NoServer, Stopped
from core.feedback import Divergence
from core.files import checkpoint
from core.files.run_folder import again
from core.files.run_log import METRICS, RunLog, read_records
from core.metrics import UpdateStats, rollout_metrics
from core.optimizer import MasterAdamW
from core.policy import Policy, Weights
from core.report import PAGES, write_pages
from core.report.doctor import final_lines
from core.report.token_traces import trace_tokens
from core.results import known
from core.sampler import Sampler, SamplingParams
from core.selection import drop_failed
from core.settings import config_to_dict
from core.terminal.console import Display
from core.terminal.interrupt import Interrupt
from core.types import Rollout
from environments.base import RunInfo

Collected = tuple[list[Rollout], list[Rollout], Canary]  # all, those to train on, its canary
LOGGED_ROLLOUTS = 8  # of an evaluation and environment, in rollouts.jsonl; all of a server
MAX_SKIPPED = 20  # updates in a row without a finite gradient; float16 may need 16 for its scale


@dataclass
class Run:
    """What `open_run` opened, and what a run keeps between updates."""

    cfg: Config
    info: RunInfo  # what the environments know of this run
    algorithm: Algorithm
    policy: Policy
    optimizer: MasterAdamW
    collector: RolloutCollector
    sampler: Sampler
    folder: Path  # runs/<name>
    run_log: RunLog
    display: Display
    interrupt: Interrupt
    progress: dict[str, Any]  # what a checkpoint stores besides weights and optimizer
    older: deque[Weights] = field(default_factory=lambda: deque(maxlen=0))  # of --staleness
    reference: Policy | None = None  # of --kl-coef
    # of --overlap: the rollouts of the next update, while a thread collects them
    ahead: list[Future[Collected]] = field(default_factory=list)
    # before an update, as the policy has other weights while --staleness samples
    save_copy: Callable[[], None] = lambda: None
    history: list[dict[str, Any]] = field(default_factory=list)  # the records
    canary: Canary = ({}, {})  # of the last rollouts: whether the sampler has the policy's weights
    started_at: float = 0.0  # when this update began
    sampled_at: float = 0.0  # when its last rollout was finished
    first_update: int = field(init=False)  # of this process

    def __post_init__(self) -> None:
        self.first_update = max(1, self.next_update)

    @property
    def divergence(self) -> Divergence | None:
        """From the teacher, of an algorithm that needs feedback."""
        return self.cfg.options.divergence if "feedback" in needs(self.cfg) else None

    @property
    def next_update(self) -> int:
        """The update that goes on or comes next; 0: the policy has not been evaluated yet."""
        return self.progress["update"] + 1

    @cached_property
    def probe(self) -> probes.WeightProbe:
        """What looks at the weights before and after an update."""
        return probes.WeightProbe(self.policy)

    @cached_property
    def scores_first(self) -> bool:
        """Whether the policy scores the sampled tokens before the first gradient step of an update.

        Otherwise π_old is found in the pass of the only step.
        """
        cfg = self.cfg
        several_steps = cfg.num_epochs > 1 or cfg.num_minibatches > 1
        return several_steps or bool({"old_logprobs", "value_head"} & needs(cfg))

    def updates(self) -> Iterator[tuple[int, UpdateStats]]:
        """The numbers of the updates from the next one to --num-updates, and stats for each.

        Evaluates the policy before the first, and saves what a warm start has taught it. Ends
        earlier once --max-sampled-tokens are sampled.
        """
        self.history = read_records(self.run_log.folder / METRICS)
        if self.next_update == 0:
            if self.cfg.sft_steps:
                self.save()
            self.save_copy()
            found = probes.of_demonstrations(self.cfg, self.collector)
            found |= self.evaluate(0)
            self.log(0, found, [])
        while self.next_update <= self.cfg.num_updates:
            if 0 < self.cfg.max_sampled_tokens <= self.progress["sampled_tokens"]:
                break
            self.interrupt.check()
            self.started_at = perf_counter()
            self.save_copy()
            self.info.updates_done = self.next_update - 1
            tokens = self.progress["sampled_tokens"]
            self.optimizer.scale_lr(lr_factor(self.cfg, self.next_update, tokens))
            self.probe.begin(self.optimizer)
            yield self.next_update, UpdateStats(self.cfg)

    def sync(self) -> None:
        """Gives the sampler the present weights, once the thread of --overlap has sampled."""
        futures.wait(self.ahead)
        self.sampler.sync()

    def finish_update(
        self, update: int, sampled: list[Rollout], batch: Batch, stats: UpdateStats
    ) -> None:
        """Evaluates, logs and saves, each where it is due; `sampled`: all its rollouts.

        How far the steps moved the tokens of some groups is for the report.
        """
        cfg = self.cfg
        metrics = rollout_metrics(cfg, sampled) | stats.means(batch)
        lr = cfg.lr * lr_factor(cfg, update, self.progress["sampled_tokens"])
        steps = int(sum(known(self.history, "update/steps"))) + stats.num_steps
        norm = stats.grad_norm if stats.num_steps else None
        metrics |= self.probe.metrics(cfg, norm, lr, steps)
        metrics |= probes.of_rollouts(cfg, self.policy, batch)
        metrics |= probes.of_episodes(sampled, batch, metrics.get("reward/correct", 0.0))
        metrics |= trace_tokens(self.policy, cfg, batch, stats)
        seen, self.progress["canary"] = self.canary  # not before: a stopped update begins again
        metrics |= seen
        if cfg.warmup_updates or cfg.lr_schedule != "constant":
            metrics["update/lr"] = lr
        metrics["time/rollout_s"] = self.sampled_at - self.started_at
        metrics["time/train_s"] = perf_counter() - self.sampled_at
        tokens = self.progress["sampled_tokens"] + sum(rollout.num_tokens for rollout in sampled)
        is_last = 0 < cfg.max_sampled_tokens <= tokens or update == cfg.num_updates
        self.info.updates_done = update
        if is_last or evaluates(update, cfg.eval_every):
            metrics |= self.evaluate(update)
        self.progress["sampled_tokens"] = tokens
        self.log(update, metrics, sampled)
        self.progress["level"] = tasks.next_level(cfg, self.progress["level"], sampled)
        if is_last or update == 1 or is_due(update, cfg.save_every):
            self.save()

    def evaluate(self, update: int) -> dict[str, float]:
        """The metrics of one greedy rollout for each held-out task."""
        cfg = self.cfg
        if cfg.eval_num_tasks == 0:
            return {}
        started = perf_counter()
        envs = tasks.held_out_envs(cfg)
        held_out = tasks.eval_tasks(envs, cfg.eval_num_tasks)
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
            results |= probes.of_greedy(self.policy, evaluation.played(rollouts))
        for line in evaluation.lines_about(results, update):
            self.display.say(line)
        return results | {"time/eval_s": perf_counter() - started}

    def say(self, line: str) -> None:
        """Prints a line that stays on the screen."""
        self.display.say(line)

    def log(self, update: int, metrics: dict[str, Any], rollouts: list[Rollout]) -> None:
        """Shows and writes the metrics and rollouts of an update, and warns about bad signs.

        Raises Fault if it is the last of MAX_SKIPPED in a row without a finite gradient.
        """
        record = {"update": update, **metrics}
        if update > 0:
            record["groups/level"] = self.progress["level"]
            drawn = {(rollout.env, rollout.seed) for rollout in rollouts}
            before = {*map(tuple, self.progress.get("tasks", []))}  # of the update before
            record["groups/repeated"] = len(drawn & before) / max(1, len(drawn))
            self.progress["tasks"] = sorted(drawn)
            evaluation.note_trained(self.progress, rollouts)
            if self.sampler.sync_seconds is not None:
                record["time/sync_s"] = self.sampler.sync_seconds
            self.run_log.log_rollouts("train", update, rollouts)
            if update == 1 and (line := diagnostics.how_exact([*self.history, record])):
                self.say(line)
            self.display.update(update, record)
        self.history.append(record)
        # the type, which --dtype auto leaves open, says how large rounding is
        dtype: Any = str(self.policy.dtype).removeprefix("torch.")
        cfg = replace(self.cfg, dtype=dtype)
        warnings = distributed.broadcast_from_rank_0(
            lambda: diagnostics.new_warnings(self.history, cfg)
        )
        if line := self.progress.pop("changed_code", ""):
            warnings["changed_code"] = line
        for name, line in warnings.items():
            self.say(f"warning: {name}: {line}")
        if warnings:
            record["warnings"] = warnings
        self.run_log.log(record)
        if update < self.cfg.num_updates and (update == 0 or evaluates(update, cfg.eval_every)):
            self.write_pages(["report.html"])  # after the last update `finish` writes all
        self.progress["update"] = update
        self._count_skipped(record)

    def save(self) -> bool:
        """Saves a checkpoint, or keeps the last one after an update without a finite gradient.

        Returns whether there is one. After update 1 there always is, as there is no earlier one.
        """
        if self.progress["skipped_in_a_row"] and self.progress["update"] > 1:
            return False
        checkpoint.save_checkpoint(
            self.folder, self.policy, self.optimizer, self.progress, self.older
        )
        return True

    def _count_skipped(self, record: dict[str, Any]) -> None:
        # without different returns there is no gradient, or it is 0: nothing is wrong with that
        skipped = record.get("update/skipped") and record.get("grad/norm", 0.0) != 0.0
        if skipped:
            self.say(f"update {record['update']} skipped: its loss or its gradient is not finite")
        self.progress["skipped_in_a_row"] = self.progress["skipped_in_a_row"] + 1 if skipped else 0
        if self.progress["skipped_in_a_row"] >= MAX_SKIPPED:
            self.write_pages()
            raise Fault(
                f"{MAX_SKIPPED} updates in a row without a finite gradient; the last checkpoint is "
                f"from before: resume it with a lower --lr than {self.cfg.lr:g}"
            )

    @contextmanager
    def saved_when_ended(self) -> Iterator[None]:
        """Saves the run where a signal, a server or failing environments end it inside."""
        resume = again(self.cfg.env, "--resume", str(self.folder))

        def with_less_memory() -> str:
            budget = max(1, self.policy.micro_batch_tokens // 2)
            return f"Resume with: {resume} --max-tokens-per-micro-batch {budget}"

        try:
            with memory.out_of_memory_as_one_line(with_less_memory):
                yield
        except Stopped:
            saved = self.cfg.sampler != "openai" and self.save()
            what = " and saved; resume" if saved else "; resume from the last checkpoint"
            self.write_pages()
            raise Stopped(f"stopped{what} with: {resume}") from None
        except (EpisodesFailed, NoServer) as error:
            failed = isinstance(error, EpisodesFailed)
            # has this update changed nothing yet? Then it can be saved, and begun again
            if self.sampled_at < self.started_at and (failed or distributed.num_ranks() == 1):
                self.save()
            elif failed:  # the weights are of an update that is not complete
                raise
            raise type(error)(f"{error}; resume with: {resume}") from None
        finally:
            self.interrupt.requested = True  # the thread of --overlap checks it, too
            futures.wait(self.ahead)

    def finish(self) -> None:
        """Writes the pages and, after the last update, the model; says what the run shows."""
        self.write_pages()
        if distributed.rank() > 0:
            return
        if self.cfg.sampler != "openai":
            checkpoint.export_model(self.folder, self.policy)
        for line in final_lines(self.folder, config_to_dict(self.cfg)):
            self.say(line)

    def write_pages(self, names: Sequence[str] = PAGES) -> None:
        """Writes the pages of these names."""
        if distributed.rank() == 0:
            for line in write_pages(self.folder, config_to_dict(self.cfg), names):
                self.say(line)


def lr_factor(cfg: Config, update: int, sampled_tokens: int) -> float:
    """The learning rate of an update, as a fraction of --lr; `sampled_tokens`: those before it.

    It rises over --warmup-updates, and then follows --lr-schedule: linear, as that of transformers,
    reaches 0 right after the last update.

    >>> cfg = Config(num_updates=6, warmup_updates=2, lr_schedule="linear")
    >>> [lr_factor(cfg, update, 0) for update in range(1, 7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> lr_factor(Config(max_sampled_tokens=100, lr_schedule="cosine"), 9, 50)
    0.5
    """
    if update <= cfg.warmup_updates:
        return update / cfg.warmup_updates
    done = (update - 1 - cfg.warmup_updates) / max(1, cfg.num_updates - cfg.warmup_updates)
    if cfg.max_sampled_tokens:
        done = max(done, sampled_tokens / cfg.max_sampled_tokens)
    if cfg.lr_schedule == "linear":
        return max(0.0, 1 - done)
    return (1 + math.cos(math.pi * min(1.0, done))) / 2 if cfg.lr_schedule == "cosine" else 1.0


def evaluates(update: int, every: int) -> bool:
    """Whether an evaluation is due: before the first regular one, five times as often.

    >>> [update for update in range(1, 31) if evaluates(update, 10)]
    [2, 4, 6, 8, 10, 20, 30]
    """
    return is_due(update, every // 5 if update < every else every)


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps is due; 0: never.

    >>> [step for step in range(1, 12) if is_due(step, 5)]
    [5, 10]
    """
    return every > 0 and step % every == 0
