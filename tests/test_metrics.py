"""Metrics of rollouts, evaluations and gradient steps, against numbers computed by hand."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from core import distributed, evaluation
from core.batching import MicroBatch, to_rollout_batch
from core.metrics import (
    UpdateStats,
    before_after,
    describe,
    distinct_tasks,
    eval_metrics,
    explained_variance,
    few_tasks,
    mcnemar,
    pass_at_k,
    rollout_metrics,
    wilson,
)
from core.types import Rollout, Turn


def rollout(reward, group=0, tokens=2, reason="stop", **info):
    turn = Turn([1], [5] * tokens, [-0.5] * tokens, reason, reward)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
    return Rollout("e", "player", 0, group, messages, [turn], info=info)


def evaluated(seed, opening, answer, correct, agent="player", env="e", **info):
    """A greedy episode of one turn; `opening` and `answer` stand for token ids."""
    turn = Turn([opening], [answer], [0.0], "stop", float(correct))
    info = info | {"correct": correct}
    return Rollout(env, agent, seed, seed, [], [turn], info=info)


def metrics_of(rollouts):
    return eval_metrics(rollouts, distinct_tasks(rollouts))


def test_rollout_metrics_by_hand():
    metrics = rollout_metrics([
        rollout(1.0, 0, correct=True, worked=True),
        rollout(1.0, 0, tokens=4, reason="length", correct=True, worked=False),
        rollout(0.0, 1, correct=False, worked=False),
        rollout(0.5, 1, correct=False, note="text"),
    ])  # fmt: skip
    expected = {
        "reward/mean": 0.625, "reward/min": 0.0, "reward/max": 1.0, "reward/std": 0.171875**0.5,
        "reward/correct": 0.5, "groups/zero_std_fraction": 0.5, "groups/all_right": 0.5,
        "groups/all_wrong": 0.5, "length/mean": 2.5, "length/max": 4,
        "length/hit_token_limit": 0.25, "info/worked": 1 / 3,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "info/note" not in metrics and "info/correct" not in metrics


def test_the_other_rollouts_of_a_group_explain_the_variance_between_groups():
    # returns 0 2 | 4 6: variance 20/3; minus that of the other rollout, -2 2 -2 2: 16/3
    rollouts = [rollout(0.0), rollout(2.0), rollout(4.0, group=1), rollout(6.0, group=1)]
    explained = rollout_metrics(rollouts)["baseline/explained_variance"]
    assert explained == pytest.approx(1 - (16 / 3) / (20 / 3))


@pytest.mark.filterwarnings("error")
def test_groups_of_one_rollout_have_no_baseline_to_measure():
    metrics = rollout_metrics([rollout(0.0), rollout(2.0, group=1)])
    assert "baseline/explained_variance" not in metrics


@pytest.mark.parametrize("size", [2, 4, 8])
def test_groups_explain_nothing_of_pure_noise(size):
    draw = random.Random(0)
    noise = [rollout(draw.gauss(0, 1), group=i // size) for i in range(4000)]
    explained = rollout_metrics(noise)["baseline/explained_variance"]
    assert explained == pytest.approx(-1 / (size - 1), abs=0.1)  # never above that of a constant


def test_explained_variance_of_a_perfect_and_of_a_constant_baseline():
    targets = torch.tensor([0.0, 1.0])
    assert explained_variance(targets, targets) == {"baseline/explained_variance": 1}
    constant = torch.tensor([1.0, 1.0])
    assert explained_variance(constant, torch.tensor([2.0, 5.0])) == {
        "baseline/explained_variance": 0
    }


def test_accuracy_counts_info_correct_and_not_the_reward():
    rollouts = [rollout(0.9, correct=False), rollout(0.1, correct=True)]
    rollouts[1].seed = 1
    metrics = metrics_of(rollouts)
    half = 1.96 * 0.4  # returns 0.9 and 0.1: standard deviation 0.4 · √2, divided by √2
    expected = {"accuracy": 0.5, "return_mean": 0.5, "return_low": 0.5 - half,
                "return_high": 0.5 + half}  # fmt: skip
    assert {k: metrics[f"eval/e/{k}"] for k in expected} == pytest.approx(expected)
    assert metrics["eval/e/ci_low"] < 0.5 < metrics["eval/e/ci_high"]


@pytest.mark.parametrize("returns", [[0.7], [0.7, 0.7, 0.7]])
def test_returns_without_spread_have_no_interval(returns):
    metrics = metrics_of([rollout(value) for value in returns])
    assert metrics["eval/e/return_mean"] == pytest.approx(0.7)
    assert math.isnan(metrics["eval/e/return_low"]) and math.isnan(metrics["eval/e/return_high"])


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [(0, 5, 2 / 32), (1, 7, 2 * (1 + 8) / 256), (3, 3, 1.0), (0, 0, 1.0), (7, 1, 2 * 9 / 256)],
)
def test_mcnemar_counts_the_tasks_that_changed(lost, won, p):
    both = {"a", "b"}
    before, after = both | {f"l{i}" for i in range(lost)}, both | {f"w{i}" for i in range(won)}
    assert mcnemar(before, after) == pytest.approx(p)


def test_wilson_interval_by_hand_and_at_one():
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-5)
    assert wilson(10, 10)[1] == 1.0 and wilson(10, 10)[0] < 0.8


def test_before_and_after_are_the_first_and_last_evaluations():
    def record(update, accuracy):
        return {"update": update, "eval/a:k=1/accuracy": accuracy,
                "eval/a:k=1/ci_low": 0.1, "eval/a:k=1/ci_high": 0.9}  # fmt: skip

    records = [{"sft_step": 1}, record(0, 0.2), {"update": 1}, record(2, 0.5), record(4, 0.75)]
    ((env, first, last),) = before_after(records)
    assert (env, first["update"], last["update"]) == ("a:k=1", 0, 4)
    assert describe(env, last) == "0.75 [0.10, 0.90]"
    assert before_after([{"update": 1}]) == []


@pytest.mark.parametrize(
    ("cap", "mode", "capped"), [(2.0, "truncate", 1), (2.0, "mask", 2), (0.0, "truncate", 0)]
)
def test_update_stats_by_hand(cap, mode, capped):
    cfg = SimpleNamespace(
        tis_cap=cap, tis_mode=mode, mask_truncated_completions=False, clip_cov=0.0
    )
    batch = to_rollout_batch([rollout(1.0, tokens=3)])  # sampler log-probs -0.5
    batch.values, batch.value_targets = torch.tensor([[[1.5, 2.5, 2.0]], [[1.0, 3.0, 2.0]]])
    stats = UpdateStats(cfg, batch)
    micro = MicroBatch(
        input_ids=torch.tensor([[1, 5, 5, 5]]),
        completion_mask=torch.ones(1, 3, dtype=torch.bool),
        index=torch.tensor([[0, 1, 2]]),
    )
    old_logprobs = torch.tensor([[-0.5, -1.0, -1.5]])  # 0, 0.5 and 1 from the sampler's
    ratio = torch.tensor([[0.4, 1.0, 3.0]])  # 3 is above a cap of 2, 0.4 below 1 / 2
    entropy = torch.tensor([[0.1, 0.2, 0.6]])
    for epoch, kl in ((0, 9.0), (1, 0.3)):  # the metrics are those of the last epoch
        stats.add(micro, torch.tensor(-2.0), old_logprobs, entropy, ratio, {"kl/approx": kl})
        stats.end_minibatch(epoch)
    expected = {
        "loss": -2.0, "kl/approx": 0.1, "policy/entropy": 0.3, "gap/logprob_mean": 0.5,
        "gap/logprob_max": 1.0, "weights/mean": 4.4 / 3, "weights/capped": capped / 3,
        "tokens/trained": 3,
        # variances of a sample: value targets 1, 3, 2: 1; minus the values (-0.5, 0.5, 0): 0.25
        "baseline/explained_variance": 0.75,
    }  # fmt: skip
    means = stats.means()
    assert {name: means[name] for name in expected} == pytest.approx(expected)


def test_update_stats_of_a_rank_without_micro_batches_are_those_of_the_last_epoch(monkeypatch):
    batch = to_rollout_batch([rollout(1.0, tokens=3)])
    batch.old_logprobs = batch.sampler_logprobs
    stats = UpdateStats(SimpleNamespace(mask_truncated_completions=False, clip_cov=0.0), batch)
    for epoch, kl in ((0, 9.0), (1, 0.3)):
        sums = {"loss": 1.0, "tokens": 3.0, "kl/approx": kl}  # all from other ranks
        monkeypatch.setattr(distributed, "all_reduce_metrics", lambda mine, sums=sums: sums)
        stats.end_minibatch(epoch)
    assert stats.means()["kl/approx"] == pytest.approx(0.1)


def test_lenient_accuracy_is_there_where_an_environment_reports_it():
    seeds = iter(range(5))

    def rollout(env, **info):
        return Rollout(env, "player", next(seeds), 0, [], [], info=info)

    metrics = metrics_of([
        rollout("a", correct=True, lenient=True), rollout("a", correct=False, lenient=True),
        rollout("a", correct=False, lenient=False), rollout("a"), rollout("b", correct=True),
    ])  # fmt: skip
    assert (metrics["eval/a/accuracy"], metrics["eval/a/lenient"]) == (1 / 4, 1 / 2)
    assert "eval/b/lenient" not in metrics


def test_pass_at_k_by_hand():
    def rollout(env, group, correct):
        return Rollout(env, "player", group, group, [], [], info={"correct": correct})

    rollouts = [rollout("a", g, c) for g, c in ((0, True), (0, False), (1, False), (1, False))]
    rollouts.append(rollout("b", 7, True))
    assert pass_at_k(rollouts, {("a", 0): 0, ("a", 1): 1, ("b", 7): 7}) == {
        "eval/a/pass_at_1": 1 / 4, "eval/a/pass_at_k": 1 / 2,
        "eval/b/pass_at_1": 1.0, "eval/b/pass_at_k": 1.0,
    }  # fmt: skip


def test_the_number_of_rollouts_that_report_a_number_is_there_unless_all_do():
    rollouts = [rollout(0.0, steps=4, invalid=1.0), *(rollout(0.0, steps=2) for _ in range(3))]
    metrics = rollout_metrics(rollouts)
    assert (metrics["info/invalid"], metrics["reported/invalid"]) == (1.0, 1)
    assert metrics["info/steps"] == 2.5 and "reported/steps" not in metrics


def test_seeds_with_the_same_opening_are_one_task():
    """Five questions, each drawn ten times; the fifth is answered wrongly."""
    metrics = metrics_of([evaluated(seed, seed % 5, 9, seed % 5 < 4) for seed in range(50)])
    expected = {"accuracy": 0.8, "ci_low": 0.375528, "ci_high": 0.963777, "return_mean": 0.8,
                "tasks": 5, "openings": 5}  # fmt: skip
    assert {k: metrics[f"eval/e/{k}"] for k in expected} == pytest.approx(expected, abs=1e-5)
    # returns 1 1 1 1 0: variance 0.2, so a standard error of 0.2
    assert metrics["eval/e/return_low"] == pytest.approx(0.8 - 1.96 * 0.2)
    assert few_tasks("e", metrics, 50) == "  (5 different tasks in 50 episodes)"


def test_an_answer_that_rounding_changed_does_not_make_a_second_task():
    rollouts = [evaluated(0, 1, 8, True), evaluated(1, 1, 9, False), evaluated(2, 2, 9, True)]
    metrics = metrics_of(rollouts)
    assert (metrics["eval/e/accuracy"], metrics["eval/e/tasks"]) == (0.75, 2)


@pytest.mark.parametrize("differs", ["verdict", "next message"])
def test_each_seed_is_a_task_if_it_decides_more_than_the_opening(differs):
    """One opening, one answer; but the opponent wins one game in four, or moves differently."""
    rollouts = [evaluated(seed, 1, 9, seed > 0 or differs != "verdict") for seed in range(4)]
    if differs == "next message":
        for r in rollouts:
            r.turns.append(Turn([1, 9, 7 + (r.seed == 3)], [2], [0.0], "stop", 0.0))
            r.info["correct"] = r.seed != 1
    metrics = metrics_of(rollouts)
    assert (metrics["eval/e/accuracy"], metrics["eval/e/tasks"]) == (0.75, 4)
    assert (metrics["eval/e/ci_low"], metrics["eval/e/ci_high"]) == wilson(3, 4)
    assert metrics["eval/e/openings"] == 1


@pytest.mark.parametrize(
    ("tasks", "openings", "note"),
    [
        (4, 4, ""),
        (4, 2, "  (4 episodes from 2 openings)"),
        (4, 1, "  (4 episodes from one opening, which is also that of training)"),
        (2, 2, "  (2 different tasks in 4 episodes)"),
        (1, 2, "  (4 episodes of one task, which is also that of training)"),
    ],
)
def test_an_evaluation_notes_how_few_tasks_its_episodes_have(tasks, openings, note):
    assert few_tasks("e", {"eval/e/tasks": tasks, "eval/e/openings": openings}, 4) == note


def test_a_failed_episode_is_a_task_of_its_own_and_wrong():
    failed = [Rollout("e", "player", seed, seed, error="TimeoutError") for seed in (0, 1)]
    metrics = metrics_of([*failed, evaluated(2, 1, 9, True), evaluated(3, 1, 9, True)])
    assert metrics["eval/e/accuracy"] == pytest.approx(1 / 3) and metrics["eval/e/tasks"] == 3


def test_each_seat_of_a_game_has_its_own_accuracy_over_games():
    """X wins the first three games, O the fourth; one game is one task, with two rollouts."""
    games = [(evaluated(g, g, 9, g < 3, "X"), evaluated(g, g, 9, g == 3, "O")) for g in range(4)]
    metrics = metrics_of([rollout for game in games for rollout in game])
    assert [metrics[f"eval/e{seat}/accuracy"] for seat in ("/X", "/O", "")] == [0.75, 0.25, 0.5]
    assert [metrics[f"eval/e{seat}/tasks"] for seat in ("/X", "/O", "")] == [4, 4, 4]
    assert (metrics["eval/e/X/ci_low"], metrics["eval/e/X/ci_high"]) == wilson(3, 4)


def test_pass_at_k_counts_each_opening_once():
    """Two samples per seed; seeds 0 to 2 ask one question, seed 3 another."""
    greedy = [evaluated(seed, seed // 3, 9, False) for seed in range(4)]
    correct = [(True, False), (False, False), (False, False), (True, True)]
    samples = [evaluated(s, s // 3, n, c[n]) for s, c in enumerate(correct) for n in (0, 1)]
    metrics = pass_at_k(samples, distinct_tasks(greedy))
    assert metrics["eval/e/pass_at_1"] == pytest.approx((1 / 6 + 1) / 2)
    assert metrics["eval/e/pass_at_k"] == pytest.approx((1 / 3 + 1) / 2)


def test_the_paired_test_counts_each_opening_once_and_leaves_out_what_was_not_played_twice():
    """Three questions, two seeds each, all wrong at first. Then question 0 is right, question 1 in
    one of two episodes, question 2 wrong: two won, none lost. Seed 6 failed in the first."""
    run = SimpleNamespace(progress={"trivial": {"e": None}})

    def p_value(right, seeds):
        rollouts = [evaluated(s, s // 2, 8 + (s in right), s in right) for s in seeds]
        return evaluation.comparisons(run, [], "e", rollouts, distinct_tasks(rollouts))

    assert p_value(right=(), seeds=range(6)) == {"eval/e/p_value": 1.0}
    assert p_value(right=(0, 1, 3, 6), seeds=range(7)) == {"eval/e/p_value": 0.5}
