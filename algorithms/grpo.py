"""GRPO: compare the rollouts of one task with each other, and don't step too far.

    A_i = (R_i - mean of the group) / (std of the group)      DeepSeekMath, arXiv:2402.03300
    L   = -Σ_t min(ρ_t A, clip(ρ_t, 1-ε_low, 1+ε_high) A),    ρ_t = π(x_t) / π_old(x_t)

Differences from the paper: the loss is averaged over all tokens of the batch and the clip has two
sides, as in DAPO (arXiv:2503.14476); there is no KL term.

    python train.py --algo grpo --grpo.clip-high 0.28
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from algorithms.common import surrogate_metrics

EPS = 1e-4  # keeps a group without spread at advantage 0


@dataclass(frozen=True)
class Options:
    """Options of GRPO."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Which standard deviation advantages are divided by; none: Dr. GRPO, arXiv:2503.20783."""
    clip_low: float = 0.2
    """Ratio below 1 - this: no further push down."""
    clip_high: float = 0.2
    """Ratio above 1 + this: no further push up."""


def compute_advantages(
    rewards: Tensor,
    completion_mask: Tensor,
    group_ids: Tensor,
    values: Tensor | None,
    truncated: Tensor,
    options: Options,
) -> Tensor:
    """Return minus its group's mean, scaled; the same for every sampled token of a rollout.

    `rewards` [B, N] float32 and `completion_mask` [B, N] over sampled tokens, `group_ids` [B];
    `values` and `truncated` are PPO's. Returns [B, N] float32, 0 off the mask.

    >>> r, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> compute_advantages(r, mask, torch.zeros(2), None, torch.zeros(2), Options("none"))
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]])
    """
    returns = rewards.sum(1)  # [B]
    same = (group_ids[:, None] == group_ids[None]).float()  # [B, B]
    size = same.sum(1)
    advantages = returns - (same @ returns) / size
    if options.scale_rewards == "group":
        variance = (same @ advantages**2) / (size - 1).clamp(min=1)  # of a sample: n - 1
        advantages = advantages / (variance.sqrt() + EPS)
    elif options.scale_rewards == "batch":
        advantages = advantages / (returns.std() + EPS)
    return torch.where(completion_mask, advantages[:, None], 0.0)


def compute_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    weights: Tensor,
    options: Options,
    denominator: float,
) -> tuple[Tensor, dict[str, float]]:
    """The clipped surrogate, negated, summed over sampled tokens, over `denominator`.

    All tensors [b, T-1] float32 (the mask bool); gradients flow through `logprobs` alone. `weights`
    are importance weights of the sampler.
    """
    logprobs = torch.where(completion_mask, logprobs, 0.0)  # no gradient off the mask
    # exp(0) = 1 in value on the first pass, but its gradient is that of log π
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    # the smaller of the two: clipping may take a gain away, never a loss
    per_token = -weights * torch.minimum(ratio * advantages, clipped * advantages)
    loss = torch.where(completion_mask, per_token, 0.0).sum() / denominator
    metrics = surrogate_metrics(
        ratio, logprobs, old_logprobs, advantages, completion_mask,
        options.clip_low, options.clip_high, denominator,
    )  # fmt: skip
    return loss, metrics
