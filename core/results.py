"""The held-out accuracy in the records of a run, without torch, so that reports start at once."""

import math
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]  # one line of metrics.jsonl or rollouts.jsonl


def before_after(records: list[Record]) -> list[tuple[str, Record, Record]]:
    """For each environment evaluated: its name, and the first and last records that evaluate it.

    What was evaluated before a file of the environment changed is not compared: then it is the
    first since.
    """
    edits = [i for i, r in enumerate(records) if "changed_code" in (r.get("warnings") or {})]
    since = records[max(edits, default=0) :]
    evaluated = [r for r in since if "update" in r and any(k.startswith("eval/") for k in r)]
    if not evaluated:
        return []
    first, last = evaluated[0], evaluated[-1]
    both = [k for k in first if k.endswith("/accuracy") and k in last]
    names = [k[len("eval/") : -len("/accuracy")] for k in both if k.startswith("eval/")]
    return [(name, first, last) for name in names]


def never_right(env: str, records: Sequence[Record]) -> bool:
    """Whether no answer of the evaluations in these records counted as right: then the mean return
    says more than the accuracy."""
    return not any(record.get(f"eval/{env}/accuracy") for record in records)


def return_interval(env: str, record: Record) -> list[float]:
    """The mean return with the ends of its interval; equal returns, which have none, are exact."""
    found = (record.get(f"eval/{env}/return_{k}") for k in ("mean", "low", "high"))
    value, low, high = (math.nan if number is None else number for number in found)
    return [value, value, value] if math.isnan(low) else [value, low, high]


def return_of(env: str, record: Record) -> str:
    """'0.35 [0.30, 0.40]': the mean return with its interval, if the returns have any spread."""
    value, low, high = return_interval(env, record)
    return f"{value:.2f} [{low:.2f}, {high:.2f}]" if low < high else f"{value:.2f}"


def accuracy_of(env: str, record: Record) -> str:
    """'0.98 [0.96, 0.99]': accuracy with its interval."""
    value, low, high = (record[f"eval/{env}/{k}"] for k in ("accuracy", "ci_low", "ci_high"))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"
