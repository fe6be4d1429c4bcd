"""An evening on PPO. A learned value before each token as the baseline, and a clipped policy ratio.

    δ_t = r_t + γ_t v°_{t+1} - v°_t,   A_t = δ_t + γ_t λ A_{t+1}   GAE, arXiv:1506.02438
    L   = -Σ_t min(ρ_t Â_t, clip(ρ_t, 1-ε, 1+ε) Â_t) + c Σ_t (v_t - (A_t + v°_t))² / 2
                                                                   PPO, arXiv:1707.06347

v_t is the value before token t: an estimate of the rewards that are still to come; v°_t is the one
before the first step of the update. A_t compares the rewards that followed token t with v°_t: λ = 1
counts all of them, λ = 0 the next reward and v°_{t+1} in place of the rest. γ_t is γ if t is the
last token of a turn and 1 otherwise; λ applies per token. Â are the advantages normalized over the
batch, ρ_t = π(x_t) / π_old(x_t) is the policy ratio, c is --ppo.value-coef. In the first gradient
step of an update ρ is 1 and nothing is clipped; by default there is only that one.

The squared error is that of v or, if larger, that of v limited to v° ± --ppo.value-clip. Both terms
have the token's weight, which turns the sum into a mean, and the first its importance weight.

The value head is a linear layer on the hidden states of the policy's last layer, so one forward
pass computes values and log-probs; the value loss trains the policy's layers too. After the last
token of an episode v is 0, also where --max-turns, the context length or a limit of the environment
cut the episode: picoRL does not bootstrap, as these limits are part of the task.

With --ppo.value-lambda 1 the value targets are the rewards still to come, which are not biased by a
value head that is initialized to 0 and still untrained. Together with --ppo.value-warmup, which
trains the value head before the policy, this is VC-PPO (arXiv:2503.01491).

    python train.py --algo ppo --num-epochs 4 --num-minibatches 4 --ppo.target-kl 0.02
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from algorithms.options import Coefficient, Fraction, LoopOptions, Range
from algorithms.tokens import Tokens, normalize, surrogate_metrics


@dataclass(frozen=True)
class Options(LoopOptions):
    """Options of PPO."""

    needs = frozenset({"value_head", "turn_credit"})
    gae_lambda: Fraction = 0.95
    """GAE's λ per token; 1: all later rewards count, 0: only the token's own reward and the next
    value."""
    value_lambda: Annotated[float | None, Range(0, 1)] = None
    """λ of the value targets, if it differs from gae_lambda; VC-PPO takes 1."""
    clip: Fraction = 0.2
    """Clip the ratio at 1 ± clip."""
    target_kl: Coefficient = 0.0
    """End an update when a minibatch's KL(π_old ‖ π) exceeds this, in nats per token, and
    drop that minibatch's gradient; 0: never."""
    value_clip: Annotated[float, Range(0, 10**15)] = 0.5
    """Moving a value further than this in an update no longer lowers its loss; 0: no clip."""
    value_coef: Coefficient = 0.5
    """Coefficient of the value loss; 0: the value head is not trained."""
    value_lr: Annotated[float, Range(0, 100)] = 1e-3
    """Learning rate of the value head; 0: --lr."""
    value_warmup: Annotated[int, Range(0, 10**9)] = 0
    """Number of initial updates that train the value head only; 0: none."""


def compute_advantages(tokens: Tokens, options: Options) -> dict[str, Tensor]:
    """[S] each: the GAE of every sampled token, normalized over those in the loss, and the value
    targets: value + GAE, not normalized, with λ = `value_lambda` if that is given."""
    advantages = gae(tokens, options.gae_lambda)
    value_errors = advantages
    if options.value_lambda is not None:  # decoupled GAE
        value_errors = gae(tokens, options.value_lambda)
    targets = (value_errors + tokens.old_values).type_as(tokens.rewards)
    advantages = normalize(advantages, tokens.in_loss).type_as(tokens.rewards)
    return {"advantages": advantages, "value_targets": targets}


def compute_loss(tokens: Tokens, options: Options) -> tuple[Tensor, dict[str, float]]:
    """Σ token_weights · (-w · surrogate + value_coef · value error / 2) over the sampled tokens.

    w are the importance weights (off_policy.py). Gradients flow through `tokens.logprobs` and
    `tokens.values`. Returns the loss, and metrics as plain sums over the tokens in it.
    """
    advantages, clip = tokens.advantages, options.clip
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()  # [n]
    # the smaller of the two: beyond the clip, a further change in the intended direction gains
    # nothing, and a change in the wrong direction still costs
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    squared_error = (tokens.values - tokens.value_targets) ** 2
    if options.value_clip:  # moving a value further than the clip no longer lowers its error
        change = (tokens.values - tokens.old_values).clamp(-options.value_clip, options.value_clip)
        limited = tokens.old_values + change
        squared_error = squared_error.maximum((limited - tokens.value_targets) ** 2)
    per_token = -tokens.importance_weights * surrogate + options.value_coef * squared_error / 2
    loss = (tokens.token_weights * per_token).sum()
    metrics = surrogate_metrics(tokens, ratio, clip, clip)
    metrics["value/loss"] = squared_error[tokens.in_loss].sum().item() / 2
    return loss, metrics


def gae(tokens: Tokens, gae_lambda: float) -> Tensor:
    """Generalized advantage estimates [S] float64 from rewards and values.

    >>> tokens = Tokens(rewards=torch.tensor([0.0, 1.0]), old_values=torch.tensor([0.5, 0.5]),
    ...                 rollout=torch.zeros(2), discounts=torch.ones(2))
    >>> gae(tokens, gae_lambda=1.0)
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    vectors = tokens.rollout, tokens.rewards, tokens.old_values, tokens.discounts
    columns = [vector.tolist() for vector in vectors]  # Python floats have 64 bits
    rows = [*zip(*columns, strict=True)]
    advantages = []
    advantage, next_value, next_rollout = 0.0, 0.0, None
    for rollout, reward, value, discount in reversed(rows):
        if rollout != next_rollout:  # the episode ends after its last token
            advantage = next_value = 0.0
        delta = reward + discount * next_value - value
        advantage = delta + discount * gae_lambda * advantage
        advantages.append(advantage)
        next_rollout, next_value = rollout, value
    return torch.tensor(advantages[::-1], dtype=torch.float64)
