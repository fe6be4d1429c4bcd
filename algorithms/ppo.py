"""PPO: a learned value before each token as the baseline, and a clipped policy ratio.

    δ_t = r_t + γ_t V_{t+1} - V_t,   A_t = δ_t + γ_t λ A_{t+1}   GAE, arXiv:1506.02438
    L   = -Σ_t min(ρ_t Â_t, clip(ρ_t, 1-ε, 1+ε) Â_t) + c Σ_t (V_t - (A_t + V_old,t))² / 2
                                                                 PPO, arXiv:1707.06347

ρ_t = π(x_t) / π_old(x_t) is the policy ratio, V_t the value before token t (the expected return
from there on), Â the advantages normalized over the batch, c is --ppo.value-coef. A_t compares the
rewards that followed token t with V_t: λ = 1 counts all of them, λ = 0 the next reward and V_{t+1}
in place of the rest. γ_t is γ if t is the last token of a turn and 1 otherwise (--credit episode:
always 1; train.py has discounted the rewards); λ applies per token. The code also multiplies both
terms by the token's weight, which turns the sum into a mean, and the policy term by its importance
weight. The squared error is that of V or, if larger, that of V limited to V_old ± v, with v =
--ppo.value-clip (by default 0.5; 0: no limit). In the first gradient step of an update ρ is 1 and
nothing is clipped; by default there is only that one.

The value head is a linear layer on the hidden states of the policy's last layer, so one forward
pass computes values and log-probs; the value loss trains the policy's layers too. After the last
token V is 0, also where --max-turns, the context length or a limit of the environment cut the
episode: these limits are part of the task. So a cut episode is trained on like any other, and no
algorithm estimates what would have followed.

--ppo.value-lambda gives the value targets a λ of their own. With 1 they are the returns, which are
not biased by a value head that is initialized to 0 and still untrained. Together with
--ppo.value-warmup, which trains the value head before the policy, this is VC-PPO
(arXiv:2503.01491).

    python train.py --algo ppo --num-epochs 4 --num-minibatches 4 --ppo.target-kl 0.02
"""

import torch
from torch import Tensor

from algorithms import common
from algorithms.options import PpoOptions as Options


def compute_advantages(
    rewards: Tensor,
    completion_mask: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    group_ids: Tensor,
    values: Tensor | None,
    gamma: float,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """GAE of every sampled token, normalized over the batch; and the targets of the values.

    `rewards` and `values` [B, N] float32, `completion_mask` [B, N]; `loss_mask` [B, N]: the tokens
    that are in the loss, over which the advantages are normalized; `turn_ids` [B, N]: the turn of
    each token; `gamma` is the discount factor per turn. PPO does not use `group_ids`. Returns
    advantages (0 where the loss mask is False) and value targets (value + GAE, not normalized, with
    λ = `value_lambda` if that is given), [B, N] float32.
    """
    assert values is not None, "PPO needs the values of the sampled tokens"
    inputs = (rewards, completion_mask, turn_ids, values, gamma)
    advantages = gae(*inputs, options.gae_lambda)
    for_targets = advantages
    if options.value_lambda is not None:  # decoupled GAE
        for_targets = gae(*inputs, options.value_lambda)
    value_targets = torch.where(completion_mask, for_targets + values, 0.0)
    return common.normalize(advantages, loss_mask), value_targets


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
    """Σ token_weights · (-w · surrogate + value_coef · value error / 2) over the sampled tokens.

    All tensors [b, T-1] float32 (the mask bool); gradients flow through `logprobs` and `values`
    only. w are the `importance_weights` between sampler and trainer; `token_weights` are 0 where a
    token is not in the loss. `old_values` are the values before the first step of the update.
    Returns the loss, and metrics as plain sums over tokens.
    """
    assert values is not None and old_values is not None and value_targets is not None
    logprobs = torch.where(completion_mask, logprobs, 0.0)  # no gradient off the mask
    values = torch.where(completion_mask, values, 0.0)
    # in the first step of an update the ratio is 1 (up to rounding) and its gradient is ∇ log π
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
    # the smaller of the two: beyond the clip, a further change in the intended direction gains
    # nothing, and a change in the wrong direction still costs
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    squared_error = (values - value_targets) ** 2
    if options.value_clip:  # moving a value further than the clip no longer lowers its error
        change = (values - old_values).clamp(-options.value_clip, options.value_clip)
        squared_error = squared_error.maximum((old_values + change - value_targets) ** 2)
    per_token = -importance_weights * surrogate + options.value_coef * squared_error / 2
    loss = torch.where(completion_mask, per_token * token_weights, 0.0).sum()
    metrics = common.surrogate_metrics(
        ratio, logprobs, old_logprobs, advantages, completion_mask,
        options.clip, options.clip,
    )  # fmt: skip
    metrics["value/loss"] = torch.where(completion_mask, squared_error, 0.0).sum().item() / 2
    return loss, metrics


def gae(
    rewards: Tensor,
    completion_mask: Tensor,
    turn_ids: Tensor,
    values: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalized advantage estimates [B, N], 0 off the mask.

    Positions off the mask are skipped, so a rollout may have gaps or padding anywhere.

    >>> r, v = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
    >>> gae(r, v > 0, torch.zeros(1, 2), v, gamma=1.0, gae_lambda=1.0)
    tensor([[0.5000, 0.5000]])
    """
    advantages = torch.zeros_like(rewards)
    next_advantage = torch.zeros_like(rewards[:, 0])
    next_turn = torch.full_like(turn_ids[:, 0], -1)
    next_value = torch.zeros_like(rewards[:, 0])  # the episode ends after its last token
    for t in reversed(range(rewards.shape[1])):
        mask = completion_mask[:, t]
        discount = torch.where(turn_ids[:, t] == next_turn, torch.ones_like(next_value), gamma)
        delta = rewards[:, t] + discount * next_value - values[:, t]
        advantage = delta + discount * gae_lambda * next_advantage
        advantages[:, t] = torch.where(mask, advantage, 0.0)
        next_advantage = torch.where(mask, advantage, next_advantage)
        next_value = torch.where(mask, values[:, t], next_value)
        next_turn = torch.where(mask, turn_ids[:, t], next_turn)
    return advantages
