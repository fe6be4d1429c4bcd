"""GRPO: compare the rollouts of a group with each other, and clip the policy ratio.

    A_i = (R_i - mean of the group) / (std of the group)       DeepSeekMath, arXiv:2402.03300
    L   = -Σ_i,t min(ρ_t A_i, clip(ρ_t, 1-ε_low, 1+ε_high) A_i),    ρ_t = π(x_t) / π_old(x_t)

R_i is the return of rollout i, ρ_t the policy ratio of its token t; π_old is the trainer's policy
before the first gradient step of the update. The std is that of a sample (n-1), plus 1e-4. The
reward does not depend on the weights, so it has no gradient. The min, called the surrogate, has
one: at ρ = 1 the policy gradient A ∇ log π. Minimizing L maximizes the surrogate. The code also
multiplies each token's term by its token weight, which turns the sum into a mean, and by its
importance weight, π_old / π_sampler capped at --tis-cap. In the first gradient step of an update
ρ is 1 and nothing is clipped; by default there is only that one.

Later variants change a few options; `--grpo.loss-type` names a set of values (LOSS_TYPES below).
The default is dapo: every token counts the same, whatever the length of its rollout.

    grpo       ε_high = ε_low; the mean over the tokens of a rollout, then over rollouts
    dr_grpo    no division by the std, none by the length               arXiv:2503.20783
    dapo       the mean over all tokens; ε_high above ε_low             arXiv:2503.14476
    lite_ppo   as dapo, with ε_high = ε_low and the std of the batch    arXiv:2508.08221
    gspo       one value of ρ for all tokens of a sequence, the geometric mean of their ratios; each
               term has the gradient of its own token's ratio (GSPO-token)
                                                                        arXiv:2507.18071
    cispo      -Σ_t clip(ρ_t) A log π, without gradient through clip(ρ_t): the clip bounds the
               size of a token's gradient and never removes it
                                                                        MiniMax-M1, arXiv:2506.13585
    scalerl    cispo with the std of the batch and the mean over the tokens of a group, then over
               groups; README.md lists the rest of the recipe          arXiv:2510.13786

Differences from the papers: there is no KL term unless --kl-coef is set, and then each of its terms
is multiplied by ρ (common.weighted_kl). DAPO's dynamic sampling, overlong penalty and overlong
filtering are flags of all algorithms: --filter-groups, --overlong-buffer and
--mask-truncated-completions.

    python train.py --algo grpo --grpo.loss-type cispo --num-minibatches 4
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from algorithms import common
from algorithms.options import GrpoOptions as Options

EPS = 1e-4  # added to a standard deviation: a group with equal returns has advantages 0, not 0/0
LOSS_TYPES: dict[str, dict[str, Any]] = {
    "grpo": {"scale_rewards": "group", "clip_low": 0.2, "clip_high": 0.2,
             "ratio_level": "token", "surrogate": "min", "aggregation": "sequence"},
    "dr_grpo": {"scale_rewards": "none", "clip_low": 0.2, "clip_high": 0.2,
                "ratio_level": "token", "surrogate": "min", "aggregation": "constant"},
    "dapo": {"scale_rewards": "group", "clip_low": 0.2, "clip_high": 0.28,
             "ratio_level": "token", "surrogate": "min", "aggregation": "token"},
    "lite_ppo": {"scale_rewards": "batch", "clip_low": 0.2, "clip_high": 0.2,
                 "ratio_level": "token", "surrogate": "min", "aggregation": "token"},
    "gspo": {"scale_rewards": "group", "clip_low": 3e-4, "clip_high": 4e-4,
             "ratio_level": "sequence", "surrogate": "min", "aggregation": "sequence"},
    # clip_low 1: a ratio is never below 0, so there is no lower clip
    "cispo": {"scale_rewards": "group", "clip_low": 1.0, "clip_high": 4.0,
              "ratio_level": "token", "surrogate": "cispo", "aggregation": "token"},
    "scalerl": {"scale_rewards": "batch", "clip_low": 1.0, "clip_high": 4.0,
                "ratio_level": "token", "surrogate": "cispo", "aggregation": "prompt"},
}  # fmt: skip


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
    """The return minus the mean of its group, scaled; the same for all sampled tokens of a turn.

    `rewards` [B, N] float32, `completion_mask` [B, N], `turn_ids` [B, N]: the turn of each token
    (all 0 if the episode is credited as a whole), `group_ids` [B]; `gamma` is the discount factor
    per turn. Tokens of turn k are compared with turn k of all rollouts of the group, also those
    whose tokens are not in the loss, so `loss_mask` [B, N] is not used; only PPO uses `values`.
    Returns advantages [B, N] float32, 0 off `completion_mask`, and no value targets.

    >>> r, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> turn_ids, group_ids = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2)
    >>> options = with_loss_type(Options("dr_grpo"))
    >>> compute_advantages(r, mask, mask, turn_ids, group_ids, None, 1.0, options)[0]
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]])
    """
    returns, exists = common.turn_returns(rewards, completion_mask, turn_ids, gamma)  # [B, K]
    group_size = common.group_sum(exists.double(), group_ids)
    group_total = common.group_sum(torch.where(exists, returns, 0.0), group_ids)
    baseline = group_total / group_size.clamp(min=1)
    advantages = torch.where(exists, returns - baseline, 0.0)
    if options.scale_rewards == "group":
        variance = common.group_sum(advantages**2, group_ids) / (group_size - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + EPS)
    elif options.scale_rewards == "batch":
        mean = common.masked_mean(returns, exists, dim=0)
        squares = torch.where(exists, (returns - mean) ** 2, 0.0).sum(0)
        variance = squares / (exists.sum(0) - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + EPS)
    return torch.where(completion_mask, advantages.gather(1, turn_ids).float(), 0.0), None


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
    """-Σ token_weights · w · surrogate over the sampled tokens of a micro-batch.

    All tensors [b, T-1] float32 (the mask bool); gradients flow through `logprobs` only. w are the
    `importance_weights` between sampler and trainer; `token_weights` are 0 where a token is not in
    the loss. `options` come from `with_loss_type`; the last three arguments are PPO's. Returns the
    loss, and metrics as plain sums over tokens.
    """
    logprobs = torch.where(completion_mask, logprobs, 0.0)  # no gradient off the mask
    log_ratio = logprobs - old_logprobs
    if options.ratio_level == "sequence":  # value: the mean; gradient: of the token's own log-ratio
        in_loss = completion_mask & (token_weights > 0)
        mean = common.masked_mean(log_ratio, in_loss, dim=1).detach()  # [b, 1]
        log_ratio = torch.where(in_loss, mean + log_ratio - log_ratio.detach(), 0.0)
    # in the first step of an update the ratio is 1 (up to rounding) and its gradient is ∇ log π
    ratio = log_ratio.exp()
    assert options.clip_low is not None and options.clip_high is not None, "see with_loss_type"
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.surrogate == "cispo":
        surrogate = clipped.detach() * advantages * logprobs
    else:
        # the smaller of the two: beyond the clip, a further change in the intended direction gains
        # nothing, and a change in the wrong direction still costs
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        if options.dual_clip:  # bounds the loss where the ratio is large and A is negative
            bounded = surrogate.maximum(options.dual_clip * advantages)
            surrogate = torch.where(advantages < 0, bounded, surrogate)
    per_token = -importance_weights * surrogate
    loss = torch.where(completion_mask, per_token * token_weights, 0.0).sum()
    metrics = common.surrogate_metrics(
        ratio, logprobs, old_logprobs, advantages, completion_mask,
        options.clip_low, options.clip_high, either_sign=options.surrogate == "cispo",
    )  # fmt: skip
    return loss, metrics


def with_loss_type(options: Options) -> Options:
    """`options` with every option that is None set to the value of its loss type.

    >>> options = with_loss_type(Options("dapo", clip_low=0.1))
    >>> options.clip_low, options.clip_high
    (0.1, 0.28)
    """
    preset = LOSS_TYPES[options.loss_type]
    return replace(options, **{k: v for k, v in preset.items() if getattr(options, k) is None})
