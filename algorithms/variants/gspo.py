"""GSPO: GRPO with one policy ratio for all tokens of a sequence.

    ρ_t = exp(mean over the sequence of log π(x_t) - log π_old(x_t))          arXiv:2507.18071
    L   = -Σ_i,t min(ρ_t A_i, clip(ρ_t, 1-ε_low, 1+ε_high) A_i)

The value of ρ is the geometric mean of the tokens' ratios. So the clip keeps or drops a sequence as
a whole, and ε is small, as a mean of ratios stays near 1. Each term has the gradient of its own
token's ratio (GSPO-token in the paper). A sequence is a rollout, or a part of one if its
context did not just grow.

    python train.py --algo gspo --num-minibatches 4
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from algorithms import grpo
from algorithms.options import Aggregation, LoopOptions, Range, Scale
from algorithms.tokens import Tokens, group_sum, surrogate_metrics

compute_advantages = grpo.compute_advantages


@dataclass(frozen=True)
class Options(LoopOptions):
    """Options of GSPO."""

    needs = grpo.Options.needs
    scale_rewards: Scale = "group"
    """As --grpo.scale-rewards."""
    clip_low: Annotated[float, Range(0, 1)] = 3e-4
    """Clip the sequence's ratio at 1 - clip_low; acts where the advantage is negative."""
    clip_high: Annotated[float, Range(0, 1000)] = 4e-4
    """Clip the sequence's ratio at 1 + clip_high; acts where the advantage is positive."""
    aggregation: Aggregation = "sequence"
    """As --grpo.aggregation."""


def compute_loss(tokens: Tokens, options: Options) -> tuple[Tensor, dict[str, float]]:
    """-Σ token_weights · w · surrogate over the sampled tokens of a micro-batch; see grpo.py."""
    advantages, low, high = tokens.advantages, options.clip_low, options.clip_high
    ratio = sequence_ratio(tokens)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    loss = -(tokens.token_weights * tokens.importance_weights * surrogate).sum()
    return loss, surrogate_metrics(tokens, ratio, low, high)


def sequence_ratio(tokens: Tokens) -> Tensor:
    """[n]: the value of the geometric mean over the sequence's tokens in the loss, with the
    gradient of the token's own ratio."""
    log_ratio = tokens.logprobs - tokens.old_logprobs
    in_loss = tokens.in_loss.float()
    count = group_sum(in_loss, tokens.sequence).clamp(min=1)
    mean = group_sum(in_loss * log_ratio.detach(), tokens.sequence) / count
    return (mean + log_ratio - log_ratio.detach()).exp()
