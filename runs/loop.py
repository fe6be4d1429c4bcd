"""Draws runs/loop.png, the picture of an update in the README: python runs/loop.py"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch  # noqa: E402

GREEN, RED, GREY, INK, PAPER = "#1f7a4d", "#b5412c", "#8a8a96", "#22222a", "#f4f4f8"
TRIES = [  # what was written, reward, advantage
    ("c h e r1 r2 y <answer>2</answer>", 1, "+0.87"),
    ("<answer>3</answer>", 0, "-0.87"),
    ("c h e r1 r2 y <answer>2</answer>", 1, "+0.87"),
    ("<answer>1</answer>", 0, "-0.87"),
]


def box(axis, x, y, w, h, title, text=""):
    patch = FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0.01,rounding_size=0.12",
                           facecolor=PAPER, edgecolor=GREY, linewidth=1.2)  # fmt: skip
    axis.add_patch(patch)
    axis.text(x + 0.15, y + h - 0.14, title, fontsize=12, fontweight="bold", color=INK, va="top")
    axis.text(
        x + 0.15, y + h - 0.58, text, fontsize=9.5, color="#55555f", va="top", linespacing=1.5
    )


def arrow(axis, start, end, bend=0.0):
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=16, color=INK,
                                   linewidth=1.5, connectionstyle=f"arc3,rad={bend}"))  # fmt: skip


def main() -> None:
    figure, axis = plt.subplots(figsize=(12.4, 5.0), layout="constrained")
    axis.set_xlim(0, 12.4)
    axis.set_ylim(0, 5.0)
    axis.axis("off")
    box(axis, 0.1, 3.3, 2.5, 1.55, "1  a task", 'How many r in\n"cherry"?')
    box(axis, 0.1, 1.4, 2.5, 1.55, "5  again", "the next tries come\nfrom the new weights")
    box(axis, 3.1, 1.4, 5.3, 3.45, "2  play: G tries at the same task")
    box(
        axis,
        8.9,
        3.3,
        3.4,
        1.55,
        "3  compare",
        "advantage: return minus the\ngroup's mean, over its deviation",
    )
    box(
        axis,
        8.9,
        1.4,
        3.4,
        1.55,
        "4  learn",
        "make tokens of an advantage above 0\nlikelier, the others less likely",
    )
    box(axis, 3.1, 0.1, 5.3, 0.85, "one set of weights")
    axis.text(5.55, 0.72, "for sampler and trainer", fontsize=9.5, color="#55555f", va="center")
    axis.text(3.25, 0.3, "nothing is sent or copied after a step", fontsize=9.5, color="#55555f",
              va="center")  # fmt: skip
    for x, word in ((7.05, "reward"), (7.85, "advantage")):
        axis.text(x, 4.12, word, fontsize=9, color=GREY, ha="center")
    for i, (text, reward, advantage) in enumerate(TRIES):
        y = 3.75 - 0.6 * i
        color, mark = (GREEN, "▲") if reward else (RED, "▼")
        axis.text(3.32, y, text, fontsize=10, family="monospace", color=INK, va="center",
                  bbox={"facecolor": color, "alpha": 0.14, "edgecolor": color,
                        "linestyle": "-" if reward else ":", "pad": 4})  # fmt: skip
        axis.text(7.05, y, str(reward), fontsize=12, color=INK, ha="center", va="center")
        axis.text(7.85, y, f"{mark} {advantage}", fontsize=10.5, color=color, ha="center",
                  va="center", fontweight="bold")  # fmt: skip
    arrow(axis, (2.65, 4.1), (3.05, 4.1))
    arrow(axis, (8.45, 4.1), (8.85, 4.1))
    arrow(axis, (10.6, 3.25), (10.6, 3.0))
    arrow(axis, (1.35, 3.0), (1.35, 3.25))
    arrow(axis, (10.6, 1.35), (8.45, 0.5), bend=-0.3)
    arrow(axis, (3.05, 0.5), (1.35, 1.35), bend=-0.3)
    axis.text(10.35, 0.5, "optimizer.step()", fontsize=9.5, family="monospace", color=INK)
    figure.savefig(HERE / "loop.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
