"""Warnings: recorded runs raise those that they should, and every fact has two sides."""

import math
import re
from pathlib import Path

import pytest

from algorithms import grpo
from core import diagnostics
from core.config import Config, resolve
from core.files.run_log import read_records

RUNS = Path(__file__).parent.parent / "runs"
FINE = {  # an update of which no fact is broken
    "groups/zero_std_fraction": 0.5, "groups/all_right": 0.2, "reward/correct": 0.5,
    "tokens/trained": 99, "tokens/sampled": 99, "update/steps": 1, "update/skipped": 0,
    "grad/norm": 0.2, "update/moved": 9e-4, "update/unchanged": 0.0, "gap/logprob_mean": 1e-7,
    "kl/approx": 1e-4,
}  # fmt: skip
SKIPPED = {"grad/norm": 0.0, "update/steps": 0, "update/skipped": 1, "update/moved": 0.0}
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


@pytest.mark.parametrize("pattern", [
    "letter_counting_tiny/grpo-seed*", "smollm2/sums*-seed*", "tools_tiny/*-seed*",
    "own_environments/*-seed*", "environments_tiny/[cimrtw]*-seed*",
])  # fmt: skip
def test_healthy_runs_end_without_a_warning(pattern):
    files = [file for file in RUNS.glob(f"{pattern}.jsonl") if "answers" not in file.name]
    found = {file.name: raised(read_records(file), dtype="bfloat16") for file in files}
    assert files and found == {file.name: [] for file in files}


def test_an_algorithm_of_the_user_need_not_have_a_baseline(tmp_path):
    """As in algorithms/README.md: no advantage is below 0. But GAE ends with a reward."""
    file = tmp_path / "best.py"
    file.write_text("from algorithms.grpo import Options, compute_advantages, compute_loss")
    for metrics, expected in (
        ({"groups/advantage_sum": 1.0}, []),
        ({"groups/advantage_sum": 0.6}, [("advantages_uneven", 2)]),
        ({"value/target_ends": 1.7}, [("value_targets", 1)]),
    ):
        assert raised(run_of(6, **metrics), algo=str(file)) == expected
    assert raised(run_of(6, groups__advantage_sum=1.0)) == [("advantages_uneven", 2)]


MOVED = {"update/steps": 4, "update/moved": 0.01}
STILL = {"kl/reference": 0.0, "gap/logprob_mean": 1e-4, "update/moved": 0.01}
SURPRISE = {"gap/surprise": 0.1, "gap/surprise_z": 4.0}
EQUAL = {"groups/equal_answers": 300, "groups/likely_equal": 100}
DEAD = {"groups/zero_std_fraction": 0.876, "groups/all_right": 0.5}
FELL = {"reward/mean": lambda update: 0.62 if update == 1 else 0.1, "reward/std": 0.44}
NOTHING = DEAD | {"groups/zero_std_fraction": 1.0, "reward/min": 0.0, "reward/max": 0.0}
LIMITS = [  # a metric within its limit and beyond it, and the update that it is named at
    ("demonstrations_wrong", "demonstrations/right", 1.0, 0.99, 1),
    ("prompts_differ", "groups/prompts_differ", 0.0, 0.01, 1),
    ("reward_differs", "reward/judged_otherwise", 0.0, 0.01, 1),
    ("no_end_token", "length/no_end", 0.0, 0.01, 1),
    ("same_tasks", "groups/repeated", 0.99, 1.0, 2),
    ("stale_weights", "gap/canary", 0.29, 0.31, 2),
    ("advantages_uneven", "groups/advantage_sum", 9e-4, 2e-3, 2),
    ("passes_lost", "grad/passes", 0.96, 0.94, 2),
    ("passes_lost", "grad/passes", 1.04, 1.06, 2),
    ("kl_runaway", "update/moved", 0.29, 0.31, 3),
    ("never_stops", "length/hit_token_limit", 0.94, 0.96, 3),
]
CASES = [  # what breaks a fact, and when; metrics that keep it; settings where it need not hold
    *((name, at, {metric: beyond}, [{metric: fine}], [])
      for name, metric, fine, beyond, at in LIMITS),
    ("no_movement", 2, {"update/moved": 0.0}, [NOTHING | {"groups/all_right": 1.0,
     "reward/max": 1.0}], [{"lr": 0.0}]),
    ("no_movement", 2, SKIPPED, [{"grad/norm": 0.2}, {"grad/norm": math.nan}], []),
    ("sampler_gap", 3, {"gap/logprob_mean": 0.04}, [], [{"staleness": 1}, {"dtype": "bfloat16"}]),
    ("sampler_gap", 3, {"gap/logprob_mean": 0.06, "update/direction": 0}, [], [{"staleness": 1}]),
    ("mixed_groups", 3, {"groups/openings": 2}, [], [{"algo": "reinforce"}]),
    ("values_differ", 2, {"value/spread": 0.05}, [], [{"dtype": "bfloat16"}]),
    ("weights_unchanged", 3, {"update/unchanged": 0.1}, [{"update/steps": 0}], []),
    ("step_size", 2, {"update/step_size": 0.02}, [{"update/step_size": 3.9}, {"update/lr": 0.0},
     {"update/lr": 5e-7}, {"update/steps": 0}], [{"lr": 0.0}]),
    ("step_size", 2, {"update/step_size": 4.1}, [{"update/steps": 4, "kl/approx": 0.1}], []),
    ("loss_weight", 3, {"loss/weight": 0.5}, [{"loss/weight": 0.0}],
     [{"mask_truncated_completions": True}, {"options": grpo.Options("dr_grpo")}]),
    ("tokens_left_out", 1, {"tokens/trained": 90}, [{"episodes/failed": 0.1},
     {"episodes/no_reward": 0.1}], [{"filter_groups": 1}, {"mask_truncated_completions": True}]),
    ("tokens_left_out", 1, {"tokens/trained": 100}, [], []),
    ("wrong_direction", 3, {"update/direction": 0.0}, [{"gap/logprob_mean": 4e-4,
     "update/moved": 7e-4}], [{"gamma": 0.9}, {"kl_coef": 1.0}]),
    ("ratio_stays_one", 2, MOVED | {"kl/approx": 9e-8}, [{"kl/approx": 2e-7}, {"update/steps": 1},
     {"update/moved": 9e-5}], []),
    ("reference_differs", 1, {"kl/reference": 1e-3}, [{"kl/reference": 9e-7}],
     [{"kl_coef": 0.1, "num_epochs": 2}, {"kl_coef": 0.1, "num_minibatches": 2}]),
    ("reference_moves", 3, STILL, [{"kl/reference": lambda update: 1e-5 * (update > 1)},
     {"update/moved": 9e-4}, {"gap/logprob_mean": 4e-4, "update/moved": 1.1e-3}], []),
    ("draws_otherwise", 2, SURPRISE, [{"gap/surprise_z": 1.0}, {"gap/surprise": 0.005}],
     [{"staleness": 1}, {"filter_groups": 2}]),
    ("draws_otherwise", 2, SURPRISE | {"gap/surprise": -0.02, "gap/surprise_z": -9.0}, [], []),
    ("equal_answers", 2, EQUAL, [{"groups/likely_equal": 140}], []),
    ("equal_answers", 2, EQUAL | {"groups/equal_answers": 0}, [{"groups/likely_equal": 27}], []),
    ("dead_groups", 5, DEAD, [{"groups/zero_std_fraction": 0.874}, {"groups/all_right": 0.91,
     "groups/zero_std_fraction": 1.0}], [{"algo": "ppo"}]),
    ("dead_groups", 5, NOTHING | {"reward/max": lambda update: 0.5 * (update == 2)}, [],
     [{"algo": "reinforce"}]),
    # 0.52 below the first is little of 0.7; back for a moment; a curriculum; few rollouts
    ("below_start", 4, FELL, [{"reward/std": 0.7}, {"groups/level": lambda update: update}],
     [{"num_prompts": 4}]),
    ("below_start", 6, FELL | {"reward/mean": lambda u: {1: 0.62, 3: 0.5}.get(u, 0.1)}, [], []),
    # returns that are always equal are named once, whatever the algorithm
    ("no_reward", 3, NOTHING, [{"reward/max": lambda update: 0.5 * (update == 2),
     "groups/zero_std_fraction": 0.5}], []),
    ("no_reward", 3, NOTHING | {"reward/min": 1.0, "reward/max": 1.0}, [], []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "at", "broken", "kept", "settings"), CASES)
def test_where_a_fact_holds_and_where_not(name, at, broken, kept, settings):
    metrics = FINE | broken
    assert raised(run_of(8, **metrics)) == [(name, at)]
    for change in kept:
        assert raised(run_of(8, **metrics | change)) == [], change
    for some in settings:
        assert raised(run_of(8, **metrics), **some) == [], some


@pytest.mark.parametrize(("name", "fine", "wrong"), [
    ("answers_unchanged", {"same_answers": 0.9}, {"same_answers": 1.0}),
    ("answers_unchanged", {"same_answers": 1.0, "tokens_mean": 2}, {"same_answers": 1.0}),
    ("tasks_missing", {"played": 64}, {"played": 63}),
    ("held_out_seen", {"seen": 1.0, "openings": 32, "tasks": 32}, {"seen": 1.0}),
])  # fmt: skip
def test_facts_of_evaluations(name, fine, wrong):
    for metrics, expected in ((fine, []), (wrong, [(name, 6)])):
        records = run_of(6, {0: 0.4, 6: 0.4}, update__moved=0.01)
        records[-1] |= {f"eval/e:k=1/{key}": value for key, value in (EVAL | metrics).items()}
        assert raised(records) == expected


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
    assert raised(run_of(15, {0: 0.1, 5: 0.5, 15: 0.5}, **dict.fromkeys(names, value))) == []


def test_a_message_has_its_numbers_and_its_example():
    records = run_of(3, groups__prompts_differ=0.25, example__prompt="'{a}' for 'b'",
                     reward__min=0.0, reward__max=0.0, info__invalid=1.0)  # fmt: skip
    found = diagnostics.active_warnings(records, resolve(Config()))
    assert "25%" in found["prompts_differ"]
    assert "'{a}' for 'b' (groups/prompts_differ); next: " in found["prompts_differ"]
    assert "; 100% of the answers could not" in found["no_reward"]
    records[-1]["reported/invalid"] = 3  # a flag of few, for which it is true
    assert "could not" not in diagnostics.active_warnings(records, Config())["no_reward"]


def test_a_held_out_accuracy_that_falls_is_a_warning_with_its_updates():
    assert raised(run_of(9, {0: 0.5, 5: 0.39})) == [("accuracy_fell", 5)]
    assert raised(run_of(9, {0: 0.5, 5: 0.41})) == []
    later = run_of(20, {0: 0.2, 5: 0.7, 10: 0.8, 15: 0.69, 20: 0.5})
    assert raised(later) == [("accuracy_fell", 15)] and raised(later[:15]) == []
    found = diagnostics.active_warnings(later, Config())["accuracy_fell"]
    assert found.startswith("accuracy on e:k=1 fell to 0.50, from 0.69 at update 15; next: ")
    assert ("accuracy_fell", 10) in raised(read_records(RUNS / "smollm2/coin-seed0.jsonl"))
