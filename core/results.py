"""Reads the records of a run; does not import torch, so that reports start at once.

A missing metric is NaN, and every comparison with NaN is false: hence conditions such as
`not x < limit`.
"""

import math
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]  # one line of metrics.jsonl or rollouts.jsonl
TARGET_ACCURACY = 0.9  # `tokens_to_target` counts the tokens until this held-out accuracy


def finite(record: Record, name: str) -> float:
    """The value of a metric; NaN if there is no finite number."""
    value = record.get(name)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else math.nan


def finite_values(records: Sequence[Record], name: str) -> list[float]:
    """The finite values of a metric."""
    values = [finite(record, name) for record in records]
    return [value for value in values if not math.isnan(value)]


def updates_of(records: Sequence[Record]) -> list[Record]:
    """The records from update 1 on; update 0 is the evaluation before training."""
    return [r for r in records if (r.get("update") or 0) > 0]


def num_updates(records: Sequence[Record]) -> int:
    """The number of the last update; 0 before the first."""
    return max((r["update"] for r in updates_of(records)), default=0)


def minutes(records: Sequence[Record]) -> float:
    """Minutes spent in warm start, sampling, training and evaluation."""
    parts = ("rollout", "train", "eval", "sft")  # time/sync_s is a part of time/train_s
    return sum(sum(finite_values(records, f"time/{part}_s")) for part in parts) / 60


def sampled_tokens(records: Sequence[Record]) -> int:
    """The number of tokens sampled for training."""
    return int(sum(finite_values(records, "tokens/sampled")))


def tokens_to_target(env: str, records: Sequence[Record]) -> int | None:
    """The tokens sampled for training up to the first evaluation with TARGET_ACCURACY on `env`;
    None if no evaluation reached it.

    >>> updates = [{"eval/a/accuracy": 0.2}, {"tokens/sampled": 70}, {"tokens/sampled": 30}]
    >>> tokens_to_target("a", [*updates, {"eval/a/accuracy": 0.9}])
    100
    """
    for end, record in enumerate(records, 1):
        if finite(record, f"eval/{env}/accuracy") >= TARGET_ACCURACY:
            return sampled_tokens(records[:end])
    return None


def logged_warnings(records: Sequence[Record]) -> list[tuple[str, list[int], str]]:
    """The warnings in the records of a log: (name, updates that raised it, first message).

    >>> first, second = {"dead_groups": "all returns equal"}, {"dead_groups": "again"}
    >>> logged_warnings([{"update": 5, "warnings": first}, {"update": 9, "warnings": second}])
    [('dead_groups', [5, 9], 'all returns equal')]
    """
    warnings: dict[str, tuple[str, list[int], str]] = {}
    for record in records:
        for name, message in (record.get("warnings") or {}).items():
            warnings.setdefault(name, (name, [], message))[1].append(record["update"])
    return list(warnings.values())


def reported(records: Sequence[Record]) -> list[str]:
    """The names info/* that all rollouts report. Others may be flags that only those rollouts
    report for which they are true: their mean is always 1.

    >>> reported([{"info/invalid": 1.0, "reported/invalid": 3, "info/right": 1.0}])
    ['info/right']
    """
    names = {name for record in records for name in record}
    few = {f"info/{name[9:]}" for name in names if name.startswith("reported/")}
    return sorted(name for name in names - few if name.startswith("info/"))


def evaluated(record: Record, metric: str = "accuracy") -> list[str]:
    """The environments (and seats, env/agent) whose evaluation has this metric."""
    names = [name for name in record if name.startswith("eval/") and name.endswith(f"/{metric}")]
    return [name[len("eval/") : -len(f"/{metric}")] for name in names]


def before_after(records: Sequence[Record]) -> list[tuple[str, Record, Record]]:
    """For each environment evaluated: its name, and the first and last records that evaluate it.

    Evaluations before the last change of an environment do not count.
    """
    edits = [i for i, r in enumerate(records) if "changed_code" in (r.get("warnings") or {})]
    evaluations = [r for r in records[max(edits, default=0) :] if evaluated(r)]
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    return [(env, first, last) for env in evaluated(first) if env in evaluated(last)]


def never_right(env: str, records: Sequence[Record]) -> bool:
    """Whether no answer of the evaluations in these records counted as right: then the mean return
    says more than the accuracy."""
    return not any(record.get(f"eval/{env}/accuracy") for record in records)


def return_of(env: str, record: Record) -> str:
    """'0.35 [0.30, 0.40]': the mean return with its interval, if the returns have any spread."""
    value, low, high = (finite(record, f"eval/{env}/return_{k}") for k in ("mean", "low", "high"))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]" if low < high else f"{value:.2f}"


def accuracy_of(env: str, record: Record) -> str:
    """'0.98 [0.96, 0.99]': accuracy with its interval."""
    value, low, high = (record[f"eval/{env}/{k}"] for k in ("accuracy", "ci_low", "ci_high"))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def mcnemar(lost: int, won: int) -> float:
    """Exact two-sided p-value of McNemar's test (1947) of two evaluations on the same tasks.

    `lost`, `won`: how many tasks only the first, or only the second, solved. If the policies are
    equally good, each of these is lost or won with probability 1/2.
    """
    as_extreme = sum(math.comb(lost + won, k) for k in range(min(lost, won) + 1))
    return min(1.0, 2 * as_extreme / 2 ** (lost + won))
