"""Draws tree.png: the trees of real updates, token by token.

    python runs/prefix_sharing/draw.py tiny smollm2     # makes both runs, writes trees.json
    python runs/prefix_sharing/draw.py                  # draws trees.json again; no run

trees.json has the first and the last update of each run. An update is a list of trees, one for each
micro-batch: (has an advantage, [(tokens shared with the sequence above, tokens), ..]).
"""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE.parent), str(ROOT)]

import numpy as np  # noqa: E402
import tyro  # noqa: E402
from figures import figure, panel  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

import train  # noqa: E402
from core.batching import MicroBatch  # noqa: E402
from core.report.curves import BLUE, ORANGE  # noqa: E402

RUNS = {  # title and flags of train.py
    "tiny": ("tiny, letter_counting, 16 x 8", ""),
    "smollm2": ("smollm2, sums, 8 x 8", "--model-id smollm2 --env math_qa:level=1,style=plain "
                "--temperature 0.7 --lr 1e-5 --max-tokens 12 --num-prompts 8 --num-updates 30"),
}  # fmt: skip
Tree = tuple[bool, list[tuple[int, int]]]


def main(runs: tyro.conf.Positional[tuple[str, ...]] = ()) -> None:
    """Draws tree.png, after training the named runs: tiny, smollm2."""
    file = HERE / "trees.json"
    trees = json.loads(file.read_text()) if file.exists() else {}
    for name in runs:
        updates = record(f"{RUNS[name][1]} --eval-num-tasks 0 --microscope 0".split())
        trees[name] = {"1": updates[0], str(len(updates)): updates[-1]}
        file.write_text(json.dumps(trees) + "\n")
    draw({name: trees[name] for name in RUNS if name in trees})


def record(flags: list[str]) -> list[list[Tree]]:
    """Trains, and returns the trees of each update."""
    updates: list[list[Tree]] = []
    cut = train.micro_batches

    def recorded(*args: Any) -> Any:
        updates.append([])
        for micro in cut(*args):
            updates[-1].append((bool(micro.advantages.any()), shared_and_length(micro)))
            yield micro

    train.micro_batches = recorded
    try:
        train.run_command(flags)
    finally:
        train.micro_batches = cut
    return updates


def shared_and_length(micro: MicroBatch) -> list[tuple[int, int]]:
    """Of each sequence, sorted: tokens shared with the one before it, and all its tokens."""
    rows, computed = [], -1
    for nodes in micro.nodes.tolist():
        length = 1 + sum(node > 0 for node in nodes[1:])  # 0: the sequence has ended
        rows.append((sum(node <= computed for node in nodes[:length]), length))
        computed = max(computed, *nodes)
    return rows


def draw(trees: dict[str, dict[str, list[Tree]]]) -> None:
    heading = "What an update computes: each distinct prefix once"
    with figure(HERE / "tree.png", heading, len(trees), 2, (13, 0.9 + 4.3 * len(trees))) as axes:
        cells = iter(axes)
        for name, updates in trees.items():
            width = max(n for parts in updates.values() for _, rows in parts for _, n in rows)
            for update, parts in updates.items():
                axis = next(cells)
                draw_update(axis, parts, width)
                title = f"{RUNS[name][0]}, update {update}\n{counts(parts)}"
                panel(axis, title, "position of the token", size=12)
        axes[0].figure.legend(  # type: ignore[union-attr]
            handles=[
                Patch(color=shade(BLUE, 1), label="computed, forward and backward"),
                Patch(color=shade(ORANGE, 1), label="computed, forward only: no advantage"),
                Patch(color=shade(BLUE, 0.25), label="shared with the sequence above"),
            ], loc="outside lower left", ncols=3, frameon=False, fontsize=11,
        )  # fmt: skip


def draw_update(axis: Axes, parts: list[Tree], width: int) -> None:
    """One thin row per sequence, sorted; one cell per token."""
    image = np.ones((sum(len(rows) for _, rows in parts), width, 3))
    row = 0
    for has_advantage, rows in parts:
        color = BLUE if has_advantage else ORANGE
        for shared, length in rows:
            image[row, :shared] = shade(color, 0.25)
            image[row, shared:length] = shade(color, 1)
            row += 1
    axis.imshow(image, aspect="auto", interpolation="nearest", extent=(0, width, row, 0))
    axis.set_ylabel("sequences, sorted")
    axis.grid(False)


def shade(color: str, strength: float) -> tuple[float, ...]:
    return tuple(1 - strength * (1 - x) for x in to_rgb(color))


def counts(parts: list[Tree]) -> str:
    tokens = sum(n for _, rows in parts for _, n in rows)
    computed = [(alive, n - shared) for alive, rows in parts for shared, n in rows]
    nodes = sum(new for _, new in computed)
    backward = sum(new for alive, new in computed if alive)
    return f"{tokens:,} tokens, {nodes:,} nodes, {backward:,} of them also backward"


if __name__ == "__main__":
    tyro.cli(main)
