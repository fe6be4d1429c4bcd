"""Corrections for the sampler's distribution: ratios, weights and rejection by hand."""

import math

import pytest
import torch

from algorithms import grpo, ppo, reinforce
from algorithms.off_policy import importance_weights, sampler_ratio
from algorithms.tokens import Tokens
from algorithms.variants import cispo, dppo, gspo, opsm

INF = float("inf")
OLD, SAMPLER = torch.tensor([0.3, 0.2, 0.9, 0.3, 0.2]), torch.tensor([0.2, 0.4, 0.1, 0.2, 0.4])


@pytest.mark.parametrize(
    "level, want",
    [  # 0.3/0.2, 0.2/0.4, 0.9/0.1; their mean or product, of all three and of the two that count
        ("token", [1.5, 0.5, 9.0, 1.5, 0.5]),
        ("geometric", [6.75 ** (1 / 3)] * 3 + [math.sqrt(0.75)] * 2),
        ("product", [6.75] * 3 + [0.75] * 2),
    ],
)
def test_sampler_ratio_is_trainer_over_sampler(level, want):
    trainer, sequence = OLD.log().requires_grad_(), torch.tensor([4, 4, 4, 7, 7])
    tokens = Tokens(old_logprobs=trainer, sampler_logprobs=SAMPLER.log(), sequence=sequence)
    ratio = sampler_ratio(tokens, level)
    assert ratio.tolist() == pytest.approx(want, abs=1e-5) and not ratio.requires_grad


@pytest.mark.parametrize(
    "cap, mode, want",
    [
        (2.0, "truncate", [0.0, 0.4, 0.5, 1.0, 2.0, 2.0, 2.0]),  # never raised, only cut
        (2.0, "mask", [0.0, 0.0, 0.5, 1.0, 2.0, 0.0, 0.0]),  # the bounds themselves are within
        (0.0, "truncate", [1.0] * 7),
        (0.0, "mask", [1.0] * 7),
    ],
)
def test_importance_weights_by_hand(cap, mode, want):
    ratio = torch.tensor([0.0, 0.4, 0.5, 1.0, 2.0, 2.5, INF])
    assert importance_weights(ratio, cap, mode).tolist() == pytest.approx(want, abs=1e-7)


@pytest.mark.parametrize("algorithm", [reinforce, grpo, ppo, gspo, cispo, dppo])
def test_importance_weights_multiply_the_gradient_of_each_token(algorithm):
    """A token of weight 3 and one of weight 0.5, each with its token weight, in the first step."""
    one, weights = torch.ones(2), torch.tensor([3.0, 0.5])
    tokens = Tokens(
        sequence=torch.zeros(2).long(), in_loss=one > 0, advantages=torch.tensor([1.0, -2.0]),
        token_weights=torch.tensor([0.25, 0.75]), importance_weights=weights, old_logprobs=-one,
        sampler_logprobs=-one, logprobs=(-one).requires_grad_(), values=one * 0,
        old_values=one * 0, value_targets=one * 0,
    )  # fmt: skip
    options = algorithm.Options()
    options = options.with_preset()
    loss, _ = algorithm.compute_loss(tokens, options)
    [gradient] = torch.autograd.grad(loss, tokens.logprobs)
    assert gradient.tolist() == pytest.approx([-0.25 * 3 * 1, -0.75 * 0.5 * -2])


def test_rejected_tokens_have_weight_0_and_are_counted():
    """Sequences with ratios π_old / π_sampler of 2 and 1/2, 4 and 1, and 1/4."""
    ratio = torch.tensor([2.0, 0.5, 4.0, 1.0, 0.25])
    sampler, capped = torch.full((5,), -1.0), [2.0, 0.5, 3.0, 1.0, 0.25]
    tokens = Tokens(
        sampler_logprobs=sampler, old_logprobs=sampler + ratio.log(),
        sequence=torch.tensor([0, 0, 1, 1, 2]), token_weights=torch.full((5,), 1 / 5),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]),
        in_loss=torch.tensor([True, False, True, False, True]),
    )  # fmt: skip
    # on average 2 nats from the sampler in each sequence
    tokens.logprobs = sampler - torch.tensor([1.0, 3.0, 1.0, 3.0, 2.0])

    def weights(**given):
        tokens.importance_weights = importance_weights(ratio, cap=3.0)
        options = opsm.Options(**given).with_preset()
        metrics = opsm.compute_loss(tokens, options)[1]
        return tokens.importance_weights.tolist(), metrics["weights/rejected"]

    assert weights(limit=0.0) == (pytest.approx(capped), 0)
    band = weights(limit=0.0, reject_low=0.5, reject_high=1.5)  # the rows' means are 1, 2 and 1/4
    assert band == (pytest.approx([2.0, 0.5, 0, 0, 0]), 2)  # of the three, those in the loss
    assert weights(limit=1.5) == (pytest.approx([2.0, 0.5, 0, 0, 0]), 2)
    assert weights(limit=2.5) == (pytest.approx(capped), 0)
