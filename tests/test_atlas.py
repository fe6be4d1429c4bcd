"""The atlas of estimators: expected gradients that theory gives, to 1e-10."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "runs/off_policy"))
import atlas

from algorithms import ppo, reinforce

G = 3  # rollouts of a task


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def tasks():
    return atlas.Tasks(torch.tensor(atlas.LOGITS))


def expected(algorithm, options, tasks, **given):
    """E of the gradient, where a rollout counts 1 / number of rollouts, whatever its length."""
    given = {"group": G, "aggregation": "constant", "max_tokens": 1} | given
    return atlas.estimate(algorithm, options, tasks, **given)[0]


def close(found, want):
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(found, want, rtol=0, atol=1e-10)


def test_the_batches_have_probability_1_and_the_right_success(tasks):
    assert sum(p for _, p in tasks.batches(G)) == pytest.approx(1, abs=1e-12)
    success = torch.zeros(2)
    for completions, p in tasks.batches(G):
        right = [atlas.RIGHT[0, completions[:G]], atlas.RIGHT[1, completions[G:]]]
        success += p * torch.stack(right).double().mean(1)
    close(success, tasks.success())


@pytest.mark.parametrize(
    "baseline, factor",
    [("none", 1), ("leave_one_out", 1), ("group", 1 - 1 / G), ("batch", 1 - 1 / (2 * G))],
)
def test_reinforce_follows_the_gradient_of_the_expected_return(tasks, baseline, factor):
    """A baseline that has the rollout's own return takes that share of the gradient away."""
    found = expected(reinforce, reinforce.Options(baseline=baseline), tasks)
    close(found, factor * atlas.gradient_of(tasks, lambda p: p))


@pytest.mark.parametrize(
    "gae_lambda, exact", [(1.0, True), (1.0, False), (0.95, True), (0.0, True), (0.0, False)]
)
def test_gae_is_unbiased_with_lambda_1_or_the_exact_values(tasks, gae_lambda, exact):
    def compute_advantages(batch, options):
        return {"advantages": ppo.gae(batch, gae_lambda), "value_targets": batch.values}

    plain = SimpleNamespace(compute_advantages=compute_advantages, compute_loss=ppo.compute_loss)
    values = tasks.values() if exact else torch.full((2, 4, 3), 0.5)
    found = expected(plain, ppo.Options(), tasks, values=values)
    want = atlas.gradient_of(tasks, lambda p: p)
    if gae_lambda or exact:
        close(found, want)
    else:
        assert (found - want).abs().max() > 0.01
