"""A board for a room: who gets the most out of the same number of sampled tokens?

    python -m core.report.compare --board "runs/*"

There is a board for each environment that runs with a budget are evaluated on: the course has two.
A run counts with its last evaluation within the budget, the tokens of --max-sampled-tokens. Such a
run ends after the update that reaches them, so it may exceed them by a twentieth. Accuracies whose
95% intervals overlap much may differ by chance, and with another seed a run differs by more.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.faults import UsageError
from core.report.summary import algorithm_title, minutes, names_of, sampled_tokens
from core.results import Record, accuracy_of, before_after

TOLERANCE = 1.05  # of the budget
HEADERS = ["run", "algorithm", "from", "accuracy [95%]", "tokens", "minutes"]
Run = tuple[Path, dict[str, Any], list[Record]]  # folder, settings and metrics


def boards(runs: list[Run]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yields the title and the rows of each board, a row as in HEADERS for each run, best first.

    The budget is that of most runs on a board; runs with another one are not on it. Raises
    UsageError if no run has an evaluation and a budget.
    """
    own = [run for run in runs if run[1]["max_sampled_tokens"] and before_after(run[2])]
    if not own:
        raise UsageError("no run has an evaluation and a budget, which --max-sampled-tokens sets")
    env_of = {folder: before_after(records)[0][0] for folder, _, records in own}
    for env in dict.fromkeys(env_of.values()):
        here = [run for run in own if env_of[run[0]] == env]
        terms = [(config["max_sampled_tokens"], config["eval_num_tasks"]) for _, config, _ in here]
        budget, tasks = Counter(terms).most_common(1)[0][0]
        entered = [run for run, its in zip(here, terms, strict=True) if its == (budget, tasks)]
        rows = []
        names = names_of([folder for folder, *_ in entered])
        for name, (_, config, records) in zip(names, entered, strict=True):
            within = until_budget(records, f"eval/{env}/accuracy", budget)
            rows.append([
                name, algorithm_title(config), model_name(config), accuracy_of(env, within[-1]),
                f"{sampled_tokens(within):,}", f"{minutes(within):.1f}",
            ])  # fmt: skip
        rows.sort(key=lambda row: row[3], reverse=True)
        yield f"{env}, {tasks} held-out tasks, {budget:,} sampled tokens", rows


def model_name(config: dict[str, Any]) -> str:
    """The model that a run starts from, by the name of its folder: runs/base/model is base."""
    model = Path(config["model_id"])
    return (model.parent if model.name == "model" else model).name


def until_budget(records: list[Record], accuracy: str, budget: int) -> list[Record]:
    """The records up to the last evaluation within the budget; the first is always within it."""
    tokens, within = 0, list[Record]()
    for end, record in enumerate(records, 1):
        tokens += record.get("tokens/sampled") or 0
        if accuracy in record and (not within or tokens <= TOLERANCE * budget):
            within = records[:end]
    return within
