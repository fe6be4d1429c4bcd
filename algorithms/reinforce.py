"""REINFORCE: raise the log-prob of what was paid better than a baseline.

    ∇J = E[ Σ_t (R - b) ∇ log π(x_t) ]        Williams 1992, doi:10.1007/BF00992696

The baseline is the batch's mean return, the group's, or for each rollout the mean of the *others*
of its group (leave-one-out: RLOO, arXiv:2402.14740), which leaves the gradient unbiased.
`normalize` scales the advantages of the batch as REINFORCE++ does (arXiv:2501.03262): over all
sampled tokens, not within a group.

    python train.py --algo reinforce --reinforce.baseline leave_one_out
"""

import torch
from torch import Tensor

from algorithms import common
from algorithms.options import ReinforceOptions as Options


def compute_advantages(
    rewards: Tensor,
    completion_mask: Tensor,
    turn_ids: Tensor,
    group_ids: Tensor,
    values: Tensor | None,
    episode_truncated: Tensor,
    gamma: float,
    options: Options,
) -> Tensor:
    """Return minus baseline, the same for every sampled token of a turn; like turns are compared.

    `rewards` [B, N] float32, `completion_mask` and `turn_ids` [B, N] over sampled tokens, all of
    one turn if the episode is credited as a whole; `group_ids` [B]; `gamma` discounts a turn;
    `values` and `episode_truncated` are PPO's. Returns [B, N] float32, 0 off the mask.

    >>> r, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> turn_ids, group_ids = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2)
    >>> compute_advantages(r, mask, turn_ids, group_ids, None, group_ids, 1.0, Options())
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]])
    """
    returns, played = common.turn_returns(rewards, completion_mask, turn_ids, gamma)  # [B, K]
    same = common.same_group(group_ids)  # [B, B]
    size = same @ played.float()  # of the group, at this turn
    total = same @ torch.where(played, returns, 0.0)
    if options.baseline == "batch":
        baseline = common.masked_mean(returns, played, dim=0).expand_as(returns)
    elif options.baseline == "group":
        baseline = total / size.clamp(min=1)
    elif options.baseline == "leave_one_out":  # who is alone has nothing to be compared with
        baseline = torch.where(size > 1, (total - returns) / (size - 1).clamp(min=1), returns)
    else:
        baseline = torch.zeros_like(returns)
    advantages = torch.where(completion_mask, (returns - baseline).gather(1, turn_ids), 0.0)
    return common.normalize(advantages, completion_mask) if options.normalize else advantages


def compute_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    weights: Tensor,
    scale: Tensor,
    options: Options,
) -> tuple[Tensor, dict[str, float]]:
    """-Σ w A log π · scale over sampled tokens.

    All tensors [b, T-1] float32 (the mask bool); gradients flow through `logprobs` alone. `weights`
    are importance weights of the sampler, `scale` from `token_scale`; `old_logprobs` serve the
    clipped algorithms, here only a metric. Metrics are sums over tokens.
    """
    logprobs = torch.where(completion_mask, logprobs, 0.0)  # no gradient off the mask
    # d log π = dπ / π: the gradient of this product is the policy gradient
    per_token = -weights * advantages * logprobs
    loss = torch.where(completion_mask, per_token * scale, 0.0).sum()
    ratio = (logprobs.detach() - old_logprobs).exp()
    metrics = common.surrogate_metrics(
        ratio, logprobs, old_logprobs, advantages, completion_mask,
        clip_low=1.0, clip_high=float("inf"),  # nothing is clipped
    )  # fmt: skip
    return loss, metrics
