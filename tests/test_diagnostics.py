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


def raised(records, **settings):
    """(name, update) of all warnings, raised record by record as in training."""
    cfg = resolve(Config(**{"lr": 5e-5, "dtype": "bfloat16"} | settings))
    return [
        (name, records[end - 1]["update"])
        for end in range(1, len(records) + 1)
        for name in diagnostics.new_warnings(records[:end], cfg)
    ]


def run_of(updates, accuracies=(), **metrics):
    """Records of updates 0 to `updates`. A metric is a number or a function of the update; its name
    has __ for /. `accuracies`: {update: accuracy}, with an interval of 0.05 to either side."""
    records = []
    for update in range(updates + 1):
        values = {k.replace("__", "/"): v(update) if callable(v) else v for k, v in metrics.items()}
        records.append({"update": update, **(values if update else {})})
        if update in accuracies:
            accuracy = accuracies[update]
            values = {"accuracy": accuracy, "ci_low": accuracy - 0.05, "ci_high": accuracy + 0.05}
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
    assert files and {file.name: raised(read_records(file)) for file in files} == {
        file.name: [] for file in files
    }


@pytest.mark.parametrize("fact", ROWS, ids=lambda fact: f"{fact.name} {fact.metric}")
def test_a_row_has_two_sides(fact):
    dtype = next(t for t in ("bfloat16", "float32") if not fact.unless(Config(dtype=t)))
    high = fact.beyond[1]
    inside, outside = (run_of(15, **{fact.metric: x}) for x in (high, 1.02 * high or 0.02))
    assert fact.name not in dict(raised(inside, dtype=dtype))
    assert [at for name, at in raised(outside, dtype=dtype) if name == fact.name] == [fact.updates]


def test_a_row_shows_its_number_and_its_example_and_wants_all_updates_to_agree():
    records = run_of(1, groups__prompts_differ=0.25, example__prompt="'{a}' for 'b'")
    (line,) = diagnostics.new_warnings(records).values()
    assert "25%" in line and "'{a}' for 'b' (groups/prompts_differ); try " in line
    assert raised(run_of(9, groups__advantage_sum=lambda update: update % 2)) == []


ALIVE = {
    "groups__zero_std_fraction": 0.5, "tokens__trained": 99, "update__steps": 1, "grad__norm": 0.2,
    "update__skipped": 0, "update__moved": 0.01, "gap__logprob_mean": 1e-7,
}  # fmt: skip
SEVERAL = ALIVE | {"update__steps": 4}
NO_SPREAD, RIGHT = "groups__zero_std_fraction", "groups__all_right"
ENTROPY, CORRECT, KL = "policy__entropy", "reward__correct", "kl__reference"
LOW = {ENTROPY: 0.01, CORRECT: 0.5, RIGHT: 0.5}
SAMPLED, FAILED = {"tokens__sampled": 99}, {"episodes__failed": 0.1}
MOVED = {"update__moved": 0.01, "gap__logprob_mean": 1e-3}
SURPRISE = {"policy__entropy": 0.5, "gap__logprob_mean": 0}


def surprise(mean, z):
    return SURPRISE | {"gap__surprise": mean, "gap__surprise_z": z}


def equal(found, likely=100):
    return {"groups__equal_answers": found, "groups__likely_equal": likely}


def after_1(value):
    """A metric that is 0 in update 1."""
    return lambda update: value * (update > 1)


@pytest.mark.parametrize(
    ("name", "fine", "wrong"),
    [
        ("loss_weight", {"loss__weight": 0.0}, {"loss__weight": 0.5}),
        ("loss_weight", {"loss__weight": 1.0005}, {"loss__weight": 1.01}),
        ("tokens_left_out", SAMPLED | {"tokens__trained": 99}, SAMPLED | {"tokens__trained": 90}),
        ("tokens_left_out", SAMPLED | FAILED | {"tokens__trained": 9},
         SAMPLED | {"tokens__trained": 100}),
        ("wrong_direction", ALIVE | {"update__direction": 0.11},
         ALIVE | {"update__direction": 0.09}),
        ("wrong_direction", ALIVE | {"update__direction": 0.0, "gap__logprob_mean": 0.006},
         ALIVE | {"update__direction": 0.0}),
        ("passes_lost", {"update__steps": 1, "grad__passes": 1.04},
         {"update__steps": 1, "grad__passes": 1.06}),
        ("no_movement", ALIVE, ALIVE | {"update__moved": 0.0}),
        ("no_movement", ALIVE | {"update__unchanged": 0}, ALIVE | {"update__unchanged": 1}),
        ("no_movement", ALIVE | {NO_SPREAD: 1, "grad__norm": 0.0, "update__moved": 0.0},
         ALIVE | {"grad__norm": 0.0, "update__skipped": 1, "update__steps": 0}),
        ("weights_unchanged", ALIVE | {"update__unchanged": 0}, ALIVE | {"update__unchanged": 0.1}),
        ("step_size", ALIVE | {"update__step_size": 0.1}, ALIVE | {"update__step_size": 0.02}),
        ("step_size", ALIVE | {"update__step_size": 3.0}, ALIVE | {"update__step_size": 5.0}),
        ("step_size", SEVERAL | {"update__step_size": 5.0}, SEVERAL | {"update__step_size": 17.0}),
        ("step_size", ALIVE | {"update__step_size": 0.01, "update__lr": 5e-7},
         ALIVE | {"update__step_size": 0.01, "update__lr": 5e-5}),
        ("step_size", ALIVE | {"update__step_size": 0.0, "update__lr": 0.0},  # the schedule's end
         ALIVE | {"update__step_size": 0.0}),
        ("step_size", ALIVE | {"update__masters_apart": 0.1}, ALIVE | {"update__masters_apart": 0}),
        ("ratio_stays_one", SEVERAL | {"kl__approx": 2e-5}, SEVERAL | {"kl__approx": 0.0}),
        ("ratio_stays_one", ALIVE | {"kl__approx": 0.0}, SEVERAL | {"kl__approx": 0.0}),
        ("reference_differs", {KL: 1e-7}, {KL: 1e-3}),
        ("reference_moves", MOVED | {KL: after_1(1e-5)}, MOVED | {KL: 0.0}),
        ("reference_moves", {KL: 0.0, "update__moved": 1e-7}, MOVED | {KL: 0.0}),
        ("reference_moves", MOVED | {KL: 0.0, "gap__logprob_mean": 0.004}, MOVED | {KL: 0.0}),
        ("equal_answers", equal(105), equal(300)),
        ("equal_answers", equal(95), equal(0)),
        ("draws_otherwise", surprise(0.1, 1.0), surprise(0.1, 4.0)),
        ("draws_otherwise", surprise(0.005, 9.0), surprise(-0.02, -9.0)),
        ("entropy_collapse", {ENTROPY: 0.021, CORRECT: 0.5}, {ENTROPY: 0.019, CORRECT: 0.5}),
        ("entropy_collapse", {ENTROPY: 0.01, CORRECT: 0.91}, {ENTROPY: 0.01, CORRECT: 0.89}),
        ("entropy_collapse", LOW | {NO_SPREAD: 0.64}, LOW | {NO_SPREAD: 0.66}),  # 0.7 of a half
        ("dead_groups", {NO_SPREAD: 0.874, RIGHT: 0.5}, {NO_SPREAD: 0.876, RIGHT: 0.5}),
        ("dead_groups", {NO_SPREAD: 1.0, RIGHT: 0.91}, {NO_SPREAD: 1.0, RIGHT: 0.89}),
    ],
)  # fmt: skip
def test_a_function_has_two_sides(name, fine, wrong):
    assert raised(run_of(8, **fine)) == []
    assert [found for found, _ in raised(run_of(8, **wrong))] == [name]


DIRECTION = ALIVE | {"update__direction": -0.5}
WRONG_TOKENS = SAMPLED | {"tokens__trained": 90}


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"lr": 0.0}, ALIVE | {"update__moved": 0.0}),
        ({"kl_coef": 0.1, "num_epochs": 2}, {KL: 0.01}),
        ({"staleness": 1}, surprise(0.1, 9.0)),
        ({"staleness": 1}, {"gap__logprob_mean": 0.06}),
        ({"filter_groups": 2}, surprise(0.1, 9.0)),
        ({"filter_groups": 1}, WRONG_TOKENS),
        ({"mask_truncated_completions": True}, WRONG_TOKENS),
        ({"gamma": 0.9}, DIRECTION),
        ({"reward_coef": 0.0}, DIRECTION),
        ({"kl_coef": 1.0}, DIRECTION),
        ({"options": grpo.Options("dr_grpo")}, {"loss__weight": 1.9}),
        ({"algo": "ppo"}, {"reward__min": 1.0, "reward__max": 1.0}),
    ],
)  # fmt: skip
def test_a_fact_is_not_judged_where_it_need_not_hold(settings, wrong):
    assert raised(run_of(6, **wrong), **settings) == []
    assert raised(run_of(6, **wrong)) != []


@pytest.mark.parametrize(("name", "fine", "wrong"), [
    ("answers_unchanged", {"same_answers": 0.9}, {"same_answers": 1.0}),
    ("answers_unchanged", {"same_answers": 1.0, "tokens_mean": 2}, {"same_answers": 1.0}),
    ("tasks_missing", {"asked": 64, "played": 64}, {"asked": 64, "played": 63}),
    ("held_out_seen", {"seen": 0.04, "openings": 64}, {"seen": 0.06, "openings": 64}),
    ("held_out_seen", {"seen": 1.0, "openings": 63}, {"seen": 1.0, "openings": 64}),
    ("held_out_seen", {"seen": 1.0, "openings": 32, "tasks": 32}, {"seen": 1.0, "openings": 64}),
])  # fmt: skip
def test_facts_of_evaluations(name, fine, wrong):
    for metrics, expected in ((fine, []), (wrong, [(name, 6)])):
        records = run_of(6, {0: 0.4, 6: 0.4}, update__moved=0.01)
        metrics = {"tasks": 64, "tokens_mean": 9} | metrics
        records[-1] |= {f"eval/e:k=1/{key}": value for key, value in metrics.items()}
        assert raised(records, eval_num_tasks=64) == expected


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
    metrics = {name.replace("/", "__"): value for name in names}
    assert raised(run_of(15, {0: 0.1, 5: 0.5, 15: 0.1}, **metrics)) == []


NOTHING = {"reward__min": 0.0, "reward__max": 0.0, NO_SPREAD: 1.0, RIGHT: 0.0}


@pytest.mark.parametrize("algo", ["grpo", "reinforce"])
def test_a_run_that_never_earned_a_reward_says_so_instead_of_dead_groups(algo):
    assert raised(run_of(2, **NOTHING), algo=algo) == []
    assert raised(run_of(15, **NOTHING), algo=algo) == [("no_reward", 3)]
    lost = NOTHING | {"reward__min": -1.0, "reward__max": -1.0}
    assert raised(run_of(9, **lost), algo=algo) == [("no_reward", 3)]
    dead = ["dead_groups"] if algo == "grpo" else []
    for earned in ({"reward__min": 1.0, "reward__max": 1.0}, {"reward__min": -1.0}):
        assert [name for name, _ in raised(run_of(6, **NOTHING | earned), algo=algo)] == dead
    once = NOTHING | {"reward__max": lambda update: 0.5 if update == 2 else 0.0}
    assert "no_reward" not in dict(raised(run_of(15, **once), algo=algo))
    unrated = raised(run_of(6, **NOTHING), algo=algo, reward_coef=0.0)
    assert [name for name, _ in unrated] == dead  # of a run that trains on a KL alone


def test_without_a_reward_the_environments_that_tiny_knows_are_named():
    made = (RUNS / "pretrain_tiny/README.md").read_text(encoding="utf-8")
    demonstrated = made.partition("--env")[2].partition("```")[0].split()
    known = {spec for spec in demonstrated if not spec.startswith("reward_hacking:")}
    advice = diagnostics.advice_without_reward
    other = advice(resolve(Config(env=("countdown",))))
    assert {*KNOWN} == known and all(spec in other for spec in known)
    assert "letter_counting" not in advice(resolve(Config()))  # it runs already
    assert "tiny" not in advice(Config(model_id="me/mine"))


def reward_of(update, low=0.1):
    return 0.62 if update == 1 else low


@pytest.mark.parametrize(
    ("changes", "updates"),
    [
        ({}, 4),
        ({"reward__std": 0.7}, None),  # 0.52 of 0.7
        ({"reward__mean": lambda u: reward_of(u, 0.1 if u != 3 else 0.5)}, 6),  # back for a moment
        ({"groups__level": lambda u: u}, None),  # a curriculum
        ({"reward__mean": math.nan}, None),
    ],
)
def test_a_reward_that_falls_below_its_start_is_a_warning(changes, updates):
    records = run_of(8, **{"reward__mean": reward_of, "reward__std": 0.44} | changes)
    assert raised(records) == ([("below_start", updates)] if updates else [])
    assert raised(records, num_prompts=4) == []  # the mean of few rollouts is too uncertain


@pytest.mark.parametrize(("later", "found"), [(0.39, "below_start"), (0.41, None), (0.6, None)])
def test_a_held_out_accuracy_below_its_start_is_a_warning(later, found):
    records = run_of(9, {0: 0.5, 5: later})
    assert raised(records) == ([(found, 5)] if found else [])


@pytest.mark.parametrize("reward", [1.0, 0.5])
def test_a_reward_that_is_always_the_same_is_not_blamed_on_the_policy(reward):
    equal = {NO_SPREAD: 1.0, "reward__min": reward, "reward__max": reward}
    for right in (0.0, 1.0):
        assert raised(run_of(9, **equal, **{RIGHT: right})) == [("dead_groups", 3)]
