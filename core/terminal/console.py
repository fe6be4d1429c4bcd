"""Shows the progress of a run: a live display in a terminal, plain lines in a pipe or a file."""

import itertools
import math
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rich import progress
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from core.types import Rollout
from environments.plumbing.text import printable

BARS = "▁▂▃▄▅▆▇█"
PLAIN_LINES = 10  # per phase, without a live display
MAX_SHOWN = 600  # characters of a message
SHOWN = {  # metrics on display: label, format and meaning
    "reward/mean": ("reward", ".3f", ""),
    "reward/correct": ("correct", ".2f", ""),
    "length/mean": ("tokens", ".1f", ""),
    "policy/entropy": ("entropy", ".3f", "how open the next token is, in nats; 0: certain"),
    "gap/logprob_mean": ("gap", ".1e", "|log-prob of trainer - sampler|, mean; only rounding"),
    "grad/norm": ("grad", ".2f", "norm of the gradient before clipping"),
}
WIDTH = 80  # of a line of metrics, at most


class Output(Console):
    """The terminal, or a pipe: where nobody reads on, as with `train.py | head`, a run goes on."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()  # what this process prints from now on is dropped
        print("nothing reads the output any more; the run goes on in its folder", file=sys.stderr)


class Display:
    """Progress bars, metrics with sparklines and a sampled completion; or plain lines.

    `quiet` prints nothing (for all ranks but 0). `meanings`: what the environment's metrics are.
    `num_updates`: of the whole run; 0: unknown.
    """

    def __init__(
        self, title: str, console: Console | None = None, quiet: bool = False,
        meanings: Mapping[str, str] | None = None, num_updates: int = 0,
    ) -> None:  # fmt: skip
        self.console = console or Output(highlight=False, quiet=quiet)
        self.plain = quiet or not self.console.is_terminal or self.console.is_dumb_terminal
        self.title = printable(title)
        self.bars: dict[str, progress.TaskID] = {}
        self.history: dict[str, list[float]] = {}
        self.meanings = meanings or {}
        self.num_updates = num_updates
        self.updates_done: list[tuple[int, float]] = []  # the update, and the time at its end
        self.cells: dict[str, str] = {}  # what the last update shows of each metric; "-": nothing
        self.widths: dict[str, int] = {}  # of the columns of a plain line
        self.completion: RenderableType = ""
        self.progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[unit]}"),
            TimeColumn(),
            progress.TextColumn("{task.fields[detail]}", markup=False),
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
        self.live.stop()  # does nothing if it was not started

    def say(self, line: str) -> None:
        """Prints a line that stays on the screen."""
        print_line(line, self.console)

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0, unit: str = "steps") -> Iterator["Phase"]:
        """Shows a bar for `total` steps, `done` of them complete; one bar per name."""
        if name in self.bars:
            self.progress.reset(self.bars[name], total=total, completed=done)
        else:
            self.bars[name] = self.progress.add_task(
                printable(name), total=total, completed=done, detail="", unit=unit
            )
        phase = Phase(self, name, total, done)
        yield phase
        self.progress.update(self.bars[name], total=phase.done)  # sampling may end before its limit

    def update(self, update: int, record: dict[str, Any], rollouts: list[Rollout]) -> None:
        """Shows the metrics of an update and the text of its first rollout; or a plain line.

        The first time that a metric appears, a line says what it is.
        """
        self.updates_done.append((update, time.monotonic()))
        shown = [n for n in SHOWN if n in record] + [n for n in record if n.startswith("info/")]
        for name in shown:
            label, _, meaning = self._look(name)
            if meaning and name not in self.history:
                self.say(f"{label}: {meaning}")
            if name not in self.history and f"reported/{label}" in record:
                self.say(f'{label} ".. of n": the mean over the n rollouts that report it')
            self.history.setdefault(name, []).append(record[name])
        self.cells = {name: self._cell(name, record) for name in self.history}
        if self.plain:
            self._say_metrics(update, record)
        if record.get("update/skipped") and record.get("grad/norm", 0.0) != 0.0:
            self.say(f"update {update} skipped: its loss or its gradient is not finite")
        if rollouts:
            self.completion = _completion_panel(rollouts[0])

    def _say_metrics(self, update: int, record: dict[str, Any]) -> None:
        """Prints a line of metrics within WIDTH, below their labels if the columns are new.

        Metrics of the environment without room in it follow with their labels.
        """
        seconds = record["time/rollout_s"] + record["time/train_s"]
        labels = {"": "update", **{name: self._look(name)[0] for name in self.history}}
        labels["time"] = "time"
        cells = {"": str(update), **self.cells, "time": f"{seconds:.1f} s"}
        before, rest = list(self.widths), list[str]()
        self.widths = {
            name: max(self.widths.get(name, 0), len(labels[name]), len(cell))
            for name, cell in cells.items()
        }
        for name in [name for name in reversed(cells) if name.startswith("info/")]:
            if sum(width + 2 for width in self.widths.values()) - 2 > WIDTH:
                del self.widths[name]
                rest.insert(0, f"{labels[name]} {cells[name]}")
        for row in [cells] if list(self.widths) == before else [labels, cells]:
            self.say("  ".join(row[name].rjust(width) for name, width in self.widths.items()))
        for line in textwrap.wrap("  ".join(rest), WIDTH - 8):
            self.say(f"{'':8}{line}")

    def _cell(self, name: str, record: dict[str, Any]) -> str:
        """The value of a metric, and how many rollouts report it if not all do."""
        if name not in record:
            return "-"
        reported = record.get(f"reported/{name.removeprefix('info/')}")
        return f"{record[name]:{self._look(name)[1]}}{f' of {reported}' if reported else ''}"

    def _look(self, name: str) -> tuple[str, str, str]:
        """Label, format and meaning of a metric."""
        key = name.removeprefix("info/")
        return SHOWN.get(name, (key, ".2f", self.meanings.get(key, "")))

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, values in self.history.items():
            label, spec, _ = self._look(name)
            bars = Text(sparkline(values, 40), style="green" if "reward" in name else "cyan")
            table.add_row(
                Text(printable(label)), bars, Text(f"{values[0]:{spec}} → {self.cells[name]}")
            )
        metrics = Panel(table, title=self._progress(), title_align="left") if self.history else ""
        title = Text(self.title, style="bold")
        # the terminal writes ^C behind the last line: behind a full one it would begin another
        return Group(title, self.progress, metrics, self.completion, "")

    def _progress(self) -> str:
        """Such as: update 5 of 25, about 40 s left."""
        (first, started), (update, now) = self.updates_done[0], self.updates_done[-1]
        if not self.num_updates:
            return f"update {update}"
        left = (self.num_updates - update) * (now - started) / max(1, update - first)
        about = f", about {duration(left)} left" if left else ""
        return f"update {update} of {self.num_updates}{about}"


class TimeColumn(progress.ProgressColumn):
    """How long a phase took, or while it runs how much longer it may take."""

    def render(self, task: progress.Task) -> Text:
        if task.finished:
            return Text(f"took {duration(task.finished_time or 0)}")
        return Text("" if task.time_remaining is None else f"{duration(task.time_remaining)} left")


class Phase:
    """A part of a run with a progress bar; call `advance` after each step."""

    def __init__(self, display: Display, name: str, total: int, done: int) -> None:
        self.display, self.name, self.total, self.done = display, name, total, done
        self.started = time.monotonic()

    def advance(self, detail: str = "", quiet: bool = False, steps: int = 1) -> None:
        """Counts `steps` and shows `detail`; a plain display prints PLAIN_LINES unless `quiet`."""
        before, self.done = self.done, self.done + steps
        detail = printable(" ".join(detail.split()))
        bar = self.display.bars[self.name]
        self.display.progress.update(bar, completed=self.done, detail=detail)
        line = max(1, self.total // PLAIN_LINES)
        if self.display.plain and not quiet and self.done // line > before // line:
            seconds = time.monotonic() - self.started
            self.display.say(f"{self.name} {self.done}/{self.total}  {detail}  {seconds:.0f} s")

    def tick_and(self, check: Callable[[], None]) -> Callable[[], None]:
        """A callback that advances the bar quietly, then calls `check`, which may raise."""

        def tick() -> None:
            self.advance(quiet=True)
            check()

        return tick


def print_line(line: str, console: Console) -> None:
    """Prints a line; a terminal breaks it between words, but not a command, which may be copied."""
    words, line = "", printable(line)
    command = re.search(r"\b(python|torchrun) ", line)
    if command and console.is_terminal and command.start() > console.width:
        words, line = line[: command.start()], line[command.start() :]
    for text in filter(None, (words, line)):
        is_copied = text is line and (command or not console.is_terminal)
        console.print(text, markup=False, emoji=False, soft_wrap=bool(is_copied))


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(40.4), duration(150), duration(7620)
    ('40 s', '2 min 30 s', '2 h 7 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def sparkline(values: list[float], width: int) -> str:
    """Returns `values` as at most `width` bars, scaled from their lowest to their highest.

    Longer lists are averaged in equal pieces. Non-finite values are left out.
    """
    values = [v for v in values if math.isfinite(v)] or [0.0]
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[int((v - low) * scale + 0.5)] for v in values)


def _completion_panel(rollout: Rollout) -> Panel:
    text = Text()
    for message in rollout.messages:
        style = "" if message["role"] == "assistant" else "dim"
        content = message["content"]
        if len(content) > MAX_SHOWN:
            content = f"{content[: MAX_SHOWN // 2]} … {content[-MAX_SHOWN // 2 :]}"
        text.append(printable(content) + "\n", style)
    text.rstrip()
    title = f"sampled · reward {rollout.episode_return:.2f}"
    return Panel(text, title=title, title_align="left", border_style="dim")
