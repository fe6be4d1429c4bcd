"""PPO: values, their targets and their loss by hand; test_float64_step.py has GAE and the clip."""

import math

import pytest
import torch

from algorithms.ppo import Options, compute_advantages, compute_loss
from algorithms.tokens import Tokens


def test_value_lambda_changes_the_targets_and_not_the_advantages():
    # r = (0, 1), V = (0.5, 0.25), γ = 1. Returns: (1, 1). λ = 0: δ = (0.25 - 0.5, 1 - 0.25)
    rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25])
    zeros = torch.zeros(2, dtype=torch.int64)

    def both(**options):
        batch = Tokens(rewards=rewards, rollout=zeros, in_loss=zeros == 0, old_values=values,
                       discounts=torch.ones(2))  # fmt: skip
        return compute_advantages(batch, Options(gae_lambda=0.0, **options)).values()

    advantages, targets = both()
    decoupled, returns = both(value_lambda=1.0)
    assert targets.tolist() == [0.25, 1.0] and returns.tolist() == [1.0, 1.0]
    assert torch.equal(advantages, decoupled)


def test_only_tokens_in_the_loss_normalize_the_advantages_and_count_in_the_value_loss():
    """With λ = 0 and values of 0 the advantages are the rewards 1, 3 and 9; the last is out."""
    zeros = torch.zeros(3)
    known = {"in_loss": torch.tensor([True, True, False]), "old_values": zeros}
    rewards, ones = torch.tensor([1.0, 3.0, 9.0]), torch.ones(3)
    batch = Tokens(rewards=rewards, rollout=zeros, discounts=ones, **known)
    found = compute_advantages(batch, Options(gae_lambda=0.0))
    assert found["advantages"].tolist() == pytest.approx([-1, 1, 0], abs=1e-3)
    tokens = Tokens(
        old_logprobs=zeros, logprobs=zeros, values=zeros, importance_weights=zeros,
        token_weights=zeros, **found, **known,
    )  # fmt: skip
    metrics = compute_loss(tokens, Options())[1]
    assert metrics["value/loss"] == (1**2 + 3**2) / 2


def loss_of(advantage, value, old_value, target, **given):
    """Of one token in the first step: the loss, the gradient of its value, and the metrics."""
    one = torch.ones(1)
    logprobs, values = (one * x for x in (math.log(0.2), value))
    values.requires_grad_()
    tokens = Tokens(
        in_loss=one > 0, old_logprobs=logprobs, logprobs=logprobs, advantages=one * advantage,
        old_values=one * old_value, values=values, value_targets=one * target,
        importance_weights=one, token_weights=one,
    )  # fmt: skip
    loss, metrics = compute_loss(tokens, Options(**given))
    loss.backward()
    return loss.item(), values.grad.item(), metrics


@pytest.mark.parametrize(
    "numbers, error, want_gradient",
    [
        # value, old value, target: larger of both squared errors, gradient of half of it
        ((1.25, 1.0, 2.0), 0.75**2, -0.75),  # within the clip
        ((2.0, 1.0, 3.0), 1.5**2, 0.0),  # above, towards the target: stopped
        ((2.0, 1.0, -1.0), 3.0**2, 3.0),  # above, away from the target: pulled back
        ((0.0, 1.0, 3.0), 3.0**2, -3.0),  # below, away from the target: pulled back
    ],
)
def test_value_clip_in_each_case(numbers, error, want_gradient):
    loss, gradient, metrics = loss_of(0.0, *numbers, value_clip=0.5, value_coef=0.2)
    assert loss == pytest.approx(0.2 * error / 2, abs=1e-6)
    assert gradient == pytest.approx(0.2 * want_gradient, abs=1e-6)
    assert metrics["value/loss"] == pytest.approx(error / 2, abs=1e-6)  # without the coefficient


def test_value_clip_0_is_no_limit_and_value_coef_0_leaves_the_values_alone():
    loss, gradient, _ = loss_of(0.0, 2.0, 1.0, 3.0, value_clip=0.0, value_coef=1.0)
    assert loss == pytest.approx((2 - 3) ** 2 / 2, abs=1e-6)
    assert gradient == pytest.approx(2 - 3, abs=1e-6)
    loss, gradient, metrics = loss_of(1.0, 2.0, 1.0, 3.0, value_coef=0.0)
    assert loss == pytest.approx(-1, abs=1e-6) and gradient == 0
    assert metrics["value/loss"] > 0  # it is measured all the same
