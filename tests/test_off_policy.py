"""Corrections for the sampler: exact expected gradients on small chains, and rejection by hand."""

import importlib.util
from pathlib import Path

import pytest
import torch

from algorithms.common import in_band, not_stale, sampler_ratio

FILE = Path(__file__).parent.parent / "runs/off_policy/table.py"
spec = importlib.util.spec_from_file_location("off_policy_table", FILE)
off_policy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(off_policy)
NO_LIMIT = 1e9


def bias(chain, *settings):
    return off_policy.bias_and_variance(chain, chain.weights(*settings))[0]


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_product_of_the_ratios_has_the_gradient_of_the_policy(noise):
    chain = off_policy.Chain(noise, length=3)
    assert bias(chain, "product", NO_LIMIT, "truncate", 0, 0, 0) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        ("token", 0, "truncate", 0, 0, 0),
        ("token", NO_LIMIT, "truncate", 0, 0, 0),
        ("geometric", NO_LIMIT, "truncate", 0, 0, 0),
        ("product", 1.05, "truncate", 0, 0, 0),
        ("product", NO_LIMIT, "truncate", 0.95, 1.05, 0),
        ("product", NO_LIMIT, "truncate", 0, 0, 0.01),
    ],
)
def test_every_other_correction_is_biased_unless_the_sampler_is_the_policy(settings):
    assert bias(off_policy.Chain(0.3, length=3), *settings) > 1e-3
    assert bias(off_policy.Chain(0.0, length=3), *settings) < 1e-6


def test_the_gradient_is_that_of_the_expected_return_by_finite_differences():
    chain = off_policy.Chain(0.3, length=2)
    exact, step = chain.true_gradient(), 1e-6
    flat = chain.logits.detach().flatten()
    for i in range(0, len(flat), 5):
        values = []
        for sign in (1, -1):
            moved = flat.clone()
            moved[i] += sign * step
            logprobs = chain.logprobs(moved.view_as(chain.logits)).sum(1)
            values.append((logprobs.exp() * chain.returns).sum())
        difference = (values[0] - values[1]).item() / (2 * step)
        assert difference == pytest.approx(exact[i].item(), abs=1e-6)


def test_ratios_of_the_three_levels_by_hand():
    old = torch.tensor([[0.5, 0.25, 1.0]]).log()
    sampler, mask = torch.tensor([[0.25, 0.5, 0.1]]).log(), torch.tensor([[True, True, False]])
    for level, want in (("token", [2, 0.5]), ("geometric", [1, 1]), ("product", [1, 1])):
        got = sampler_ratio(old, sampler, mask, level)[0, :2].tolist()
        assert got == pytest.approx(want), level
    one_sided = sampler_ratio(old, old - 0.5, mask, "product")[0, 0].item()
    assert one_sided == pytest.approx(torch.tensor(1.0).exp().item())  # two tokens of 0.5 nats


def test_the_band_may_be_open_and_asymmetric():
    ratio = torch.tensor([[0.5], [1.0], [1.5], [3.0]])
    assert in_band(ratio, 0, 0).all()
    assert in_band(ratio, 0.6, 2.0).flatten().tolist() == [False, True, True, False]
    assert in_band(ratio, 0.6, 0).flatten().tolist() == [False, True, True, True]


def test_opsm_leaves_out_negative_advantages_of_rows_that_moved_away():
    sampler = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]])
    logprobs = torch.tensor([[-1.5, -1.7], [-1.5, -1.7], [-1.0, -1.1]])  # 0.6, 0.6, 0.05 nats away
    advantages = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    kept = not_stale(logprobs, sampler, advantages, sampler < 0, limit=0.3)
    assert kept.tolist() == [[False, False], [True, True], [True, True]]
