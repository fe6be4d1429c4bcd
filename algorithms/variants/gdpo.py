"""GDPO: GRPO for several rewards, each of which is normalized by itself before they are added.

    a_ik = (r_ik - mean of the group) / (std of the group)      reward k of rollout i
    s_i  = Σ_k w_k a_ik
    A_i  = (s_i - mean of the batch) / (std of the batch)                         arXiv:2601.05242

GRPO adds the rewards first. So 1 + 0 is 0 + 1 to it, however rare one of the two is in the group,
and the reward with the largest spread decides. Here each one has the same spread, in every group,
and w_k says how much it counts. The mean of the batch is 0, as that of every group is, so the code
leaves it out. The stds are those of a sample (n-1), plus 1e-4.

An environment reports r_k as info["reward_<name>"], and w_k as info["weight_<name>"] (by default
1), in the last step that has any info. Its `reward` is not read here. A reward that a rollout
lacks is compared among the others of its group and counts 0 for it; a rollout without any has
advantage 0.

The loss is GRPO's, with its default numbers: the two algorithms differ in their advantages only.

    python train.py --algo gdpo --env "rewarded:data=rows.jsonl,reward=my.py:right my.py:brief"
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from algorithms import common, grpo
from algorithms.common import Batch
from algorithms.grpo import EPS
from algorithms.options import Aggregation, LoopOptions, Range

NEEDS = {"groups", "reward_parts", "episode_credit"}
compute_loss = grpo.compute_loss


@dataclass(frozen=True)
class Options(LoopOptions):
    """Options of GDPO, with the meaning that they have for GRPO."""

    clip_low: Annotated[float, Range(0, 1)] = 0.2
    """As --grpo.clip-low."""
    clip_high: Annotated[float, Range(0, 1000)] = 0.28
    """As --grpo.clip-high."""
    aggregation: Aggregation | None = "token"
    """As --grpo.aggregation."""
    dual_clip: Annotated[float, Range(1.01, 1000, or_zero=True)] = 0.0
    """As --grpo.dual-clip."""


def compute_advantages(batch: Batch, options: Options) -> Tensor:
    """[B, N]: the weighted sum of the normalized rewards, over its std; equal for all tokens.

    1 + 0 is worth more than 0 + 1 here, since the first reward is rarer in the group:

    >>> rewards = torch.tensor([[1, 0], [0, 1], [0, 0], [0, 1]], dtype=torch.float64)
    >>> batch = Batch(completion_mask=torch.ones(4, 1) > 0, group_ids=torch.zeros(4),
    ...               reward_parts=rewards, reward_weights=torch.ones_like(rewards))
    >>> compute_advantages(batch, Options()).T
    tensor([[ 0.6894,  0.3981, -1.4856,  0.3981]])
    """
    rewards, group_ids = batch.reward_parts, batch.group_ids  # [B, M], NaN where there is none
    exists = ~rewards.isnan()
    group_size = common.group_sum(exists.double(), group_ids)
    group_total = common.group_sum(torch.where(exists, rewards, 0.0), group_ids)
    centered = common.minus(rewards, group_total / group_size.clamp(min=1))
    centered = torch.where(exists, centered, 0.0)
    variance = common.group_sum(centered**2, group_ids) / (group_size - 1).clamp(min=1)
    terms = batch.reward_weights * centered / (variance.sqrt() + EPS)  # [B, M]
    total = terms.sum(1, keepdim=True)  # [B, 1]
    # rewards that cancel leave a difference by rounding; see `common.minus`
    total[total.abs() <= common.ROUNDING * terms.abs().sum(1, keepdim=True)] = 0.0
    batch_variance = (total**2).sum() / (exists.any(1).sum() - 1).clamp(min=1)
    advantages = (total / (batch_variance.sqrt() + EPS)).to(torch.get_default_dtype())
    return torch.where(batch.completion_mask, advantages, 0.0)
