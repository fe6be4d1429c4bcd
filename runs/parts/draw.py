"""Draws the effect of each part of an algorithm, and writes the table of the page; no run.

    python runs/record.py parts             # make all runs again
    python runs/record.py parts 'clip*'     # or those of one part
    python runs/parts/draw.py

README.md has the runs, as runs/record.py reads them; panels.yaml has `pictures`, a list of panels
for each, and `panels`:

    metric    of the curves; * stands for the environment
    y         what it is, in words
    runs      label: name of a run
    metrics   label: metric of `run`, in place of metric and runs
    bars      label: metric, in place of metric: the last values are drawn as bars
    why       what the panel shows, in two or three lines
"""

import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

import yaml
from matplotlib.axes import Axes

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402

from core.report import curves  # noqa: E402

WIDTH, HEIGHT = 4.3, 4.6  # inches of a panel, the text below it included
Seeds = dict[str, list[record.Run]]  # the runs of a name, one for each seed


def main() -> None:
    page = yaml.safe_load((HERE / "panels.yaml").read_text(encoding="utf-8"))
    seeds: Seeds = {}
    for run in record.read_page(HERE)[1]:
        if run.read().records:
            seeds.setdefault(run.name, []).append(run)
    for file, picture in page["pictures"].items():
        across = picture["across"]
        down = -(-len(picture["panels"]) // across)
        size = (WIDTH * across, HEIGHT * down)
        with curves.panels(HERE / file, picture.get("title", ""), down, across, size) as axes:
            for axis, title in zip(axes, picture["panels"], strict=False):
                draw_panel(axis, title, page["panels"][title], seeds)
            for axis in axes[len(picture["panels"]) :]:
                axis.set_visible(False)
    record.write_table(HERE, [*table(page["panels"], seeds), "", record.recorded_with(HERE)])


def draw_panel(axis: Axes, title: str, spec: dict[str, Any], seeds: Seeds) -> None:
    """A line and a band from the lowest to the highest seed for each run, or bars."""
    curves.label(axis, title, "" if "bars" in spec else "update")
    if "bars" in spec:
        draw_bars(axis, spec, seeds)
    else:
        for (label, metric, name), color in zip(lines_of(spec), curves.COLORS, strict=False):
            points = [run.curve(metric) for run in seeds[name]]
            record.seed_band(axis, points, color=color, label=label, linewidth=2.2)
    if "accuracy" in spec["y"]:
        axis.set_ylim(-0.02, 1.3 if "bars" in spec else 1.04)
    axis.set_ylabel(spec["y"])
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=10, ncols=2 if "bars" in spec else 1)
    why = "\n".join(textwrap.wrap(spec["why"], 54))
    axis.text(-0.1, -0.24, why, transform=axis.transAxes, fontsize=10, color=curves.INK, va="top")


def draw_bars(axis: Axes, spec: dict[str, Any], seeds: Seeds) -> None:
    """For each run a bar for each metric, as high as the mean, and a point for each seed."""
    width = 0.8 / len(spec["bars"])
    bars = zip(spec["bars"].items(), curves.COLORS, strict=False)
    for i, ((label, metric), color) in enumerate(bars):
        for place, name in enumerate(spec["runs"].values()):
            values = [run.values(metric, run.envs[0])[-1] for run in seeds[name]]
            x = place + (i - (len(spec["bars"]) - 1) / 2) * width
            legend = label if label and not place else None
            mean = statistics.fmean(values)
            axis.bar(x, mean, 0.92 * width, color=color, alpha=0.75, label=legend)
            axis.plot([x] * len(values), values, ".", color=curves.INK, markersize=4)
    labels = [label.replace(" ", "\n") for label in spec["runs"]]
    axis.set_xticks(range(len(labels)), labels, fontsize=9, rotation=30 if len(labels) > 5 else 0)
    axis.grid(axis="x", visible=False)


def lines_of(spec: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The lines of a panel: label, metric, name of the run."""
    if "metrics" in spec:
        return [(label, metric, spec["run"]) for label, metric in spec["metrics"].items()]
    lines = []
    for label, name in spec["runs"].items():
        for suffix, metric in spec.get("bars", {"": spec.get("metric")}).items():
            lines.append((f"{label}, {suffix}" if suffix else label, metric, name))
    return lines


def table(panels: dict[str, dict[str, Any]], seeds: Seeds) -> list[str]:
    """The last value of each line or bar: the mean over the seeds, the lowest and the highest."""
    rows = []
    for title, spec in panels.items():
        cells = []
        for label, metric, name in lines_of(spec):
            last = [run.values(metric, run.envs[0])[-1] for run in seeds[name]]
            spread = f" [{min(last):.2f}, {max(last):.2f}]" if len(last) > 1 else ""
            cells.append(f"{label}: {statistics.fmean(last):.2f}{spread}")
        rows.append([title, spec["y"], "; ".join(cells)])
    return record.markdown("panel | measured | at the end: mean [lowest, highest seed]", rows)


if __name__ == "__main__":
    main()
