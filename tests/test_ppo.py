"""PPO: GAE against its definition as a double sum, the clip and the value loss by hand."""

import math

import pytest
import torch

from algorithms.common import Batch, Micro
from algorithms.ppo import Options, compute_advantages, compute_loss, gae

NAN = float("nan")
# gaps at the start, in the middle and at the end; a full row; a row of one token
GAPS = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0]]).bool()
TURNS = torch.tensor([[0, 0, 0, 0, 1, 0], [0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])


def draw(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 6, generator=generator, dtype=dtype)  # rewards, values


def batch_of(rewards, values, gamma, in_loss=GAPS):
    return Batch(rewards=rewards, completion_mask=GAPS, loss_mask=in_loss, turn_ids=TURNS,
                 values=values, gamma=gamma)  # fmt: skip


def double_sum(rewards, values, gamma, lam):
    """A_t = Σ_k (Π_i<k γ_t+i λ) δ_t+k over the sampled tokens of each row, in Python floats; γ_t is
    1 if the next token is of the same turn, else γ."""
    advantages = torch.zeros_like(rewards)
    for b in range(len(rewards)):
        places = GAPS[b].nonzero().flatten().tolist()
        r, v = rewards[b, places].tolist(), values[b, places].tolist()
        turns = [*TURNS[b, places].tolist(), None]
        v.append(0.0)
        discounts = [1.0 if turns[t] == turns[t + 1] else gamma for t in range(len(r))]
        deltas = [r[t] + discounts[t] * v[t + 1] - v[t] for t in range(len(r))]
        for t, place in enumerate(places):
            advantages[b, place] = sum(
                math.prod(discount * lam for discount in discounts[t:k]) * deltas[k]
                for k in range(t, len(r))
            )
    return advantages


@pytest.mark.parametrize("gamma, lam", [(0.9, 0.95), (0.0, 1.0), (1.0, 0.0), (0.5, 1.0)])
@pytest.mark.parametrize("junk", [0.0, NAN])
def test_gae_equals_the_double_sum_with_turns_and_gaps_in_the_mask(gamma, lam, junk):
    rewards, values = draw()
    got = gae(batch_of(rewards, values.masked_fill(~GAPS, junk), gamma), lam)
    want = double_sum(rewards, values, gamma, lam)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_value_lambda_changes_the_targets_and_not_the_advantages():
    # r = (0, 1), V = (0.5, 0.25), γ = 1. Returns: (1, 1). λ = 0: δ = (0.25 - 0.5, 1 - 0.25)
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    mask, zeros = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.int64)

    def both(**options):
        batch = Batch(rewards=rewards, completion_mask=mask, loss_mask=mask, turn_ids=zeros,
                      values=values)  # fmt: skip
        return compute_advantages(batch, Options(gae_lambda=0.0, **options)).values()

    advantages, targets = both()
    decoupled, returns = both(value_lambda=1.0)
    assert targets.tolist() == [[0.25, 1.0]] and returns.tolist() == [[1.0, 1.0]]
    assert torch.equal(advantages, decoupled)


@pytest.mark.parametrize("in_loss", [GAPS, GAPS & (TURNS < 1)])
def test_advantages_are_normalised_over_the_loss_and_targets_are_gae_plus_the_values(in_loss):
    """The second: the completions of turns 1 and 2 hit the token limit."""
    rewards, values = draw(torch.float32)
    batch = batch_of(rewards, values.masked_fill(~GAPS, NAN), 0.5, in_loss)
    found = compute_advantages(batch, Options(gae_lambda=0.75))
    raw = gae(batch_of(rewards, values, 0.5), 0.75).float()
    torch.testing.assert_close(found["value_targets"], (raw + values) * GAPS, atol=1e-6, rtol=0)
    want = (raw - raw[in_loss].mean()) / (raw[in_loss].std(correction=0) + 1e-4) * in_loss
    torch.testing.assert_close(found["advantages"], want, atol=1e-6, rtol=0)


def loss_of(ratio, advantage, value=0.0, old_value=0.0, target=0.0, weight=1.0, scale=1.0, **given):
    """Of one token: loss, gradients of log-prob and value, metrics; π / π_old is `ratio`."""
    ratio, advantage, value, old_value, target, weight, scale = (
        torch.tensor([[x]]) for x in (ratio, advantage, value, old_value, target, weight, scale)
    )
    old = torch.full_like(ratio, math.log(0.2))
    logprobs, value = (old + ratio.log()).requires_grad_(), value.requires_grad_()
    micro = Micro(
        completion_mask=ratio > 0, old_logprobs=old, advantages=advantage, values=old_value,
        value_targets=target, importance_weights=weight, token_weights=scale,
    )  # fmt: skip
    loss, metrics = compute_loss(logprobs, value, micro, Options(**given))
    loss.backward()
    return loss.item(), logprobs.grad.item(), value.grad.item(), metrics


@pytest.mark.parametrize(
    "ratio, advantage, want_loss, want_gradient",
    [
        # the gradient of the log-prob is -A · ratio, or 0 where clipped
        (1.5, 2.0, -2.4, 0.0),  # high, good: clipped
        (1.5, -2.0, 3.0, 3.0),  # high, bad: pushed down
        (0.5, 2.0, -1.0, -1.0),  # low, good: pushed up
        (0.5, -2.0, 1.6, 0.0),  # low, bad: clipped
        (1.15, 2.0, -2.3, -2.3),  # within
        (0.85, -2.0, 1.7, 1.7),
    ],
)
def test_clip_in_each_case(ratio, advantage, want_loss, want_gradient):
    loss, gradient, of_value, metrics = loss_of(ratio, advantage, clip=0.2)  # the value is right
    assert loss == pytest.approx(want_loss, abs=1e-6)
    assert gradient == pytest.approx(want_gradient, abs=1e-6)
    stopped = want_gradient == 0
    high, low = metrics["clip/high_fraction"], metrics["clip/low_fraction"]
    assert (high, low) == (stopped and ratio > 1, stopped and ratio < 1)
    assert metrics["kl/approx"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)
    assert of_value == metrics["value/loss"] == 0


@pytest.mark.parametrize(
    "numbers, error, want_gradient",
    [
        # value, old value, target: larger of both squared errors, gradient of half of it
        ((1.25, 1.0, 2.0), 0.75**2, -0.75),  # within the clip
        ((2.0, 1.0, 3.0), 1.5**2, 0.0),  # above, towards the target: stopped
        ((0.0, 1.0, -1.0), 1.5**2, 0.0),  # below, towards the target: stopped
        ((2.0, 1.0, -1.0), 3.0**2, 3.0),  # above, away from the target: pulled back
        ((0.0, 1.0, 3.0), 3.0**2, -3.0),  # below, away from the target: pulled back
        ((2.0, 1.0, 1.875), 0.375**2, 0),  # past the target by less than the clip lacks
        ((2.0, 1.0, 1.625), 0.375**2, 0.375),  # by more: pulled back
    ],
)
def test_value_clip_in_each_case(numbers, error, want_gradient):
    loss, _, gradient, metrics = loss_of(1.0, 0.0, *numbers, value_clip=0.5, value_coef=0.2)
    assert loss == pytest.approx(0.2 * error / 2, abs=1e-6)
    assert gradient == pytest.approx(0.2 * want_gradient, abs=1e-6)
    assert metrics["value/loss"] == pytest.approx(error / 2, abs=1e-6)  # without the coefficient


def test_value_clip_0_is_no_limit_and_value_coef_0_leaves_the_values_alone():
    loss, _, gradient, _ = loss_of(1.0, 0.0, 2.0, 1.0, 3.0, value_clip=0.0, value_coef=1.0)
    assert loss == pytest.approx((2 - 3) ** 2 / 2, abs=1e-6)
    assert gradient == pytest.approx(2 - 3, abs=1e-6)
    loss, _, gradient, metrics = loss_of(1.0, 1.0, 2.0, 1.0, 3.0, value_coef=0.0)
    assert loss == pytest.approx(-1, abs=1e-6) and gradient == 0
    assert metrics["value/loss"] > 0  # it is measured all the same


def test_weights_are_of_the_policy_and_scale_is_of_both():
    loss, gradient, of_value, metrics = loss_of(
        1.0, 3.0, value=2.0, old_value=2.0, target=1.0, weight=0.5, scale=0.25, value_coef=1.0
    )
    assert loss == pytest.approx((-0.5 * 3 + 1 / 2) / 4, abs=1e-6)
    assert gradient == pytest.approx(-0.5 * 3 / 4, abs=1e-6)
    assert of_value == pytest.approx(1 / 4, abs=1e-6)
    assert metrics["value/loss"] == 0.5  # sums of tokens, not scaled
