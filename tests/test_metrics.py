"""Metrics of rollouts, evaluations and gradient steps, against numbers computed by hand."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from core import distributed
from core.batching import MicroBatch, to_rollout_batch
from core.metrics import (
    UpdateStats,
    before_after,
    describe,
    eval_metrics,
    explained_variance,
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


def test_numbers_without_a_mean_are_left_out_of_the_metrics_of_info():
    values = [10**400, -(10**400), 1e308, math.inf, math.nan]
    rollouts = [rollout(0.0, x=value, y=True) for value in values for _ in range(2)]
    metrics = rollout_metrics([*rollouts, rollout(0.0, x=3)])
    assert (metrics["info/x"], metrics["info/y"]) == (3, 1)


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
    metrics = eval_metrics([rollout(0.9, correct=False), rollout(0.1, correct=True)])
    half = 1.96 * 0.4  # returns 0.9 and 0.1: standard deviation 0.4 · √2, divided by √2
    expected = {"accuracy": 0.5, "return_mean": 0.5, "return_low": 0.5 - half,
                "return_high": 0.5 + half}  # fmt: skip
    assert {k: metrics[f"eval/e/{k}"] for k in expected} == pytest.approx(expected)
    assert metrics["eval/e/ci_low"] < 0.5 < metrics["eval/e/ci_high"]


@pytest.mark.parametrize("returns", [[0.7], [0.7, 0.7, 0.7]])
def test_returns_without_spread_have_no_interval(returns):
    metrics = eval_metrics([rollout(value) for value in returns])
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
    def rollout(env, **info):
        return Rollout(env, "player", 0, 0, [], [], info=info)

    metrics = eval_metrics([
        rollout("a", correct=True, lenient=True), rollout("a", correct=False, lenient=True),
        rollout("a", correct=False, lenient=False), rollout("a"), rollout("b", correct=True),
    ])  # fmt: skip
    assert (metrics["eval/a/accuracy"], metrics["eval/a/lenient"]) == (1 / 4, 1 / 2)
    assert "eval/b/lenient" not in metrics


def test_pass_at_k_by_hand():
    def rollout(env, group, correct):
        return Rollout(env, "player", 0, group, [], [], info={"correct": correct})

    rollouts = [rollout("a", g, c) for g, c in ((0, True), (0, False), (1, False), (1, False))]
    assert pass_at_k([*rollouts, rollout("b", 7, True)]) == {
        "eval/a/pass_at_1": 1 / 4, "eval/a/pass_at_k": 1 / 2,
        "eval/b/pass_at_1": 1.0, "eval/b/pass_at_k": 1.0,
    }  # fmt: skip
