"""What the loop stands on, opened from the settings and closed whatever happens."""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from core import checkpoint, config, diagnostics, distributed, memory, run_log, selection
from core import run_dir as run_folder
from core.console import Display
from core.interrupt import Interrupt
from core.model import Policy, load_policy
from core.nanollm import make_sampler
from core.openai_sampler import OpenAISampler
from core.optimizer import MasterAdamW, make_optimizer
from core.reference import make_reference, reference_memory
from core.rollouts import BatchedEnv
from core.sampler import Sampler, TorchSampler
from core.types import Rollout, UsageError
from core.workshop import as_algorithm

SKIPS_IN_A_ROW = 10  # so many updates without a finite loss, and the run stops


@dataclass
class Run:
    """Everything that lasts from the first step to the last."""

    folder: Path
    policy: Policy
    optimizer: MasterAdamW
    batched_env: BatchedEnv  # plays
    sampler: Sampler  # writes
    log: run_log.Journal
    display: Display
    stop: Interrupt
    progress: dict[str, Any]  # what a checkpoint remembers
    exercises: ModuleType | None = None  # scratch.py, with --algo scratch
    reference: Policy | None = None  # what --kl-coef holds on to
    past: list[dict[str, Any]] = field(default_factory=list)  # what warnings look at of each record
    code: int = 1  # the exit code that the run has come to

    def save(self) -> None:
        if distributed.rank() == 0:
            checkpoint.save_checkpoint(self.folder, self.policy, self.optimizer, self.progress)

    def begin_rl(self, lr: float, value_lr: float) -> None:
        """RL begins with fresh moments, and samples from what the warm start made."""
        self.optimizer.release()
        self.optimizer = make_optimizer(self.policy, lr, value_lr)
        self.sampler.sync()

    def keep_reference(self) -> None:
        self.reference = make_reference(self.policy, self.folder, self.progress["update"])

    def drop_failed(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts whose environments didn't fail; the person is told of the others.

        Raises UsageError when too many failed.
        """
        good, remarks = selection.without_failed(rollouts)
        for remark in remarks:
            self.display.say(remark)
        return good

    def conclude(self, cfg: Any, record: dict[str, Any]) -> bool:
        """What follows an update: warnings, the journal, a checkpoint when one is due. False: the
        run stops here, for --stop-on or because its losses aren't finite."""
        update, skipped = record["update"], bool(record.get("update/skipped"))
        stopping = self.warn(record, cfg.stop_on, config.compares(cfg))
        self.log.log(record)
        self.progress["update"] = update
        given_up = self.given_up(skipped, cfg.lr)
        due = is_due(update, cfg.save_every, cfg.num_updates) and not skipped and not given_up
        if due or stopping:
            self.save()
        return not (given_up or stopping)

    def warn(self, record: dict[str, Any], stop_on: tuple[str, ...], by_group: bool) -> bool:
        """Say and note what begins to go wrong; whether --stop-on has it."""
        self.past.append(diagnostics.warning_inputs(record))
        found = distributed.broadcast_from_rank_0(lambda: diagnostics.new(self.past, by_group))
        for name, line in found.items():
            self.display.say(f"warning: {name}: {line}")
        if found:
            record["warnings"] = found
        named = [name for name in found if name in stop_on or "any" in stop_on]
        if named:
            self.display.say(f"--stop-on {named[0]}: stopped; go on with: "
                             f"python train.py --resume {self.folder}")  # fmt: skip
        return bool(named)

    def given_up(self, skipped: bool, lr: float) -> bool:
        """Count the updates in a row without a finite loss; say so when they are too many."""
        self.progress["skipped_in_a_row"] = self.progress["skipped_in_a_row"] + 1 if skipped else 0
        if self.progress["skipped_in_a_row"] < SKIPS_IN_A_ROW:
            return False
        self.display.say(
            f"{SKIPS_IN_A_ROW} updates in a row without a finite loss: stopped, the last good "
            f"checkpoint kept. Try a lower --lr than {lr:g}"
        )
        return True


@contextmanager
def open_run(cfg: Any, config: dict[str, Any], runs: Path, remarks: list[str]) -> Iterator[Run]:
    """The run that `cfg` (train.Config) asks for: a new folder in `runs`, or the one to go on with.

    `config` is what its config.yaml says, `remarks` are lines to show. What people look at is
    written at the end. Raises UsageError for what can't be had; then no new folder is left.
    """
    with distributed.process_group(cfg.device), tempfile.TemporaryDirectory() as aside:
        folder, new = distributed.broadcast_from_rank_0(lambda: folder_of(cfg, runs))
        writes = distributed.rank() == 0
        with run_folder.lock_run_dir(folder, config, new) if writes else nullcontext():
            # what the other ranks would write is rank 0's to write
            own = folder if writes else Path(aside)
            with memory.explained(), _opened(cfg, config, folder, own, new, remarks) as run:
                yield run
            if writes:
                finish(run, config, exported=cfg.sampler != "openai")


def folder_of(cfg: Any, runs: Path) -> tuple[Path, bool]:
    """The run's folder, and whether it is a new one, not there yet, or one to go on with."""
    if cfg.resume:
        return Path(cfg.resume), False
    if distributed.may_restart() and not cfg.run_name:
        raise UsageError("give a --run-name, so that a restart finds the run that it goes on with")
    if distributed.is_restarted() and (runs / cfg.run_name).exists():
        return runs / cfg.run_name, False
    stem = f"{cfg.algo}-{'+'.join(spec.partition(':')[0] for spec in cfg.env)}"
    return run_folder.new_folder(runs, cfg.run_name, stem[: config.LONGEST_NAME]), True


def finish(run: Run, config: dict[str, Any], exported: bool) -> None:
    """Write what people look at and, of a run that came to its end, the model; say where."""
    if run.code == 0 and exported:
        checkpoint.export_model(run.folder, run.policy)
    run_log.write_pages(run.folder, config)
    if run.code == 0:
        print("\n".join(run_log.summary(run.folder, config)))


@contextmanager
def _opened(
    cfg: Any, config: dict[str, Any], folder: Path, own: Path, new: bool, remarks: list[str]
) -> Iterator[Run]:
    memory.keep_freed()
    found = checkpoint.NEW_RUN if new else checkpoint.find_checkpoint(folder)
    mine = as_algorithm.open_exercises() if cfg.algo == "scratch" else None
    served = cfg.sampler == "openai"  # then the model is elsewhere, and tiny its tokenizer here
    policy = distributed.rank_0_first(lambda: load_policy(
        "tiny" if served else cfg.model_id, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed,
        lora_rank=cfg.lora_rank, lora_alpha=cfg.lora_alpha, value_head=cfg.algo == "ppo",
        max_length=cfg.max_model_len, tiny_folder=folder / "base",
        trust_remote_code=cfg.trust_remote_code,
    ))  # fmt: skip
    in_warm_start = found.progress["sft_step"] < cfg.sft_steps
    optimizer = make_optimizer(policy, cfg.sft_lr if in_warm_start else cfg.lr, cfg.ppo.value_lr)
    if found.folder:
        checkpoint.load_checkpoint(found.folder, policy, optimizer)
    to_come = optimizer.memory_to_come() + (reference_memory(policy) if cfg.kl_coef else 0)
    sampler: Sampler = (
        OpenAISampler(policy, cfg.base_url, cfg.model_id) if served else
        TorchSampler(policy, as_algorithm.drawing(mine)) if mine else
        make_sampler(cfg.sampler, policy, cfg.gpu_memory_utilization, to_come)
    )  # fmt: skip
    remarks = [*remarks, *memory.fit(policy, cfg, to_come)]
    run_log.rewind(own, found.progress)
    run_folder.write_config(own, config)
    done = own / "metrics.jsonl"  # rank 0's, which decides for all
    past = (
        [diagnostics.warning_inputs(r) for r in run_log.read_records(done)] if done.exists() else []
    )
    if mine:
        as_algorithm.keep(mine, folder)
        remarks = [*remarks, *as_algorithm.remarks(mine)]
    with (
        closing(sampler),
        Interrupt() as stop,
        run_log.Journal(own, config, cfg.track if own == folder else "none") as log,
        Display(title(cfg, policy), quiet=own != folder) as display,
    ):
        sampler.say = display.say
        for remark in filter(None, [*found.remarks, sampler.remark, *remarks]):
            display.say(remark)
        drop_thinking = cfg.thinking == "drop"
        batched_env = BatchedEnv(policy, cfg.max_turns, drop_thinking, cfg.env_timeout)
        yield Run(folder, policy, optimizer, batched_env, sampler, log, display, stop,
                  dict(found.progress), mine, past=past)  # fmt: skip


def title(cfg: Any, policy: Policy) -> str:
    ranks = f" x {distributed.num_ranks()}" if distributed.num_ranks() > 1 else ""
    return f"picoRL · {cfg.algo} · {' '.join(cfg.env)} · {policy.size()}{ranks}"


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done `every` so many steps is due; always at 0 and at the last step."""
    return step in (0, last) or (every > 0 and step % every == 0)
