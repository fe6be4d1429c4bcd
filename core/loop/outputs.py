"""What a run shows, and writes into its folder: lines, records, checkpoints, pages, the model."""

import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core import distributed
from core.algorithm import FOLDER, Algorithm, title_of
from core.config import Config
from core.files import checkpoint, run_folder
from core.files.run_log import METRICS, RunLog, read_records, rewind
from core.optimizer import MasterAdamW
from core.policy import Policy, Weights
from core.report import PAGES, write_pages
from core.report.doctor import final_lines
from core.results import Record
from core.settings import changed_settings, config_to_dict
from core.terminal.console import Display
from environments.plumbing.registry import meanings, short_names


@dataclass
class Outputs:
    """The folder of a run, and what is written there."""

    cfg: Config
    folder: Path  # runs/<name>
    run_log: RunLog
    display: Display

    def say(self, line: str) -> None:
        """Prints a line that stays on the screen."""
        self.display.say(line)

    def records(self) -> list[Record]:
        """The records so far."""
        return read_records(self.run_log.folder / METRICS)

    def save(
        self, policy: Policy, optimizer: MasterAdamW, progress: dict[str, Any],
        older: deque[Weights],
    ) -> bool:  # fmt: skip
        """Saves a checkpoint, or keeps the last one after an update without a finite gradient.

        Returns whether there is one. After update 1 there always is, as there is no earlier one.
        """
        if progress["skipped_in_a_row"] and progress["update"] > 1:
            return False
        checkpoint.save_checkpoint(self.folder, policy, optimizer, progress, older)
        return True

    def write_pages(self, names: Sequence[str] = PAGES) -> None:
        """Writes the pages of these names."""
        if distributed.rank() == 0:
            for line in write_pages(self.folder, config_to_dict(self.cfg), names):
                self.say(line)

    def finish(self, policy: Policy, progress: dict[str, Any], is_complete: bool) -> None:
        """Writes all pages and, of a run that `is_complete`, the model; says what the run shows."""
        self.write_pages()
        if distributed.rank() > 0 or not is_complete:
            return
        if self.cfg.sampler != "openai":
            checkpoint.export_model(self.folder, policy)
        for line in final_lines(self.folder, config_to_dict(self.cfg)):
            self.say(line)

    def resume_command(self) -> str:
        """The command that resumes this run."""
        flags = "--resume", str(self.folder)
        if any(env.only_in_python for env in self.cfg.env):
            return run_folder.again(self.cfg.env, *flags)
        return run_folder.train_command(*flags)


@contextmanager
def open_outputs(
    cfg: Config, algorithm: Algorithm, policy: Policy, folder: Path, log_dir: Path,
    progress: dict[str, Any], new: bool,
) -> Iterator[Outputs]:  # fmt: skip
    """The outputs, open. Drops the records after the checkpoint, writes config.yaml, keeps a copy
    of the algorithm's file, and says which settings a resume has changed. If a file of an
    environment has changed, the tasks may be others: later evaluations are compared with the first
    one since."""
    distributed.broadcast_from_rank_0(lambda: rewind(log_dir, progress))
    changed = {} if new or log_dir != folder else changed_settings(cfg, folder)
    settings = config_to_dict(cfg)
    run_folder.write_config(log_dir, settings)
    if FOLDER not in algorithm.file.parents:  # a file of the user's
        with suppress(shutil.SameFileError):
            shutil.copy(algorithm.file, log_dir)
    files = {env.short: env.checksum() for env in (*cfg.env, *cfg.eval_env)}
    known = progress.get("files", {})
    if edited := [env for env, code in files.items() if known.get(env, code) != code]:
        progress.pop("first_correct", None)
        progress["changed_code"] = (f"a file of {', '.join(edited)} has changed: accuracies before "
                                    "and after are of different tasks")  # fmt: skip
    progress["files"] = files
    quiet = log_dir != folder
    algo = title_of(cfg.algo, algorithm.variant or cfg.options.loss_type)
    ranks = f" x {distributed.num_ranks()}" if distributed.num_ranks() > 1 else ""
    title = f"picoRL · {algo} · {short_names(cfg.env)} · {policy.size()}{ranks}"
    updates = 0 if cfg.max_sampled_tokens else cfg.num_updates
    with (
        RunLog(log_dir, settings, "none" if quiet else cfg.track) as log,
        Display(title, None, quiet, meanings(cfg.env), updates) as display,
    ):
        if changes := ", ".join(f"{name} {old} -> {now}" for name, (old, now) in changed.items()):
            display.say(f"changed at this resume: {changes}")
        yield Outputs(cfg, folder, log, display)
