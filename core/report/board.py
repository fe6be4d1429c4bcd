"""A board for a room: who gets the most out of the same number of sampled tokens?

    python -m core.report.compare --board "runs/*"

There is a board for each environment that runs with a budget are evaluated on: the course has two.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.faults import UsageError
from core.report.summary import algorithm_title, minutes, names_of, sampled_tokens
from core.results import Record, accuracy_of, before_after
from environments.plumbing.registry import short_names

TOLERANCE = 1.05  # of the budget
HEADERS = ["rank", "run", "algorithm", "held-out accuracy [95%]", "sampled tokens", "minutes"]
Terms = tuple[tuple[str, Any], ...]  # what each is called, and its value
NOT_EVALUATED = ("evaluated on", "nothing")
Run = tuple[Path, dict[str, Any], list[Record]]  # folder, settings and metrics


def boards(runs: list[Run]) -> Iterator[tuple[str, list[list[str]], list[str]]]:
    """Yields the board of each environment that runs with a budget are evaluated on, that of most
    first; it says of the runs of no board why they are not on it."""
    env_of = {folder: terms_of(config, records)[0] for folder, config, records in runs}
    budgeted = [env_of[folder] for folder, config, _ in runs if config["max_sampled_tokens"]]
    envs = [env for env, _ in Counter(budgeted).most_common() if env != NOT_EVALUATED]
    for i, env in enumerate(envs or [NOT_EVALUATED]):
        its = [env, *({*env_of.values()} - {*envs} if i == 0 else ())]
        yield board([run for run in runs if env_of[run[0]] in its])


def board(runs: list[Run]) -> tuple[str, list[list[str]], list[str]]:
    """Returns the terms, a row as in HEADERS for each run, best first, and lines: why runs are not
    on the board, or not with their last evaluation.

    The terms and the budget are those of most runs that set --max-sampled-tokens; a room has others
    too. Raises UsageError if there is none.
    """
    terms = [terms_of(config, records) for _, config, records in runs]
    budgets = [config["max_sampled_tokens"] for _, config, _ in runs]
    entered = [(term, tokens) for term, tokens in zip(terms, budgets, strict=True)
               if term[0] != NOT_EVALUATED and tokens]  # fmt: skip
    if not entered:
        raise UsageError("no run has an evaluation and a budget, which --max-sampled-tokens sets")
    common, budget = Counter(entered).most_common(1)[0][0]
    env, tasks, model = (value for _, value in common[:3])
    accuracy = f"eval/{env}/accuracy"
    compared, beyond, why = [], list[str](), dict[str, list[str]]()
    names = names_of([folder for folder, *_ in runs])
    for name, (_, config, records), term in zip(names, runs, terms, strict=True):
        if term != common:
            why.setdefault(difference(term, common), []).append(name)
            continue
        within = until_budget(records, accuracy, budget)
        compared.append((name, config, within))
        if any(accuracy in record for record in records[len(within) :]):
            beyond.append(name)
    compared.sort(key=lambda run: -run[2][-1][accuracy])
    rows, first, rank = list[list[str]](), compared[0][2][-1], 1
    for place, (name, config, within) in enumerate(compared, 1):
        if is_better(first, within[-1], env):
            first, rank = within[-1], place
        rows.append([str(rank), name, algorithm_title(config), accuracy_of(env, within[-1]),
                     f"{sampled_tokens(within):,}", f"{minutes(within):.1f}"])  # fmt: skip
    lines = [f"Not on this board: {', '.join(names)}: {reason}" for reason, names in why.items()]
    if beyond:
        lines.append(f"{', '.join(beyond)}: the last evaluation within the budget counts; later "
                     "ones had sampled more tokens")  # fmt: skip
    title = f"{env}, {tasks} held-out tasks, {budget:,} sampled tokens, all from {model}"
    return title, rows, lines


def terms_of(config: dict[str, Any], records: list[Record]) -> Terms:
    """What the runs of a board have in common. The held-out tasks follow from the environment and
    their number (core/tasks.py), whatever the seed of the run. A model goes by the name of its
    folder, whose path differs from disk to disk; its accuracy before RL tells others apart."""
    evaluated = before_after(records)
    if not evaluated:
        return (NOT_EVALUATED,)
    env, first, _ = evaluated[0]
    model = Path(config["model_id"])  # runs/base/model: base
    model = model.parent if model.name == "model" else model
    return (
        ("evaluated on", env), ("held-out tasks", config["eval_num_tasks"]), ("from", model.name),
        ("trained on", short_names(config["env"])),
        ("warm-start steps", config["sft_steps"]),
        ("accuracy before RL", f"{first[f'eval/{env}/accuracy']:.2f}"),
    )  # fmt: skip


def difference(terms: Terms, common: Terms) -> str:
    """Why a run is not on the board.

    >>> difference((("from", "base"), ("steps", 50)), (("from", "base"), ("steps", 0)))
    'steps 50, not 0'
    """
    pairs = zip(terms, common, strict=False)
    return next(f"{name} {its}, not {theirs}" for (name, its), (_, theirs) in pairs
                if its != theirs)  # fmt: skip


def until_budget(records: list[Record], accuracy: str, budget: int) -> list[Record]:
    """The records up to the last evaluation within the budget; the first is always within it."""
    tokens, within = 0, list[Record]()
    for end, record in enumerate(records, 1):
        tokens += record.get("tokens/sampled") or 0
        if accuracy in record and (not within or tokens <= TOLERANCE * budget):
            within = records[:end]
    return within


def is_better(one: Record, other: Record, env: str) -> bool:
    """Whether the 95% interval of the difference of two accuracies excludes 0, from the Wilson
    interval of each; as for different tasks, which is cautious, as the tasks are the same."""
    name = f"eval/{env}"
    below = one[f"{name}/accuracy"] - one[f"{name}/ci_low"]
    above = other[f"{name}/ci_high"] - other[f"{name}/accuracy"]
    difference: float = one[f"{name}/accuracy"] - other[f"{name}/accuracy"]
    return difference > math.hypot(below, above)
