"""The afternoon, 6 of 6. GRPO: compare the rollouts of a group, and clip the policy ratio.

    A_i = (R_i - mean of the group) / (std of the group)       DeepSeekMath, arXiv:2402.03300
    L   = -Σ_i,t min(ρ_t A_i, clip(ρ_t, 1-ε_low, 1+ε_high) A_i),    ρ_t = π(x_t) / π_old(x_t)

R_i is the return of rollout i and π_old the trainer's policy before the first gradient step of the
update. The code divides by the std of a sample (n-1) plus 1e-4. In the first step of an update, by
default the only one, every ratio ρ_t is 1, up to rounding, and nothing is clipped. But the ratio
still has a gradient: that of a term of L is -A_i ∇ log π(x_t), the policy gradient with the sign
for descent.

The code also multiplies each token's term by its token weight, by default 1 / number of tokens, and
by its importance weight, π_old / π_sampler capped at --tis-cap (off_policy.py).

Variants change a few numbers; `--grpo.loss-type` names a set of them (LOSS_TYPES below). The
default is dapo: every token counts the same, whatever the length of its rollout.

    grpo       ε_high = ε_low; the mean over the tokens of a rollout, then over rollouts
    dr_grpo    no division by the std, none by the length               arXiv:2503.20783
    dapo       the mean over all tokens; ε_high above ε_low             arXiv:2503.14476
    lite_ppo   as dapo, with ε_high = ε_low and the std of the batch    arXiv:2508.08221
    max_rl     as dapo, but divides by the mean of the group            arXiv:2602.02710

max_rl is for returns of 0 and 1. With many samples, and p the probability of 1, the expected
gradient is ∇p without a division, ∇p / √(p(1-p)) = ∇(2 arcsin √p) with the std, and
∇p / p = ∇ log p with max_rl: the rarer a success, the more it counts. G samples shrink the last:

    E[Σ_i A_i ∇ log π(rollout i)] / G = (1 - (1-p)^(G-1)) ∇ log p

variants/ has other formulas: gspo, cispo, dppo, gdpo, kl_cov, opsm, sdpo and echo.

Differences from the papers: there is no KL term unless --kl-coef is set; then its estimator is k2
(--kl-estimator; DeepSeekMath has k3), and each of its terms is multiplied by ρ
(kl.py). `token` weights are taken over all groups of a step, as verl and TRL do;
DAPO's equation has them within each group, which is `prompt`. Its dynamic sampling, overlong
penalty and overlong filtering are flags of the loop: --filter-groups, --overlong-buffer (not with
gdpo) and --mask-truncated-completions.

    python train.py --algo grpo --grpo.loss-type dr_grpo --num-minibatches 4
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from algorithms import common
from algorithms.common import Batch, Micro
from algorithms.options import Aggregation, LoopOptions, Range, Scale

EPS = 1e-4  # keeps a divisor above 0: a group with equal returns has advantages 0, not 0/0
LOSS_TYPES: dict[str, dict[str, Any]] = {
    "grpo": {"scale_rewards": "group", "clip_low": 0.2, "clip_high": 0.2,
             "aggregation": "sequence"},
    "dr_grpo": {"scale_rewards": "none", "clip_low": 0.2, "clip_high": 0.2,
                "aggregation": "constant"},
    "dapo": {"scale_rewards": "group", "clip_low": 0.2, "clip_high": 0.28,
             "aggregation": "token"},
    "lite_ppo": {"scale_rewards": "batch", "clip_low": 0.2, "clip_high": 0.2,
                 "aggregation": "token"},
    "max_rl": {"scale_rewards": "mean", "clip_low": 0.2, "clip_high": 0.28,
               "aggregation": "token"},
}  # fmt: skip


@dataclass(frozen=True)
class Options(LoopOptions):
    """Options of GRPO; None: the value of the loss type."""

    loss_type: Literal["grpo", "dr_grpo", "dapo", "lite_ppo", "max_rl"] = "dapo"
    """Variant of GRPO: sets every option below that you do not give, except dual_clip."""
    scale_rewards: Scale | None = None
    """Divide advantages by the standard deviation of the group's or the batch's returns, or by the
    absolute mean of the group's, for returns that are not negative."""
    clip_low: Annotated[float | None, Range(0, 1)] = None
    """Clip the ratio at 1 - clip_low; acts where the advantage is negative."""
    clip_high: Annotated[float | None, Range(0, 1000)] = None
    """Clip the ratio at 1 + clip_high; acts where the advantage is positive."""
    aggregation: Aggregation | None = None
    """token: the mean over all tokens; sequence: the mean of each rollout, then over rollouts;
    prompt: the mean of each group, then over groups; constant: the sum divided by rollouts ·
    max_tokens."""
    dual_clip: Annotated[float, Range(1.01, 1000, or_zero=True)] = 0.0
    """Ratio, above 1, at which the loss of tokens with negative advantage stops growing; 0: off."""


def needs(options: Any) -> set[str]:  # Any: variants/ have Options of their own
    """What this needs of the settings (core/algorithm.py); if it divides, no --kl-in reward."""
    return {"groups"} if options.scale_rewards == "none" else {"groups", "no_kl_in_reward"}


def resolve(options: Any) -> Any:
    """`options` with every option that is None set to the value of its loss type.

    >>> options = resolve(Options("dapo", clip_low=0.1))
    >>> options.clip_low, options.clip_high
    (0.1, 0.28)
    """
    preset = LOSS_TYPES[options.loss_type]
    return replace(options, **{k: v for k, v in preset.items() if getattr(options, k) is None})


def compute_advantages(batch: Batch, options: Any) -> Tensor:
    """[B, N]: the return minus the mean of its group, scaled; equal for all tokens of a turn.

    Turn k is compared with turn k of all rollouts of the group, also of those that a flag keeps
    out of the loss. With --credit episode, the default, a rollout counts as one turn.

    >>> mask, turn_ids = torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.int64)
    >>> batch = Batch(rewards=torch.tensor([[0.0, 1.0], [0.0, 0.0]]), completion_mask=mask,
    ...               turn_ids=turn_ids, group_ids=torch.zeros(2))
    >>> compute_advantages(batch, resolve(Options("dr_grpo")))
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]])
    """
    mask, group_ids = batch.completion_mask, batch.group_ids
    returns, exists = common.turn_returns(batch)  # [B, K]
    group_size = common.group_sum(exists.double(), group_ids)
    group_total = common.group_sum(torch.where(exists, returns, 0.0), group_ids)
    baseline = group_total / group_size.clamp(min=1)
    advantages = torch.where(exists, common.minus(returns, baseline), 0.0)
    if options.scale_rewards == "group":
        variance = common.group_sum(advantages**2, group_ids) / (group_size - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + EPS)
    elif options.scale_rewards == "batch":
        mean = common.masked_mean(returns, exists, dim=0)
        squares = torch.where(exists, (returns - mean) ** 2, 0.0).sum(0)
        variance = squares / (exists.sum(0) - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + EPS)
    elif options.scale_rewards == "mean":
        advantages = advantages / baseline.abs().clamp(min=EPS)  # abs: no sign is flipped
    advantages = advantages.gather(1, batch.turn_ids).type_as(batch.rewards)
    return torch.where(mask, advantages, 0.0)


def compute_loss(
    logprobs: Tensor, values: Tensor | None, micro: Micro, options: Options
) -> tuple[Tensor, dict[str, float]]:
    """-Σ token_weights · w · min(ρ A, clip(ρ) A) over the sampled tokens of a micro-batch.

    `logprobs` [b, T-1] are those of the policy now; only they have gradients. w are the
    importance weights between sampler and trainer (off_policy.py). `values` are PPO's. Returns the
    loss, and metrics as plain sums over the tokens in it.
    """
    assert options.clip_low is not None and options.clip_high is not None, "see resolve"
    mask, advantages = micro.completion_mask, micro.advantages
    logprobs = torch.where(mask, logprobs, 0.0)  # padding has no gradient, and no NaN
    ratio = (logprobs - micro.old_logprobs).exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    # the smaller of the two: beyond the clip, a further change in the intended direction gains
    # nothing, and a change in the wrong direction still costs
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    if options.dual_clip:  # bounds the loss where the ratio is large and A is negative
        bounded = surrogate.maximum(options.dual_clip * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    per_token = -micro.importance_weights * surrogate
    loss = torch.where(mask, per_token * micro.token_weights, 0.0).sum()
    return loss, common.surrogate_metrics(
        ratio, logprobs, micro, options.clip_low, options.clip_high
    )
