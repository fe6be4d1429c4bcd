"""Draws what runs where, and when: python runs/scale/draw.py writes scale.png."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, GREY, BLUE, GREEN = "#22222a", "#5c5c68", "#2f6db5", "#1f7a4d"
PAPER, PALE_BLUE, PALE_GREEN = "#f4f4f8", "#d7e5f5", "#d5ebdf"


def main() -> None:
    figure, axis = plt.subplots(figsize=(13.8, 5.4))
    figure.subplots_adjust(0, 0, 1, 1)
    axis.set(xlim=(0, 13.8), ylim=(0, 5.4))
    axis.axis("off")

    title(axis, 0.3, "What runs where: --sampler server")
    box(axis, 0.3, 1.6, 2.3, 2.9, PALE_GREEN)
    text(axis, 1.45, 4.15, "train.py", 13, bold=True)
    text(axis, 1.45, 3.1, "episodes, rewards\nlosses, optimizer\nbase model\n+ LoRA adapters", 11)
    for row, name in enumerate(("server A", "server B")):
        top = 4.5 - 1.55 * row
        box(axis, 5.2, top - 1.35, 1.9, 1.35, PALE_BLUE)
        text(axis, 6.15, top - 0.35, name, 13, bold=True)
        text(axis, 6.15, top - 0.88, "vllm serve\nsame base model", 11)
        arrow(axis, (2.65, top - 0.55), (5.15, top - 0.55), BLUE)
        arrow(axis, (5.15, top - 0.85), (2.65, top - 0.85), BLUE)
    text(axis, 3.9, 4.18, "prompt: token ids", 10, BLUE)
    text(axis, 3.9, 3.42, "sampled ids, log-probs", 10, BLUE)
    box(axis, 2.9, 0.25, 3.2, 0.85, PAPER)
    text(axis, 4.5, 0.82, "--adapter-folder", 12, bold=True)
    text(axis, 4.5, 0.47, "v11   v12   one path for each update", 10)
    arrow(axis, (1.45, 1.55), (2.85, 0.68), GREEN)
    arrow(axis, (6.15, 0.68), (6.6, 1.55), GREEN)
    text(axis, 1.0, 0.85, "after each\nupdate", 10, GREEN)
    text(axis, 7.0, 0.95, "each server\nloads it", 10, GREEN)

    title(axis, 8.0, "When: --staleness 1, in turn")
    bars(axis, 3.85, [(8.0, 1.4, 2), (10.3, 1.4, 3), (12.6, 0.9, 4)], PALE_BLUE, "episodes")
    bars(axis, 3.1, [(9.4, 0.9, 2), (11.7, 0.9, 3)], PALE_GREEN, "training")
    text(axis, 8.0, 2.45, "--overlap", 14, left=True, bold=True)
    bars(axis, 1.6, [(8.0, 1.4, 3), (9.4, 1.4, 4), (10.8, 1.4, 5), (12.2, 1.3, 6)], PALE_BLUE, "")
    bars(axis, 0.85, [(8.0, 0.9, 2), (9.4, 0.9, 3), (10.8, 0.9, 4), (12.2, 0.9, 5)], PALE_GREEN, "")
    rule = "The weights that play update n are those from before training n - 1, in both."
    text(axis, 8.0, 0.4, rule, 10.5, GREY, left=True)
    figure.savefig(Path(__file__).with_name("scale.png"), dpi=110)


def title(axis: Axes, left: float, words: str) -> None:
    text(axis, left, 5.0, words, 14, left=True, bold=True)


def box(axis: Axes, left: float, bottom: float, width: float, height: float, color: str) -> None:
    style = "round,pad=0,rounding_size=0.08"
    axis.add_patch(FancyBboxPatch((left, bottom), width, height, style, fc=color, ec=GREY, lw=0.8))


def bars(axis: Axes, bottom: float, spans: list[tuple], color: str, label: str) -> None:
    """Boxes (left, width, number of the update), with a word above the first."""
    for left, width, update in spans:
        box(axis, left, bottom, width - 0.06, 0.5, color)
        text(axis, left + width / 2, bottom + 0.25, f"update {update}" if width > 1 else update, 10)
    text(axis, spans[0][0], bottom + 0.62, label, 10, GREY, left=True)


def text(axis: Axes, x: float, y: float, words: object, size: float, color: str = INK,
         left: bool = False, bold: bool = False) -> None:  # fmt: skip
    axis.text(x, y, words, fontsize=size, color=color, ha="left" if left else "center", va="center",
              fontweight="bold" if bold else "normal", linespacing=1.4)  # fmt: skip


def arrow(axis: Axes, start: tuple, end: tuple, color: str) -> None:
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=color))


if __name__ == "__main__":
    main()
