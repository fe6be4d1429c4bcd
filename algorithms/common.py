"""The afternoon, 4 of 6. What the algorithms share: a batch, returns, token weights.

Axes: B rollouts, N sampled tokens of a rollout, K turns; b sequences of a micro-batch, T tokens of
a sequence. The loop's RolloutBatch and MicroBatch (core/batching.py) are a Batch and a Micro, with
what the model needs besides.

Every loss is a sum over tokens, and each token's term is multiplied by its token weight. The
weights are computed once per gradient step, so the gradients of micro-batches add up to the
gradient of the step, however the step was cut.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from algorithms.kl import kl_estimate
from algorithms.options import Aggregation

NOT_YET: Any = None  # a tensor that the loop computes later
ROUNDING = 1e-7  # relative difference below which returns are equal, as rewards are float32


@dataclass(kw_only=True)
class TokenTensors:
    """What is known about each sampled token, for the formulas of an algorithm.

    The tensors are [B, N] in the batch of an update and [b, T-1] in a micro-batch of it; float32
    unless stated otherwise. Off its `completion_mask`, a micro-batch has 0 (False) in these fields.
    """

    completion_mask: Tensor  # bool: True for sampled tokens, False for padding and prompts
    loss_mask: Tensor = NOT_YET  # bool: the sampled tokens that count in the loss; by default all
    turn_ids: Tensor = NOT_YET  # int64: the turn of a token; --credit episode: 0 everywhere
    group_ids: Tensor = NOT_YET  # [B] or [b] int64: rollouts of a group have the same number
    rewards: Tensor = NOT_YET  # a turn's, at its last token; --kl-in reward: less KL at every token
    sampler_logprobs: Tensor = NOT_YET  # log-probs that the sampler reported, in nats
    old_logprobs: Tensor = NOT_YET  # of the trainer, before the first gradient step
    ref_logprobs: Tensor = NOT_YET  # under the reference policy
    divergence: Tensor = NOT_YET  # of the policy from its teacher, with gradient: variants/sdpo.py
    values: Tensor = NOT_YET  # estimates of the value head before the first gradient step
    advantages: Tensor = NOT_YET  # of compute_advantages
    value_targets: Tensor = NOT_YET  # of compute_advantages, if there is a value head
    token_weights: Tensor = NOT_YET  # what a token's term is multiplied by; 0: not in the loss
    own: dict[str, Tensor] = field(default_factory=dict)  # further tensors of compute_advantages

    def __post_init__(self) -> None:
        if self.loss_mask is NOT_YET:
            self.loss_mask = self.completion_mask

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.completion_mask.sum())


@dataclass(kw_only=True)
class Batch(TokenTensors):
    """The sampled tokens of an update, for `compute_advantages`."""

    gamma: float = 1.0  # discount factor per turn
    # [B, M] float64: M rewards of an episode that the environment reports one by one, NaN where it
    # has none
    reward_parts: Tensor = NOT_YET
    reward_weights: Tensor = NOT_YET  # their weights
    metrics: dict[str, float] = field(default_factory=dict)  # what the algorithm adds to the log


@dataclass(kw_only=True)
class Micro(TokenTensors):
    """The sampled tokens of a micro-batch, for `compute_loss`."""

    sampler_ratio: Tensor = NOT_YET  # π_old / π_sampler
    importance_weights: Tensor = NOT_YET  # made of it: capped, or 0 where a token is rejected
    # of the tokens that the environment wrote between completions, for variants/echo.py
    observation_weights: Tensor = NOT_YET  # 1 / their number in the step; 0 for other tokens
    observation_logprobs: Tensor = NOT_YET  # of the policy now, at temperature 1, with gradient


def turn_returns(batch: Batch) -> tuple[Tensor, Tensor]:
    """Discounted return from each turn on, R_k = r_k + γ R_{k+1}, and which turns exist.

    Returns [B, K] float64, so that sums round far below ROUNDING (see `minus`), and [B, K] bool.
    With --credit episode K = 1, and R is the sum of the rewards, which shape_rewards discounted.

    >>> rewards, turn_ids = torch.tensor([[0.0, 1.0, 4.0]]), torch.tensor([[0, 0, 1]])
    >>> mask = turn_ids >= 0
    >>> batch = Batch(rewards=rewards, completion_mask=mask, turn_ids=turn_ids, gamma=0.5)
    >>> turn_returns(batch)[0]
    tensor([[3., 4.]], dtype=torch.float64)
    """
    mask, turn_ids = batch.completion_mask, batch.turn_ids
    rewards = torch.where(mask, batch.rewards, 0.0).double()
    zeros = rewards.new_zeros(len(rewards), int(turn_ids.max()) + 1)
    returns = zeros.scatter_add(1, turn_ids, rewards)
    exists = zeros.scatter_add(1, turn_ids, mask.double()) > 0
    for k in reversed(range(returns.shape[1] - 1)):
        returns[:, k] += batch.gamma * returns[:, k + 1]
    return returns, exists


def minus(returns: Tensor, baseline: Tensor) -> Tensor:
    """`returns - baseline`, float64; 0 where they differ by rounding only.

    The mean of equal numbers can be off in the last digit, and the rewards 0.1 and 0.2 of two turns
    do not add up to the reward 0.3. Adam, which divides the gradient by its size, would turn such a
    difference into a step of the full learning rate.

    >>> mean = torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64).sum() / 3
    >>> 0.1 - mean.item() == 0, minus(torch.tensor(0.1, dtype=torch.float64), mean).item()
    (False, 0.0)
    """
    difference = returns.double() - baseline.double()
    return torch.where(difference.abs() <= ROUNDING * returns.abs(), 0.0, difference)


def group_sum(values: Tensor, group_ids: Tensor) -> Tensor:
    """Sum of `values` [B, K] over the rollouts of the same group, for each rollout: [B, K].

    >>> group_sum(torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([0, 0, 1])).squeeze(1)
    tensor([3., 3., 5.])
    """
    same = group_ids[:, None] == group_ids[None]  # [B, B]
    return same.to(values.dtype) @ values


def token_weights(
    loss_mask: Tensor,
    aggregation: Aggregation,
    max_tokens: int,
    rows: list[int] | None = None,
    group_ids: Tensor | None = None,
) -> Tensor:
    """Weight of each token's term in the loss of one step; the loss is the weighted sum.

        token       1 / all tokens: every token counts the same     DAPO in verl and TRL (grpo.py)
        sequence    1 / (S · tokens of its rollout)                  GRPO, arXiv:2402.03300
        prompt      1 / (groups · tokens of its group in the step)   ScaleRL, arXiv:2510.13786
        constant    1 / (S · max_tokens)                             Dr. GRPO, arXiv:2503.20783

    S is the number of rollouts in the step, `groups` that of the groups they are from. With
    `sequence`, which here means the whole rollout, each token of a long rollout weighs less, so a
    long wrong answer is pushed down less per token. With `constant` the weight does not depend on
    the rollout's length; `max_tokens` is the limit of one completion, so a rollout of several turns
    can weigh more than 1/S. Rollouts and groups without a token in the mask are counted, too.

    `loss_mask` [B, N] bool; `rows`: the S rollouts of this step (None: all B); `group_ids` [B]
    (None: each rollout is a group). Returns [B, N] of the default dtype, 0 in other rows.

    >>> token_weights(torch.tensor([[True, True], [True, False]]), "sequence", 8)
    tensor([[0.2500, 0.2500],
            [0.5000, 0.0000]])
    """
    mask = (loss_mask if rows is None else loss_mask[rows]).to(torch.get_default_dtype())
    if aggregation == "token":
        weights = mask / mask.sum().clamp(min=1)
    elif aggregation == "sequence":
        weights = mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)
    elif aggregation == "prompt":
        groups = torch.arange(len(loss_mask)) if group_ids is None else group_ids
        groups = groups if rows is None else groups[rows]
        tokens = group_sum(mask.sum(1, keepdim=True), groups)  # [S, 1]
        weights = mask / tokens.clamp(min=1) / len(groups.unique())
    else:
        weights = mask / (len(mask) * max_tokens)
    if rows is None:
        return weights
    return torch.zeros(loss_mask.shape).index_copy_(0, torch.tensor(rows), weights)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is True, of all or along `dim` (kept); 0 for an empty mask.

    >>> masked_mean(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    kept = torch.where(mask, values, 0)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim, keepdim=True) / mask.sum(dim, keepdim=True).clamp(min=1)


def normalize(values: Tensor, mask: Tensor, eps: float = 1e-4) -> Tensor:
    """Shifts and scales to mean 0 and standard deviation 1 over the mask; 0 off the mask."""
    centered = minus(values, masked_mean(values.double(), mask))
    std = masked_mean(centered**2, mask).sqrt()
    return torch.where(mask, centered / (std + eps), 0)


def surrogate_metrics(
    ratio: Tensor,
    logprobs: Tensor,
    micro: Micro,
    clip_low: float,
    clip_high: float,
    either_sign: bool = False,
) -> dict[str, float]:
    """Sums over the tokens in the loss; the loop divides them by the number of these tokens.

    A token counts as clipped if its ratio is above the clip and its advantage positive, or its
    ratio below the clip and its advantage negative: there the clip removes the gradient.
    `either_sign`: whatever the sign of the advantage (CISPO). kl/approx is KL(π_old ‖ π).
    """
    mask, advantages = micro.loss_mask, micro.advantages
    low, high = mask & (ratio < 1 - clip_low), mask & (ratio > 1 + clip_high)
    if not either_sign:
        low, high = low & (advantages < 0), high & (advantages > 0)
    kl = torch.where(mask, kl_estimate(micro.old_logprobs, logprobs), 0)
    return {
        "clip/low_fraction": low.sum().item(),
        "clip/high_fraction": high.sum().item(),
        "kl/approx": kl.sum().item(),
    }
