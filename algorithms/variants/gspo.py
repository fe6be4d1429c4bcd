"""GSPO: GRPO with one policy ratio for all tokens of a sequence.

    ρ_t = exp(mean over the sequence of log π(x_t) - log π_old(x_t))          arXiv:2507.18071
    L   = -Σ_i,t min(ρ_t A_i, clip(ρ_t, 1-ε_low, 1+ε_high) A_i)

The value of ρ is the geometric mean of the tokens' ratios. So the clip keeps or drops a sequence as
a whole, and ε is small, as a mean of ratios stays near 1. Each term has the gradient of its own
token's ratio (GSPO-token in the paper). A sequence is a rollout, or a part of one if the
environment replaced the context. The KL and the entropy of --kl-coef and --entropy-coef keep the
ratio of the token.

    python train.py --algo gspo --num-minibatches 4
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from algorithms import common, grpo
from algorithms.common import Micro
from algorithms.options import Aggregation, LoopOptions, Range, Scale

needs = grpo.needs
compute_advantages = grpo.compute_advantages


@dataclass(frozen=True)
class Options(LoopOptions):
    """Options of GSPO."""

    scale_rewards: Scale = "group"
    """As --grpo.scale-rewards."""
    clip_low: Annotated[float, Range(0, 1)] = 3e-4
    """Clip the sequence's ratio at 1 - clip_low; acts where the advantage is negative."""
    clip_high: Annotated[float, Range(0, 1000)] = 4e-4
    """Clip the sequence's ratio at 1 + clip_high; acts where the advantage is positive."""
    aggregation: Aggregation | None = "sequence"
    """As --grpo.aggregation."""


def compute_loss(
    logprobs: Tensor, values: Tensor | None, micro: Micro, options: Options
) -> tuple[Tensor, dict[str, float]]:
    """-Σ token_weights · w · surrogate over the sampled tokens of a micro-batch; see grpo.py."""
    mask, in_loss, advantages = micro.completion_mask, micro.loss_mask, micro.advantages
    logprobs = torch.where(mask, logprobs, 0.0)  # padding has no gradient, and no NaN
    log_ratio = logprobs - micro.old_logprobs
    mean = common.masked_mean(log_ratio, in_loss, dim=1).detach()  # [b, 1]
    # the value of the mean, with the gradient of the token's own log-ratio
    ratio = torch.where(in_loss, mean + log_ratio - log_ratio.detach(), 0.0).exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    per_token = -micro.importance_weights * surrogate
    loss = torch.where(mask, per_token * micro.token_weights, 0.0).sum()
    return loss, common.surrogate_metrics(
        ratio, logprobs, micro, options.clip_low, options.clip_high
    )
