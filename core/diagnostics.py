"""Learning that goes wrong: six named warnings, each a judgement of the metrics so far.

They are functions of the records alone, so a run that was resumed raises the same ones at the same
updates. The bounds are such that the recorded runs that learn raise nothing, and those made to
fail (runs/what_goes_wrong) what they deserve; a test holds both.

    for name, line in new(records).items():      # the last record is the update just done
        print(f"{name}: {line}")                 # what is seen, in figures; what to try
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

Record = dict[str, Any]  # a line of metrics.jsonl

# name: what it means; what to try
WARNINGS = {
    "entropy_collapse": (
        "hardly anything is left to try, and the tasks aren't solved",
        "--entropy-coef 0.01, a lower --lr, a higher --temperature, or an earlier checkpoint",
    ),
    "reward_without_accuracy": (
        "what is paid rises, what was meant falls: the reward is being gamed, or learnt by heart",
        "reading the best-paid rollouts in report.html, a stricter reward, --kl-coef, more tasks",
    ),
    "weights_at_cap": (
        "many tokens were sampled by a policy that the trainer doesn't recognise",
        "the same --dtype on both sides (float32 to find out), --top-p 1 --top-k 0",
    ),
    "dead_groups": (
        "the rollouts of a task are all paid alike, so there is nothing to compare",
        "--temperature 1, easier tasks, --curriculum 0.8, --filter-groups 3, a larger --group-size",
    ),
    "kl_runaway": (
        "the policy moves away too fast, or too far to come back",
        "a lower --lr, fewer --num-epochs, a narrower clip, a higher --kl-coef",
    ),
    "sampler_gap": (
        "sampler and trainer disagree about the same tokens: they see other text or other weights",
        "--sampler torch, --dtype float32, --top-p 1 --top-k 0 to find which side is wrong",
    ),
}
WINDOW = 5  # updates that are judged together: one alone says little
QUIET = 10  # updates that a warning must not have held before it is raised anew
SPREAD = 10  # updates at the start and now, for what is sampled and not evaluated
EVALUATIONS = 20  # so many back are compared
SOLVED = 0.9  # share correct from which a sure policy is a good one
ENTROPY, ENTROPY_SHARE = 0.02, 0.1  # nats a token; share of what it was at first
CAPPED = 0.05  # share of tokens whose weight is cut
OPEN, COMPARABLE = 0.1, 0.25  # share of groups not all right; of those, share with any spread
KL_STEP, KL_REFERENCE = 0.05, 0.5  # nats a token: from the policy that sampled, from the reference
GAP_MEAN, GAP_TOKEN = 0.05, 5.0  # nats: mean of all tokens; of one token, in two updates
LOOKED_AT = """update reward/mean reward/correct policy/entropy weights/capped
    groups/zero_std_fraction groups/all_right kl/approx kl/reference gap/logprob_mean
    gap/logprob_max""".split()
EDGES = ("/accuracy", "/ci_low", "/ci_high")


def new(records: list[Record], by_group: bool = True) -> dict[str, str]:
    """The warnings that begin to hold with the last record, after QUIET updates in which they did
    not (and an evaluation, for what is seen there): name -> a line with the figures.

    `records`: those of the run so far, or what `warning_inputs` keeps of them. `by_group`: whether
    rollouts are compared within their group; otherwise dead groups do no harm.
    """
    found = raised(records, by_group)
    earlier = [len(records) - back for back in range(1, QUIET + 1)] if found else []
    if found and _is_evaluation(records[-1]):
        before = (i for i in range(len(records) - 1, 0, -1) if _is_evaluation(records[i - 1]))
        earlier += [next(before, 0)]
    held = {name for end in earlier if end > 0 for name in raised(records[:end], by_group)}
    return {name: line for name, line in found.items() if name not in held}


def raised(records: list[Record], by_group: bool = True) -> dict[str, str]:
    """The warnings that hold at the last record: name -> a line with the figures.

    What an evaluation shows holds at evaluations. Values that aren't there, or aren't finite, say
    nothing.
    """
    if not records or "update" not in records[-1]:
        return {}
    last = [r for r in records[-WINDOW:] if "update" in r]
    checks: dict[str, Callable[[], str]] = {
        "entropy_collapse": lambda: _entropy(_first(records, WINDOW), last),
        "reward_without_accuracy": lambda: _evaluated(records) or _sampled(records),
        "weights_at_cap": lambda: _capped(last),
        "dead_groups": lambda: _groups(last) if by_group else "",
        "kl_runaway": lambda: _kl(last),
        "sampler_gap": lambda: _gap(last),
    }
    seen = {name: check() for name, check in checks.items()}
    return {name: f"{told}; try {WARNINGS[name][1]}" for name, told in seen.items() if told}


def warning_inputs(record: Record) -> Record:
    """The part of a record that warnings look at: about 1 kB, to keep of every update."""
    return {k: v for k, v in record.items() if k in LOOKED_AT or _is_accuracy(k)}


def collect(records: list[Record]) -> list[tuple[str, list[int], str]]:
    """The warnings noted in records: (name, updates at which it was raised, its first line).

    >>> collect([{"update": 5, "warnings": {"a": "x"}}, {"update": 30, "warnings": {"a": "y"}}])
    [('a', [5, 30], 'x')]
    """
    found: dict[str, tuple[str, list[int], str]] = {}
    for record in records:
        for name, line in (record.get("warnings") or {}).items():
            found.setdefault(name, (name, [], line))[1].append(record["update"])
    return list(found.values())


def _entropy(first: list[Record], last: list[Record]) -> str:
    """Nothing left to try. A policy that solves its tasks may be sure of itself."""
    start, now = _values(first, "policy/entropy"), _values(last, "policy/entropy")
    correct = _mean(last, "reward/correct")
    if not start or not now or correct is None or correct >= SOLVED:
        return ""
    at_first, entropy = statistics.median(start), statistics.median(now)
    if entropy >= max(ENTROPY, ENTROPY_SHARE * at_first):
        return ""
    return f"entropy {entropy:.2g} nats a token ({at_first:.2g} at first), {correct:.0%} correct"


def _evaluated(records: list[Record]) -> str:
    """Held-out accuracy below what it was, beyond both intervals, while reward rose since."""
    if not _is_evaluation(records[-1]):
        return ""
    now, after = records[-1], records[-WINDOW:]
    evaluations = (i for i in range(len(records) - 2 * WINDOW, 0, -1)
                   if _is_evaluation(records[i - 1]))  # fmt: skip
    for i, _ in zip(evaluations, range(EVALUATIONS), strict=False):
        then = records[i - 1]
        risen = _moved(records[i : i + WINDOW], after, "reward/mean")
        if not risen or risen[1] < risen[0]:
            continue
        for env in (key.removesuffix("/ci_low") for key in then if key.endswith("/ci_low")):
            low, high = _finite(then, f"{env}/ci_low"), _finite(now, f"{env}/ci_high")
            was, is_now = (_finite(r, f"{env}/accuracy") for r in (then, now))
            if None not in (low, high, was, is_now) and high < low:  # type: ignore[operator]
                return (f"since update {then['update']} reward rose from {risen[0]:.2f} to "
                        f"{risen[1]:.2f}, accuracy on {env.removeprefix('eval/')} fell from "
                        f"{was:.2f} to {is_now:.2f}")  # fmt: skip
    return ""


def _sampled(records: list[Record]) -> str:
    """The same among the rollouts of training: reward above what it was at first, fewer correct."""
    first, last = _first(records, SPREAD), records[-SPREAD:]
    if len(first) < SPREAD or last[0].get("update", 0) <= first[-1]["update"]:
        return ""
    reward, correct = (_moved(first, last, f"reward/{key}") for key in ("mean", "correct"))
    if not reward or not correct or reward[1] < reward[0] or correct[1] > correct[0] / 2:
        return ""
    return (f"since the first {SPREAD} updates reward rose from {reward[0]:.2f} to {reward[1]:.2f},"
            f" the share of rollouts that are correct fell from {correct[0]:.2g} to "
            f"{correct[1]:.2g}")  # fmt: skip


def _capped(last: list[Record]) -> str:
    share = _mean(last, "weights/capped")
    if share is None or share <= CAPPED:
        return ""
    return f"{share:.1%} of tokens have an importance weight beyond the cap"


def _groups(last: list[Record]) -> str:
    """Groups that are all right need no lesson; of the others, too few have anything to compare."""
    zero_std, right = _mean(last, "groups/zero_std_fraction"), _mean(last, "groups/all_right")
    if zero_std is None or right is None:
        return ""
    spread, rest = 1 - zero_std, 1 - right
    if rest <= OPEN or spread > COMPARABLE * rest:
        return ""
    return f"of the groups not all right ({rest:.0%}) only {spread / rest:.0%} have a spread"


def _kl(last: list[Record]) -> str:
    for name, bound, whom in (
        ("kl/approx", KL_STEP, "an update"),
        ("kl/reference", KL_REFERENCE, "from the reference"),
    ):
        kl = _mean(last, name)
        if kl is not None and kl > bound:
            return f"KL {kl:.2g} nats a token {whom}, above {bound:g}"
    return ""


def _gap(last: list[Record]) -> str:
    mean, most = _mean(last, "gap/logprob_mean"), _values(last, "gap/logprob_max")
    if mean is not None and mean > GAP_MEAN:
        return f"log-probs are {mean:.2g} nats apart on average, above {GAP_MEAN:g}"
    apart = [value for value in most if value > GAP_TOKEN]
    if len(apart) < 2:
        return ""
    return (f"in {len(apart)} of {len(most)} updates a token's log-probs were {max(apart):.3g} "
            f"nats apart")  # fmt: skip


def _first(records: list[Record], number: int) -> list[Record]:
    """The first updates that were learnt from, so many at most."""
    found = (r for r in records if (r.get("update") or 0) > 0)
    return [r for r, _ in zip(found, range(number), strict=False)]


def _values(records: list[Record], name: str) -> list[float]:
    """Those of a metric that are there and finite; none where fewer than WINDOW are."""
    finite = [x for r in records if (x := _finite(r, name)) is not None]
    return finite if len(finite) >= WINDOW else []


def _finite(record: Record, name: str) -> float | None:
    value = record.get(name)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _mean(records: list[Record], name: str) -> float | None:
    values = _values(records, name)
    return statistics.fmean(values) if values else None


def _moved(before: list[Record], after: list[Record], name: str) -> tuple[float, float] | None:
    """The means of a metric before and after, where they differ by two standard errors."""
    both = [_values(before, name), _values(after, name)]
    if not all(both):
        return None
    old, new_ = map(statistics.fmean, both)
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in both))
    return (old, new_) if abs(new_ - old) > 2 * error else None


def _is_evaluation(record: Record) -> bool:
    return "update" in record and any(map(_is_accuracy, record))


def _is_accuracy(key: str) -> bool:
    return key.startswith("eval/") and key.endswith(EDGES)
