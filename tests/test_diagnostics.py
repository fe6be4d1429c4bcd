"""Warnings: recorded runs raise those that they should, and every fact has two sides."""

import math
import re
from pathlib import Path

import pytest

from algorithms import grpo
from core import diagnostics
from core.config import KNOWN, Config, resolve
from core.files.run_log import read_records
from core.invariants import FACTS, Fact

RUNS = Path(__file__).parent.parent / "runs"
ROWS = [fact for fact in (*FACTS, *diagnostics.SYMPTOMS) if isinstance(fact, Fact)]
FINE = {  # an update of which no fact is broken
    "groups/zero_std_fraction": 0.5, "groups/all_right": 0.2, "reward/correct": 0.5,
    "tokens/trained": 99, "tokens/sampled": 99, "update/steps": 1, "update/skipped": 0,
    "grad/norm": 0.2, "update/moved": 9e-4, "update/unchanged": 0.0, "gap/logprob_mean": 1e-7,
    "kl/approx": 1e-4,
}  # fmt: skip
SKIPPED = {"grad/norm": 0.0, "update/steps": 0, "update/skipped": 1}
EVAL = {"accuracy": 0.4, "ci_low": 0.35, "ci_high": 0.45, "tasks": 64, "tokens_mean": 9,
        "openings": 64, "asked": 64, "played": 64}  # fmt: skip


def raised(records, **settings):
    """(name, update) of all warnings, raised record by record as in training."""
    cfg = resolve(Config(**{"lr": 5e-5, "dtype": "float32", "eval_num_tasks": 64} | settings))
    return [
        (name, records[end - 1]["update"])
        for end in range(1, len(records) + 1)
        for name in diagnostics.new_warnings(records[:end], cfg)
    ]


def run_of(updates, accuracies=(), **metrics):
    """Records of updates 0 to `updates`. A metric is a number or a function of the update; its name
    may have __ for /. `accuracies`: {update: accuracy}, with an interval of 0.05 to either side."""
    records = []
    for update in range(updates + 1):
        values = {k.replace("__", "/"): v(update) if callable(v) else v for k, v in metrics.items()}
        records.append({"update": update, **(values if update else {})})
        if update in accuracies:
            at = accuracies[update]
            values = {"accuracy": at, "ci_low": at - 0.05, "ci_high": at + 0.05}
            records[-1] |= {f"eval/e:k=1/{key}": value for key, value in values.items()}
    return records


def test_a_recorded_run_that_fell_raises_its_warning():
    assert ("below_start", 10) in raised(read_records(RUNS / "smollm2/coin-seed0.jsonl"))


@pytest.mark.parametrize("pattern", [
    "letter_counting_tiny/grpo-seed*",
    "smollm2/sums*-seed*", "tools_tiny/*-seed*", "own_environments/*-seed*",
    "environments_tiny/[cimrtw]*-seed*",
])  # fmt: skip
def test_healthy_runs_end_without_a_warning(pattern):
    files = [file for file in RUNS.glob(f"{pattern}.jsonl") if "answers" not in file.name]
    found = {file.name: raised(read_records(file), dtype="bfloat16") for file in files}
    assert files and found == {file.name: [] for file in files}


LIMITS = [
    pytest.param(fact, sign, id=f"{fact.name} {fact.limit.metric} {sign}")
    for fact in ROWS
    for sign, end in ((-1, fact.limit.low), (1, fact.limit.high))
    # where a metric ends, such as a fraction at 0 and 1, is no limit
    if math.isfinite(end)
    and ((sign, end) not in [(-1, 0), (1, 1)] or "openings" in fact.limit.metric)
]


@pytest.mark.parametrize(("fact", "sign"), LIMITS)
def test_a_limit_has_two_sides_and_only_its_fact_is_raised(fact, sign):
    metric, low, high, at = fact.limit
    end, width = high if sign > 0 else low, high - low
    step = sign * 0.02 * (width if 0 < width < math.inf else abs(end) or 1)
    at += fact.name == "weights_unchanged"  # new adapters have no gradient in update 1
    for value, expected in ((end - step * (width > 0), []), (end + step, [(fact.name, at)])):
        records = run_of(6, **FINE | {metric: value})
        if metric.startswith("*/"):
            of_eval = EVAL | {metric[2:]: value}
            records[at] |= {f"eval/e:k=1/{key}": value for key, value in of_eval.items()}
        found = raised(records)
        assert found == expected or (fact.name not in dict(found) and not expected)


def test_a_row_shows_its_number_and_its_example_and_wants_all_updates_to_agree():
    records = run_of(1, groups__prompts_differ=0.25, example__prompt="'{a}' for 'b'")
    (line,) = diagnostics.new_warnings(records).values()
    assert "25%" in line and "'{a}' for 'b' (groups/prompts_differ); try " in line
    assert raised(run_of(9, groups__advantage_sum=lambda update: update % 2)) == []
    assert raised(run_of(9, length__hit_token_limit=1.0)[1:]) == [("never_stops", 3)]


MOVED = {"update/steps": 4, "update/moved": 0.01}
STILL = {"kl/reference": 0.0, "gap/logprob_mean": 1e-4, "update/moved": 0.01}
SURPRISE = {"gap/surprise": 0.1, "gap/surprise_z": 4.0}
EQUAL = {"groups/equal_answers": 300, "groups/likely_equal": 100}
LOW = {"policy/entropy": 0.01, "groups/all_right": 0.5, "groups/zero_std_fraction": 0.66}
DEAD = {"groups/zero_std_fraction": 0.876, "groups/all_right": 0.5}
CASES = [  # what breaks a fact; metrics that keep it; settings with which it need not hold
    ("no_movement", {"update/moved": 0.0}, [DEAD | {"groups/zero_std_fraction": 1.0,
     "groups/all_right": 1.0}, {"grad/norm": 0.0}], [{"lr": 0.0}]),
    ("no_movement", SKIPPED, [{"grad/norm": 0.2}, {"grad/norm": math.nan}], []),
    ("sampler_gap", {"gap/logprob_mean": 0.04}, [], [{"staleness": 1}, {"dtype": "bfloat16"}]),
    ("sampler_gap", {"gap/logprob_mean": 0.06, "update/direction": 0}, [], [{"staleness": 1}]),
    ("mixed_groups", {"groups/openings": 2}, [], [{"algo": "reinforce"}]),
    ("values_differ", {"value/spread": 0.05}, [], [{"dtype": "bfloat16"}]),
    ("weights_unchanged", {"update/unchanged": 0.1}, [{"update/steps": 0}], []),
    ("step_size", {"update/step_size": 0.02}, [{"update/step_size": 3.9}, {"update/lr": 0.0},
     {"update/lr": 5e-7}, {"update/steps": 0}], [{"lr": 0.0}]),
    ("step_size", {"update/step_size": 4.1}, [{"update/steps": 4, "kl/approx": 0.1}], []),
    ("loss_weight", {"loss/weight": 0.5}, [{"loss/weight": 0.0}],
     [{"mask_truncated_completions": True}, {"options": grpo.Options("dr_grpo")}]),
    ("tokens_left_out", {"tokens/trained": 90}, [{"episodes/failed": 0.1},
     {"episodes/no_reward": 0.1}], [{"filter_groups": 1}, {"mask_truncated_completions": True}]),
    ("tokens_left_out", {"tokens/trained": 100}, [], []),
    ("wrong_direction", {"update/direction": 0.0}, [{"gap/logprob_mean": 4e-4,
     "update/moved": 7e-4}], [{"gamma": 0.9}, {"kl_coef": 1.0}]),
    ("ratio_stays_one", MOVED | {"kl/approx": 9e-8}, [{"kl/approx": 2e-7}, {"update/steps": 1},
     {"update/moved": 9e-5}], []),
    ("reference_differs", {"kl/reference": 1e-3}, [{"kl/reference": 9e-7}],
     [{"kl_coef": 0.1, "num_epochs": 2}, {"kl_coef": 0.1, "num_minibatches": 2}]),
    ("reference_moves", STILL, [{"kl/reference": lambda update: 1e-5 * (update > 1)},
     {"update/moved": 9e-4}, {"gap/logprob_mean": 4e-4, "update/moved": 1.1e-3}], []),
    ("draws_otherwise", SURPRISE, [{"gap/surprise_z": 1.0}, {"gap/surprise": 0.005}],
     [{"staleness": 1}, {"filter_groups": 2}]),
    ("draws_otherwise", SURPRISE | {"gap/surprise": -0.02, "gap/surprise_z": -9.0}, [], []),
    ("equal_answers", EQUAL, [{"groups/likely_equal": 140}], []),
    ("equal_answers", EQUAL | {"groups/equal_answers": 0}, [{"groups/likely_equal": 27}], []),
    ("entropy_collapse", LOW, [{"groups/zero_std_fraction": 0.64}, {"reward/correct": 0.91}], []),
    ("dead_groups", DEAD, [{"groups/zero_std_fraction": 0.874}, {"groups/all_right": 0.91,
     "groups/zero_std_fraction": 1.0}], [{"algo": "ppo"}]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "broken", "kept", "settings"), CASES)
def test_where_a_fact_holds_and_where_not(name, broken, kept, settings):
    metrics = FINE | broken
    assert {found for found, _ in raised(run_of(8, **metrics))} == {name}
    for change in kept:
        assert raised(run_of(8, **metrics | change)) == [], change
    for some in settings:
        assert raised(run_of(8, **metrics), **some) == [], some


@pytest.mark.parametrize(("name", "fine", "wrong"), [
    ("answers_unchanged", {"same_answers": 0.9}, {"same_answers": 1.0}),
    ("answers_unchanged", {"same_answers": 1.0, "tokens_mean": 2}, {"same_answers": 1.0}),
    ("tasks_missing", {"played": 64}, {"played": 63}),
    ("held_out_seen", {"seen": 1.0, "openings": 63}, {"seen": 1.0}),
    ("held_out_seen", {"seen": 1.0, "openings": 32, "tasks": 32}, {"seen": 1.0}),
])  # fmt: skip
def test_facts_of_evaluations(name, fine, wrong):
    for metrics, expected in ((fine, []), (wrong, [(name, 6)])):
        records = run_of(6, {0: 0.4, 6: 0.4}, update__moved=0.01)
        records[-1] |= {f"eval/e:k=1/{key}": value for key, value in (EVAL | metrics).items()}
        assert raised(records) == expected


def test_rising_reward_with_falling_accuracy_is_a_warning():
    def reward(u):
        return 0.5 + 0.02 * u + 0.01 * (-1) ** u

    fell = {0: 0.5, 10: 0.7, 20: 0.59}
    assert raised(run_of(25, fell, reward__mean=reward)) == [("reward_without_accuracy", 20)]
    overlapping = {0: 0.5, 10: 0.7, 20: 0.61}
    assert raised(run_of(25, overlapping, reward__mean=reward)) == []
    assert raised(run_of(25, fell, reward__mean=lambda u: 2 - reward(u))) == []  # both fall
    noise = run_of(25, fell, reward__mean=lambda u: 0.5 + 0.01 * (u > 10) + 0.1 * (-1) ** u)
    assert raised(noise) == []
    too_close = {0: 0.1, 10: 0.9, 19: 0.1}  # fewer than two windows apart
    assert raised(run_of(25, too_close, reward__mean=reward)) == []


def test_warning_is_repeated_only_after_ten_updates_without_it():
    def cut(u):  # of the last three updates each is cut at 3-5 and 15-20 and 42-44
        return 1.0 * (u <= 5 or 13 <= u <= 20 or 40 <= u <= 44)

    first, last = ("never_stops", 3), ("never_stops", 42)
    assert raised(run_of(50, length__hit_token_limit=cut)) == [first, last]
    later = run_of(50, length__hit_token_limit=lambda u: cut(u - 1 if u > 6 else u))
    assert ("never_stops", 16) in raised(later)


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_missing_and_non_finite_values_raise_no_warning(value):
    page = (RUNS.parent / "core/README.md").read_text(encoding="utf-8")
    names = {*re.findall(r"`([a-z]+/\w+)`", page), "info/agent_error"}
    assert raised(run_of(15, {0: 0.1, 5: 0.5, 15: 0.1}, **dict.fromkeys(names, value))) == []


@pytest.mark.parametrize("algo", ["grpo", "reinforce"])
@pytest.mark.parametrize(("earned", "found"), [
    ({}, ("no_reward", 3)),
    ({"reward/min": -1.0, "reward/max": -1.0}, ("no_reward", 3)),
    ({"reward/min": 0.5, "reward/max": 0.5}, ("dead_groups", 3)),
    ({"reward/min": 1.0, "reward/max": 1.0, "groups/all_right": 1.0}, ("dead_groups", 3)),
    ({"reward/max": lambda update: 0.5 if update == 2 else 0.0}, ("dead_groups", 5)),
])  # fmt: skip
def test_returns_that_are_always_equal_are_named_once(algo, earned, found):
    nothing = {"reward/min": 0.0, "reward/max": 0.0, **DEAD, "groups/zero_std_fraction": 1.0}
    name, _ = found
    expected = [found] if name == "no_reward" or algo == "grpo" else []
    assert raised(run_of(2, **nothing | earned), algo=algo) == []
    assert raised(run_of(9, **nothing | earned), algo=algo) == expected


def test_without_a_reward_the_environments_that_tiny_knows_are_named():
    made = (RUNS / "pretrain_tiny/README.md").read_text(encoding="utf-8")
    demonstrated = made.partition("--env")[2].partition("```")[0].split()
    known = {spec for spec in demonstrated if not spec.startswith("reward_hacking:")}
    assert {*KNOWN} == known
    records = run_of(3, reward__min=0.0, reward__max=0.0)
    for settings, named in (({"env": ("compose",)}, True), ({}, False),
                            ({"env": ("compose",), "model_id": "me/mine"}, False)):  # fmt: skip
        line = diagnostics.new_warnings(records, resolve(Config(**settings)))["no_reward"]
        assert all(spec in line for spec in known) == named


@pytest.mark.parametrize(
    ("changes", "updates"),
    [
        ({}, 4),
        ({"reward/std": 0.7}, None),  # 0.52 of 0.7
        ({"reward/mean": lambda u: {1: 0.62, 3: 0.5}.get(u, 0.1)}, 6),  # back for a moment
        ({"groups/level": lambda u: u}, None),  # a curriculum
        ({"reward/mean": math.nan}, None),
    ],
)
def test_a_reward_that_falls_below_its_start_is_a_warning(changes, updates):
    fell = {"reward/mean": lambda u: 0.62 if u == 1 else 0.1, "reward/std": 0.44}
    records = run_of(8, **fell | changes)
    assert raised(records) == ([("below_start", updates)] if updates else [])
    assert raised(records, num_prompts=4) == []  # the mean of few rollouts is too uncertain


@pytest.mark.parametrize(("later", "found"), [(0.39, "below_start"), (0.41, None), (0.6, None)])
def test_a_held_out_accuracy_below_its_start_is_a_warning(later, found):
    records = run_of(9, {0: 0.5, 5: later})
    assert raised(records) == ([(found, 5)] if found else [])
