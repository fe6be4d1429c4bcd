"""Clip-Cov: GRPO without policy gradient for some of the tokens that lower the entropy most.

    A_t = 0    for a fraction of all tokens, drawn at random from those with low ≤ cov_t ≤ high
                                                                        arXiv:2505.22617

cov_t is the token's part of the covariance of log-prob and advantage; kl_cov.py says why it counts.

Differences from the paper: the tokens are chosen once per update, from the log-probs before its
first step, where the authors choose them in every step. The normalization of the loss does not
change: a token without gradient still counts.

    python train.py --algo clip_cov
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from algorithms import grpo
from algorithms.common import Batch
from algorithms.options import Fraction, Range
from algorithms.variants.kl_cov import covariance, highest

resolve = grpo.resolve
compute_loss = grpo.compute_loss


@dataclass(frozen=True)
class Options(grpo.Options):
    """Options of Clip-Cov, beside those of GRPO."""

    fraction: Fraction = 0.0002
    """Fraction of the tokens in the loss that get no policy gradient; at least one token."""
    low: Annotated[float, Range(0, 10**15)] = 1.0
    """Smallest covariance of these tokens."""
    high: Annotated[float, Range(0, 10**15)] = 5.0
    """Largest covariance of these tokens."""


def needs(options: Options) -> set[str]:
    """What this needs of the settings, in the words of core/algorithm.py."""
    return grpo.needs(options) | {"old_logprobs"}


def compute_advantages(batch: Batch, options: Options) -> dict[str, Tensor | float]:
    """GRPO's advantages, with 0 for the drawn tokens, and their fraction, for the log.

    All tokens within the range are drawn if they are fewer than the fraction.
    """
    advantages, mask = grpo.compute_advantages(batch, options), batch.loss_mask
    cov = covariance(batch, advantages)
    draws = torch.rand(cov.shape, generator=torch.Generator().manual_seed(batch.seed))
    within = mask & (cov >= options.low) & (cov <= options.high)
    clipped = highest(draws, within, options.fraction * mask.sum().item())
    fraction = clipped.sum().item() / max(1, mask.sum().item())
    return {"advantages": advantages.masked_fill(clipped, 0.0), "clip/cov_fraction": fraction}
