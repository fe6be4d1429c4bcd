"""The afternoon, 9 of 9. GRPO: compare the rollouts of a group, and clip the policy ratio.

    A_i = (R_i - mean of the group) / (std of the group)       DeepSeekMath, arXiv:2402.03300
    L   = -Σ_i,t min(ρ_t A_i, clip(ρ_t, 1-ε_low, 1+ε_high) A_i),    ρ_t = π(x_t) / π_old(x_t)

R_i is the return of rollout i and π_old the trainer's policy before the first gradient step of the
update. The std is that of a sample (n-1). In the first step of an update, by default the only one,
every ratio ρ_t is 1, up to rounding, and nothing is clipped. But the ratio still has a gradient:
that of a term of L is -A_i ∇ log π(x_t), the policy gradient with the sign for descent.

Each term also has its token weight, by default 1 / number of tokens, and its importance weight,
π_old / π_sampler capped at --tis-cap (off_policy.py).

`--grpo.loss-type` names a set of numbers (LOSS_TYPES below). The default is dapo: every token
counts the same, whatever the length of its rollout.

    grpo       ε_high = ε_low; the mean over the tokens of a rollout, then over rollouts
    dr_grpo    no division by the std, none by the length               arXiv:2503.20783
    dapo       the mean over all tokens; ε_high above ε_low             arXiv:2503.14476
    lite_ppo   as dapo, with ε_high = ε_low and the std of the batch    arXiv:2508.08221
    max_rl     as dapo, but divides by the mean of the group            arXiv:2602.02710 (README.md)

Differences from the papers: there is no KL term unless --kl-coef is set. Then its estimator is k2
(DeepSeekMath: k3), and each of its terms is multiplied by ρ (kl.py). `token` weights are taken over
all groups of a step, as verl and TRL do; DAPO's equation has them within each group, which is
`prompt`. DAPO's dynamic sampling and overlong filtering are --filter-groups and
--mask-truncated-completions.

    python train.py --algo grpo --grpo.loss-type dr_grpo --num-minibatches 4
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from algorithms.options import Aggregation, LoopOptions, Range, Scale
from algorithms.tokens import Tokens, group_mean, group_std, minus, surrogate_metrics, turns_of

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

    presets = LOSS_TYPES

    loss_type: Literal["grpo", "dr_grpo", "dapo", "lite_ppo", "max_rl"] = "dapo"
    """Variant of GRPO: sets every option below that you do not give."""
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

    needs = frozenset({"groups"})  # to compare


def compute_advantages(tokens: Tokens, options: Any) -> Tensor:  # Any: also Options of variants/
    """[S]: the return minus the mean of its group, scaled; equal for all tokens of a turn.

    With --credit episode, the default, a rollout counts as one turn. Turn k is compared with turn k
    of all rollouts of the group, also of those that --mask-truncated-completions leaves out.

    >>> tokens = Tokens(rewards=torch.tensor([0.0, 1.0, 0.0]), rollout=torch.tensor([0, 0, 1]),
    ...                 turn=torch.zeros(3).long(), group=torch.zeros(3).long(),
    ...                 discounts=torch.ones(3))
    >>> compute_advantages(tokens, Options("dr_grpo").with_preset())
    tensor([ 0.5000,  0.5000, -0.5000])
    """
    turns = turns_of(tokens)
    mean = group_mean(turns.returns, turns.peers)  # [K], K turns
    advantages = minus(turns.returns, mean)
    if options.scale_rewards == "group":
        advantages = advantages / (group_std(turns.returns, turns.peers) + EPS)
    elif options.scale_rewards == "batch":
        advantages = advantages / (group_std(turns.returns, turns.index) + EPS)
    elif options.scale_rewards == "mean":
        advantages = advantages / mean.abs().clamp(min=EPS)  # abs: no sign is flipped
    return advantages[turns.of_token].type_as(tokens.rewards)


def compute_loss(tokens: Tokens, options: Any) -> tuple[Tensor, dict[str, float]]:
    """-Σ token_weights · w · min(ρ A, clip(ρ) A) over the n sampled tokens of a micro-batch.

    w are the importance weights between sampler and trainer (off_policy.py). Gradients flow through
    `tokens.logprobs`. Returns the loss, and metrics as plain sums over the tokens in it.
    """
    advantages, low, high = tokens.advantages, options.clip_low, options.clip_high
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()  # [n]
    # the smaller of the two: beyond the clip, a further change in the intended direction gains
    # nothing, and a change in the wrong direction still costs
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    loss = -(tokens.token_weights * tokens.importance_weights * surrogate).sum()
    return loss, surrogate_metrics(tokens, ratio, low, high)
