"""Shows the progress of a run: a line for each update and, in a terminal, progress bars."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from environments.plumbing.text import printable

SHOWN = {  # metrics in the line of an update: label and format
    "reward/mean": ("reward", ".3f"), "reward/correct": ("correct", ".2f"),
    "length/mean": ("tokens", ".1f"), "policy/entropy": ("entropy", ".3f"),
}  # fmt: skip


class Display:
    """The lines and bars of a run, on `console`.

    `meanings`: explains the environment's metrics. `num_updates`: of the whole run; 0: unknown.
    """

    def __init__(
        self, title: str, console: Console, meanings: Mapping[str, str], num_updates: int = 0
    ) -> None:
        self.console = console
        self.title = title
        self.meanings = dict(meanings)
        self.num_updates = num_updates
        self.progress = Progress(console=self.console, transient=True, speed_estimate_period=3600)
        self.bar: TaskID | None = None  # of the updates

    def __enter__(self) -> "Display":
        self.say(self.title)
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self.progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.progress.live.stop()  # does nothing if it was not started

    def say(self, line: str) -> None:
        """Prints a line that stays on the screen."""
        self.console.print(printable(line), markup=False, emoji=False, soft_wrap=True)

    @contextmanager
    def phase(
        self, name: str, total: int, completed: int = 0, check: Callable[[], None] = lambda: None
    ) -> Iterator[Callable[[], None]]:
        """Shows a bar of `total` steps until the phase ends; `completed`: steps before it.

        Yields a function to call after each step; it calls `check`, which may raise.
        """
        bar = self.progress.add_task(name, total=total, completed=completed)

        def advance() -> None:
            self.progress.advance(bar)
            check()

        yield advance
        self.progress.remove_task(bar)

    def update(self, update: int, record: dict[str, Any]) -> None:
        """Prints the line of an update; explains each metric of the environment once."""
        if self.bar is None and self.num_updates:  # it also shows how long the rest may take
            self.bar = self.progress.add_task("updates", total=self.num_updates)
        if self.bar is not None:
            self.progress.update(self.bar, completed=update)
        cells = [f"update {update}"]
        for name, value in record.items():
            key = name.removeprefix("info/")
            if name in SHOWN or key != name:
                label, form = SHOWN.get(name, (key, ".2f"))
                cells.append(f"{label} {value:{form}}")
                if reported := record.get(f"reported/{key}"):  # by this many rollouts, not by all
                    cells[-1] += f" of {reported}"
            if key != name and (meaning := self.meanings.pop(key, "")):
                self.say(f"{key}: {meaning}")
        seconds = record["time/rollout_s"] + record["time/train_s"]
        self.say("  ".join([*cells, f"{seconds:.1f} s"]))
