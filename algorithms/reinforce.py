"""The afternoon, 5 of 6. REINFORCE: make rollouts with a high return likelier, others less likely.

    ∇J = E[ Σ_t ρ_t (R - b) ∇ log π(x_t) ]        Williams 1992, doi:10.1007/BF00992696

J is the expected return, which gradient steps increase; R is the return of the rollout that token
x_t is part of. ρ_t = π(x_t) / π_old(x_t) is the policy ratio, with π_old the policy before the
first gradient step of the update. In that first step ρ_t is 1, as in Williams's paper. In later
steps the gradient is an approximation: ρ_t corrects for token t, which π_old sampled, but not for
the other tokens of the rollout. The ratio is not clipped.

The baseline b makes the gradient less noisy. It is the mean return of the batch, that of the group,
for each rollout the mean of the other rollouts of its group (leave-one-out: RLOO,
arXiv:2402.14740), or 0. If the mean over n rollouts includes the rollout's own return, the expected
gradient is multiplied by 1 - 1/n; the leave-one-out mean leaves it as it is. (The default token
weights depend on the sampled lengths, so with them the factor is approximate.) `normalize` shifts
and scales the advantages R - b as REINFORCE++ does (arXiv:2501.03262), over all tokens in the loss.

    python train.py --algo reinforce --reinforce.baseline leave_one_out
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from algorithms import common
from algorithms.common import Batch, Micro
from algorithms.options import LoopOptions


@dataclass(frozen=True)
class Options(LoopOptions):
    """Options of REINFORCE."""

    baseline: Literal["batch", "group", "leave_one_out", "none"] = "batch"
    """Subtracted from the return: the mean of the batch, of the group, of the other rollouts of the
    group (RLOO), or nothing."""
    normalize: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over all tokens in the loss (as in
    REINFORCE++)."""


def needs(options: Options) -> set[str]:
    """What this needs of the settings, in the words of core/algorithm.py."""
    return {"groups"} if options.baseline in ("group", "leave_one_out") else set()


def compute_advantages(batch: Batch, options: Options) -> Tensor:
    """[B, N]: the return minus the baseline; equal for all sampled tokens of a turn.

    The baseline of turn k is made of turn k of the rollouts. With --credit episode, the default, a
    rollout counts as one turn.

    >>> mask, turn_ids = torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.int64)
    >>> batch = Batch(rewards=torch.tensor([[0.0, 1.0], [0.0, 0.0]]), completion_mask=mask,
    ...               turn_ids=turn_ids, group_ids=torch.zeros(2))
    >>> compute_advantages(batch, Options())
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]])
    """
    group_ids = batch.group_ids
    returns, exists = common.turn_returns(batch)  # [B, K]
    group_size = common.group_sum(exists.double(), group_ids)
    group_total = common.group_sum(torch.where(exists, returns, 0.0), group_ids)
    if options.baseline == "batch":
        baseline = common.masked_mean(returns, exists, dim=0).expand_as(returns)
    elif options.baseline == "group":
        baseline = group_total / group_size.clamp(min=1)
    elif options.baseline == "leave_one_out":  # a single rollout has no others: advantage 0
        others = (group_total - returns) / (group_size - 1).clamp(min=1)
        baseline = torch.where(group_size > 1, others, returns)
    else:
        baseline = torch.zeros_like(returns)
    advantages = common.minus(returns, baseline).gather(1, batch.turn_ids)
    if options.normalize:
        advantages = common.normalize(advantages, batch.loss_mask)
    return torch.where(batch.completion_mask, advantages, 0.0).type_as(batch.rewards)


def compute_loss(
    logprobs: Tensor, values: Tensor | None, micro: Micro, options: Options
) -> tuple[Tensor, dict[str, float]]:
    """-Σ token_weights · w · sg[ρ] · A · log π over the sampled tokens of a micro-batch.

    Its gradient is the policy gradient, with the sign for descent; its value says nothing about how
    good the policy is. `logprobs` [b, T-1] are those of the policy now; only they have gradients.
    A are the advantages, w the importance weights between sampler and trainer (off_policy.py);
    sg[ρ] is ρ without gradient. `values` are PPO's. Returns the loss, and metrics as plain sums
    over the tokens in it.
    """
    mask, advantages = micro.completion_mask, micro.advantages
    logprobs = torch.where(mask, logprobs, 0.0)  # padding has no gradient, and no NaN
    ratio = (logprobs.detach() - micro.old_logprobs).exp()
    per_token = -micro.importance_weights * ratio * advantages * logprobs
    loss = torch.where(mask, per_token * micro.token_weights, 0.0).sum()
    # no clip: bounds that no ratio reaches
    return loss, common.surrogate_metrics(ratio, logprobs, micro, 1.0, float("inf"))
