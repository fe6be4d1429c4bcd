"""What a run writes into its folder while it goes on: records, checkpoints and pages."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from core import distributed
from core.config import Config
from core.files import checkpoint, run_folder
from core.files.run_log import RunLog
from core.optimizer import MasterAdamW
from core.policy import Policy, Weights
from core.report import write_pages
from core.settings import config_to_dict
from core.terminal.console import Display

MAX_TIME = 0.015  # fraction of a run's time that report.html may take, and the others, too
PAGES = {"report.html": ["report.html"], "curves.png": ["README.md", "curves.png"]}
FIRST_TIME = 2.0  # seconds to expect of the first curves, as matplotlib is imported


@dataclass
class Outputs:
    """The folder of a run, and what is written there."""

    cfg: Config
    folder: Path  # runs/<name>
    run_log: RunLog
    display: Display
    saved: Path | None = None  # the last checkpoint
    opened_at: float = field(default_factory=perf_counter)
    # of each time that report.html was written, and the other pages
    page_seconds: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in PAGES}
    )

    def save(
        self, policy: Policy, optimizer: MasterAdamW, progress: dict[str, Any],
        older: deque[Weights],
    ) -> bool:  # fmt: skip
        """Saves a checkpoint, or keeps the last one after an update without a finite gradient.

        Returns whether there is one. After update 1 there always is, as there is no earlier one.
        """
        if progress["skipped_in_a_row"] and progress["update"] > 1:
            return False
        self.saved = checkpoint.save_checkpoint(self.folder, policy, optimizer, progress, older)
        return True

    def write_pages(self) -> None:
        """Writes report.html and curves.png, unless that takes more than 3% of the run's time.

        The first report.html is written in any case: it takes some hundredths of a second.
        """
        if distributed.rank() > 0:
            return
        for page, names in PAGES.items():
            started, seconds = perf_counter(), self.page_seconds[page]
            expected = sum(seconds) + max(seconds, default=FIRST_TIME)
            is_first = page == "report.html" and not seconds and not (self.folder / page).exists()
            if is_first or expected < MAX_TIME * (started - self.opened_at):
                for line in write_pages(self.folder, config_to_dict(self.cfg), names):
                    self.display.say(line)
                seconds.append(perf_counter() - started)

    def resume_command(self) -> str:
        """The command that resumes this run."""
        flags = "--resume", str(self.folder)
        if any(env.only_in_python for env in self.cfg.env):
            return run_folder.again(self.cfg.env, *flags)
        return run_folder.train_command(*flags)
