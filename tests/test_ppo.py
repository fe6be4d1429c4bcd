"""PPO: values, their targets and their loss by hand; test_float64_step.py has GAE and the clip."""

import math

import pytest
import torch

from algorithms.ppo import Options, compute_advantages, compute_loss
from algorithms.tokens import Tokens


def of_rewards(rewards, values, in_loss=None, **options):
    """Advantages and targets of the tokens of a rollout; λ = 0."""
    rewards, zeros = torch.tensor(rewards), torch.zeros(len(rewards))
    in_loss = zeros == 0 if in_loss is None else torch.tensor(in_loss)
    tokens = Tokens(rewards=rewards, old_values=torch.tensor(values), rollout=zeros,
                    in_loss=in_loss, discounts=zeros + 1)  # fmt: skip
    options = Options(gae_lambda=0.0, **options)
    return [x.tolist() for x in compute_advantages(tokens, options).values()]


def test_value_lambda_changes_the_targets_and_not_the_advantages():
    # r = (0, 1), V = (0.5, 0.25), γ = 1. Returns: (1, 1). λ = 0: δ = (0.25 - 0.5, 1 - 0.25)
    advantages, targets = of_rewards([0.0, 1.0], [0.5, 0.25])
    decoupled, returns = of_rewards([0.0, 1.0], [0.5, 0.25], value_lambda=1.0)
    assert targets == [0.25, 1.0] and returns == [1.0, 1.0] and advantages == decoupled


def test_only_tokens_in_the_loss_normalize_the_advantages():
    advantages, _ = of_rewards([1.0, 3.0, 9.0], [0.0] * 3, [True, True, False])
    assert advantages == pytest.approx([-1, 1, 0], abs=1e-3)


@pytest.mark.parametrize(
    "value, old, target, value_clip, error, want_gradient",
    [  # larger of both squared errors, gradient of half of it
        (1.25, 1.0, 2.0, 0.5, 0.75**2, -0.75),  # within the clip
        (2.0, 1.0, 3.0, 0.5, 1.5**2, 0.0),  # above, towards the target: stopped
        (2.0, 1.0, -1.0, 0.5, 3.0**2, 3.0),  # above, away from the target: pulled back
        (0.0, 1.0, 3.0, 0.5, 3.0**2, -3.0),  # below, away from the target: pulled back
        (2.0, 1.0, 3.0, 0.0, 1.0, -1.0),  # no limit
    ],
)
@pytest.mark.parametrize("value_coef", [0.2, 0.0])
def test_the_value_loss_of_a_token(
    value, old, target, value_clip, error, want_gradient, value_coef
):
    """Beside one that is out of the loss; both have the advantage 0.5 in the first step."""
    ones = torch.ones(2)
    logprobs, values = ones * math.log(0.2), (ones * value).requires_grad_()
    tokens = Tokens(
        in_loss=torch.tensor([True, False]), old_logprobs=logprobs, logprobs=logprobs,
        advantages=ones / 2, old_values=ones * old, values=values, value_targets=ones * target,
        importance_weights=ones, token_weights=torch.tensor([1.0, 0.0]),
    )  # fmt: skip
    options = Options(value_clip=value_clip, value_coef=value_coef)
    loss, metrics = compute_loss(tokens, options)
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 + value_coef * error / 2, abs=1e-6)
    assert values.grad.tolist() == pytest.approx([value_coef * want_gradient, 0.0], abs=1e-6)
    assert metrics["value/loss"] == pytest.approx(error / 2, abs=1e-6)  # without the coefficient
