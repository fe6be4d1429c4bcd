"""`curves.png`: what a run learnt, in one picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, on any machine
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from core import diagnostics

INK, GRID = "#2b2b33", "#e4e4ea"
BLUE, ORANGE, GREEN, PURPLE = "#2f6db5", "#d9772b", "#2e8b57", "#7b4fa3"
RED = "#c84820"
LOOKS = [
    {"color": BLUE, "linestyle": "-"},  # line styles too: colour alone is lost on some
    {"color": ORANGE, "linestyle": "--"},
    {"color": GREEN, "linestyle": ":"},
    {"color": PURPLE, "linestyle": "-."},
]
STYLE: Any = {
    "font.size": 11, "axes.edgecolor": GRID, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True,
}  # fmt: skip


def draw_curves(path: Path, records: list[dict[str, Any]], title: str) -> None:
    """Draw held-out accuracy, reward, completion length and the warm start, as far as logged.

    Where a warning was raised stands a thin line with its name.
    """
    updates = [r for r in records if "reward/mean" in r]
    warm = [r for r in records if "sft/loss" in r]
    shares = sorted({k for r in updates for k in r if k.startswith("info/")})
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
        figure.suptitle(title, fontsize=15, fontweight="bold", x=0.02, ha="left")
        _accuracy(axes[0, 0], records)
        _lines(axes[0, 1], updates, "Reward per rollout", ["reward/mean"], [BLUE])
        _lines(axes[1, 0], updates, "Completion length, tokens", ["length/mean"], [ORANGE])
        if shares:
            _lines(axes[1, 1], updates, "Share of rollouts", shares, [GREEN, PURPLE, ORANGE])
        elif warm:
            axes[1, 1].plot([r["sft_step"] for r in warm], [r["sft/loss"] for r in warm], c=PURPLE)
            axes[1, 1].set_title("Warm start: loss, nats a token", loc="left", fontweight="bold")
        _warnings([axes[0, 0], axes[0, 1], axes[1, 0], *([axes[1, 1]] if shares else [])], records)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _warnings(panels: list[Axes], records: list[dict[str, Any]]) -> None:
    by_update: dict[int, list[str]] = {}
    for name, at, _ in diagnostics.collect(records):
        for update in at:
            by_update.setdefault(update, []).append(name)
    for update, names in by_update.items():
        for axis in panels:
            axis.axvline(update, color=RED, linewidth=0.9, linestyle=":")
        panels[0].annotate(
            ", ".join(names), (update, 0.02), (2, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", rotation=90, fontsize=8, color=RED, va="bottom",
        )  # fmt: skip


def _accuracy(axis: Axes, records: list[dict[str, Any]]) -> None:
    axis.set_title("Held-out accuracy, 95% interval", loc="left", fontweight="bold")
    evaluated = [r for r in records if "update" in r and any(k.endswith("/accuracy") for k in r)]
    names = [k[: -len("/accuracy")] for k in (evaluated or [{}])[0] if k.endswith("/accuracy")]
    for name, color in zip(names, [BLUE, ORANGE, GREEN, PURPLE], strict=False):
        at = [r["update"] for r in evaluated]
        value = [r[f"{name}/accuracy"] for r in evaluated]
        low, high = ([r[f"{name}/{k}"] for r in evaluated] for k in ("ci_low", "ci_high"))
        axis.fill_between(at, low, high, color=color, alpha=0.18, linewidth=0)
        axis.plot(at, value, color=color, marker="o", markersize=4, label=name[len("eval/") :])
        for i, shift in ((0, (10, -3)), (-1, (-8, -20))):
            axis.annotate(
                f"{value[i]:.2f}", (at[i], value[i]), shift, textcoords="offset points",
                fontsize=14, fontweight="bold", color=color,
            )  # fmt: skip
    axis.set_ylim(-0.03, 1.05)
    axis.set_xlabel("update")
    if len(names) > 1:
        axis.legend(frameon=False)


def _lines(
    axis: Axes, updates: list[dict[str, Any]], title: str, names: list[str], colors: list[str]
) -> None:
    axis.set_title(title, loc="left", fontweight="bold")
    axis.set_xlabel("update")
    for name, color in zip(names, colors, strict=False):
        points = [(r["update"], r[name]) for r in updates if r.get(name) is not None]
        if not points:
            continue
        at, values = zip(*points, strict=True)
        axis.plot(at, values, color=color, linewidth=1, alpha=0.35)
        smooth = [_mean(values[max(0, i - 2) : i + 3]) for i in range(len(values))]
        axis.plot(at, smooth, color=color, linewidth=2.2, label=name.split("/")[1])
    if len(names) > 1 or names[0].startswith("info/"):
        axis.legend(frameon=False)
        axis.set_ylim(-0.03, 1.05)


def draw_seeds(path: Path, runs: dict[str, list[list[dict[str, Any]]]], title: str) -> None:
    """Compare algorithms: for each, the mean over its seeds and the band from least to most.

    `runs`: the records of each seed's metrics.jsonl, by algorithm.
    """
    panels = [
        ("/accuracy", "Held-out accuracy (greedy)"),
        ("reward/correct", "Correct in training (sampled)"),
        ("length/mean", "Completion length, tokens"),
        ("info/worked", "Share worked out"),
    ]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
        figure.suptitle(title, fontsize=15, fontweight="bold", x=0.02, ha="left")
        for axis, (suffix, name) in zip(axes.flat, panels, strict=True):
            axis.set_title(name, loc="left", fontweight="bold")
            axis.set_xlabel("update")
            for (label, seeds), look in zip(runs.items(), LOOKS, strict=False):
                at, values = _by_update(seeds, suffix)
                middle = [_mean(v) for v in values]
                axis.plot(at, middle, label=label, linewidth=1.8, **look)
                low, high = [min(v) for v in values], [max(v) for v in values]
                axis.fill_between(at, low, high, color=look["color"], alpha=0.15, linewidth=0)
            if suffix != "length/mean":
                axis.set_ylim(-0.03, 1.05)
        axes[0, 0].legend(frameon=False, loc="lower right")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _by_update(
    seeds: list[list[dict[str, Any]]], suffix: str
) -> tuple[list[int], list[list[float]]]:
    found: dict[int, list[float]] = {}
    for records in seeds:
        for record in records:
            for key, value in record.items():
                if key.endswith(suffix) and value is not None and "update" in record:
                    found.setdefault(record["update"], []).append(value)
    return sorted(found), [found[at] for at in sorted(found)]
