"""KL-Cov: GRPO with a KL penalty for the tokens that lower the entropy most.

    cov_t = (log π_old(x_t) - mean) (A_t - mean)        the means over all tokens in the loss
    L     = L_GRPO + Σ_t β (ρ_t - 1 - log ρ_t)          over the tokens with the highest cov_t
                                                                        arXiv:2505.22617

A policy gradient step lowers the entropy roughly in proportion to the mean of cov_t, to which a few
tokens contribute most: likely ones with a high advantage, and unlikely ones with a low advantage.
The penalty, an estimate of KL(π_old ‖ π), holds these back. It is 0 in the first step of an update.

Differences from the paper: the tokens are chosen once per update, from the log-probs before its
first step, where the authors choose them in every step; they take |log ρ| as the penalty, and do
not clip. The normalization of the loss does not change.

    python train.py --algo kl_cov --num-minibatches 4
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms import grpo
from algorithms.common import Batch, Micro, masked_mean
from algorithms.kl import kl_estimate
from algorithms.options import Coefficient, Fraction

resolve = grpo.resolve


@dataclass(frozen=True)
class Options(grpo.Options):
    """Options of KL-Cov, beside those of GRPO."""

    fraction: Fraction = 0.002
    """Fraction of the tokens in the loss that have the penalty, those with the highest
    covariance; at least one token."""
    coef: Coefficient = 1.0
    """Coefficient of the penalty."""


def needs(options: Options) -> set[str]:
    """What this needs of the settings, in the words of core/algorithm.py."""
    return grpo.needs(options) | {"old_logprobs", "several_steps"}


def compute_advantages(batch: Batch, options: Options) -> dict[str, Tensor]:
    """GRPO's advantages, and the penalty's coefficient [B, N], mostly 0, for `compute_loss`.

    The whole batch decides which tokens it is, so micro-batches and ranks do not change them.
    """
    advantages, mask = grpo.compute_advantages(batch, options), batch.loss_mask
    chosen = highest(covariance(batch, advantages), mask, options.fraction * mask.sum().item())
    return {"advantages": advantages, "penalty_coef": options.coef * chosen}


def compute_loss(
    logprobs: Tensor, values: Tensor | None, micro: Micro, options: Options
) -> tuple[Tensor, dict[str, float]]:
    """GRPO's loss and the penalty. π_old sampled the tokens, so the penalty has no ratio."""
    loss, metrics = grpo.compute_loss(logprobs, values, micro, options)
    mask, weights = micro.completion_mask, micro.token_weights * micro.importance_weights
    logprobs = torch.where(mask, logprobs, 0.0)  # padding has no gradient, and no NaN
    kl = micro.own["penalty_coef"] * kl_estimate(micro.old_logprobs, logprobs)
    return loss + torch.where(mask, weights * kl, 0.0).sum(), metrics


def covariance(batch: Batch, advantages: Tensor) -> Tensor:
    """cov_t of each token, 0 off the loss mask, [B, N].

    >>> mask = torch.tensor([[True, True, False]])
    >>> logprobs, advantages = torch.tensor([[-1.0, -3.0, 9.0]]), torch.tensor([[2.0, 0.0, 9.0]])
    >>> covariance(Batch(completion_mask=mask, old_logprobs=logprobs), advantages)
    tensor([[1., 1., 0.]])
    """
    mask = batch.loss_mask
    from_mean = batch.old_logprobs - masked_mean(batch.old_logprobs, mask)
    return torch.where(mask, from_mean * (advantages - masked_mean(advantages, mask)), 0.0)


def highest(scores: Tensor, candidates: Tensor, count: float) -> Tensor:
    """[B, N] bool: the `count` candidates (rounded down, at least one) with the highest scores.

    >>> highest(torch.tensor([3.0, 1.0, 2.0, 9.0]), torch.tensor([True, True, True, False]), 2.1)
    tensor([ True, False,  True, False])
    """
    count = min(max(1, int(count)), int(candidates.sum()))
    best = scores.masked_fill(~candidates, -torch.inf).flatten().topk(count).indices
    chosen = torch.zeros(scores.numel(), dtype=torch.bool)
    chosen[best] = True
    return chosen.view_as(scores)
