"""DPPO: GRPO that limits how far a token's probability moves, not its ratio.

    L = -Σ_i,t m_t ρ_t A_i                                                    arXiv:2602.04879
    m_t = 0    where |π(x_t) - π_sampler(x_t)| > δ and the step would move it further: π above
               π_sampler and A_i positive, or below it and A_i negative

A ratio says little about how far the policy has moved: from 0.001 to 0.002 it is 2, from 0.6 to 0.9
it is 1.5, though the second changes what is sampled and the first hardly does. So the clip of
GRPO holds rare tokens back and lets likely ones go. m_t depends on the difference, which is the
total variation between the two policies if all other tokens are taken as one (`binary` in the
paper), and is measured from the policy that sampled.

`--dppo.drop any --dppo.limit 0.3` is IPO, prime-rl's default: m_t is 0 beyond δ also where the step
would take the change back. There the cap is 10,000 (`--tis-cap`), and advantages are not divided
(`--dppo.scale-rewards none`).

Differences from the paper: the ratio to the sampler is w ρ, whose w is capped (off_policy.py), and
of its two divergences only the total variation is here. The value of δ is ours.

    python train.py --algo dppo --num-minibatches 4
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from algorithms import grpo
from algorithms.options import Aggregation, Fraction, LoopOptions, Scale
from algorithms.tokens import Tokens, surrogate_metrics

compute_advantages = grpo.compute_advantages


@dataclass(frozen=True)
class Options(LoopOptions):
    """Options of DPPO."""

    needs = grpo.Options.needs
    scale_rewards: Scale = "group"
    """As --grpo.scale-rewards."""
    limit: Fraction = 0.2
    """δ, the largest change of a token's probability that drops nothing."""
    drop: Literal["further", "any"] = "further"
    """Which tokens beyond the limit drop: those that the step would move further, or any (IPO)."""
    aggregation: Aggregation = "token"
    """As --grpo.aggregation."""


def compute_loss(tokens: Tokens, options: Options) -> tuple[Tensor, dict[str, float]]:
    """-Σ token_weights · w · surrogate over the sampled tokens of a micro-batch; see grpo.py."""
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    moved = tokens.logprobs.detach().exp() - tokens.sampler_logprobs.exp()
    dropped = moved.abs() > options.limit
    if options.drop == "further":
        dropped &= moved * tokens.advantages > 0
    surrogate = ~dropped * ratio * tokens.advantages
    loss = -(tokens.token_weights * tokens.importance_weights * surrogate).sum()
    metrics = surrogate_metrics(tokens, ratio, 1.0, float("inf"))
    metrics["clip/low_fraction"] = (tokens.in_loss & dropped & (moved < 0)).sum().item()
    metrics["clip/high_fraction"] = (tokens.in_loss & dropped & (moved > 0)).sum().item()
    return loss, metrics
