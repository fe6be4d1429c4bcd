"""Draws runs/loop.png, one update of GRPO as a diagram: python runs/loop.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

GREEN, RED, GREY, INK, PAPER, BLUE = (
    "#1f7a4d",
    "#b5412c",
    "#5c5c68",
    "#22222a",
    "#f4f4f8",
    "#2f6db5",
)
ROLLOUTS = [  # completion, reward, advantage: (reward - mean) / standard deviation of the group
    ("p a r1 r2 o t <answer>2</answer>", 1.0, 0.87),
    ("<answer>3</answer>", 0.1, -0.87),
    ("p a r1 r2 o t <answer>2</answer>", 1.0, 0.87),
    ("<answer>1</answer>", 0.1, -0.87),
]
STEPS = [  # left edge, width, title, what the step does
    (0.2, 2.3, "Prompt", "one of P tasks"),
    (2.9, 3.9, "1  Sample", "G completions of the same prompt"),
    (6.9, 1.6, "2  Reward", "from the\nenvironment"),
    (8.6, 2.3, "3  Advantage", "(reward − group mean)\n/ group std"),
    (11.0, 2.6, "4  Gradient step", "change the probability\nof these tokens"),
]


def main() -> None:
    figure, axis = plt.subplots(figsize=(13.8, 6.2))
    figure.subplots_adjust(0, 0, 1, 1)
    axis.set(xlim=(0, 13.8), ylim=(0, 6.2))
    axis.axis("off")
    for left, width, title, text in STEPS:
        box(axis, left, 1.85, width, 4.15)
        axis.text(left + 0.15, 5.72, title, fontsize=14, fontweight="bold", color=INK, va="center")
        axis.text(left + 0.15, 5.42, text, fontsize=11, color=GREY, va="top", linespacing=1.3)
    axis.text(0.35, 3.6, 'How many r in\n"parrot"?', fontsize=13, color=INK, va="center",
              linespacing=1.5)  # fmt: skip
    for row, rollout in enumerate(ROLLOUTS):
        draw_rollout(axis, 4.5 - 0.68 * row, *rollout)
    arrow(axis, (2.52, 3.6), (2.88, 3.6), GREY)

    box(axis, 0.2, 0.2, 13.4, 0.85, color="#e3ecf7", edge=BLUE)
    axis.text(6.9, 0.74, "One set of weights in memory", fontsize=14, fontweight="bold", color=INK,
              ha="center", va="center")  # fmt: skip
    axis.text(6.9, 0.4, "the sampler and the trainer share it, so no weights are sent after a step",
              fontsize=11, color=GREY, ha="center", va="center")  # fmt: skip
    arrow(axis, (4.85, 1.08), (4.85, 1.82), BLUE)
    axis.text(5.05, 1.44, "the sampler reads the weights", fontsize=11, color=BLUE, va="center")
    arrow(axis, (12.3, 1.82), (12.3, 1.08), BLUE)
    axis.text(12.1, 1.44, "optimizer.step() writes the weights", fontsize=11, color=BLUE,
              ha="right", va="center")  # fmt: skip
    figure.savefig(Path(__file__).with_name("loop.png"), dpi=110)
    plt.close(figure)


def draw_rollout(axis: Axes, y: float, text: str, reward: float, advantage: float) -> None:
    """One row: what was sampled, its reward, its advantage, and what the step does to it."""
    color, verb = (GREEN, "▲ raise") if advantage > 0 else (RED, "▼ lower")
    frame = {"facecolor": color, "alpha": 0.14, "edgecolor": color, "pad": 5,
             "linestyle": "-" if advantage > 0 else ":"}  # fmt: skip
    axis.text(3.12, y, text, fontsize=11.5, family="monospace", color=INK, va="center", bbox=frame)
    axis.text(7.7, y, f"{reward:.1f}", fontsize=13, color=INK, ha="center", va="center")
    for x, cell in ((9.75, f"{advantage:+.2f}".replace("-", "−")), (12.3, verb)):
        axis.text(x, y, cell, fontsize=13, fontweight="bold", color=color, ha="center", va="center")


def box(
    axis: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    color: str = PAPER,
    edge: str = GREY,
) -> None:
    look = {"facecolor": color, "edgecolor": edge, "linewidth": 0.8}
    corners = "round,pad=0,rounding_size=0.12"
    axis.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=corners, **look))


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=20, linewidth=2,
                                   color=color, shrinkA=0, shrinkB=0))  # fmt: skip


if __name__ == "__main__":
    main()
