"""Corrections for the sampler's distribution: ratios, weights and rejection by hand."""

import math

import pytest
import torch

from algorithms.off_policy import importance_weights, sampler_ratio
from algorithms.tokens import Tokens
from runs.off_policy import atlas

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


LOG3 = math.log(3)
QUARTERS = torch.tensor([[[LOG3, 0.0], [0.0, 0.0], [LOG3, 0.0]]] * 2)  # logits of the atlas' tasks


def test_exact_values_by_hand():
    """Tokens go on with probabilities 3/4, 1/2 and 3/4."""
    # a token at the last place is right in 1 of 4 cases, the second ends right in the first task
    want = [[0.75 * 0.625, 0.625, 0.25], [0.75 * 0.125, 0.125, 0.25]]
    assert torch.allclose(atlas.Tasks(QUARTERS).values()[:, 3], torch.tensor(want))
