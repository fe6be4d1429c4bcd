"""KL-Cov (arXiv:2505.22617): the tokens that it chooses, and its penalty."""

import math

import pytest
import torch

from algorithms.tokens import Tokens
from algorithms.variants import kl_cov
from algorithms.variants.kl_cov import covariance, highest
from core.config import Config, resolve
from core.loop.run import Run


def test_the_penalty_of_kl_cov_is_the_kl_to_the_old_policy_on_the_tokens_with_the_highest():
    generator = torch.Generator().manual_seed(0)
    rewards, old = torch.randn(2, 1000, generator=generator)  # 20 rollouts of 50 tokens
    rollout = torch.arange(1000) // 50
    in_loss = torch.arange(1000) % 5 > 0  # 800 tokens
    batch = Tokens(rewards=rewards, old_logprobs=old, in_loss=in_loss, rollout=rollout,
                   turn=rollout * 0, group=rollout // 4, discounts=torch.ones(1000))  # fmt: skip
    options = kl_cov.Options(fraction=0.1, coef=0.8).with_preset()
    advantages, coef = kl_cov.compute_advantages(batch, options).values()
    cov = covariance(batch, advantages)
    assert coef.unique().tolist() == pytest.approx([0, 0.8]) and (coef > 0).sum() == 80
    assert cov[coef > 0].min() >= cov[in_loss & (coef == 0)].max()

    ratio, old = torch.tensor([2.0, 3.0]), torch.tensor([-1.0, -1.5])
    logprobs = (old + ratio.log()).requires_grad_()
    tokens = Tokens(
        in_loss=old < 0, old_logprobs=old, advantages=torch.zeros(2), logprobs=logprobs,
        importance_weights=torch.tensor([1.0, 0.5]), token_weights=torch.full((2,), 0.25),
        penalty_coef=torch.tensor([0.0, 0.8]),
    )  # fmt: skip
    loss = kl_cov.compute_loss(tokens, options)[0]
    assert loss.item() == pytest.approx(0.8 * 0.25 * 0.5 * (3 - 1 - math.log(3)))
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert gradient.tolist() == pytest.approx([0, 0.8 * 0.25 * 0.5 * (3 - 1)])


def test_at_least_one_token_has_the_penalty_and_of_equal_ones_the_first():
    in_loss = torch.tensor([False, True, True, True])
    scores = torch.tensor([9.0, 1.0, 2.0, 2.0])
    assert highest(scores, in_loss, 0.3).tolist() == [False, False, True, False]
    assert not highest(scores, in_loss & False, 0.3).any()


def test_the_old_log_probs_are_computed_where_a_setting_needs_them():
    needs = {
        name: Run(resolve(Config(**settings)), *[None] * 11, {"update": 0}).scores_first
        for name, settings in {
            "default": {}, "epochs": {"num_epochs": 2}, "minibatches": {"num_minibatches": 2},
            "ppo": {"algo": "ppo"}, "kl_cov": {"algo": "kl_cov"}, "kl": {"kl_coef": 0.1},
            "kl in the reward": {"kl_coef": 0.1, "kl_in": "reward"},
            "no kl": {"kl_in": "reward"},
        }.items()
    }  # fmt: skip
    assert [name for name, needed in needs.items() if not needed] == ["default", "kl", "no kl"]
