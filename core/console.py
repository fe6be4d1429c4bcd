"""What a person sees while it trains: a live display in a terminal, plain lines elsewhere."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from core.types import Rollout

BARS = "▁▂▃▄▅▆▇█"
PLAIN_LINES = 10  # of one phase, where there is no live display
# what is shown of the metrics: (name, label, format)
SHOWN = [
    ("reward/mean", "reward", "{:.3f}"),
    ("reward/correct", "correct", "{:.2f}"),
    ("length/mean", "tokens", "{:.1f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("gap/logprob_mean", "gap", "{:.1e}"),
    ("grad/norm", "grad", "{:.2f}"),
]


class Display:
    """Progress of each phase, the metrics with sparklines, one completion; or plain lines."""

    def __init__(self, title: str, console: Console | None = None, quiet: bool = False):
        self.console = console or Console(highlight=False, quiet=quiet)
        self.plain = quiet or not self.console.is_terminal or self.console.is_dumb_terminal
        self.title = title
        self.bars: dict[str, TaskID] = {}
        self.history: dict[str, list[float]] = {}
        self.completion: RenderableType | None = None
        self.progress = Progress(
            TextColumn("{task.description}", justify="left"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[detail]}"),
            console=self.console,
        )
        self.live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)

    def __enter__(self) -> "Display":
        if self.plain:
            self.say(self.title)
        else:
            self.live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self.plain:
            self.live.stop()

    def say(self, line: str) -> None:
        """One line that stays on the screen."""
        self.console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator["Phase"]:
        """A piece of work of `total` steps, `done` of them already; its bar serves again later."""
        if name in self.bars:
            self.progress.reset(self.bars[name], total=total, completed=done)
        else:
            self.bars[name] = self.progress.add_task(name, total=total, completed=done, detail="")
        yield Phase(self, name, self.bars[name], total)

    def update(self, update: int, record: dict[str, Any], rollouts: list[Rollout]) -> None:
        """One update: its metrics with sparklines and a completion, or one plain line."""
        names = [*SHOWN, *_info_columns(record)]
        for name, _, _ in names:
            if name in record:
                self.history.setdefault(name, []).append(record[name])
        if self.plain:
            parts = [f"{label} {fmt.format(record[n])}" for n, label, fmt in names if n in record]
            seconds = record["time/rollout_s"] + record["time/train_s"]
            self.say(f"update {update:4d}  {'  '.join(parts)}  {seconds:.1f} s")
        if record["update/skipped"]:
            self.say(f"update {update} skipped: its loss or gradient is not finite")
        self.completion = _completion_panel(rollouts[0])

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self.title, style="bold"), self.progress]
        if self.history:
            table = Table.grid(padding=(0, 2))
            labels = {n: (label, fmt) for n, label, fmt in [*SHOWN, *_info_columns(self.history)]}
            for name, values in self.history.items():
                label, fmt = labels[name]
                line = Text(sparkline(values, 40), style="green" if "reward" in name else "cyan")
                first, last = fmt.format(values[0]), fmt.format(values[-1])
                table.add_row(label, line, Text(f"{first} → {last}"))
            parts.append(Panel(table, title="updates", title_align="left"))
        if self.completion is not None:
            parts.append(self.completion)
        return Group(*parts)


class Phase:
    """One running piece of work; `advance` after each step."""

    def __init__(self, display: Display, name: str, task: TaskID, total: int):
        self.display, self.name, self.task, self.total = display, name, task, total
        self.begun = self.lapped = time.monotonic()

    def tick(self) -> None:
        """One step more, shown in the live display only."""
        self.advance(quiet=True)

    def tick_and(self, check: Callable[[], None]) -> Callable[[], None]:
        """`tick`, then `check`, which may raise to stop the work."""

        def both() -> None:
            self.tick()
            check()

        return both

    def show(self, detail: str) -> None:
        """Put a few words beside the bar of the live display."""
        self.display.progress.update(self.task, detail=" ".join(detail.split()))

    def lap(self) -> float:
        """Seconds since the last lap, or since the beginning."""
        since, self.lapped = self.lapped, time.monotonic()
        return self.lapped - since

    def advance(self, detail: str = "", quiet: bool = False) -> None:
        """One step more is done. In plain mode prints at each tenth of the way, unless `quiet`."""
        progress = self.display.progress
        progress.update(self.task, advance=1, detail=detail)
        if quiet or not self.display.plain:
            return
        done = next(int(t.completed) for t in progress.tasks if t.id == self.task)
        if done % max(1, self.total // PLAIN_LINES) == 0:
            took = time.monotonic() - self.begun
            self.display.say(f"{self.name} {done}/{self.total}  {detail}  {took:.0f} s")


def sparkline(values: list[float], width: int) -> str:
    """The last values as bars, scaled from the least to the greatest of all.

    >>> sparkline([0.0, 0.5, 1.0], width=10)
    '▁▅█'
    """
    values = [v for v in values if math.isfinite(v)] or [0.0]
    if len(values) > width:  # means of neighbours, so that the whole run stays in view
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[int((v - low) * scale + 0.5)] for v in values)


def _completion_panel(rollout: Rollout) -> RenderableType:
    text = Text()
    for message in rollout.messages:
        style = "" if message["role"] == "assistant" else "dim"
        text.append(_short(message["content"]) + "\n", style)
    text.rstrip()
    title = f"sampled · reward {rollout.episode_return:.2f}"
    return Panel(text, title=title, title_align="left", border_style="dim")


def _info_columns(metrics: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(n, n[len("info/") :], "{:.2f}") for n in metrics if n.startswith("info/")]


def _short(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"
