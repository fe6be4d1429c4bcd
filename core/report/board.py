"""A board for a room: who gets the most out of the same number of sampled tokens?

    python -m core.report.compare --board "runs/*"

The runs of a board start from the same model and are evaluated on the same held-out tasks. A run
counts with its last evaluation within the budget, the tokens of --max-sampled-tokens. Such a run
ends after the update that reaches them, so it may exceed them by a twentieth.

Runs that cannot be told apart share a rank. Each is compared with the first of the rank above: it
has a rank of its own if the 95% interval of the difference of the two accuracies excludes 0
(Newcombe 1998, Statistics in Medicine 17:873-890, method 10). That is about the held-out tasks:
with another seed, a run differs by more.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from core.faults import UsageError
from core.report.summary import algorithm_title, minutes
from core.results import accuracy_of, before_after
from core.run.log import Record

TOLERANCE = 1.05  # of the budget
HEADERS = ["rank", "run", "algorithm", "held-out accuracy [95%]", "sampled tokens", "minutes"]


@dataclass
class Entry:
    """A run on the board, at its last evaluation within the budget."""

    name: str
    algorithm: str
    evaluation: Record  # eval/{env}/accuracy, ci_low, ci_high
    tokens: int  # sampled until then
    minutes: float
    has_later: bool = False  # evaluations, beyond the budget


def board(
    runs: list[tuple[Path, dict[str, Any], list[Record]]],
) -> tuple[str, list[list[str]], list[str]]:
    """Returns the terms, a row as in HEADERS for each run, best first, and lines: why runs are not
    on the board, or not with their last evaluation.

    `runs`: folder, settings and metrics of each. The terms and the budget are those of most runs
    that set --max-sampled-tokens; a room has others too. Raises UsageError if there is none.
    """
    models = names_of_models([str(config["model_id"]) for _, config, _ in runs])
    terms = [terms_of(*run[1:], model) for run, model in zip(runs, models, strict=True)]
    budgets = [config["max_sampled_tokens"] for _, config, _ in runs]
    entered = [(term, tokens) for term, tokens in zip(terms, budgets, strict=True)
               if term[0] and tokens]  # fmt: skip
    if not entered:
        raise UsageError("no run has an evaluation and a budget, which --max-sampled-tokens sets")
    common = Counter(term for term, _ in entered).most_common(1)[0][0]
    budget = Counter(tokens for term, tokens in entered if term == common).most_common(1)[0][0]
    env, tasks, model = common[:3]
    compared = [run for run, term in zip(runs, terms, strict=True) if term == common]
    entries = [entry_of(*run, env, budget) for run in compared]
    entries.sort(key=lambda entry: -entry.evaluation[f"eval/{env}/accuracy"])
    rows, first, rank = list[list[str]](), entries[0], 1
    for place, entry in enumerate(entries, 1):
        if is_better(first.evaluation, entry.evaluation, env):
            first, rank = entry, place
        rows.append([str(rank), entry.name, entry.algorithm, accuracy_of(env, entry.evaluation),
                     f"{entry.tokens:,}", f"{entry.minutes:.1f}"])  # fmt: skip
    why: dict[str, list[str]] = {}
    for run, term in zip(runs, terms, strict=True):
        if term != common:
            why.setdefault(difference(term, common), []).append(run[0].name)
    lines = [f"Not on this board: {', '.join(names)}: {reason}" for reason, names in why.items()]
    if beyond := [entry.name for entry in entries if entry.has_later]:
        lines.append(f"{', '.join(beyond)}: the last evaluation within the budget counts; later "
                     "ones had sampled more tokens")  # fmt: skip
    title = f"{env}, {tasks} held-out tasks, {budget:,} sampled tokens, all from {model}"
    return title, rows, lines


# environment, held-out tasks, name of the model, environments of training, SFT steps, accuracy
# before RL
Terms = tuple[str, int, str, str, int, str]


def names_of_models(ids: list[str]) -> list[str]:
    """A name for the model that each --model-id stands for: of a folder its own name, or its path
    if another folder has that name. Runs of other machines name folders that are not here."""
    paths = [Path(model_id).expanduser() for model_id in ids]
    here = [path.resolve() if path.is_dir() else None for path in paths]
    names = [
        path.parent.name if path.name == "model" else folder.name if folder else model_id
        for model_id, path, folder in zip(ids, paths, here, strict=True)
    ]  # runs/base/model: base
    count = Counter(name for name, folder in {*zip(names, here, strict=True)} if folder)
    return [str(folder) if folder and count[name] > 1 else name
            for name, folder in zip(names, here, strict=True)]  # fmt: skip


def terms_of(config: dict[str, Any], records: list[Record], model: str) -> Terms:
    """What the runs of a board have in common. The held-out tasks follow from the environment and
    their number (core/tasks.py), whatever the seed of the run."""
    evaluated = before_after(records)
    env, first = evaluated[0][:2] if evaluated else ("", {})
    start = f"{first[f'eval/{env}/accuracy']:.2f}" if evaluated else ""
    trained = " ".join(config["env"])
    return env, config["eval_num_tasks"], model, trained, config["sft_steps"], start


def difference(term: Terms, common: Terms) -> str:
    """Why a run is not on the board.

    >>> difference(("a", 256, "tiny", "a", 50, "0.90"), ("a", 256, "tiny", "a", 0, "0.40"))
    'a warm start of 50 steps, not 0'
    """
    if not term[0]:
        return "not evaluated"
    names = (
        "environment {}, not {}|{} held-out tasks, not {}|from {}, not {}|trained on {}, not {}|"
    )
    names += "a warm start of {} steps, not {}|starts at {}, not {}"
    texts = zip(names.split("|"), term, common, strict=True)
    return next(text.format(its, theirs) for text, its, theirs in texts if its != theirs)


def entry_of(
    folder: Path, config: dict[str, Any], records: list[Record], env: str, budget: int
) -> Entry:
    """The run at its last evaluation within the budget; the first is always within it."""
    tokens, entry = 0, None
    for i, record in enumerate(records):
        tokens += record.get("tokens/sampled") or 0
        if f"eval/{env}/accuracy" not in record:
            continue
        if entry is not None and tokens > TOLERANCE * budget:
            return replace(entry, has_later=True)
        entry = Entry(folder.name, algorithm_title(config), record, tokens,
                      minutes(records[: i + 1]))  # fmt: skip
    assert entry is not None, "terms_of found an evaluation"
    return entry


def is_better(one: Record, other: Record, env: str) -> bool:
    """Whether the 95% interval of the difference of two accuracies excludes 0, from the Wilson
    interval of each; as for different tasks, which is cautious, as the tasks are the same."""
    name = f"eval/{env}"
    below = one[f"{name}/accuracy"] - one[f"{name}/ci_low"]
    above = other[f"{name}/ci_high"] - other[f"{name}/accuracy"]
    difference: float = one[f"{name}/accuracy"] - other[f"{name}/accuracy"]
    return difference > math.hypot(below, above)
