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

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms import grpo
from algorithms.kl import kl_estimate
from algorithms.options import Coefficient, Fraction
from algorithms.tokens import Tokens


@dataclass(frozen=True)
class Options(grpo.Options):
    """Options of KL-Cov, beside those of GRPO."""

    fraction: Fraction = 0.002
    """Fraction of the tokens in the loss that have the penalty, those with the highest
    covariance; at least one token."""
    coef: Coefficient = 1.0
    """Coefficient of the penalty."""

    @property
    def needs(self) -> Set[str]:
        """What GRPO needs, and `old_logprobs` and `several_steps` (core/algorithm.py)."""
        return super().needs | {"old_logprobs", "several_steps"}


def compute_advantages(tokens: Tokens, options: Options) -> dict[str, Tensor]:
    """GRPO's advantages, and the penalty's coefficient [S], mostly 0, for `compute_loss`.

    The whole batch decides which tokens it is, so micro-batches and ranks do not change them.
    """
    advantages = grpo.compute_advantages(tokens, options)
    count = options.fraction * tokens.in_loss.sum().item()
    chosen = highest(covariance(tokens, advantages), tokens.in_loss, count)
    return {"advantages": advantages, "penalty_coef": options.coef * chosen}


def compute_loss(tokens: Tokens, options: Options) -> tuple[Tensor, dict[str, float]]:
    """GRPO's loss and the penalty. π_old sampled the tokens, so the penalty has no ratio."""
    loss, metrics = grpo.compute_loss(tokens, options)
    kl = tokens.penalty_coef * kl_estimate(tokens.old_logprobs, tokens.logprobs)
    return loss + (tokens.token_weights * tokens.importance_weights * kl).sum(), metrics


def covariance(tokens: Tokens, advantages: Tensor) -> Tensor:
    """cov_t of each token, [S].

    >>> in_loss = torch.tensor([True, True, False])
    >>> logprobs, advantages = torch.tensor([-1.0, -3.0, 9.0]), torch.tensor([2.0, 0.0, 9.0])
    >>> covariance(Tokens(in_loss=in_loss, old_logprobs=logprobs), advantages)[in_loss]
    tensor([1., 1.])
    """
    old, in_loss = tokens.old_logprobs, tokens.in_loss
    return (old - old[in_loss].mean()) * (advantages - advantages[in_loss].mean())


def highest(scores: Tensor, in_loss: Tensor, count: float) -> Tensor:
    """[S] bool: the `count` tokens in the loss with the highest scores; rounded down, at least one.

    >>> highest(torch.tensor([3.0, 1.0, 2.0, 9.0]), torch.tensor([True, True, True, False]), 2.1)
    tensor([ True, False,  True, False])
    """
    numbers = in_loss.nonzero().squeeze(1)
    ordered = numbers[scores[numbers].argsort(descending=True, stable=True)]
    return torch.zeros_like(in_loss).index_fill(0, ordered[: max(1, int(count))], True)
