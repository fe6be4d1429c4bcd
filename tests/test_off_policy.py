"""Corrections for the sampler's distribution: ratios, weights and rejection by hand, and the exact
expected gradient of a chain of two tokens."""

import itertools
import math

import pytest
import torch

from algorithms.common import importance_weights, in_band, not_stale, sampler_ratio

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
@pytest.mark.parametrize("junk", [1.0, 0.0, NAN])  # its logarithms: 0, -inf, nan
def test_sampler_ratio_is_trainer_over_sampler(level, want, junk):
    trainer = OLD.masked_fill(~SAMPLED, junk).log().requires_grad_()
    ratio = sampler_ratio(trainer, SAMPLER.log(), SAMPLED, level)
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


def test_the_band_includes_its_bounds_and_may_be_open():
    ratio = torch.tensor([0.5, 0.6, 1.5, 2.0, 3.0])
    assert in_band(ratio, 0, 0).all()
    assert in_band(ratio, 0.6, 2.0).tolist() == [False, True, True, True, False]
    assert in_band(ratio, 0.6, 0).tolist() == [False, True, True, True, True]


def test_opsm_leaves_out_negative_advantages_of_rows_that_moved_away():
    sampler = torch.full((4, 2), -1.0)
    logprobs = torch.tensor([[-1.5, -2.0], [-1.5, -2.0], [-1.0, -2.0], [-0.0, -0.0]])
    logprobs.requires_grad_()  # 0.75, 0.75, 0.5 and -1 nats away in the mean
    advantages = torch.tensor([[-1.0, -1.0], [0.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]])
    mask = torch.ones(4, 2, dtype=torch.bool)
    kept = not_stale(logprobs, sampler, advantages, mask, limit=0.5)
    assert kept.tolist() == [[False, False], [True, True], [True, True], [True, True]]
    mask[0, 1] = False  # then the mean of row 0 is that of its first token: 0.5
    logprobs = logprobs.masked_fill(~mask, NAN)
    assert not_stale(logprobs, sampler, advantages, mask, limit=0.5)[0, 0]


def test_only_the_product_has_the_gradient_of_the_policy():
    """Two tokens of a table of logits, sampled by other logits: the sum over all four sequences of
    chance · weight · return · ∇ log π, against ∇ of the expected return."""
    generator = torch.Generator().manual_seed(0)
    logits, noise = torch.randn(2, 3, 2, generator=generator, dtype=torch.float64)
    logits.requires_grad_()

    def logprobs(table, x, y):  # the second token depends on the first
        return torch.stack([table.log_softmax(-1)[0, x], table.log_softmax(-1)[1 + x, y]])[None]

    def bias(level):
        expected, estimate = 0.0, 0.0
        for x, y in itertools.product(range(2), repeat=2):
            own, sampler = logprobs(logits, x, y), logprobs(logits.detach() + 0.5 * noise, x, y)
            gain = 1.0 + 2 * x - 3 * x * y
            expected = expected + own.sum().exp() * gain
            ratio = sampler_ratio(own, sampler, torch.ones(1, 2, dtype=torch.bool), level)
            estimate = estimate + sampler.sum().exp() * gain * (ratio * own).sum()
        exact, ours = (
            torch.autograd.grad(value, logits, retain_graph=True)[0]
            for value in (expected, estimate)
        )
        return (exact - ours).abs().max().item()

    assert bias("product") < 1e-12
    assert bias("token") > 1e-3 and bias("geometric") > 1e-3
