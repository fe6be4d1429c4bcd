"""CISPO: GRPO whose clip bounds the size of a token's gradient and never removes it.

    L = -Σ_i,t sg[clip(ρ_t, 1-ε_low, 1+ε_high)] A_i log π(x_t)    MiniMax-M1, arXiv:2506.13585

sg: no gradient. GRPO's clip takes a token out of the gradient once its ratio has moved too far,
often the rare tokens that start a new idea. Here such a token keeps the weight of the clip.

`--cispo.loss-type scalerl` divides by the std of the batch, and takes the mean over the tokens of a
group, then over groups (arXiv:2510.13786; README.md has the rest of that recipe).

    python train.py --algo cispo --num-minibatches 4
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import Tensor

from algorithms import grpo
from algorithms.options import Aggregation, LoopOptions, Range, Scale
from algorithms.tokens import Tokens, surrogate_metrics

LOSS_TYPES: dict[str, dict[str, Any]] = {
    "cispo": {"scale_rewards": "group", "aggregation": "token"},
    "scalerl": {"scale_rewards": "batch", "aggregation": "prompt"},
}
compute_advantages = grpo.compute_advantages


@dataclass(frozen=True)
class Options(LoopOptions):
    """Options of CISPO; None: the value that the loss type sets."""

    needs = grpo.Options.needs
    presets = LOSS_TYPES

    loss_type: Literal["cispo", "scalerl"] = "cispo"
    """scalerl: other values of the next two options."""
    scale_rewards: Scale | None = None
    """As --grpo.scale-rewards."""
    aggregation: Aggregation | None = None
    """As --grpo.aggregation."""
    clip_low: Annotated[float, Range(0, 1)] = 1.0
    """Ratios below 1 - clip_low count as that; 1: no lower clip, as a ratio is never below 0."""
    clip_high: Annotated[float, Range(0, 1000)] = 4.0
    """Ratios above 1 + clip_high count as that."""


def compute_loss(tokens: Tokens, options: Options) -> tuple[Tensor, dict[str, float]]:
    """-Σ token_weights · w · surrogate over the sampled tokens of a micro-batch; see grpo.py."""
    low, high = options.clip_low, options.clip_high
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    surrogate = ratio.clamp(1 - low, 1 + high).detach() * tokens.advantages * tokens.logprobs
    loss = -(tokens.token_weights * tokens.importance_weights * surrogate).sum()
    return loss, surrogate_metrics(tokens, ratio, low, high, either_sign=True)
