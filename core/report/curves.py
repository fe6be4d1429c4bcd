"""Draws `curves.png`, the curves of a run; without pyplot, so that a notebook keeps its backend."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from core.files.atomic import published
from core.results import Record, before_after, logged_warnings, reported

INK, GRID = "#2b2b33", "#e4e4ea"
BLUE, ORANGE, GREEN, PURPLE = "#2f6db5", "#d9772b", "#2e8b57", "#7b4fa3"
RED = "#c84820"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED)
STYLE: Any = {"font.size": 11, "axes.grid": True, "axes.axisbelow": True, "text.usetex": False}
STYLE |= dict.fromkeys(["axes.labelcolor", "text.color", "xtick.color", "ytick.color"], INK)
STYLE |= dict.fromkeys(["axes.edgecolor", "grid.color"], GRID)
STYLE |= dict.fromkeys(["axes.spines.top", "axes.spines.right", "text.parse_math"], False)
Row = Sequence[float]
SMOOTHING = 2  # neighbours on each side that the thick line averages


@contextmanager
def panels(
    path: Path, title: str, rows: int, columns: int, size: tuple[float, float]
) -> Iterator[list[Axes]]:
    """Yields rows * columns panels of `size` inches in all, and then writes the picture; the file
    is replaced as a whole."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout="constrained")
        figure.suptitle(title, fontsize=15, fontweight="bold", x=0.01, ha="left", wrap=True)
        yield [*figure.subplots(rows, columns, squeeze=False).flat]
        with published(path) as part:
            figure.savefig(part, dpi=100, format="png")


def draw_curves(
    path: Path, records: list[Record], title: str, meanings: Mapping[str, str] | None = None
) -> None:
    """Draws accuracy, reward, completion length, and the metrics of the environment (info/*) or, if
    it has none, the entropy. Dotted lines mark warnings, which report.html names.

    `meanings`: explains info/* in the legend, by key.
    """
    updates = [r for r in records if "update" in r and "reward/mean" in r]
    info = {name: (meanings or {}).get(name[5:], name[5:]) for name in reported(updates)}
    with panels(path, title, 2, 2, (11, 7)) as axes:
        label(axes[0], "Held-out accuracy, 95% interval")
        axes[0].set_ylim(-0.03, 1.05)
        for (env, _, _), color in zip(before_after(records), COLORS, strict=False):
            accuracy = f"eval/{env}/accuracy"
            evaluations = [r for r in records if accuracy in r and "update" in r]
            names = "update", accuracy, f"eval/{env}/ci_low", f"eval/{env}/ci_high"
            columns = [[r[name] for r in evaluations] for name in names]
            band(axes[0], *columns, color=color, marker="o", markersize=4, label=env)
            trivial = evaluations[0].get(f"eval/{env}/trivial")
            if trivial is not None:
                axes[0].axhline(trivial, color=color, linestyle="--", label="trivial baseline")
        draw_metrics(axes[1], updates, "Reward per rollout", {"reward/mean": None})
        draw_metrics(axes[2], updates, "Completion length, tokens", {"length/mean": None})
        if info:
            draw_metrics(axes[3], updates, "Reported by the environment, mean", info)
        else:
            draw_metrics(axes[3], updates, "Entropy, nats per token", {"policy/entropy": None})
        warned = set[int]().union(*(updates for _, updates, _ in logged_warnings(records)))
        for axis in axes:
            for update in warned:
                axis.axvline(update, color=RED, linewidth=0.9, linestyle=":")
            if axis.get_legend_handles_labels()[1]:
                axis.legend(frameon=False)


def label(axis: Axes, title: str, x: str = "update") -> None:
    """Sets the title and the x label of a panel."""
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.set_xlabel(x)
    axis.locator_params(axis="x", integer=True)


def draw_metrics(
    axis: Axes, updates: list[Record], title: str, metrics: Mapping[str, str | None]
) -> None:
    """Draws each metric, with its label, as a thin line, and its moving average as a thick one."""
    label(axis, title)
    for (metric, name), color in zip(metrics.items(), COLORS, strict=False):
        points = [(r["update"], r[metric]) for r in updates if r.get(metric) is not None]
        x = [update for update, _ in points]
        values = [value for _, value in points]
        windows = (slice(max(0, i - SMOOTHING), i + SMOOTHING + 1) for i in range(len(values)))
        smooth = [statistics.fmean(values[window]) for window in windows]
        axis.plot(x, values, color=color, linewidth=1, alpha=0.35)
        axis.plot(x, smooth, color=color, linewidth=2.2, label=name)


def band(axis: Axes, x: Row, middle: Row, low: Row, high: Row, **line: Any) -> None:
    """Draws a curve, and a band from `low` to `high` around it."""
    axis.fill_between(x, low, high, color=line["color"], alpha=0.18, linewidth=0)
    axis.plot(x, middle, **line)
