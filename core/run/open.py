"""Opens everything that a run needs, and closes it on exit: policy, optimizer, sampler, files."""

import copy
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from core import STARTED, config, distributed, evaluation, tasks
from core.algorithm import FOLDER, name_of, title_of
from core.config import RUNS, Config
from core.context import Renderer
from core.episodes import RolloutCollector
from core.nanollm import make_sampler
from core.optimizer import MasterAdamW, make_optimizer
from core.policy import Policy
from core.pool import is_program as is_agent_program
from core.report import write_pages
from core.report.summary import final_lines
from core.run import checkpoint, diagnostics, memory
from core.run import folder as run_dir
from core.run import log as run_log
from core.run.console import Display, print_line
from core.run.files import scratch_folder
from core.run.interrupt import Interrupt, is_program
from core.run.models import load_policy
from core.run.reference import reference_bytes
from core.run.staleness import Weights
from core.run.writer import Writer
from core.sampler import Sampler, SamplingParams, TorchSampler
from core.selection import drop_failed
from core.tasks import Task
from core.types import Rollout, Stopped, UsageError
from environments import Env, rewarded
from environments.registry import constructor, meanings, short, split_spec

LOGGED_ROLLOUTS = 8  # of each evaluation, in rollouts.jsonl; all with --sampler openai
MAX_PAGES = 0.03  # fraction of a run's time that may go into its pages
FIRST_PAGES = 2.0  # seconds to expect of the first ones, which import matplotlib
MAX_SKIPPED = 20  # updates in a row without a finite gradient; float16 may need 16 for its scale


@dataclass
class Run:
    """Everything that a run keeps between updates."""

    cfg: Config
    folder: Path  # runs/<name>
    policy: Policy
    optimizer: MasterAdamW
    collector: RolloutCollector
    sampler: Sampler
    run_log: run_log.RunLog
    display: Display
    writer: Writer
    interrupt: Interrupt
    progress: dict[str, Any]  # what a checkpoint stores besides weights and optimizer
    history: list[dict[str, Any]] = field(default_factory=list)  # inputs of the warnings
    older: deque[Weights] = field(default_factory=lambda: deque(maxlen=0))  # of --staleness
    notes: dict[str, str] = field(default_factory=dict)  # for the next update's record
    stopped: bool = False  # ended before the last update
    saved: Path | None = None  # the last checkpoint
    opened_at: float = field(default_factory=perf_counter)
    started_at: float = 0.0  # when this update began
    sampled_at: float = 0.0  # when its last rollout was finished
    page_seconds: list[float] = field(default_factory=list)  # of each time the pages were written
    start_seconds: dict[str, float] = field(default_factory=dict)  # for the first record

    @property
    def next_update(self) -> int:
        """The update to continue with; 0: the policy has not been evaluated yet."""
        return self.progress["update"] + 1

    def updates(self) -> Iterator[int]:
        """The numbers of the updates from the next one to --num-updates.

        Evaluates the policy before the first, and saves what a warm start has taught it. Ends
        earlier once --max-sampled-tokens are sampled, or if `log` has stopped the run.
        """
        rewarded.STATE.max_steps = self.cfg.num_updates
        if self.next_update == 0:
            if self.cfg.sft_steps:
                self.save()
                of_warm_start = run_log.read_records(self.folder / run_log.METRICS)
                self.history = [*map(diagnostics.warning_inputs, of_warm_start)]
            self.log(0, self.evaluate(0), [])
        while self.next_update <= self.cfg.num_updates and not self.stopped:
            if 0 < self.cfg.max_sampled_tokens <= self.progress["sampled_tokens"]:
                break
            self.interrupt.check()
            self.writer.check()
            self.started_at = perf_counter()
            rewarded.STATE.global_step = self.next_update - 1  # updates that are complete
            yield self.next_update

    def finish_update(
        self, update: int, sampled: list[Rollout], metrics: dict[str, Any], next_level: int
    ) -> None:
        """Evaluates, logs and saves, each where it is due.

        `sampled`: all rollouts of the update; `next_level`: of the tasks of the next one.
        """
        cfg = self.cfg
        metrics["time/rollout_s"] = self.sampled_at - self.started_at
        metrics["time/train_s"] = perf_counter() - self.sampled_at
        tokens = self.progress["sampled_tokens"] + sum(rollout.num_tokens for rollout in sampled)
        is_last = 0 < cfg.max_sampled_tokens <= tokens or update == cfg.num_updates
        # before the first regular evaluation, evaluations are five times as frequent
        every = cfg.eval_every // 5 if update < cfg.eval_every else cfg.eval_every
        if is_last or is_due(update, every):
            metrics |= self.evaluate(update)
        self.progress["sampled_tokens"] = tokens
        stop = self.log(update, metrics, sampled)
        self.progress["level"] = next_level
        if stop or is_last or update == 1 or is_due(update, cfg.save_every):
            self.save()

    def say(self, line: str) -> None:
        """Prints a line that stays on the screen."""
        self.display.say(line)

    def log(self, update: int, metrics: dict[str, Any], rollouts: list[Rollout]) -> bool:
        """Shows and writes the metrics and rollouts of an update, and warns about bad signs.

        Returns whether the run has to stop: because of --stop-on, or because MAX_SKIPPED updates in
        a row had no finite gradient.
        """
        record = {"update": update, **metrics, **self.start_seconds}
        self.start_seconds = {}
        if update > 0:
            record["groups/level"] = self.progress["level"]
            if self.cfg.lora_rank:
                record["lora/zero_fraction"] = self.policy.zero_adapters()
            if self.sampler.sync_seconds is not None:
                record["time/sync_s"] = self.sampler.sync_seconds
            self.run_log.log_rollouts("train", update, rollouts)
            self.display.update(update, record, rollouts)
        self.history.append(diagnostics.warning_inputs(record))
        by_group = "groups" in config.needs(self.cfg)
        advice = diagnostics.advice_without_reward(self.cfg)
        warnings = distributed.broadcast_from_rank_0(
            lambda: diagnostics.new_warnings(self.history, by_group, advice, self.cfg)
        )
        if self.cfg.staleness:
            warnings.pop("sampler_gap", None)  # the sampler has older weights
        for name, line in warnings.items():
            self.say(f"warning: {name}: {line}")
        if warnings or self.notes:
            record["warnings"], self.notes = warnings | self.notes, {}
        self.run_log.log(record)
        if update > 0 and any(name.startswith("eval/") for name in record):
            self._write_pages()
        self.progress["update"] = update
        self.stopped = self._too_many_skipped(record) or self._stops_on(list(warnings))
        return self.stopped

    def evaluate(self, update: int) -> dict[str, float]:
        """The metrics of one greedy rollout for each held-out task; logs the first rollouts.

        Ctrl-C ends an evaluation of --sampler openai: it logs the episodes that ended, then raises
        Stopped.
        """
        if self.cfg.eval_num_tasks == 0:
            return {}
        rewarded.STATE.global_step = update
        started, on_server = perf_counter(), self.cfg.sampler == "openai"
        held_out = evaluation.held_out_tasks(self.cfg)
        greedy = SamplingParams(self.cfg.max_tokens, temperature=0.0)
        rollouts = sample_held_out(self, held_out, greedy)
        stopped = on_server and self.interrupt.requested
        logged = rollouts if on_server else rollouts[:LOGGED_ROLLOUTS]
        self.run_log.log_rollouts("eval", update, logged)
        if not stopped:
            drop_failed(rollouts, self.say)  # warns; raises if over half failed
        results = evaluation.accuracy_metrics(rollouts)
        if self.cfg.eval_samples and not stopped:
            repeated = evaluation.repeated_tasks(self.cfg, held_out)
            sampled = sample_held_out(self, *repeated)
            results |= evaluation.pass_at_k(rollouts, sampled, self.cfg.eval_samples)
            for line in evaluation.left_out_lines(results, self.cfg.eval_samples):
                self.say(line)
        is_first = "first_correct" not in self.progress
        if not stopped:
            play_trivial = partial(self.collector.demonstrate, trivial=True)
            results |= evaluation.comparisons(self.progress, rollouts, held_out, play_trivial)
        for line in evaluation.accuracy_lines(rollouts, results):
            self.say(f"held-out accuracy at update {update}: {line}")
        for line in evaluation.few_tasks_lines(rollouts, results) if is_first else []:
            self.say(line)
        for line in evaluation.changed_lines(results):
            self.say(line)
        if stopped:
            self.log(update, results, [])
            raise Stopped
        return results | {"time/eval_s": perf_counter() - started}

    def drop_failed(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts whose environment did not fail; if over half failed, saves and raises."""
        try:
            return drop_failed(rollouts, self.say)
        except UsageError as error:
            if self.next_update == 0:
                raise
            self.save()
            raise UsageError(f"{error}; resume with: {self.resume_command()}") from None

    def save(self) -> bool:
        """Saves a checkpoint, or keeps the last one after an update without a finite gradient.

        It is written while the run goes on. Returns whether there is one. After update 1 there
        always is, as there is no earlier one.
        """
        if self.progress["skipped_in_a_row"] and self.progress["update"] > 1:
            return False
        self.writer.wait()  # for the one before
        progress = copy.deepcopy(self.progress) | self.run_log.sync()
        self.saved = checkpoint.save_checkpoint(
            self.folder, self.policy, self.optimizer, progress, self.older, self.writer
        )
        return True

    def _write_pages(self) -> None:
        """Writes report.html and curves.png, unless that takes more than 3% of the run's time."""
        spent, longest = sum(self.page_seconds), max(self.page_seconds, default=FIRST_PAGES)
        started = perf_counter()
        too_long = spent + longest > MAX_PAGES * (started - self.opened_at)
        if distributed.rank() > 0 or too_long:
            return
        for line in write_pages(self.folder, run_dir.config_to_dict(self.cfg)):
            self.say(line)
        self.page_seconds.append(perf_counter() - started)

    def _stops_on(self, warnings: list[str]) -> bool:
        named = [w for w in warnings if w in self.cfg.stop_on or "any" in self.cfg.stop_on]
        if named:
            self.say(f"--stop-on {named[0]}: stopped; resume with: {self.resume_command()}")
        return bool(named)

    def _too_many_skipped(self, record: dict[str, Any]) -> bool:
        # without different returns there is no gradient, or it is 0: nothing is wrong with that
        skipped = record.get("update/skipped") and record.get("grad/norm", 0.0) != 0.0
        self.progress["skipped_in_a_row"] = self.progress["skipped_in_a_row"] + 1 if skipped else 0
        too_many = self.progress["skipped_in_a_row"] >= MAX_SKIPPED
        if too_many:
            self.say(f"{MAX_SKIPPED} updates in a row without a finite gradient: stopped. "
                     "The last checkpoint is from before; "
                     f"try a lower --lr than {self.cfg.lr:g}")  # fmt: skip
        return too_many

    def resume_command(self) -> str:
        """The command that resumes this run."""
        trust = config.trust_flags(vars(self.cfg), self.folder / "config.yaml")
        return run_dir.train_command("--resume", str(self.folder), *trust)

    def command_with_less_memory(self) -> str:
        """What to do when memory runs out: resume with half the micro-batch budget."""
        budget = max(1, self.policy.micro_batch_tokens // 2)
        return f"Resume with: {self.resume_command()} --max-tokens-per-micro-batch {budget}"


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps is due; 0: never.

    >>> [step for step in range(1, 12) if is_due(step, 5)]
    [5, 10]
    """
    return every > 0 and step % every == 0


def sample_held_out(run: Run, held_out: list[Task], params: SamplingParams) -> list[Rollout]:
    """One rollout per task and agent."""
    with run.display.phase("evaluation", params.max_tokens, unit="tokens") as phase, run.sampler:

        def on_progress() -> None:
            phase.advance(run.sampler.latest, quiet=True)
            if run.interrupt.requested:
                run.sampler.stop()

        return run.collector.collect(held_out, run.sampler, params, on_progress)


@contextmanager
def open_run(cfg: Config, algorithm: Any) -> Iterator[Run]:
    """Creates the folder of a new run, or opens that of `cfg.resume`, and all that the run needs.

    Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 save the run and raise Stopped. On exit, writes report.html,
    curves.png, README.md and, for a run that reached its last update, the model. Raises UsageError
    for invalid settings; then no new folder is left behind.
    """
    with distributed.process_group(cfg.device), scratch_folder() as scratch_dir:
        restarted = distributed.is_restarted()
        folder, is_new = distributed.broadcast_from_rank_0(lambda: folder_of(cfg, restarted))
        cfg = distributed.broadcast_from_rank_0(lambda: with_date(cfg, folder, is_new))
        settings = run_dir.config_to_dict(cfg)
        if is_new:
            folder = distributed.broadcast_from_rank_0(
                lambda: run_dir.create_run(folder, settings, take_next=not cfg.run_name)
            )
        is_writer = distributed.rank() == 0
        with run_dir.lock_run_dir(folder, settings, is_new) if is_writer else nullcontext():
            distributed.check_shared(folder)
            # ranks other than 0 write into a folder that is thrown away
            log_dir = folder if is_writer else scratch_dir
            with _opened(cfg, algorithm, folder, log_dir, is_new) as run:
                interrupted = saved = False
                try:
                    with memory.out_of_memory_as_one_line(run.command_with_less_memory):
                        yield run
                except Stopped:
                    interrupted = True
                    if cfg.sampler != "openai":
                        saved = run.save()
            if interrupted and cfg.sampler == "openai":  # the pages would take seconds
                raise Stopped(f"stopped; the episodes that ended are in {folder}/rollouts.jsonl")
            if is_writer:
                for line in write_pages(run.folder, settings):
                    run.say(line)
            if interrupted:
                what = " and saved; resume" if saved else "; resume from the last checkpoint"
                raise Stopped(f"stopped{what} with: {run.resume_command()}")
            if is_writer and not run.stopped:
                if cfg.sampler != "openai":
                    latest = checkpoint.folder_of(run.folder, run.progress)
                    same = run.saved if run.saved == latest else None  # of the same weights
                    checkpoint.export_model(run.folder, run.policy, same)
                for line in final_lines(run.folder, settings):
                    print_line(line, Console(highlight=False))


def folder_of(cfg: Config, restarted: bool = False) -> tuple[Path, bool]:
    """The run's folder, and whether it is new. Raises UsageError for a name that is taken."""
    if cfg.resume:
        return Path(cfg.resume), False
    if distributed.may_restart() and not cfg.run_name:
        raise UsageError("torchrun --max-restarts needs a --run-name, to find the run to resume")
    if restarted and (RUNS / cfg.run_name).exists():
        return RUNS / cfg.run_name, False
    names = [split_spec(spec)[0].rpartition(":")[2] for spec in cfg.env]  # of module:Class, Class
    stem = f"{name_of(cfg.algo)}-{'+'.join(names)}"
    return run_dir.new_folder(RUNS, cfg.run_name, stem[: config.MAX_NAME_BYTES]), True


def with_date(cfg: Config, folder: Path, is_new: bool) -> Config:
    """The settings with the date of the run's start for the chat template, if it may show a date.

    A run that torchrun restarts keeps its date.
    """
    if cfg.template_date or cfg.model_id in (*config.TINY, config.SMOLLM2):
        return cfg
    if cfg.sampler == "openai":  # the server has the template
        return cfg
    saved = "" if is_new else run_dir.read_config(folder / "config.yaml").template_date
    return replace(cfg, template_date=saved or date.today().isoformat())


@contextmanager
def _opened(cfg: Config, algorithm: Any, folder: Path, log_dir: Path, new: bool) -> Iterator[Run]:
    started = perf_counter()
    found = checkpoint.ResumePoint() if new else checkpoint.find_checkpoint(folder)
    smaller = memory.smaller_weights(cfg.lora_rank, cfg.quantize != "none")
    advice = f"Use {smaller}--optimizer adamw8bit, a lower --max-model-len or a smaller model"
    with memory.out_of_memory_as_one_line(lambda: advice):
        policy = _load_policy(cfg, folder)
        if policy.device.type == "cuda" and policy.dtype.itemsize == 2:
            # TF32 for the float32 LoRA adapters; products of 16-bit numbers are exact in TF32
            torch.set_float32_matmul_precision("high")
        progress = checkpoint.START | found.progress
        opponents = None
        if config.opponents(cfg):
            from core.extras.opponents import Opponents

            opponents = Opponents(cfg, policy, folder, progress)
        optimizer = optimizer_for(cfg, policy)  # warm_start sets its own learning rate
        older = deque[Weights](maxlen=cfg.staleness)
        if found.folder:
            checkpoint.load_checkpoint(found.folder, policy, optimizer)
            older.extend(checkpoint.load_older(found.folder))
        reserved = reference_bytes(cfg, policy)
        loaded = perf_counter()
        sampler = _make_sampler(cfg, policy, algorithm, reserved)
        future_bytes = reserved + optimizer.gradient_bytes()
        start_seconds = {"model": loaded - started, "sampler": perf_counter() - loaded}
        if is_program():
            start_seconds["import"] = started - STARTED
        remarks = memory.set_micro_batch_budget(policy, cfg, future_bytes)
    damage = distributed.broadcast_from_rank_0(
        lambda: run_log.rewind(log_dir, found.progress, cfg.trust)
    )
    changes = distributed.broadcast_from_rank_0(
        lambda: {} if new else run_dir.changed_settings(cfg, folder)
    )
    changed = {name: f"{name} {before} -> {now}" for name, (before, now) in changes.items()}
    recorded = [line for name, line in changed.items() if name not in config.FREE_ON_RESUME]
    notes = {"damaged_log": damage, "changed_settings": ", ".join(recorded)}
    notes = {name: line for name, line in notes.items() if line}
    records = run_log.read_records(log_dir / run_log.METRICS)
    settings = run_dir.config_to_dict(cfg)
    run_dir.write_config(log_dir, settings)
    algo = title_of(cfg.algo, getattr(algorithm, "variant", cfg.options.loss_type))
    file = Path(algorithm.__file__)
    if FOLDER not in file.parents:  # a file of the user's, which the run keeps
        with suppress(shutil.SameFileError):
            shutil.copy(file, log_dir)
    remarks = [*remarks, *getattr(algorithm, "remarks", ())]
    ranks = f" x {distributed.num_ranks()}" if distributed.num_ranks() > 1 else ""
    title = f"picoRL · {algo} · {' '.join(map(short, cfg.env))} · {policy.size()}{ranks}"
    with (
        closing(sampler),
        Interrupt() as interrupt,
        run_log.RunLog(log_dir, settings, cfg.track if log_dir == folder else "none") as log,
        Display(
            title,
            None,
            log_dir != folder,
            meanings(cfg.env, trust=True),
            0 if cfg.max_sampled_tokens else cfg.num_updates,
        ) as display,
        Writer(display) as writer,
    ):
        sampler.say = interrupt.say = display.say
        resumed = f"changed at this resume: {', '.join(changed.values())}" if changed else ""
        own = [*found.remarks, damage, resumed, policy.remark, sampler.remark]
        of_settings = config.remarks(cfg, distributed.num_ranks())
        for line in filter(None, [*own, *of_settings, *remarks]):
            display.say(line)
        display.say(f"report: {folder / 'report.html'}  (written at evaluations; reload it)")
        history = [diagnostics.warning_inputs(record) for record in records]
        renderer = Renderer
        if any(map(tasks.has_tools, (*cfg.env, *cfg.eval_env))):
            from core.extras.tools import ToolRenderer as renderer
        with closing(RolloutCollector(
            policy, cfg.max_turns, cfg.thinking == "drop", cfg.env_timeout,
            env_instances=cfg.env_instances, system_prompt=cfg.system_prompt, renderer=renderer,
        )) as collector:  # fmt: skip
            collector.pool.threads.say, collector.opponents = display.say, opponents
            for spec in dict.fromkeys((*cfg.env, *cfg.eval_env)):
                if split_spec(spec)[0] == "rewarded":
                    render, length = collector.renderer.first_prompt, policy.max_length
                    if line := rewarded.leave_out(spec, render, length):
                        display.say(line)
            if any(map(is_agent_program, (*cfg.env, *cfg.eval_env))):
                from core.extras import agents

                collector.play_program = partial(agents.play_program, collector)
            yield Run(
                cfg, folder, policy, optimizer, collector, sampler, log, display, writer, interrupt,
                progress, history, older, notes,
                start_seconds={f"time/start_{k}_s": v for k, v in start_seconds.items()},
            )  # fmt: skip


def _load_policy(cfg: Config, folder: Path) -> Policy:
    # with --sampler openai the server has the model; tiny's tokenizer counts the tokens here
    model_id = "tiny" if cfg.sampler == "openai" else cfg.model_id
    return distributed.rank_0_first(lambda: load_policy(
        cfg, model_id, folder / "base", cfg.quantize, lora_rank=cfg.lora_rank,
        lora_alpha=cfg.lora_alpha, value_head="value_head" in config.needs(cfg),
    ))  # fmt: skip


def optimizer_for(cfg: Config, policy: Policy) -> MasterAdamW:
    """The optimizer of a run, with the learning rates of RL.

    Raises UsageError if it does not suit the weights, or if there is no GPU to offload from.
    """
    if cfg.optimizer == "adamw_bf16_sr" and policy.dtype != torch.bfloat16:
        raise UsageError("--optimizer adamw_bf16_sr needs bfloat16 weights; add --dtype bfloat16")
    if cfg.offload_optimizer and policy.device.type != "cuda":
        raise UsageError("--offload-optimizer moves the optimizer from a GPU to the host's memory; "
                         f"remove it with --device {policy.device.type}")  # fmt: skip
    kind, options = MasterAdamW, dict[str, Any]()
    if cfg.optimizer != "adamw":
        from core.extras.piecewise_adamw import optimizer_options

        options = optimizer_options(cfg.optimizer, cfg.seed)
    elif cfg.shard_optimizer != "off" and distributed.num_ranks() > 1:
        from core.extras.sharded_optimizer import ShardedAdamW as kind
    return make_optimizer(
        policy, cfg.lr, cfg.options.value_lr, kind, offload=cfg.offload_optimizer, **options
    )


def _make_sampler(cfg: Config, policy: Policy, algorithm: Any, reserved: int) -> Sampler:
    if cfg.sampler == "openai":
        from core.extras.openai_sampler import OpenAISampler

        return OpenAISampler(policy, cfg.base_url, cfg.model_id)
    if hasattr(algorithm, "draw"):
        return TorchSampler(policy, algorithm.draw)
    # the trainer has to know which tokens top-k and top-p kept
    drops_tokens = cfg.top_p < 1 or cfg.top_k > 0
    return make_sampler(cfg.sampler, policy, cfg.gpu_memory_utilization, reserved, cfg.vllm_eager,
                        drops_tokens, num_rollouts(cfg))  # fmt: skip


def num_rollouts(cfg: Config) -> int:
    """How many completions this rank samples at the same time, at most; 0: unknown, as for games.

    >>> num_rollouts(Config(num_prompts=16, group_size=8, eval_num_tasks=100))
    128
    >>> num_rollouts(Config(env=("iterated_game",)))
    0
    """
    if not all(map(has_one_agent, (*cfg.env, *cfg.eval_env))):
        return 0
    trained = cfg.num_prompts * cfg.group_size if cfg.num_updates else 0
    evaluated = cfg.eval_num_tasks * max(1, cfg.eval_samples) * len(cfg.eval_env or cfg.env)
    return -(-max(trained, evaluated) // distributed.num_ranks())


def has_one_agent(spec: str) -> bool:
    """Whether an episode never asks for several completions at the same time; False: unknown."""
    made: Any = constructor(spec)
    return isinstance(made, type) and issubclass(made, Env) and not is_agent_program(spec)
