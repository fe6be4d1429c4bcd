"""DPPO: GRPO that limits how far a token's probability moves, not its ratio.

    L = -Σ_i,t m_t ρ_t A_i                                                    arXiv:2602.04879
    m_t = 0    where |π(x_t) - π_sampler(x_t)| > δ and the step would move it further: π above
               π_sampler and A_i positive, or below it and A_i negative

A ratio says little about how far the policy has moved: from 0.001 to 0.002 it is 2, from 0.6 to 0.9
it is 1.5, though the second changes what is sampled and the first hardly does. So the clip of
GRPO holds rare tokens back and lets likely ones go. m_t depends on the difference, which is the
total variation between the two policies if all other tokens are taken as one (`binary` in the
paper), and is measured from the policy that sampled, older weights and other kernels included.

Differences from the paper: the ratio to the sampler is w ρ, whose w is capped (off_policy.py), and
of its two divergences only the total variation is here. The value of δ is ours.

    python train.py --algo dppo --num-minibatches 4
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms import common, grpo
from algorithms.common import Micro
from algorithms.options import Aggregation, Fraction, LoopOptions, Scale

needs = grpo.needs
compute_advantages = grpo.compute_advantages


@dataclass(frozen=True)
class Options(LoopOptions):
    """Options of DPPO."""

    scale_rewards: Scale = "group"
    """As --grpo.scale-rewards."""
    limit: Fraction = 0.2
    """δ, the largest change of a token's probability that a gradient may continue."""
    aggregation: Aggregation | None = "token"
    """As --grpo.aggregation."""


def compute_loss(
    logprobs: Tensor, values: Tensor | None, micro: Micro, options: Options
) -> tuple[Tensor, dict[str, float]]:
    """-Σ token_weights · w · surrogate over the sampled tokens of a micro-batch; see grpo.py."""
    mask, advantages = micro.completion_mask, micro.advantages
    logprobs = torch.where(mask, logprobs, 0.0)  # padding has no gradient, and no NaN
    ratio = (logprobs - micro.old_logprobs).exp()
    moved = logprobs.detach().exp() - micro.sampler_logprobs.exp()
    dropped = (moved.abs() > options.limit) & (moved * advantages > 0)
    surrogate = torch.where(dropped, 0.0, ratio * advantages)
    per_token = -micro.importance_weights * surrogate
    loss = torch.where(mask, per_token * micro.token_weights, 0.0).sum()
    metrics = common.surrogate_metrics(ratio, logprobs, micro, 1.0, float("inf"))  # no clip
    low, high = (micro.loss_mask & dropped & (advantages * sign > 0) for sign in (-1, 1))
    return loss, metrics | {
        "clip/low_fraction": low.sum().item(),
        "clip/high_fraction": high.sum().item(),
    }
