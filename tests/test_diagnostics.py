"""Warnings: recorded runs raise those that they should, and every threshold has two sides."""

import math
import re
from pathlib import Path

import pytest

from algorithms import grpo
from core import diagnostics
from core.config import KNOWN, Config, resolve
from core.files.run_log import read_records
from environments import base

RUNS = Path(__file__).parent.parent / "runs"


def raised(records, by_group=True):
    """(name, update) of all warnings, raised record by record as in training."""
    cfg = Config(lr=5e-5, algo="grpo" if by_group else "reinforce")
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
    assert raised(read_records(RUNS / "smollm2/coin-seed0.jsonl"))[1] == ("below_start", 10)


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


def after_1(value):
    """A metric that is 0 in update 1."""
    return lambda update: value * (update > 1)


NO_SPREAD, RIGHT = "groups__zero_std_fraction", "groups__all_right"
ENTROPY, CORRECT = "policy__entropy", "reward__correct"
DIRECTION, GAP = "update__direction", "gap__logprob_mean"
MOVED = {"update__moved": 0.01, GAP: 0.001}
SAMPLED, TRAINED, KL = {"tokens__sampled": 99}, "tokens__trained", "kl__reference"
LOW = {ENTROPY: 0.01, CORRECT: 0.5, RIGHT: 0.5}


@pytest.mark.parametrize(
    ("name", "below", "above"),
    [
        ("weights_at_cap", {"weights__capped": 0.049}, {"weights__capped": 0.051}),
        ("kl_runaway", {"kl__approx": 0.049}, {"kl__approx": 0.051}),
        ("kl_runaway", {"update__moved": 0.29}, {"update__moved": 0.31}),
        ("wrong_direction", MOVED | {DIRECTION: 0.11}, MOVED | {DIRECTION: 0.09}),
        ("wrong_direction", MOVED | {DIRECTION: 0.0, GAP: 0.006}, MOVED | {DIRECTION: 0.0}),
        ("mixed_groups", {"groups__openings": 1.0}, {"groups__openings": 1.1}),
        ("same_tasks", {"groups__repeated": 0.99}, {"groups__repeated": 1.0}),
        ("loss_weight", {"loss__weight": 1.0005}, {"loss__weight": 1.002}),
        ("tokens_left_out", SAMPLED | {TRAINED: 99}, SAMPLED | {TRAINED: 90}),
        (
            "tokens_left_out",
            SAMPLED | {TRAINED: 9, "episodes__failed": 0.1},
            SAMPLED | {TRAINED: 100},
        ),
        ("reference_moves", MOVED | {KL: after_1(1e-5)}, MOVED | {KL: 0.0}),
        ("reference_moves", {KL: 0.0, "update__moved": 1e-7}, MOVED | {KL: 0.0}),
        ("reference_moves", MOVED | {KL: 0.0, GAP: 0.004}, MOVED | {KL: 0.0, GAP: 0.003}),
        ("never_stops", {"length__hit_token_limit": 0.94}, {"length__hit_token_limit": 0.96}),
        ("episodes_cut", {"episodes__truncated": 0.19}, {"episodes__truncated": 0.21}),
        ("sampler_gap", {"gap__logprob_mean": 0.049}, {"gap__logprob_mean": 0.051}),
        ("sampler_gap", {"gap__logprob_max": 4.9}, {"gap__logprob_max": 5.1}),
        ("entropy_collapse", {ENTROPY: 0.021, CORRECT: 0.5}, {ENTROPY: 0.019, CORRECT: 0.5}),
        ("entropy_collapse", {ENTROPY: 0.01, CORRECT: 0.91}, {ENTROPY: 0.01, CORRECT: 0.89}),
        ("entropy_collapse", {**LOW, NO_SPREAD: 0.64}, {**LOW, NO_SPREAD: 0.66}),  # 0.7 of a half
        ("dead_groups", {NO_SPREAD: 0.874, RIGHT: 0.5}, {NO_SPREAD: 0.876, RIGHT: 0.5}),
        ("dead_groups", {NO_SPREAD: 1.0, RIGHT: 0.91}, {NO_SPREAD: 1.0, RIGHT: 0.89}),
    ],
)
def test_threshold_has_two_sides(name, below, above):
    assert raised(run_of(15, **below)) == []
    [(found, update)] = raised(run_of(15, **above))  # once
    # at the first full window; three updates of a clear sign are enough, and two of a certain one
    slow = name in ("weights_at_cap", "episodes_cut", "entropy_collapse", "dead_groups")
    certain = name == "same_tasks" or "gap__logprob_max" in above
    expected = 5 if slow and above.get(NO_SPREAD) != 1 else 2 if certain else 3
    assert (found, update) == (name, expected)


def test_values_explain_nothing_where_all_returns_are_equal():
    equal = {"reward__min": 1.0, "reward__max": 1.0}
    assert diagnostics.new_warnings(run_of(3, **equal), Config(algo="ppo")) == {}


def test_an_update_that_a_strong_kl_rules_may_have_any_direction():
    records = run_of(3, **MOVED, **{DIRECTION: 0.0})
    assert [*diagnostics.new_warnings(records)] == ["wrong_direction"]
    assert diagnostics.new_warnings(records, cfg=Config(lr=5e-5, kl_coef=0.6)) == {}


@pytest.mark.parametrize(
    ("metrics", "without", "with_it"),
    [
        ({GAP: 6e-4}, Config(), Config(dtype="float32")),  # whose rounding is smaller
        ({GAP: 0.06}, Config(staleness=1), Config()),  # samples of older weights differ
        (SAMPLED | {TRAINED: 90}, Config(mask_truncated_completions=True), Config()),
        (SAMPLED | {TRAINED: 90}, Config(filter_groups=1), Config()),
        ({"loss__weight": 1.9}, resolve(Config(options=grpo.Options("dr_grpo"))), Config()),
    ],
)
def test_settings_that_explain_a_metric(metrics, without, with_it):
    records = run_of(3, **metrics)
    assert diagnostics.new_warnings(records, without) == {}
    assert len(diagnostics.new_warnings(records, with_it)) == 1


@pytest.mark.parametrize(
    ("seen", "openings", "tasks", "found"),
    [(0.06, 254, 254, 1), (0.04, 254, 254, 0), (1.0, 253, 254, 0), (1.0, 32, 32, 0)],
)
def test_held_out_tasks_that_training_has_had_are_a_warning(seen, openings, tasks, found):
    records = run_of(2, {0: 0.5, 2: 0.5})
    values = {"seen": seen, "openings": openings, "tasks": tasks}
    records[-1] |= {f"eval/e:k=1/{key}": value for key, value in values.items()}
    assert raised(records) == [("held_out_seen", 2)] * found


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


@pytest.mark.parametrize(
    ("correct", "found"), [(0.24, [("reward_without_accuracy", 20)]), (0.26, [])]
)
def test_rising_reward_with_half_as_many_correct_rollouts_is_a_warning(correct, found):
    def level(before, after):
        return lambda u: (before if u <= 10 else after) + 0.001 * (-1) ** u

    metrics = {"reward__mean": level(0.3, 0.6), CORRECT: level(0.5, correct)}
    assert raised(run_of(20, **metrics)) == found


def test_warning_is_repeated_only_after_ten_updates_without_it():
    def capped(u):  # its mean over five updates is too high at 5-7, 17-20 and 42-44
        return 0.1 if u <= 5 or u in (15, 16, 17, 18, 40, 41, 42) else 0.0

    first, last = ("weights_at_cap", 5), ("weights_at_cap", 42)
    assert raised(run_of(50, weights__capped=capped)) == [first, last]
    later = run_of(50, weights__capped=lambda u: capped(u - 1 if u > 6 else u))
    assert ("weights_at_cap", 18) in raised(later)


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_missing_and_non_finite_values_raise_no_warning(value):
    page = (RUNS.parent / "core/README.md").read_text(encoding="utf-8")
    names = {*re.findall(r"`([a-z]+/\w+)`", page), "info/agent_error"}
    metrics = {name.replace("/", "__"): value for name in names}
    records = run_of(15, {0: 0.1, 5: 0.5, 15: 0.1}, **metrics)
    assert raised(records) == []


class Unrewarded(base.Env):
    def reset(self, seed):
        return [{"role": "user", "content": f"{seed}?"}]

    def step(self, response):
        return base.Step(None, 0.0, True, {"correct": False})


FLAGS = """--env unrewarded --sft-steps 0 --num-updates 4 --num-prompts 2 --group-size 2
    --eval-num-tasks 2 --eval-every 0 --save-every 0 --max-tokens 4 --device cpu""".split()


NOTHING = {"reward__min": 0.0, "reward__max": 0.0, NO_SPREAD: 1.0, RIGHT: 0.0}


@pytest.mark.parametrize("by_group", [True, False])
def test_a_run_that_never_earned_a_reward_says_so_instead_of_dead_groups(by_group):
    assert raised(run_of(2, **NOTHING), by_group) == []
    assert raised(run_of(15, **NOTHING), by_group) == [("no_reward", 3)]
    lost = NOTHING | {"reward__min": -1.0, "reward__max": -1.0}
    assert raised(run_of(9, **lost), by_group) == [("no_reward", 3)]
    dead = [("dead_groups", 3)] if by_group else []
    for earned in ({"reward__min": 1.0, "reward__max": 1.0}, {"reward__min": -1.0}):
        assert raised(run_of(4, **NOTHING | earned), by_group) == dead
    once = NOTHING | {"reward__max": lambda update: 0.5 if update == 2 else 0.0}
    assert "no_reward" not in dict(raised(run_of(15, **once), by_group))
    cfg = Config(algo="grpo" if by_group else "reinforce", reward_coef=0.0)
    unrated = diagnostics.new_warnings(run_of(3, **NOTHING), cfg)
    assert [*unrated] == [name for name, _ in dead]  # of a run that trains on a KL alone


def test_without_a_reward_the_environments_that_tiny_knows_are_named():
    made = (RUNS / "pretrain_tiny/README.md").read_text(encoding="utf-8")
    demonstrated = made.partition("--env")[2].partition("```")[0].split()
    known = {spec for spec in demonstrated if not spec.startswith("reward_hacking:")}
    advice = diagnostics.advice_without_reward
    other = advice(resolve(Config(env=("countdown",))))
    assert {*KNOWN} == known and all(spec in other for spec in known)
    assert "letter_counting" not in advice(resolve(Config()))  # it runs already
    assert "tiny" not in advice(Config(model_id="me/mine"))
    assert advice(Config(reward_coef=0.0)) == ""


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
    if updates:  # the mean of few rollouts is too uncertain
        few = Config(lr=5e-3, num_prompts=4)
        assert diagnostics.new_warnings(records[: updates + 1], cfg=few) == {}


@pytest.mark.parametrize(("later", "found"), [(0.39, "below_start"), (0.41, None), (0.6, None)])
def test_a_held_out_accuracy_below_its_start_is_a_warning(later, found):
    records = run_of(9, {0: 0.5, 5: later})
    assert raised(records) == ([(found, 5)] if found else [])


@pytest.mark.parametrize("reward", [1.0, 0.5])
def test_a_reward_that_is_always_the_same_is_not_blamed_on_the_policy(reward):
    equal = {NO_SPREAD: 1.0, "reward__min": reward, "reward__max": reward}
    for right in (0.0, 1.0):
        assert raised(run_of(9, **equal, **{RIGHT: right})) == [("dead_groups", 3)]


@pytest.mark.parametrize(
    ("losses", "accuracy", "memorized"),
    [([0.3, 0.02], 0.02, False), ([0.02, 0.02], 0.0, True), ([0.02, 0.02], 0.6, False),
     ([0.02, 0.02, 0.3], 0.0, False), ([], 0.0, False)],
)  # fmt: skip
def test_a_warm_start_that_knows_only_its_demonstrations_is_a_warning(losses, accuracy, memorized):
    """exp(-0.02 · 20) = 0.67: half of it is more than 0.05 and less than 0.65."""
    steps = [{"sft_step": 20 * (i + 1), "sft/loss": loss} for i, loss in enumerate(losses)]
    records = run_of(5, {0: accuracy})
    records[0]["eval/e:k=1/tokens_mean"] = 20
    found = diagnostics.new_warnings([*steps, *records[:1]])
    assert [*found] == ["memorized"] * memorized
    assert diagnostics.new_warnings([*steps, *records[:2]]) == {}
