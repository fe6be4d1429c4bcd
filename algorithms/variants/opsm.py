"""OPSM: GRPO that leaves out what is too far from the policy: off-policy sequence masking.

    w_t = 0    where A_t < 0 and the mean over the sequence of log π_sampler - log π exceeds `limit`
                                                                DeepSeek-V3.2, arXiv:2512.02556
    w_t = 0    where the geometric mean of π_old / π_sampler over the sequence is outside
               [reject_low, reject_high]

Both means are over all tokens of the sequence, also those that a flag keeps out of the loss. w_t is
the importance weight of the token (off_policy.py). A token of weight 0 has no gradient, also
none of --kl-coef and --entropy-coef; the loss is still divided by all tokens. The metric
weights/rejected is the fraction of tokens left out.

    python train.py --algo opsm --opsm.reject-low 0.95 --opsm.reject-high 1.1 --num-minibatches 4
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from algorithms import grpo, off_policy
from algorithms.options import Coefficient, Fraction, Range
from algorithms.tokens import Tokens, group_mean

compute_advantages = grpo.compute_advantages


@dataclass(frozen=True)
class Options(grpo.Options):
    """Options of OPSM, beside those of GRPO."""

    limit: Coefficient = 0.05
    """Leave out tokens with a negative advantage in sequences that the policy has moved away from
    by more than this, in nats per token; 0: keep them."""
    reject_low: Fraction = 0.0
    """Leave out sequences whose geometric-mean weight is below this; 0: keep all."""
    reject_high: Annotated[float, Range(1, 10**6, or_zero=True)] = 0.0
    """Leave out sequences whose geometric-mean weight is above this; 0: keep all."""


def compute_loss(tokens: Tokens, options: Options) -> tuple[Tensor, dict[str, float]]:
    """GRPO's loss with importance weights of 0 where a token is left out.

    Sets `tokens.importance_weights`, which the loop's KL and entropy terms are multiplied by too.
    """
    kept = kept_tokens(tokens, options)
    tokens.importance_weights = tokens.importance_weights * kept
    loss, metrics = grpo.compute_loss(tokens, options)
    rejected = (tokens.in_loss & ~kept).sum().item()
    return loss, metrics | {"weights/rejected": rejected}


def kept_tokens(tokens: Tokens, options: Options) -> Tensor:
    """Which tokens are not left out, [n] bool."""
    mean_ratio = off_policy.sampler_ratio(tokens, "geometric")
    kept = mean_ratio >= options.reject_low
    if options.reject_high:
        kept &= mean_ratio <= options.reject_high
    if options.limit:
        distance = (tokens.sampler_logprobs - tokens.logprobs).detach()
        moved = group_mean(distance, tokens.sequence)
        kept &= (tokens.advantages >= 0) | (moved <= options.limit)
    return kept
