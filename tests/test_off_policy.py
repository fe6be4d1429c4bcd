"""Corrections for the sampler's distribution: ratios, weights and rejection by hand."""

import math

import pytest
import torch

from algorithms.common import Micro
from algorithms.off_policy import importance_weights, sampler_ratio
from algorithms.variants import opsm

INF, NAN = float("inf"), float("nan")
OLD, SAMPLER = torch.tensor([[0.3, 0.2, 0.9]] * 2), torch.tensor([[0.2, 0.4, 0.1]] * 2)
SAMPLED = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize(
    "level, want",
    [  # 0.3/0.2, 0.2/0.4, 0.9/0.1; their mean or product, of all three and of the two that count
        ("token", [1.5, 0.5, 9.0, 1.5, 0.5]),
        ("geometric", [6.75 ** (1 / 3)] * 3 + [math.sqrt(0.75)] * 2),
        ("product", [6.75] * 3 + [0.75] * 2),
    ],
)
def test_sampler_ratio_is_trainer_over_sampler(level, want):
    trainer = OLD.masked_fill(~SAMPLED, NAN).log().requires_grad_()
    micro = Micro(completion_mask=SAMPLED, old_logprobs=trainer, sampler_logprobs=SAMPLER.log())
    ratio = sampler_ratio(micro, level)
    assert ratio[SAMPLED].tolist() == pytest.approx(want, abs=1e-5)
    assert ratio.shape == OLD.shape and ratio.isfinite().all() and not ratio.requires_grad


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


def test_rejected_tokens_have_weight_0_and_are_counted():
    """Rows with ratios π_old / π_sampler of 2 and 1/2, 4 and 1, and 1/4; one token is masked."""
    ratio = torch.tensor([[2.0, 0.5], [4.0, 1.0], [0.25, 8.0]])
    sampler, capped = torch.full((3, 2), -1.0), [2.0, 0.5, 3.0, 1.0, 0.25]
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    micro = Micro(
        completion_mask=mask, sampler_logprobs=sampler, old_logprobs=sampler + ratio.log(),
        advantages=torch.tensor([[1.0] * 2, [-1.0] * 2, [-1.0] * 2]), token_weights=mask / 5,
        loss_mask=mask & torch.tensor([True, False]),
    )  # fmt: skip
    logprobs = sampler - 2.0  # further from the sampler than 1.5 nats

    def weights(**given):
        micro.importance_weights = importance_weights(ratio, cap=3.0)
        options = opsm.resolve(opsm.Options(**given))
        metrics = opsm.compute_loss(logprobs, None, micro, options)[1]
        return micro.importance_weights[mask].tolist(), metrics["weights/rejected"]

    assert weights(limit=0.0) == (pytest.approx(capped), 0)
    band = weights(limit=0.0, reject_low=0.5, reject_high=1.5)  # the rows' means are 1, 2 and 1/4
    assert band == (pytest.approx([2.0, 0.5, 0, 0, 0]), 2)  # of the three, those in the loss
    assert weights(limit=1.5) == (pytest.approx([2.0, 0.5, 0, 0, 0]), 2)
    assert weights(limit=2.5) == (pytest.approx(capped), 0)
