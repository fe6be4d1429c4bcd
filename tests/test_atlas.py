"""The atlas of estimators: expected gradients that theory gives, to 1e-10."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "runs/off_policy"))
import atlas

from algorithms import common, grpo, ppo, reinforce

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


def test_dr_grpo_is_reinforce_with_the_mean_of_the_group(tasks):
    found = expected(grpo, grpo.Options("dr_grpo"), tasks)
    close(found, (1 - 1 / G) * atlas.gradient_of(tasks, lambda p: p))


def test_max_rl_follows_the_gradient_of_the_log_of_success(tasks):
    """... of each task up to the factor that grpo.py names."""
    factor = 1 - (1 - tasks.success()) ** (G - 1)
    found = expected(grpo, grpo.Options("max_rl"), tasks)
    close(found, factor[:, None, None] * atlas.gradient_of(tasks, torch.log))


def test_grpo_with_the_std_by_the_number_of_right_answers(tasks):
    """E[Σ A_i ∇ log π] = ∇p E[Σ A_i (R_i - p)] / (p (1-p)): k of G are right, binomially."""
    factors = []
    for p in tasks.success().tolist():
        total = 0.0
        for k in range(1, G):
            std = math.sqrt(k * (G - k) / (G * (G - 1)))
            right, wrong = (1 - k / G) / (std + 1e-4), -(k / G) / (std + 1e-4)
            chance = math.comb(G, k) * p**k * (1 - p) ** (G - k)
            total += chance * (k * right * (1 - p) - (G - k) * wrong * p)
        factors.append(total / G / (p * (1 - p)))
    found = expected(grpo, grpo.Options("dapo"), tasks)
    close(found, torch.tensor(factors)[:, None, None] * atlas.gradient_of(tasks, lambda p: p))


@pytest.mark.parametrize(
    "gae_lambda, exact", [(1.0, True), (1.0, False), (0.95, True), (0.0, True)]
)
def test_gae_is_unbiased_with_lambda_1_or_the_exact_values(tasks, gae_lambda, exact):
    def compute_advantages(batch, options):
        batch.advantages, batch.value_targets = ppo.gae(batch, gae_lambda), batch.values

    plain = SimpleNamespace(compute_advantages=compute_advantages, compute_loss=ppo.compute_loss)
    values = tasks.values() if exact else torch.full((2, 4, 3), 0.5)
    found = expected(plain, ppo.Options(), tasks, values=values)
    close(found, atlas.gradient_of(tasks, lambda p: p))


def test_gae_is_biased_with_lambda_0_and_wrong_values(tasks):
    def compute_advantages(batch, options):
        batch.advantages, batch.value_targets = ppo.gae(batch, 0.0), batch.values

    plain = SimpleNamespace(compute_advantages=compute_advantages, compute_loss=ppo.compute_loss)
    found = expected(plain, ppo.Options(), tasks, values=torch.full((2, 4, 3), 0.5))
    assert (found - atlas.gradient_of(tasks, lambda p: p)).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_distillation_follows_the_gradient_of_the_kl(tasks, kind):
    """Only the KL to a teacher, token by token, each in its context as the policy sampled it."""
    teacher = atlas.Tasks(tasks.logits.flip(0))
    task = torch.arange(2).repeat_interleave(G)

    def compute_advantages(batch, options):
        batch.advantages = torch.zeros_like(batch.rewards)
        # which completion each rollout is: their log-probs differ
        same = (tasks.logprobs()[task] == batch.old_logprobs[:, None]).all(-1)
        batch.own = {"teacher": teacher.logprobs()[task, same.double().argmax(1)]}

    def compute_loss(logprobs, values, micro, options):
        ratio = (logprobs - micro.old_logprobs).exp()
        kl = common.weighted_kl(logprobs, ratio, micro.own["teacher"], kind)
        return (micro.token_weights * torch.where(micro.completion_mask, kl, 0.0)).sum(), {}

    plain = SimpleNamespace(compute_advantages=compute_advantages, compute_loss=compute_loss)
    close(expected(plain, None, tasks), atlas.kl_gradient(tasks, teacher))
