"""REINFORCE: raise the log-probs of rollouts with a higher return than a baseline.

    ∇J = E[ Σ_t ρ_t (R - b) ∇ log π(x_t) ]        Williams 1992, doi:10.1007/BF00992696

ρ_t = π(x_t) / π_old(x_t), the policy ratio, is 1 in the first step of an update, as in Williams's
paper. In later steps the gradient is an approximation: ρ_t corrects for token t, which an older
policy sampled, but not for the other tokens of the rollout. It is not clipped.

The baseline b is the mean return of the batch, that of the group, for each rollout the mean of the
other rollouts of its group (leave-one-out: RLOO, arXiv:2402.14740), or 0. A mean over n rollouts
that contains the rollout's own return multiplies the expected gradient by 1 - 1/n; the
leave-one-out mean leaves it as it is (both for token weights that do not depend on the sampled
lengths). `normalize` scales the advantages as REINFORCE++ does
(arXiv:2501.03262): over all tokens that are in the loss.

    python train.py --algo reinforce --reinforce.baseline leave_one_out
"""

import torch
from torch import Tensor

from algorithms import common
from algorithms.options import ReinforceOptions as Options


def compute_advantages(
    rewards: Tensor,
    completion_mask: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    group_ids: Tensor,
    values: Tensor | None,
    gamma: float,
    options: Options,
) -> tuple[Tensor, None]:
    """The return minus the baseline; the same for every sampled token of a turn.

    `rewards` [B, N] float32, `completion_mask` [B, N], `turn_ids` [B, N]: the turn of each token
    (all 0 if the episode is credited as a whole), `group_ids` [B]; `gamma` is the discount factor
    per turn. The baseline of turn k is made of turn k of the rollouts. `loss_mask` [B, N]: the
    tokens that are in the loss, over which `normalize` works. Only PPO uses `values`. Returns
    advantages [B, N] float32, 0 off the mask (`normalize`: off the loss mask), no value targets.

    >>> r, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> turn_ids, group_ids = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2)
    >>> compute_advantages(r, mask, mask, turn_ids, group_ids, None, 1.0, Options())[0]
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]])
    """
    returns, exists = common.turn_returns(rewards, completion_mask, turn_ids, gamma)  # [B, K]
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
    advantages = (returns - baseline).gather(1, turn_ids).float()
    if options.normalize:
        return common.normalize(advantages, loss_mask), None
    return torch.where(completion_mask, advantages, 0.0), None


def compute_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    importance_weights: Tensor,
    token_weights: Tensor,
    options: Options,
    values: Tensor | None = None,
    old_values: Tensor | None = None,
    value_targets: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """-Σ token_weights · w · sg[ρ] · A · log π over the sampled tokens of a micro-batch.

    All tensors [b, T-1] float32 (the mask bool); gradients flow through `logprobs` only. w are the
    `importance_weights` between sampler and trainer; `token_weights` are 0 where a token is not in
    the loss; sg[ρ]: no gradient through ρ. The last three arguments are PPO's. Returns the loss,
    and metrics as plain sums over tokens.
    """
    logprobs = torch.where(completion_mask, logprobs, 0.0)  # no gradient off the mask
    ratio = (logprobs.detach() - old_logprobs).exp()
    # its gradient is -w ρ A ∇ log π, the policy gradient; its value has no meaning
    per_token = -importance_weights * ratio * advantages * logprobs
    loss = torch.where(completion_mask, per_token * token_weights, 0.0).sum()
    metrics = common.surrogate_metrics(
        ratio, logprobs, old_logprobs, advantages, completion_mask,
        clip_low=1.0, clip_high=float("inf"),  # REINFORCE does not clip
    )  # fmt: skip
    return loss, metrics
