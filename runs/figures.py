"""Figures of the pages: one look, and curves with a band around them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from core.report.curves import INK, STYLE


@contextmanager
def figure(
    path: Path, title: str, rows: int, columns: int, size: tuple[float, float], **options: Any
) -> Iterator[list[Axes]]:
    """Yields rows * columns panels of `size` inches in all; saves the figure at the end."""
    with plt.rc_context(STYLE):
        drawn, axes = plt.subplots(
            rows, columns, figsize=size, layout="constrained", squeeze=False, **options
        )
        drawn.suptitle(title, fontsize=15, fontweight="bold", x=0.01, ha="left")
        yield list(axes.flat)
        drawn.savefig(path, dpi=100)
        plt.close(drawn)


def panel(axis: Axes, title: str, xlabel: str = "", size: float = 11) -> None:
    """Set the title and the x label of a panel."""
    axis.set_title(title, loc="left", fontsize=size, fontweight="bold", color=INK)
    axis.set_xlabel(xlabel)


def band(
    axis: Axes, x: Sequence[float], middle: Sequence[float], low: Sequence[float],
    high: Sequence[float], color: str, alpha: float = 0.18, **line: Any,
) -> None:  # fmt: skip
    """Draw a curve and a band from `low` to `high` around it."""
    axis.fill_between(x, low, high, color=color, alpha=alpha, linewidth=0)
    axis.plot(x, middle, **({"color": color} | line))


def seed_band(axis: Axes, seeds: list[list[tuple[float, float]]], **look: Any) -> None:
    """Draw the mean over seeds, with a band from the lowest to the highest seed.

    `seeds`: for each seed its points (x, y); point i of every seed is one point of the curve.
    """
    points = [list(zip(*at, strict=True)) for at in zip(*seeds, strict=False)]
    x = [sum(xs) / len(xs) for xs, _ in points]
    middle = [sum(ys) / len(ys) for _, ys in points]
    band(axis, x, middle, [min(ys) for _, ys in points], [max(ys) for _, ys in points], **look)
