"""GRPO: advantages within the group, and the clip in all its cases, by hand."""

import math

import pytest
import torch

from algorithms.grpo import EPS, Options, compute_advantages, compute_loss

NAN = float("nan")


def advantages_of(returns, group_ids, scale="none"):
    """One token a rollout, so that advantages are a plain list."""
    rewards = torch.tensor(returns)[:, None]
    mask = torch.ones_like(rewards, dtype=torch.bool)
    cut = torch.zeros(len(returns), dtype=torch.bool)
    options = Options(scale_rewards=scale)
    got = compute_advantages(rewards, mask, torch.tensor(group_ids), None, cut, options)
    return got.squeeze(1).tolist()


def loss_of(ratio, advantages, mask=None, weights=None, denominator=1.0, options=None):
    """Loss, gradient of the log-probs and metrics where π / π_old is `ratio`, from π_old = 0.2."""
    old = torch.full_like(ratio, math.log(0.2))
    logprobs = (old + ratio.log()).requires_grad_()
    mask = torch.ones_like(ratio, dtype=torch.bool) if mask is None else mask
    weights = torch.ones_like(ratio) if weights is None else weights
    loss, metrics = compute_loss(
        logprobs, old, advantages, mask, weights, options or Options(), denominator
    )
    loss.backward()
    return loss.item(), logprobs.grad, metrics


def test_advantages_are_returns_minus_the_mean_of_the_group():
    assert advantages_of([1.0, 0.0, 8.0, 2.0], [0, 0, 1, 1]) == [0.5, -0.5, 3, -3]


def test_groups_need_not_stand_side_by_side():
    returns, groups = [1.0, 8.0, 0.0, 2.0, 0.5], [4, 9, 4, 9, 4]
    for scale in ("group", "batch", "none"):
        got = advantages_of(returns, groups, scale)
        side_by_side = [0, 2, 4, 1, 3]
        want = advantages_of(
            [returns[i] for i in side_by_side], [groups[i] for i in side_by_side], scale
        )
        assert [got[i] for i in side_by_side] == pytest.approx(want, abs=1e-6)
    assert advantages_of(returns, groups) == [0.5, 3, -0.5, -3, 0]


def test_scale_group_divides_by_each_group_s_own_deviation():
    # deviations of a sample: of (1, 0) √½, of (8, 2) √18
    got = advantages_of([1.0, 8.0, 0.0, 2.0], [0, 1, 0, 1], "group")
    small, large = 0.5 / (math.sqrt(0.5) + EPS), 3 / (math.sqrt(18) + EPS)
    assert got == pytest.approx([small, large, -small, -large], abs=1e-6)


def test_scale_batch_divides_all_by_the_deviation_of_the_returns():
    # returns 1, 0, 5, 2: mean 2, variance (1 + 4 + 9 + 0) / 3
    got = advantages_of([1.0, 0.0, 5.0, 2.0], [0, 0, 1, 1], "batch")
    deviation = math.sqrt(14 / 3) + EPS
    assert got == pytest.approx([a / deviation for a in (0.5, -0.5, 1.5, -1.5)], abs=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_without_spread_or_of_one_has_no_advantage(scale):
    got = advantages_of([1.0, 1.0, 0.25, 9.0, 7.0], [0, 0, 1, 2, 2], scale)
    assert got[:3] == [0, 0, 0]
    assert got[3] == -got[4] > 0


def test_advantages_are_the_same_for_all_tokens_of_a_rollout_and_zero_off_the_mask():
    rewards = torch.tensor([[0.25, 0.0, 0.75], [0.0, 0.5, 0.0]])  # returns 1 and 0.5
    mask = torch.tensor([[True, True, True], [True, True, False]])
    cut, options = torch.zeros(2, dtype=torch.bool), Options("none")
    got = compute_advantages(rewards, mask, torch.tensor([3, 3]), None, cut, options)
    assert got.tolist() == [[0.25, 0.25, 0.25], [-0.25, -0.25, 0.0]]


def test_at_ratio_1_the_loss_is_minus_the_mean_advantage_and_its_gradient_is_not_zero():
    loss, gradient, _ = loss_of(torch.ones(2), torch.tensor([2.0, -1.0]), denominator=2)
    assert loss == pytest.approx(-0.5, abs=1e-6)
    assert gradient.tolist() == pytest.approx([-1, 0.5], abs=1e-6)


# clip_low 0.2, clip_high 0.3
CASES = {
    # ratio, advantage: loss, gradient of the log-prob (-A · ratio, or 0 where clipped)
    "high, good: clipped": (1.5, 2.0, -2.6, 0.0),
    "high, bad: pushed down": (1.5, -2.0, 3.0, 3.0),
    "low, good: pushed up": (0.5, 2.0, -1.0, -1.0),
    "low, bad: clipped": (0.5, -2.0, 1.6, 0.0),
    "within, above 1, good": (1.25, 2.0, -2.5, -2.5),
    "within, below 1, bad": (0.85, -2.0, 1.7, 1.7),
}


@pytest.mark.parametrize("case", CASES)
def test_clip_in_each_case(case):
    ratio, advantage, want_loss, want_gradient = CASES[case]
    options = Options(clip_low=0.2, clip_high=0.3)
    loss, gradient, metrics = loss_of(
        torch.tensor([ratio]), torch.tensor([advantage]), options=options
    )
    assert loss == pytest.approx(want_loss, abs=1e-6)
    assert gradient.item() == pytest.approx(want_gradient, abs=1e-6)
    if want_gradient == 0:
        assert gradient.item() == 0  # not nearly
    stopped = metrics["clip/low_fraction"] + metrics["clip/high_fraction"]
    assert stopped == (want_gradient == 0)


def test_importance_weights_scale_loss_and_gradient():
    loss, gradient, _ = loss_of(torch.ones(1), torch.tensor([3.0]), weights=torch.tensor([0.5]))
    assert loss == pytest.approx(-1.5, abs=1e-6)
    assert gradient.item() == pytest.approx(-1.5, abs=1e-6)


def test_masked_tokens_never_matter():
    mask = torch.tensor([[True, False], [False, True]])
    junk = torch.where(mask, 1.0, NAN)
    loss, gradient, metrics = loss_of(junk, 3 * junk, mask, junk, denominator=2)
    assert loss == pytest.approx(-3, abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([[-1.5, 0], [0, -1.5]]))
    assert not any(math.isnan(value) for value in metrics.values())


def test_micro_batches_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    ratio = 0.5 + torch.rand(5, 4, generator=generator)  # clipped on both sides, and not
    advantages = torch.randn(5, 4, generator=generator)
    mask = torch.rand(5, 4, generator=generator) < 0.6
    whole, gradient, metrics = loss_of(ratio, advantages, mask, denominator=11)
    parts = [
        loss_of(ratio[r], advantages[r], mask[r], denominator=11)
        for r in torch.arange(5).split([1, 3, 1])
    ]
    assert sum(part[0] for part in parts) == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)
    for name, value in metrics.items():
        assert sum(part[2][name] for part in parts) == pytest.approx(value, abs=1e-6)
