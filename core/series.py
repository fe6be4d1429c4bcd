"""Reading metrics out of the records of a run: what diagnostics and facts are computed from.

A missing metric is NaN, and every comparison with NaN is false: hence conditions such as
`not x < limit`.
"""

import math
import statistics

from core.results import Record

WINDOW = 5  # a metric is judged by its mean over this many updates
MIN_UPDATES = 3  # or by each of this many, where each is a clear sign


def updates_of(records: list[Record]) -> list[Record]:
    """The records from update 1 on; update 0 is the evaluation before training."""
    return [r for r in records if (r.get("update") or 0) > 0]


def finite(record: Record, name: str) -> float:
    """The value of a metric; NaN, with which every comparison is false, if there is no number."""
    value = record.get(name)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else math.nan


def known(records: list[Record], name: str) -> list[float]:
    """The finite values of a metric."""
    return [value for r in records if not math.isnan(value := finite(r, name))]


def change_of(first: list[Record], last: list[Record], name: str) -> tuple[float, float] | None:
    """The means of a metric in both lists; None unless they differ by two standard errors, and with
    fewer than WINDOW values."""
    both = known(first, name), known(last, name)
    if min(map(len, both)) < WINDOW:
        return None
    error = math.sqrt(sum(statistics.variance(v) / len(v) for v in both))
    before, after = map(statistics.fmean, both)
    return (before, after) if abs(after - before) > 2 * error else None


def evaluated(record: Record, metric: str) -> list[str]:
    """ "eval/<env>" of each environment whose evaluation has this metric."""
    end = f"/{metric}"
    return [k.removesuffix(end) for k in record if k.startswith("eval/") and k.endswith(end)]


def is_evaluation(record: Record) -> bool:
    return "update" in record and bool(evaluated(record, "accuracy"))
