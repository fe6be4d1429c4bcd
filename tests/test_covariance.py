"""Clip-Cov and KL-Cov (arXiv:2505.22617): the tokens they choose."""

import torch

import train
from algorithms.common import clip_cov, covariance, kl_cov
from core.batching import to_rollout_batch
from core.seeds import ALGORITHM, derive_seed
from core.selection import limit_covariance
from core.types import Rollout, Turn

NAN = float("nan")


def test_covariance_by_hand():
    # log-probs -1 -2 -3 (mean -2), advantages 3 0 -3 (mean 0); the second row has one token masked
    logprobs, advantages = torch.tensor([[[-1.0, -2.0], [-3.0, NAN]], [[4.0, 1.0], [-2.0, NAN]]])
    mask = torch.tensor([[True, True], [True, False]])
    assert covariance(logprobs, advantages, mask).tolist() == [[3, 0], [3, 0]]
    assert covariance(logprobs, -advantages, mask).tolist() == [[-3, 0], [-3, 0]]


def test_clip_cov_draws_a_fraction_of_all_tokens_from_those_in_the_range():
    cov = torch.arange(1000.0).view(10, 100) / 100  # 0.00 to 9.99; 401 of them in [1, 5]
    mask = torch.ones_like(cov, dtype=torch.bool)
    chosen = clip_cov(cov, mask, 0.2, 1.0, 5.0, seed=0)
    assert chosen.sum() == 200 and 2.7 < cov[chosen].mean() < 3.3  # at random: 3, error 0.06
    assert torch.equal(chosen, clip_cov(cov, mask, 0.2, 1.0, 5.0, seed=0))
    assert not torch.equal(chosen, clip_cov(cov, mask, 0.2, 1.0, 5.0, seed=1))
    everything = clip_cov(cov, mask, 0.9, 1.0, 5.0, seed=0)  # there are no more
    assert torch.equal(everything, (cov >= 1) & (cov <= 5)) and everything.sum() == 401
    assert clip_cov(cov, mask, 1e-6, 1.0, 5.0, seed=0).sum() == 1
    assert clip_cov(cov, ~mask, 0.2, 1.0, 5.0, seed=0).sum() == 0


def test_kl_cov_takes_the_tokens_with_the_highest_covariance():
    cov = torch.tensor([[5.0, -9.0, 1.0], [2.0, 3.0, 7.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert kl_cov(cov, mask, 0.5).tolist() == [[True, False, False], [False, True, False]]
    assert kl_cov(cov, mask, 0.001).sum() == 1
    assert torch.equal(kl_cov(cov, mask, 1.0), mask)


def test_an_update_chooses_once_from_the_whole_batch():
    turns = [Turn([1], [5] * 40, [-0.5] * 40, "stop") for _ in range(2)]
    rollouts = [Rollout("e", "player", i, i, turns=[turn]) for i, turn in enumerate(turns)]
    batch = to_rollout_batch(rollouts)
    generator = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(2, 2, 40, generator=generator)
    batch.old_logprobs, batch.advantages = old, advantages
    cfg = train.Config(
        seed=5, clip_cov=0.2, clip_cov_low=0.0, clip_cov_high=9.0, kl_cov=0.1, kl_cov_coef=0.7
    )
    in_loss = torch.arange(80).view(2, 40) % 3 > 0
    limit_covariance(cfg, batch, in_loss, 7)
    cov = covariance(old, advantages, in_loss)
    clipped = clip_cov(cov, in_loss, 0.2, 0.0, 9.0, derive_seed(5, ALGORITHM, 7))
    assert torch.equal(batch.advantages, advantages.masked_fill(clipped, 0.0))
    assert torch.equal(batch.kl_cov_coef, 0.7 * kl_cov(cov, in_loss, 0.1).float())
    assert batch.clip_cov_fraction == clipped.sum().item() / in_loss.sum().item()


def test_the_old_log_probs_are_computed_where_a_setting_needs_them():
    needs = {
        name: train.needs_old_logprobs(train.Config(**settings))
        for name, settings in {
            "default": {}, "epochs": {"num_epochs": 2}, "minibatches": {"num_minibatches": 2},
            "ppo": {"algo": "ppo"}, "clip_cov": {"clip_cov": 0.1}, "kl": {"kl_coef": 0.1},
            "kl in the reward": {"kl_coef": 0.1, "kl_in": "reward"},
            "no kl": {"kl_in": "reward"},
        }.items()
    }  # fmt: skip
    assert [name for name, needed in needs.items() if not needed] == ["default", "kl", "no kl"]
