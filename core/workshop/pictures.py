"""The pictures of workshop.ipynb. Each function draws one and shows it below its cell."""

from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from core.report.curves import BLUE, GREEN, INK, ORANGE, PURPLE, STYLE
from core.report.token_traces import pieces

GREY, PALE_GREY, PALE_ORANGE = "#a0a0ac", "#b9b9c4", "#fbe3d0"
SLANTED: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
BOLD: dict[str, Any] = {"loc": "left", "weight": "bold"}

plt.rcParams.update({**STYLE, "figure.dpi": 90, "figure.constrained_layout.use": True})


def next_tokens(
    tokenizer: PreTrainedTokenizerBase, ids: Tensor, mask: Tensor, logits: Tensor
) -> None:
    """What the policy expects after each token before a sampled one.

    `ids` [T], `mask` [T-1] bool, `logits` [T, V] of one sequence.
    """
    first = mask.nonzero().flatten()
    names = ["␣" if name == " " else name for name in pieces(tokenizer, ids.tolist())]
    columns = list(dict.fromkeys(ids[first + 1].tolist()))
    probabilities = logits[first].softmax(-1)[:, columns]
    fig, axis = plt.subplots(figsize=(0.5 * len(columns) + 3.4, 0.34 * len(first) + 1.6))
    image = axis.imshow(probabilities, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for line, t in enumerate(first):
        sampled = columns.index(int(ids[t + 1]))
        axis.plot(sampled, line, "s", ms=14, mec=ORANGE, mfc="none", mew=2.5)
    labels = [text.replace(" ", "␣") for text in pieces(tokenizer, columns)]
    axis.set_xticks(range(len(columns)), labels, **SLANTED)
    axis.set_yticks(range(len(first)), [f"{names[t]}   {int(t)}" for t in first])
    axis.set(xlabel="possible next tokens (those of this completion)", ylabel="token and position")
    axis.set_title("Each row predicts the token of the next row (orange)", **BOLD)
    axis.grid(False)
    fig.colorbar(image, label="probability")
    plt.show()


def sampled_tokens(texts: list[str], mask: Tensor) -> None:
    """The tokens of a chat, those hatched that the policy sampled; `mask` [T-1] bool."""
    _, axis = plt.subplots(figsize=(11, 6))
    x = y = 0.0
    for i, text in enumerate(texts):
        width = 1.3 + 0.72 * max(0, len(text) - 1)
        if x + width > 38:
            x, y = 0.0, y - 1.4
        sampled = i > 0 and bool(mask[i - 1])
        face, edge = (PALE_ORANGE, ORANGE) if sampled else ("white", PALE_GREY)
        hatch = "////" if sampled else ""
        box = plt.Rectangle((x, y), width - 0.12, 1.15, lw=0.8, fc=face, ec=edge, hatch=hatch)
        axis.add_patch(box)
        axis.text(
            x + width / 2 - 0.06, y + 0.55, text.replace(" ", "␣"), size=12, ha="center",
            va="center", family="monospace", bbox={"fc": face, "ec": "none", "pad": 0.6},
        )  # fmt: skip
        x += width
    axis.set(xlim=(-0.2, 38.2), ylim=(y - 0.4, 1.5))
    axis.axis("off")
    axis.set_title("Sampled tokens (hatched) are trained; the others are context", **BOLD)
    plt.show()


def clipped_objective(clipped_loss: Callable[..., Tensor]) -> None:
    """The objective of one token as a function of its ratio, for both signs of the advantage."""
    at, unit = torch.linspace(0, 2, 201), torch.ones(1, 1)
    _, axes = plt.subplots(1, 2, figsize=(10, 3.2))
    for axis, a, color in ((axes[0], 1.0, BLUE), (axes[1], -1.0, ORANGE)):
        objective = [-clipped_loss(r.log().view(1, 1), 0 * unit, a * unit, unit.bool()) for r in at]
        axis.plot(at, a * at, color=GREY, ls="--", label="ρ A, without the clip")
        axis.plot(at, objective, color=color, lw=2.5, label="with the clip")
        flat = (1.2, 2.0) if a > 0 else (0.0, 0.8)
        axis.axvspan(*flat, color=color, alpha=0.1, lw=0)
        middle = (sum(flat) / 2, 0.06)
        axis.annotate("no gradient", middle, xycoords=("data", "axes fraction"), ha="center")
        axis.plot(1, a, "o", color=INK)
        axis.set(xlabel="ρ = π / π_old", ylabel="objective (to maximize)")
        axis.set_title(f"A = {a:+.0f}", **BOLD)
        axis.legend(frameon=False, loc="upper left" if a > 0 else "upper right")
    plt.show()


def values_and_advantages(values: Tensor, by_lambda: dict[float, Tensor]) -> None:
    """The values of an episode with a reward of 1 at its end, and its advantages for each λ."""
    _, (above, below) = plt.subplots(2, 1, figsize=(8, 4.6), sharex=True, height_ratios=(2, 3))
    end = len(values) - 1
    above.step(range(len(values)), values, where="mid", color=INK)
    above.set(ylabel="value", ylim=(0, 1.1))
    above.plot(end, 1, "*", color=GREEN, ms=14, clip_on=False)
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "center"}
    above.annotate("reward 1", (end, 1), (-10, 0), **place)
    marks = zip(by_lambda.items(), (ORANGE, PURPLE, BLUE), "sDo", strict=True)
    for (lam, advantages), color, mark in marks:
        below.plot(advantages, color=color, marker=mark, ms=5, label=f"λ = {lam:g}")
    below.axhline(0, color=INK, lw=0.8)
    below.set(xlabel="token", ylabel="advantage")
    below.set_xticks(range(len(values)))
    below.legend(frameon=False, ncols=3)
    title = "λ = 0 blames the token after which the value fell; λ = 1 looks at the end"
    above.set_title(title, **BOLD)
    plt.show()


def changes_of_tokens(better: dict[str, Any], worse: dict[str, Any]) -> None:
    """The log-prob of each token of two logged rollouts before and after an update."""
    fig, axes = plt.subplots(2, 1, figsize=(10, 6))
    for axis, line, color in ((axes[0], better, BLUE), (axes[1], worse, ORANGE)):
        (trace,) = line["token_traces"]
        for i, (before, after) in enumerate(zip(trace["trainer"], trace["after"], strict=True)):
            axis.plot((i, i), (before, after), color=color, lw=2.5, zorder=1)
            axis.plot(i, before, "o", color="white", mec=INK, ms=6)
            axis.plot(i, after, "^" if after > before else "v", color=color, ms=8)
        axis.set_xticks(range(len(trace["text"])), [*map(repr, trace["text"])], **SLANTED)
        axis.grid(False, axis="x")
        axis.set_ylabel("log-prob")
        axis.margins(y=0.15)
        title = f"return {line['return']:.1f}, advantage {trace['advantage'][0]:+.2f}"
        axis.set_title(title, **BOLD)
    asked = better["messages"][0]["content"].split("?")[0]
    title = f"{asked}? Log-probs before (circle) and after (triangle) update 1"
    fig.suptitle(title, x=0.01, ha="left")
    plt.show()
