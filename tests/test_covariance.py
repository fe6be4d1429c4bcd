"""Clip-Cov and KL-Cov (arXiv:2505.22617): the tokens they choose, and what they do to a step."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import load_small, save_small
from single_update import single_update

import train
from algorithms.common import clip_cov, covariance, kl_cov
from core.batching import MicroBatch
from core.optimizer import make_optimizer
from core.types import Rollout, Turn

NAN = float("nan")
# log-probs -1 -2 -3 (mean -2) with advantages 3 0 -3 (mean 0); the second row has one token masked
LOGPROBS = torch.tensor([[-1.0, -2.0], [-3.0, NAN]])
ADVANTAGES = torch.tensor([[3.0, 0.0], [-3.0, NAN]])
MASK = torch.tensor([[True, True], [True, False]])


def test_covariance_by_hand():
    assert covariance(LOGPROBS, ADVANTAGES, MASK).tolist() == [[3, 0], [3, 0]]
    # a likely token with a low advantage, and an unlikely one with a high advantage
    assert covariance(LOGPROBS, -ADVANTAGES, MASK).tolist() == [[-3, 0], [-3, 0]]


def test_clip_cov_draws_a_fraction_of_all_tokens_from_those_in_the_range():
    cov = torch.arange(1000.0).view(10, 100) / 100  # 0.00 to 9.99; 401 of them in [1, 5]
    mask = torch.ones_like(cov, dtype=torch.bool)
    chosen = clip_cov(cov, mask, 0.2, 1.0, 5.0, seed=0)
    assert chosen.sum() == 200
    assert cov[chosen].min() >= 1 and cov[chosen].max() <= 5
    assert 2.7 < cov[chosen].mean() < 3.3  # 3.0 is the mean of the range; standard error 0.06
    assert torch.equal(chosen, clip_cov(cov, mask, 0.2, 1.0, 5.0, seed=0))
    assert not torch.equal(chosen, clip_cov(cov, mask, 0.2, 1.0, 5.0, seed=1))
    assert clip_cov(cov, mask, 0.9, 1.0, 5.0, seed=0).sum() == 401  # there are no more
    assert clip_cov(cov, mask, 1e-6, 1.0, 5.0, seed=0).sum() == 1
    assert clip_cov(cov, mask, 0.2, 20.0, 30.0, seed=0).sum() == 0
    assert clip_cov(cov, ~mask, 0.2, 1.0, 5.0, seed=0).sum() == 0


def test_kl_cov_takes_the_tokens_with_the_highest_covariance():
    cov = torch.tensor([[5.0, -9.0, 1.0], [2.0, 3.0, 7.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert kl_cov(cov, mask, 0.5).tolist() == [[True, False, False], [False, True, False]]
    assert kl_cov(cov, mask, 0.001).sum() == 1
    assert torch.equal(kl_cov(cov, mask, 1.0), mask)


def test_the_penalty_of_kl_cov_is_the_kl_to_the_old_policy_on_its_tokens_alone():
    ratio = torch.tensor([[2.0, 3.0]])
    old = torch.tensor([[-1.0, -1.5]])
    logprobs = (old + ratio.log()).requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    micro = MicroBatch(
        input_ids=torch.zeros(1, 3), completion_mask=mask, index=torch.zeros(1, 2),
        token_weights=torch.tensor([[0.25, 0.25]]), kl_cov_coef=torch.tensor([[0.0, 0.8]]),
    )  # fmt: skip
    importance = torch.tensor([[1.0, 0.5]])
    loss, _ = train.regularizers(train.Config(), None, logprobs, old, old, importance, micro)
    loss.backward()
    assert loss.item() == pytest.approx(0.8 * 0.25 * 0.5 * (3 - 1 - math.log(3)))
    assert logprobs.grad[0].tolist() == pytest.approx([0, 0.8 * 0.25 * 0.5 * (3 - 1)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def rollouts():
    """Two groups of three rollouts, with different lengths and rewards."""
    found = []
    for i in range(6):
        ids = [(17 * i + 5 * t) % 256 for t in range(2 + i)]
        turn = Turn([65, 66 + i // 3], ids, [-5.5] * len(ids), "stop", float(i % 3))
        found.append(Rollout("test", "player", i // 3, i // 3, turns=[turn]))
    return found


def step(folder, micro_batch_tokens=200, **options):
    """The gradient of each step of one update, flat, and the update's metrics."""
    policy = load_small(folder, value_head=options.get("algo") == "ppo")
    policy.micro_batch_tokens = micro_batch_tokens
    optimizer, gradients = make_optimizer(policy, 1e-2), []
    plain = optimizer.step

    def recorded(*args):
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()]))
        return plain(*args)

    optimizer.step = recorded
    cfg = train.Config(num_prompts=2, group_size=3, max_grad_norm=0.0, **options)
    return gradients, single_update(cfg, policy, optimizer, rollouts())


COVARIANCE = {"clip_cov": 0.2, "clip_cov_low": 0.0, "kl_cov": 0.3, "kl_cov_coef": 5.0}


@pytest.mark.parametrize("options", [{"algo": "reinforce"}, {"algo": "grpo"}, {"algo": "ppo"}])
def test_micro_batches_do_not_change_the_steps(folder, options):
    options = options | COVARIANCE | {"num_epochs": 2}
    whole, metrics = step(folder, **options)
    cut, _ = step(folder, micro_batch_tokens=1, **options)
    for a, b in zip(whole, cut, strict=True):
        assert a.norm() > 1e-3
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)
    assert metrics["clip/cov_fraction"] == pytest.approx(5 / 27)  # int(0.2 · 27 tokens)


def test_clip_cov_of_everything_leaves_no_policy_gradient(folder):
    everything = {"clip_cov": 1.0, "clip_cov_low": 0.0, "clip_cov_high": 1e9}
    (plain,), _ = step(folder)
    (clipped,), metrics = step(folder, **everything)
    share = metrics["clip/cov_fraction"]
    assert 0.3 < share < 0.7  # those with a negative covariance keep their gradient
    assert not torch.allclose(plain, clipped)


def test_kl_cov_shrinks_the_second_step(folder):
    (first, second), _ = step(folder, num_epochs=2)
    (same, held), metrics = step(folder, num_epochs=2, kl_cov=1.0, kl_cov_coef=100.0)
    assert torch.equal(first, same)  # at π = π_old the gradient of the KL is 0
    assert not torch.allclose(second, held)
    assert "clip/cov_fraction" not in metrics


def test_the_options_are_off_by_default():
    cfg = train.Config()
    assert cfg.clip_cov == cfg.kl_cov == 0 and not train.needs_old_logprobs(cfg)
    assert train.needs_old_logprobs(replace(cfg, clip_cov=0.1))
