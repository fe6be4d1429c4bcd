"""REINFORCE: raise the log-prob of what was paid better than a baseline.

    ∇J = E[ Σ_t (R - b) ∇ log π(x_t) ]        Williams 1992, doi:10.1007/BF00992696

The baseline is the batch's mean return, or for each rollout the mean of the *others* of its group
(leave-one-out: RLOO, arXiv:2402.14740), which leaves the gradient unbiased.

    python train.py --algo reinforce
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """Options of REINFORCE."""

    baseline: Literal["batch", "leave_one_out"] = "batch"
    """What a return is compared with: the mean of the batch, or of the others of its group."""


def compute_advantages(
    rewards: Tensor,
    completion_mask: Tensor,
    group_ids: Tensor,
    values: Tensor | None,
    truncated: Tensor,
    options: Options,
) -> Tensor:
    """Return minus baseline, the same for every sampled token of a rollout.

    `rewards` [B, N] float32 and `completion_mask` [B, N] over sampled tokens, `group_ids` [B];
    `values` and `truncated` are PPO's. Returns [B, N] float32, 0 off the mask.

    >>> r, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> compute_advantages(r, mask, torch.zeros(2), None, torch.zeros(2), Options())
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]])
    """
    returns = rewards.sum(1)  # [B]
    if options.baseline == "leave_one_out":
        same = (group_ids[:, None] == group_ids[None]).float()  # [B, B]
        others = same.sum(1) - 1
        baseline = (same @ returns - returns) / others.clamp(min=1)
        advantages = torch.where(others > 0, returns - baseline, 0.0)
    else:
        advantages = returns - returns.mean()
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
    """-Σ w A log π / denominator, over sampled tokens.

    All tensors [b, T-1] float32 (the mask bool); gradients flow through `logprobs` alone. `weights`
    are importance weights of the sampler; `old_logprobs` are the clipped algorithms'.
    """
    logprobs = torch.where(completion_mask, logprobs, 0.0)  # no gradient off the mask
    # d log π = dπ / π: the gradient of this product is the policy gradient
    per_token = -weights * advantages * logprobs
    loss = torch.where(completion_mask, per_token, 0.0).sum() / denominator
    return loss, {}
