"""--keep-best: the evaluation with the best result so far, whose model is kept.

The best of many evaluations is flattered: part of what makes it the best is chance. So the number
to publish is that of the exported model on other tasks.
"""

from pathlib import Path
from typing import Any

from core.files.atomic import remove
from core.results import Record

FOLDER = "best"  # of the run, while it goes on; then it becomes model/


def note(progress: dict[str, Any], update: int, metrics: Record) -> bool:
    """Whether an evaluation is better than all before, of which `progress` keeps the best one.

    What counts is the mean accuracy over its environments; of equal ones, the mean return.

    >>> progress, now = {}, {"eval/snake/accuracy": 0.5, "eval/snake/return_mean": 2.0}
    >>> note(progress, 3, now), note(progress, 4, now), progress["best"]
    (True, False, [3, 0.5, 2.0])
    """
    means = []
    for end in ("/accuracy", "/return_mean"):
        values = [x for k, x in metrics.items() if k.startswith("eval/") and k.endswith(end)]
        means += [sum(values) / len(values)] if values else []
    is_better = means > progress.get("best", [0])[1:]
    if is_better:
        progress["best"] = [update, *means]
    return is_better


def export(run: Path) -> bool:
    """Makes the kept model the one that the run has trained. False if the run has none: a resumed
    one without a better evaluation has it already in model/."""
    if (run / FOLDER).is_dir():
        remove(run / "model")
        (run / FOLDER).rename(run / "model")
    return (run / "model").is_dir()
