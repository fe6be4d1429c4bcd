"""Scores detectors of faults on the runs of data/.

    python runs/clinic/score.py ours                       # core/diagnostics.py
    python runs/clinic/score.py reward_and_kl toolkit      # two rules for comparison, below
    python runs/clinic/score.py my_file.py:detect          # yours

A detector is a function of a run's records so far, each a dict of metrics (core/README.md), and of
the run's flags, that returns the names of what it warns of. It is asked after every record. A fault
counts as named once the detector warns of anything in that run, at the median of the update over
three seeds; `right` counts those where it named what is wrong (for `ours` only, by the table of
faults.py). A false alarm is a warning in a healthy run.
"""

import importlib.util
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

from core import diagnostics  # noqa: E402
from core.config import Config, resolve  # noqa: E402
from core.terminal import cli  # noqa: E402

Records = list[dict[str, Any]]
Detector = Callable[[Records, str], set[str]]
NEVER = 10**6  # the update of a fault that is not named


def ours(records: Records, flags: str) -> set[str]:
    """The warnings of core/diagnostics.py."""
    return {*diagnostics.active_warnings(records, settings(flags))}


def reward_and_kl(records: Records, flags: str) -> set[str]:
    """What people look at: the reward of the last updates is below that of the first, or the KL is
    above 0.1 nats per token (of an update, or to the reference)."""
    updates = [r for r in records if r.get("update", 0) > 0]
    rewards = [r["reward/mean"] for r in updates]
    found = set()
    if len(rewards) >= 6 and statistics.fmean(rewards[-3:]) < statistics.fmean(rewards[:3]):
        found.add("the reward falls")
    last = updates[-1] if updates else {}
    if max(last.get("kl/approx") or 0, last.get("kl/reference") or 0) > 0.1:
        found.add("the KL is high")
    return found


def toolkit(records: Records, flags: str, patience: float = 1.0) -> set[str]:
    """The rules for GRPO and PPO of microsoft/post-training-toolkit (heuristics/builtin, read on
    2026-11-28), for our metrics: name, limit, the window of its mean, the first update."""
    updates = [r for r in records if r.get("update", 0) > 0]
    found = set()
    for name, metric, is_bad, window, first in (
        ("kl_divergence_high", "kl/reference", lambda x, _: x > 0.3, 20, 30),
        ("reward_variance_spike", "reward/std", lambda x, before: x > 2.5 * before, 20, 50),
        ("response_truncation", "length/hit_token_limit", lambda x, _: x > 0.3, 20, 30),
        ("group_reward_collapse", "groups/zero_std_fraction", lambda x, _: x > 0.99, 20, 40),
        ("importance_sampling_ratio", "weights/mean", lambda x, _: x < 0.5, 20, 30),
        ("clip_fraction_high", "clip/high_fraction", lambda x, _: x > 0.3, 20, 30),
        ("entropy_collapse", "policy/entropy", lambda x, before: x < 0.5 * before, 30, 50),
        ("explained_variance_low", "baseline/explained_variance", lambda x, _: x < 0.1, 30, 50),
        ("value_head_divergence", "value/loss", lambda x, _: x > 0.5, 20, 30),
    ):
        with_values = name != "explained_variance_low" or any("value/loss" in r for r in updates)
        values = [r[metric] for r in updates if with_values and r.get(metric) is not None]
        length = max(2, round(window * patience))
        if len(values) < max(3, round(first * patience)) or not values:
            continue
        if is_bad(statistics.fmean(values[-length:]), statistics.fmean(values[:length])):
            found.add(name)
    return found


def toolkit_at_once(records: Records, flags: str) -> set[str]:
    """The same rules, which wait for 30 to 50 updates, with a tenth of the patience."""
    return toolkit(records, flags, 0.1)


@cache
def settings(flags: str) -> Config:
    """The settings of a run, as the run has them."""
    cfg = resolve(cli.complete(cli.parse(flags.split())))
    return replace(cfg, dtype="float32") if cfg.dtype == "auto" else cfg


def runs_of(kind: str) -> Iterator[tuple[dict[str, Any], Records]]:
    """The runs of a file of data/, with their records."""
    for line in (HERE / f"data/{kind}.jsonl").open(encoding="utf-8"):
        run = json.loads(line)
        columns = run["metrics"]
        length = max(map(len, columns.values()))
        yield run, [{name: x[i] for name, x in columns.items() if x[i] is not None}
                    for i in range(length)]  # fmt: skip


def first_alarms(detect: Detector, run: dict[str, Any], records: Records) -> dict[str, int]:
    """What a detector warns of in a run, each with the update of its first warning."""
    found: dict[str, int] = {}
    for end in range(1, len(records) + 1):
        if "update" in records[end - 1]:
            for name in detect(records[:end], run["flags"]):
                found.setdefault(name, records[end - 1]["update"])
    return found


def score(detect: Detector, kinds: tuple[str, ...]) -> dict[str, Any]:
    """By fault, the median update at which it was named, and at which it was named rightly; and the
    false alarms of each healthy run."""
    import faults

    expected = {
        name: fault.warning
        for name, fault in (faults.FAULTS | faults.MORE | faults.HELD_OUT).items()
    }
    named, right = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    false: dict[str, dict[str, int]] = {}
    for kind in kinds:
        for run, records in runs_of(kind):
            alarms = first_alarms(detect, run, records)
            if not run["fault"]:
                false[f"{run['name']} {run['seed']}"] = alarms
                continue
            named[run["name"]].append(min(alarms.values(), default=NEVER))
            right[run["name"]].append(alarms.get(expected.get(run["fault"], ""), NEVER))
    medians = [{name: statistics.median(x) for name, x in of.items()} for of in (named, right)]
    return {"named": medians[0], "right": medians[1], "false": false}


def summary(name: str, found: dict[str, Any]) -> str:
    """A row of the page's table."""
    by = [[sum(x <= update for x in found[kind].values()) for update in (3, NEVER - 1)]
          for kind in ("named", "right")]  # fmt: skip
    alarms = sum(map(len, found["false"].values()))
    return (f"{name}: of {len(found['named'])} faults it warns in {by[0][0]} by update 3 and in "
            f"{by[0][1]} by the end, of these rightly {by[1][0]} and {by[1][1]}; {alarms} false "
            f"alarms in {len(found['false'])} healthy runs")  # fmt: skip


def load(name: str) -> Detector:
    """A detector of this file, or FILE.py:FUNCTION."""
    if ".py:" not in name:
        return globals()[name]
    file, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


def main(names: list[str]) -> None:
    for name in names:
        print(summary(name, score(load(name), ("faults", "healthy"))))


if __name__ == "__main__":
    main(sys.argv[1:] or ["ours", "reward_and_kl", "toolkit", "toolkit_at_once"])
