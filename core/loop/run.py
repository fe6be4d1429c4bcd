"""The state of a run, and what the loop of train.py does between two updates."""

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
from core.files.run_folder import start_command
from core.files.run_log import METRICS, RunLog, read_records
from core.metrics import UpdateStats, rollout_metrics
from core.optimizer import MasterAdamW
from core.policy import Policy, Weights
from core.report import PAGES, write_pages
from core.report.doctor import final_lines
from core.report.token_traces import trace_tokens
from core.results import finite_values
from core.sampler import Sampler, SamplingParams
from core.selection import drop_failed
from core.settings import config_to_dict
from core.terminal.console import Display
from core.terminal.interrupt import Interrupt
from core.types import Rollout
from environments.base import RunInfo

Collected = tuple[list[Rollout], list[Rollout], Canary]  # all rollouts, those to train on, canary
LOGGED_ROLLOUTS = 8  # of each environment's evaluation, in rollouts.jsonl; with a server all
MAX_SKIPPED = 20  # updates in a row without a finite gradient; float16 may need 16 for its scale


@dataclass
class Run:
    """The objects that `open_run` has opened, and the state that a run keeps between updates."""

    cfg: Config
    info: RunInfo  # for environments: how far this run is
    algorithm: Algorithm
    policy: Policy
    optimizer: MasterAdamW
    collector: RolloutCollector
    sampler: Sampler
    folder: Path  # runs/<name>
    run_log: RunLog
    display: Display
    interrupt: Interrupt
    progress: dict[str, Any]  # stored in a checkpoint besides weights and optimizer
    older: deque[Weights] = field(default_factory=lambda: deque(maxlen=0))  # for --staleness
    reference: Policy | None = None  # for --kl-coef
    # for --overlap: the rollouts of the next update, while a thread collects them
    ahead: list[Future[Collected]] = field(default_factory=list)
    # saves an opponent's copy of the weights; called before --staleness exchanges them
    save_copy: Callable[[], None] = lambda: None
    history: list[dict[str, Any]] = field(default_factory=list)  # the records of metrics.jsonl
    canary: Canary = ({}, {})  # of the last rollouts: whether the sampler has the policy's weights
    started_at: float = 0.0  # time at which this update began
    sampled_at: float = 0.0  # time at which its last rollout ended
    first_update: int = field(init=False)  # that this process makes; a resumed run has earlier ones

    def __post_init__(self) -> None:
        self.first_update = max(1, self.next_update)

    @property
    def divergence(self) -> Divergence | None:
        """The divergence from the teacher in the loss of an algorithm that needs feedback."""
        return self.cfg.options.divergence if "feedback" in needs(self.cfg) else None

    @property
    def next_update(self) -> int:
        """The number of the present or next update; 0: the policy has not been evaluated yet."""
        return self.progress["update"] + 1

    @cached_property
    def probe(self) -> probes.WeightProbe:
        """Compares the weights before and after an update."""
        return probes.WeightProbe(self.policy)

    @cached_property
    def scores_first(self) -> bool:
        """Whether the policy scores the sampled tokens before the first gradient step of an update.

        If not, an update has one step, and π_old is computed in the forward pass of that step.
        """
        cfg = self.cfg
        several_steps = cfg.num_epochs > 1 or cfg.num_minibatches > 1
        return several_steps or bool({"old_logprobs", "value_head"} & needs(cfg))

    def updates(self) -> Iterator[tuple[int, UpdateStats]]:
        """The numbers of the updates from the next one to --num-updates, and stats for each.

        Before the first update, saves the policy if it had a warm start, and evaluates it. Ends
        earlier once --max-sampled-tokens are sampled.
        """
        self.history = read_records(self.run_log.folder / METRICS)
        if self.next_update == 0:
            if self.cfg.sft_steps:
                self.save()
            self.save_copy()
            metrics = probes.of_demonstrations(self.cfg, self.collector)
            metrics |= self.evaluate(0)
            self.log(0, metrics, [])
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
        """Logs an update; evaluates and saves if that is due. `sampled`: all its rollouts."""
        cfg = self.cfg
        metrics = rollout_metrics(cfg, sampled) | stats.means(batch)
        lr = cfg.lr * lr_factor(cfg, update, self.progress["sampled_tokens"])
        steps = int(sum(finite_values(self.history, "update/steps"))) + stats.num_steps
        norm = stats.grad_norm if stats.num_steps else None
        metrics |= self.probe.metrics(cfg, norm, lr, steps)
        metrics |= probes.of_rollouts(cfg, self.policy, batch)
        metrics |= probes.of_episodes(sampled, batch, metrics.get("reward/correct", 0.0))
        metrics |= trace_tokens(self.policy, cfg, batch, stats)
        canary_metrics, canary_state = self.canary
        metrics |= canary_metrics
        self.progress["canary"] = canary_state  # not before: a stopped update begins again
        if cfg.warmup_updates or cfg.lr_schedule != "constant":
            metrics["update/lr"] = lr
        metrics["time/rollout_s"] = self.sampled_at - self.started_at
        metrics["time/train_s"] = perf_counter() - self.sampled_at
        tokens = self.progress["sampled_tokens"] + sum(rollout.num_tokens for rollout in sampled)
        is_last = 0 < cfg.max_sampled_tokens <= tokens or update == cfg.num_updates
        self.info.updates_done = update
        if is_last or evaluation_is_due(update, cfg.eval_every):
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
            of_env = [rollout for rollout in rollouts if rollout.env == env]
            logged = of_env if on_server else of_env[:LOGGED_ROLLOUTS]
            self.run_log.log_rollouts("eval", update, logged)
        drop_failed(rollouts, self.say)  # warns; raises if over half failed
        play_trivial = partial(self.collector.demonstrate, trivial=True)
        results = evaluation.accuracy_metrics(rollouts) | evaluation.comparisons(
            self.progress, rollouts, held_out, cfg.eval_num_tasks, play_trivial
        )
        if not on_server:
            results |= probes.of_greedy(self.policy, evaluation.played(rollouts))
        for line in evaluation.lines_about(results, update):
            self.say(line)
        return results | {"time/eval_s": perf_counter() - started}

    def say(self, line: str) -> None:
        self.display.say(line)

    def log(self, update: int, metrics: dict[str, Any], rollouts: list[Rollout]) -> None:
        """Prints and writes the metrics and rollouts of an update, and warns about bad signs.

        Raises Fault if it is the last of MAX_SKIPPED in a row without a finite gradient.
        """
        record = {"update": update, **metrics}
        if update > 0:
            record["groups/level"] = self.progress["level"]
            task_keys = {(rollout.env, rollout.seed) for rollout in rollouts}
            before = {*map(tuple, self.progress.get("tasks", []))}  # of the update before
            record["groups/repeated"] = len(task_keys & before) / max(1, len(task_keys))
            self.progress["tasks"] = sorted(task_keys)
            evaluation.note_trained(self.progress, rollouts)
            if self.sampler.sync_seconds is not None:
                record["time/sync_s"] = self.sampler.sync_seconds
            self.run_log.log_rollouts("train", update, rollouts)
            if update == 1 and (line := diagnostics.how_exact([*self.history, record])):
                self.say(line)
            self.display.update(update, record)
        self.history.append(record)
        # how large rounding is depends on the dtype, which --dtype auto leaves open
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
        evaluated = update == 0 or evaluation_is_due(update, cfg.eval_every)
        if evaluated and update < self.cfg.num_updates:
            self.write_pages(["report.html"])  # after the last update `finish` writes all pages
        self.progress["update"] = update
        self._count_skipped(record)

    def save(self) -> bool:
        """Saves a checkpoint, unless the last update had no finite gradient.

        Returns whether it did. After update 1 it always does: RL has no earlier checkpoint.
        """
        if self.progress["skipped_in_a_row"] and self.progress["update"] > 1:
            return False
        checkpoint.save_checkpoint(
            self.folder, self.policy, self.optimizer, self.progress, self.older
        )
        return True

    def _count_skipped(self, record: dict[str, Any]) -> None:
        # if all returns of each group are equal, the gradient is missing or 0, and that is right
        skipped = record.get("update/skipped") and record.get("grad/norm", 0.0) != 0.0
        if skipped:
            self.say(f"update {record['update']} skipped: its loss or its gradient is not finite")
            self.progress["skipped_in_a_row"] += 1
        else:
            self.progress["skipped_in_a_row"] = 0
        if self.progress["skipped_in_a_row"] >= MAX_SKIPPED:
            self.write_pages()
            raise Fault(
                f"{MAX_SKIPPED} updates in a row without a finite gradient; the last checkpoint is "
                f"from before: resume it with a lower --lr than {self.cfg.lr:g}"
            )

    @contextmanager
    def save_when_stopped(self) -> Iterator[None]:
        """Saves the run if a signal, a server or failing environments stop it inside."""
        resume = start_command(self.cfg.env, "--resume", str(self.folder))

        def with_less_memory() -> str:
            budget = max(1, self.policy.micro_batch_tokens // 2)
            return f"Resume with: {resume} --max-tokens-per-micro-batch {budget}"

        try:
            with memory.out_of_memory_as_one_line(with_less_memory):
                yield
        except Stopped:
            saved = self.cfg.sampler != "openai" and self.save()
            state = " and saved; resume" if saved else "; resume from the last checkpoint"
            self.write_pages()
            raise Stopped(f"stopped{state} with: {resume}") from None
        except (EpisodesFailed, NoServer) as error:
            failed = isinstance(error, EpisodesFailed)
            unchanged = self.sampled_at < self.started_at  # this update has taken no step yet
            if unchanged and (failed or distributed.num_ranks() == 1):
                self.save()  # the resumed run begins this update again
            elif failed:  # the weights are of an update that is not complete
                raise
            raise type(error)(f"{error}; resume with: {resume}") from None
        finally:
            self.interrupt.requested = True  # ends the thread of --overlap, too
            futures.wait(self.ahead)

    def finish(self) -> None:
        """Writes the pages and the model; prints the result of the run."""
        self.write_pages()
        if distributed.rank() > 0:
            return
        if self.cfg.sampler != "openai":
            checkpoint.export_model(self.folder, self.policy)
        for line in final_lines(self.folder, config_to_dict(self.cfg)):
            self.say(line)

    def write_pages(self, names: Sequence[str] = PAGES) -> None:
        if distributed.rank() == 0:
            for line in write_pages(self.folder, config_to_dict(self.cfg), names):
                self.say(line)


def lr_factor(cfg: Config, update: int, sampled_tokens: int) -> float:
    """The learning rate of an update, as a fraction of --lr; `sampled_tokens`: before this update.

    It rises over --warmup-updates, and then follows --lr-schedule. `linear` reaches 0 right after
    the last update, as that of transformers does.

    >>> cfg = Config(num_updates=6, warmup_updates=2, lr_schedule="linear")
    >>> [lr_factor(cfg, update, 0) for update in range(1, 7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> lr_factor(Config(max_sampled_tokens=100, lr_schedule="cosine"), 9, 50)
    0.5
    """
    if update <= cfg.warmup_updates:
        return update / cfg.warmup_updates
    fraction = (update - 1 - cfg.warmup_updates) / max(1, cfg.num_updates - cfg.warmup_updates)
    if cfg.max_sampled_tokens:
        fraction = max(fraction, sampled_tokens / cfg.max_sampled_tokens)
    if cfg.lr_schedule == "linear":
        return max(0.0, 1 - fraction)
    if cfg.lr_schedule == "cosine":
        return (1 + math.cos(math.pi * min(1.0, fraction))) / 2
    return 1.0


def evaluation_is_due(update: int, every: int) -> bool:
    """Whether an evaluation is due. Before the first regular one it is due five times as often.

    >>> [update for update in range(1, 31) if evaluation_is_due(update, 10)]
    [2, 4, 6, 8, 10, 20, 30]
    """
    return is_due(update, every // 5 if update < every else every)


def is_due(step: int, every: int) -> bool:
    """Whether an event of every `every` steps is due at this step; 0: never.

    >>> [step for step in range(1, 12) if is_due(step, 5)]
    [5, 10]
    """
    return every > 0 and step % every == 0
