"""--keep-best: the evaluation with the best result so far, and its model.

The best of many evaluations is flattered: part of what makes it the best is chance. So the number
to publish is that of the exported model on other tasks.
"""

import math
from pathlib import Path
from typing import Any

from core.files.atomic import remove
from core.files.checkpoint import export_model
from core.policy import Policy
from core.results import Record

FOLDER = "best"  # of the run, while it goes on; then it becomes model/


def score_of(metrics: Record) -> float | None:
    """The mean accuracy over the environments of an evaluation; the mean return where nothing was
    right, which counts as less; None without an evaluation.

    >>> score_of({"eval/snake/accuracy": 0.5, "eval/snake/return_mean": 2.0})
    0.5
    """
    values: dict[str, list[float]] = {"/accuracy": [], "/return_mean": []}
    for name, value in metrics.items():
        for end in values:
            if name.startswith("eval/") and name.endswith(end):
                values[end].append(value)
    accuracies, returns = values.values()
    if not accuracies:
        return None
    if any(accuracies):
        return sum(accuracies) / len(accuracies)
    return math.atan(sum(returns) / len(returns)) / math.pi - 0.5  # from -1 to 0, in their order


def note(progress: dict[str, Any], update: int, metrics: Record) -> bool:
    """Compares an evaluation with the best one before; whether it is better. `progress` keeps
    the best one."""
    score = score_of(metrics)
    if score is None:
        return False
    best = progress.get("best")
    is_better = best is None or score > best[1]
    progress["best"] = [update, score] if is_better else best
    return is_better


def save(run: Path, policy: Policy) -> None:
    """Keeps the present model."""
    export_model(run, policy, name=FOLDER)


def export(run: Path) -> bool:
    """Makes the kept model the one that the run has trained. False if the run has none: a resumed
    one without a better evaluation has it already in model/."""
    if (run / FOLDER).is_dir():
        remove(run / "model")
        (run / FOLDER).rename(run / "model")
    return (run / "model").is_dir()
