"""What the loop stands on, opened from the settings and closed whatever happens."""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from core import checkpoint, distributed, exercises, journal, memory
from core.batched_env import BatchedEnv
from core.console import Display
from core.interrupt import Interrupt
from core.model import Policy, load_policy
from core.nanollm import make_sampler
from core.openai_sampler import OpenAISampler
from core.optimizer import MasterAdamW, make_optimizer
from core.reference import make_reference, reference_memory
from core.sampler import Sampler, TorchSampler
from core.types import UsageError

SKIPS_IN_A_ROW = 10  # so many updates without a finite loss, and the run stops


@dataclass
class Run:
    """Everything that lasts from the first step to the last."""

    folder: Path
    policy: Policy
    optimizer: MasterAdamW
    batched_env: BatchedEnv  # plays
    sampler: Sampler  # writes
    log: journal.Journal
    display: Display
    stop: Interrupt
    progress: dict[str, Any]  # what a checkpoint remembers
    exercises: ModuleType | None = None  # scratch.py, with --algo scratch
    reference: Policy | None = None  # what --kl-coef holds on to

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

    `config` is what its config.yaml says, `remarks` are lines to show. Raises UsageError for what
    can't be had, before anything is written.
    """
    with distributed.joined(cfg.device), tempfile.TemporaryDirectory() as aside:
        folder = distributed.agreed(lambda: folder_of(cfg, runs))
        # what the other ranks would write is rank 0's to write
        own = folder if distributed.rank() == 0 else Path(aside)
        with _opened(cfg, config, folder, own, remarks) as run:
            yield run


def folder_of(cfg: Any, runs: Path) -> Path:
    """The run's folder: the one to go on with, or one that isn't there yet."""
    if cfg.resume:
        return Path(cfg.resume)
    if distributed.may_restart() and not cfg.run_name:
        raise UsageError("give a --run-name, so that a restart finds the run that it goes on with")
    if distributed.is_restarted() and (runs / cfg.run_name).exists():
        return runs / cfg.run_name
    stem = f"{cfg.algo}-{'+'.join(spec.partition(':')[0] for spec in cfg.env)}"
    return journal.new_folder(runs, cfg.run_name, stem)


@contextmanager
def _opened(
    cfg: Any, config: dict[str, Any], folder: Path, own: Path, remarks: list[str]
) -> Iterator[Run]:
    going_on = cfg.resume or (folder / "config.yaml").exists()
    found = checkpoint.find_checkpoint(folder) if going_on else checkpoint.NEW_RUN
    mine = exercises.open_exercises() if cfg.algo == "scratch" else None
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
        TorchSampler(policy, exercises.drawing(mine)) if mine else
        make_sampler(cfg.sampler, policy, cfg.gpu_memory_utilization, to_come)
    )  # fmt: skip
    remarks = [*remarks, *memory.fit(policy, cfg, to_come)]
    journal.rewind(own, found.progress)
    journal.create_run(own, config)
    if mine:
        exercises.keep(mine, folder)
        remarks = [*remarks, *exercises.remarks(mine)]
    with (
        closing(sampler),
        Interrupt() as stop,
        journal.Journal(own, config, cfg.track if own == folder else "none") as log,
        Display(title(cfg, policy), quiet=own != folder) as display,
    ):
        for remark in filter(None, [*found.remarks, sampler.remark, *remarks]):
            display.say(remark)
        batched_env = BatchedEnv(policy, cfg.max_turns, drop_thinking=cfg.thinking == "drop")
        yield Run(folder, policy, optimizer, batched_env, sampler, log, display, stop,
                  dict(found.progress), mine)  # fmt: skip


def title(cfg: Any, policy: Policy) -> str:
    ranks = f" x {distributed.num_ranks()}" if distributed.num_ranks() > 1 else ""
    return f"picoRL · {cfg.algo} · {' '.join(cfg.env)} · {policy.size()}{ranks}"


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done `every` so many steps is due; always at 0 and at the last step."""
    return step in (0, last) or (every > 0 and step % every == 0)
