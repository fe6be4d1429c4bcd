"""GRPO: compare the rollouts of one task with each other, and don't step too far.

    A_i = (R_i - mean of the group) / (std of the group)      DeepSeekMath, arXiv:2402.03300
    L   = -Σ_t min(ρ_t A, clip(ρ_t, 1-ε_low, 1+ε_high) A),    ρ_t = π(x_t) / π_old(x_t)

What was proposed since are other values of a few fields; a variant is a name for a set of them.
The default is dapo: each token counts the same, whatever the length of its completion.

    grpo       as above; the mean over each completion, then over completions
    dr_grpo    no division by the std, none by the length         arXiv:2503.20783
    dapo       the mean over all tokens; more room upwards        arXiv:2503.14476
    gspo       ρ: the geometric mean over the sequence            arXiv:2507.18071
    cispo      -Σ_t sg(clip(ρ_t)) A log π: no token's gradient is taken away, its weight is capped
                                                                  MiniMax-M1, arXiv:2506.13585

Differences from the papers: no KL term unless --kl-coef asks for one; DAPO's dynamic sampling,
overlong penalty and overlong filtering are the flags of all algorithms --filter-groups,
--overlong-buffer and --mask-episode_truncated-completions.

    python train.py --algo grpo --grpo.loss-type dapo --grpo.clip-high 0.3
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from algorithms import common
from algorithms.options import GrpoOptions as Options

EPS = 1e-4  # keeps a group without spread at advantage 0
LOSS_TYPES: dict[str, dict[str, Any]] = {
    "grpo": {"scale_rewards": "group", "clip_low": 0.2, "clip_high": 0.2, "ratio_level": "token",
             "surrogate": "min", "aggregation": "sequence"},
    "dr_grpo": {"scale_rewards": "none", "clip_low": 0.2, "clip_high": 0.2, "ratio_level": "token",
                "surrogate": "min", "aggregation": "constant"},
    "dapo": {"scale_rewards": "group", "clip_low": 0.2, "clip_high": 0.28, "ratio_level": "token",
             "surrogate": "min", "aggregation": "token"},
    "gspo": {"scale_rewards": "group", "clip_low": 3e-4, "clip_high": 4e-4,
             "ratio_level": "sequence", "surrogate": "min", "aggregation": "sequence"},
    "cispo": {"scale_rewards": "group", "clip_low": 1.0, "clip_high": 4.0, "ratio_level": "token",
              "surrogate": "cispo", "aggregation": "token"},
}  # fmt: skip


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
    """Return minus its group's mean, scaled; the same for every sampled token of a turn.

    `rewards` [B, N] float32, `completion_mask` and `turn_ids` [B, N] over sampled tokens, all of
    one turn if the episode is credited as a whole; `group_ids` [B]; `gamma` discounts a turn;
    `values` and `episode_truncated` are PPO's. Returns [B, N] float32, 0 off the mask.

    >>> r, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> turn_ids, group_ids = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2)
    >>> options = with_loss_type(Options("dr_grpo"))
    >>> compute_advantages(r, mask, turn_ids, group_ids, None, group_ids, 1.0, options)
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]])
    """
    returns, played = common.turn_returns(rewards, completion_mask, turn_ids, gamma)  # [B, K]
    same = common.same_group(group_ids)  # [B, B]
    size = same @ played.float()  # of the group, at this turn
    total = same @ torch.where(played, returns, 0.0)
    advantages = torch.where(played, returns - total / size.clamp(min=1), 0.0)
    if options.scale_rewards == "group":
        variance = (same @ advantages**2) / (size - 1).clamp(min=1)  # of a sample: n - 1
        advantages = advantages / (variance.sqrt() + EPS)
    elif options.scale_rewards == "batch":
        mean = common.masked_mean(returns, played, dim=0)
        squares = torch.where(played, (returns - mean) ** 2, 0.0).sum(0)
        variance = squares / (played.sum(0) - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + EPS)
    return torch.where(completion_mask, advantages.gather(1, turn_ids), 0.0)


def compute_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    weights: Tensor,
    scale: Tensor,
    options: Options,
) -> tuple[Tensor, dict[str, float]]:
    """The clipped surrogate, negated, · scale, summed over sampled tokens.

    All tensors [b, T-1] float32 (the mask bool); gradients flow through `logprobs` alone. `weights`
    are importance weights of the sampler, `scale` from `token_scale`; `options` from
    `with_loss_type`. Metrics are sums over tokens.
    """
    logprobs = torch.where(completion_mask, logprobs, 0.0)  # no gradient off the mask
    log_ratio = logprobs - old_logprobs
    if options.ratio_level == "sequence":  # every token carries the whole sequence's ratio
        mean = common.masked_mean(log_ratio, completion_mask, dim=1)  # [b, 1]
        log_ratio = torch.where(completion_mask, mean, 0.0)
    # exp(0) = 1 in value on the first pass, but its gradient is that of log π
    ratio = log_ratio.exp()
    assert options.clip_low is not None and options.clip_high is not None, "see with_loss_type"
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.surrogate == "cispo":
        gain = clipped.detach() * advantages * logprobs
    else:  # the smaller of the two: clipping may take a gain away, never a loss
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        if options.dual_clip:  # where ρ runs off upwards, a loss may not run off with it
            gain = torch.where(advantages < 0, gain.maximum(options.dual_clip * advantages), gain)
    per_token = -weights * gain
    loss = torch.where(completion_mask, per_token * scale, 0.0).sum()
    metrics = common.surrogate_metrics(
        ratio, logprobs, old_logprobs, advantages, completion_mask,
        options.clip_low, options.clip_high,
    )  # fmt: skip
    return loss, metrics


def with_loss_type(options: Options) -> Options:
    """The options with every field that isn't given as the variant has it.

    >>> options = with_loss_type(Options("dapo", clip_low=0.1))
    >>> options.clip_low, options.clip_high
    (0.1, 0.28)
    """
    preset = LOSS_TYPES[options.loss_type]
    return replace(options, **{k: v for k, v in preset.items() if getattr(options, k) is None})
