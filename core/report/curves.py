"""Draws the training curves of a run, `curves.png`, and of several, `compare.png`."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to files, so needs no window system
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from core.files.atomic import published
from core.report.summary import TARGET_ACCURACY, accuracy_by_tokens, logged_warnings, reported
from core.results import Record, before_after

INK, GRID = "#2b2b33", "#e4e4ea"
BLUE, ORANGE, GREEN, PURPLE = "#2f6db5", "#d9772b", "#2e8b57", "#7b4fa3"
RED = "#c84820"
STYLE: Any = {
    "font.size": 11, "axes.edgecolor": GRID, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True,
    "text.parse_math": False,
}  # fmt: skip
SMOOTHING = 2  # neighbours on each side that the thick line averages


def draw_curves(
    path: Path, records: list[Record], title: str, meanings: Mapping[str, str] | None = None
) -> None:
    """Draws accuracy, reward, completion length and a fourth panel: the metrics of the environment
    (info/*), or else the loss of the warm start, or the entropy. Dotted lines mark warnings, which
    report.html names. The file is replaced as a whole.
    `meanings`: what info/* are, by their key."""
    updates = [r for r in records if "update" in r and "reward/mean" in r]
    warm_start = [r for r in records if "sft_step" in r and "sft/loss" in r]
    info = reported(updates)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="none")  # constrained draws twice
        figure.subplots_adjust(left=0.055, right=0.985, top=0.87, bottom=0.075, hspace=0.36,
                               wspace=0.13)  # fmt: skip
        figure.suptitle(title, fontsize=15, fontweight="bold", x=0.02, y=0.98, ha="left", wrap=True)
        _draw_accuracy(axes[0, 0], records)
        _label(axes[0, 1], "Reward per rollout")
        _draw_metric(axes[0, 1], updates, "reward/mean", BLUE)
        _label(axes[1, 0], "Completion length, tokens")
        _draw_metric(axes[1, 0], updates, "length/mean", ORANGE)
        if info:
            _draw_info(axes[1, 1], updates, info, meanings or {})
        elif warm_start:
            steps, losses = ([r[key] for r in warm_start] for key in ("sft_step", "sft/loss"))
            axes[1, 1].plot(steps, losses, color=PURPLE)
            _label(axes[1, 1], "Warm start: loss, nats per token", "step")
        else:
            _label(axes[1, 1], "Entropy, nats per token")
            _draw_metric(axes[1, 1], updates, "policy/entropy", PURPLE)
        _mark_warnings(list(axes.flat)[: 3 if warm_start and not info else 4], records)
        with published(path) as part:
            figure.savefig(part, dpi=110, format="png")
        plt.close(figure)


def draw_comparison(path: Path, runs: list[tuple[str, list[Record]]]) -> None:
    """Draws the held-out accuracy by sampled tokens of runs, with its 95% interval.

    `runs`: name and records of each.

    One panel for each environment that was evaluated. A star marks the evaluation at which a run
    reaches TARGET_ACCURACY, the dashed line.
    """
    envs = list(dict.fromkeys(env for _, records in runs for env, *_ in before_after(records)))
    with plt.rc_context(STYLE):
        size = (8 * max(1, len(envs)), 4.5)
        figure, axes = plt.subplots(1, max(1, len(envs)), figsize=size, squeeze=False)
        for axis, env in zip(axes[0], envs, strict=False):
            _label(axis, f"{env}: held-out accuracy", "tokens sampled for training")
            axis.axhline(TARGET_ACCURACY, color=INK, linewidth=1, linestyle="--",
                         label=f"accuracy {TARGET_ACCURACY:g}; ★: reached")  # fmt: skip
            for i, (name, records) in enumerate(runs):
                if not (points := accuracy_by_tokens(env, records)):
                    continue
                tokens, accuracy = zip(*points, strict=True)
                look: Any = {"color": f"C{i % 10}", "marker": "o"}
                axis.plot(tokens, accuracy, label=name, markersize=4, **look)
                evaluated = [r for r in records if f"eval/{env}/accuracy" in r]
                low, high = ([r[f"eval/{env}/ci_{end}"] for r in evaluated]
                             for end in ("low", "high"))  # fmt: skip
                axis.fill_between(tokens, low, high, color=look["color"], alpha=0.15, linewidth=0)
                if reached := [point for point in points if point[1] >= TARGET_ACCURACY]:
                    axis.plot(*reached[0], **(look | {"marker": "*", "markersize": 16}))
            axis.set_ylim(-0.03, 1.05)
            axis.xaxis.set_major_formatter("{x:,.0f}")
            axis.legend(loc="lower right", frameon=False)
        with published(path) as part:
            figure.savefig(part, dpi=110, format="png", bbox_inches="tight")
        plt.close(figure)


def _label(axis: Axes, title: str, x: str = "update") -> None:
    axis.set_title(title, loc="left", fontweight="bold")
    axis.set_xlabel(x)
    axis.locator_params(axis="x", integer=True)


def _draw_accuracy(axis: Axes, records: list[Record]) -> None:
    _label(axis, "Held-out accuracy, 95% interval")
    envs = before_after(records)
    for (env, *_), color in zip(envs, [BLUE, ORANGE, GREEN, PURPLE], strict=False):
        evaluated = [r for r in records if "update" in r and f"eval/{env}/accuracy" in r]
        updates = [r["update"] for r in evaluated]
        values, low, high = (
            [r[f"eval/{env}/{key}"] for r in evaluated] for key in ("accuracy", "ci_low", "ci_high")
        )
        axis.fill_between(updates, low, high, color=color, alpha=0.18, linewidth=0)
        label = f"{env}: {values[0]:.2f} → {values[-1]:.2f}"
        axis.plot(updates, values, color=color, marker="o", markersize=4, label=label)
        if (trivial := evaluated[0].get(f"eval/{env}/trivial")) is not None:
            label = f"trivial baseline: {trivial:.2f}"
            axis.axhline(trivial, color=color, linewidth=1.2, linestyle="--", label=label)
    axis.set_ylim(-0.03, 1.05)
    if envs:
        axis.legend(frameon=False)


def _draw_metric(
    axis: Axes, records: list[Record], name: str, color: str, label: str | None = None
) -> None:
    """Draws a metric as a thin line, and its moving average as a thick one."""
    if points := [(r["update"], r[name]) for r in records if r.get(name) is not None]:
        updates, values = zip(*points, strict=True)
        axis.plot(updates, values, color=color, linewidth=1, alpha=0.35)
        axis.plot(updates, _smooth(values), color=color, linewidth=2.2, label=label)


def _draw_info(
    axis: Axes, records: list[Record], names: list[str], meanings: Mapping[str, str]
) -> None:
    """Draws what the environment reports; a single metric is the title."""
    texts = [meanings.get(key, key) for key in (name.removeprefix("info/") for name in names)]
    title = "Reported by the environment, mean" if len(names) > 1 else texts[0]
    _label(axis, title[:1].upper() + title[1:])
    for name, text, color in zip(names, texts, (GREEN, PURPLE, ORANGE), strict=False):
        _draw_metric(axis, records, name, color, text)
    if len(names) > 1:
        axis.legend(frameon=False)
    values = [r[name] for r in records for name in names if r.get(name) is not None]
    if values and min(values) >= 0 and max(values) <= 1:
        axis.set_ylim(-0.03, 1.05)


def _mark_warnings(panels: list[Axes], records: list[Record]) -> None:
    for update in {update for _, updates, _ in logged_warnings(records) for update in updates}:
        for axis in panels:
            axis.axvline(update, color=RED, linewidth=0.9, linestyle=":")


def _smooth(values: Sequence[float]) -> list[float]:
    if len(values) <= 2 * SMOOTHING:  # nearly each window would hold all values
        return [*values]
    windows = (values[max(0, i - SMOOTHING) : i + SMOOTHING + 1] for i in range(len(values)))
    return [statistics.fmean(window) for window in windows]
