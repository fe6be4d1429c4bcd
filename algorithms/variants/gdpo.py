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

from algorithms import grpo
from algorithms.grpo import EPS
from algorithms.options import Aggregation, LoopOptions, Range
from algorithms.tokens import ROUNDING, Tokens, group_sum, minus

compute_loss = grpo.compute_loss


@dataclass(frozen=True)
class Options(LoopOptions):
    """Options of GDPO, with the meaning that they have for GRPO."""

    needs = frozenset({"groups", "reward_parts", "episode_credit"})
    clip_low: Annotated[float, Range(0, 1)] = 0.2
    """As --grpo.clip-low."""
    clip_high: Annotated[float, Range(0, 1000)] = 0.28
    """As --grpo.clip-high."""
    aggregation: Aggregation = "token"
    """As --grpo.aggregation."""
    dual_clip: Annotated[float, Range(1.01, 1000, or_zero=True)] = 0.0
    """As --grpo.dual-clip."""


def compute_advantages(tokens: Tokens, options: Options) -> Tensor:
    """[S]: the weighted sum of the normalized rewards, over its std; equal for all tokens.

    1 + 0 is worth more than 0 + 1 here, since the first reward is rarer in the group:

    >>> rewards = torch.tensor([[1, 0], [0, 1], [0, 0], [0, 1]], dtype=torch.float64)
    >>> tokens = Tokens(rollout=torch.arange(4), group=torch.zeros(4).long(),
    ...                 reward_parts=rewards, reward_weights=torch.ones_like(rewards))
    >>> compute_advantages(tokens, Options())
    tensor([ 0.6894,  0.3981, -1.4856,  0.3981])
    """
    lengths = tokens.rollout.unique_consecutive(return_counts=True)[1]
    last = lengths.cumsum(0) - 1  # each rollout's last token, to stand for it
    rewards, weights = tokens.reward_parts[last], tokens.reward_weights[last]  # [rollouts, parts]
    group = tokens.group[last]
    exists = ~rewards.isnan()
    size = group_sum(exists.double(), group)
    centered = minus(rewards, group_sum(rewards.nan_to_num(), group) / size.clamp(min=1))
    centered = centered.nan_to_num()  # NaN: a reward that the rollout lacks
    variance = group_sum(centered**2, group) / (size - 1).clamp(min=1)
    terms = weights * centered / (variance.sqrt() + EPS)
    total = terms.sum(1)
    # rewards that cancel leave a difference by rounding; see `minus`
    total[total.abs() <= ROUNDING * terms.abs().sum(1)] = 0.0
    batch_variance = (total**2).sum() / (exists.any(1).sum() - 1).clamp(min=1)
    advantages = (total / (batch_variance.sqrt() + EPS)).to(torch.get_default_dtype())
    return advantages.repeat_interleave(lengths)
