"""The afternoon, 8 of 9. REINFORCE: make rollouts with a high return likelier, others less likely.

    ∇J = E[ Σ_t ρ_t (R - b) ∇ log π(x_t) ]        Williams 1992, doi:10.1007/BF00992696

J is the expected return, which gradient steps increase; R is the return of the rollout that token
x_t is part of. ρ_t = π(x_t) / π_old(x_t) is the policy ratio, with π_old the policy before the
first gradient step of the update. In that first step ρ_t is 1, as in Williams's paper. In later
steps the gradient is an approximation: ρ_t corrects for token t, which π_old sampled, but not for
the other tokens of the rollout. The ratio is not clipped.

The baseline b makes the gradient less noisy. It is the mean return of the batch, that of the group,
for each rollout the mean of the other rollouts of its group (leave-one-out: RLOO,
arXiv:2402.14740), or 0. A mean that includes the rollout's own return multiplies the expected
gradient by 1 - 1 / (number of rollouts in it); the leave-one-out mean leaves it as it is. The
default token weights depend on the sampled lengths; with them both hold approximately. `normalize`
shifts and scales the advantages R - b over all tokens in the loss (REINFORCE++, arXiv:2501.03262).

    python train.py --algo reinforce --reinforce.baseline leave_one_out
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from algorithms.options import LoopOptions
from algorithms.tokens import (
    Tokens,
    group_mean,
    group_sum,
    minus,
    normalize,
    surrogate_metrics,
    turns_of,
)


@dataclass(frozen=True)
class Options(LoopOptions):
    """Options of REINFORCE."""

    baseline: Literal["batch", "group", "leave_one_out", "none"] = "batch"
    """Subtracted from the return: the mean of the batch, of the group, of the group's other
    rollouts (RLOO), or nothing."""
    normalize: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over all tokens in the loss (as in
    REINFORCE++)."""

    @property
    def needs(self) -> Set[str]:
        """Groups, if the baseline is a mean over a group."""
        return {"groups"} if self.baseline in ("group", "leave_one_out") else set()


def compute_advantages(tokens: Tokens, options: Options) -> Tensor:
    """[S]: the return minus the baseline; equal for all sampled tokens of a turn.

    The baseline of turn k is made of turn k of the rollouts. With --credit episode, the default, a
    rollout counts as one turn.

    >>> tokens = Tokens(rewards=torch.tensor([0.0, 1.0, 0.0]), rollout=torch.tensor([0, 0, 1]),
    ...                 turn=torch.zeros(3).long(), group=torch.zeros(3).long(),
    ...                 discounts=torch.ones(3))
    >>> compute_advantages(tokens, Options())
    tensor([ 0.5000,  0.5000, -0.5000])
    """
    turns = turns_of(tokens)
    returns = turns.returns  # [K], K turns
    if options.baseline == "batch":
        baseline = group_mean(returns, turns.index)
    elif options.baseline == "group":
        baseline = group_mean(returns, turns.peers)
    elif options.baseline == "leave_one_out":  # a single rollout has no others: advantage 0
        size = group_sum(torch.ones_like(returns), turns.peers)
        sum_of_others = group_sum(returns, turns.peers) - returns
        baseline = torch.where(size > 1, sum_of_others / (size - 1).clamp(min=1), returns)
    else:
        baseline = torch.zeros_like(returns)
    advantages = minus(returns, baseline)[turns.of_token]
    if options.normalize:
        advantages = normalize(advantages, tokens.in_loss)
    return advantages.type_as(tokens.rewards)


def compute_loss(tokens: Tokens, options: Options) -> tuple[Tensor, dict[str, float]]:
    """-Σ token_weights · w · sg[ρ] · A · log π over the n sampled tokens of a micro-batch.

    Its gradient is the policy gradient, with the sign for descent; its value says nothing about how
    good the policy is. w are the importance weights (off_policy.py); sg[ρ] is ρ without gradient.
    Gradients flow through `tokens.logprobs`. Returns the loss, and metrics as sums over its tokens.
    """
    ratio = (tokens.logprobs.detach() - tokens.old_logprobs).exp()  # [n]
    factor = tokens.importance_weights * ratio * tokens.advantages
    loss = -(tokens.token_weights * factor * tokens.logprobs).sum()
    # nothing is clipped, so no token counts as clipped
    return loss, surrogate_metrics(tokens, ratio, 1.0, float("inf"))
