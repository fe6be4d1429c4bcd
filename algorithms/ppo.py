"""PPO: a learned value of each token as baseline, and don't step too far.

    δ_t = r_t + γ V_t+1 - V_t,   A_t = δ_t + γλ A_t+1        GAE, arXiv:1506.02438
    L   = -Σ_t min(ρ_t A_t, clip(ρ_t, 1-ε, 1+ε) A_t) + c Σ_t (V_t - (A_t + V_t,old))² / 2
                                                             PPO, arXiv:1707.06347

The value head is linear on the policy's trunk: one forward pass makes both. λ counts tokens, γ
counts turns: it is 1 from token to token within one. A rollout that was cut off, not ended, goes on
in the value of its last token instead of ending with nothing.

    python train.py --algo ppo --num-epochs 4 --num-minibatches 4 --ppo.target-kl 0.02
"""

import torch
from torch import Tensor

from algorithms import common
from algorithms.options import PpoOptions as Options


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
    """GAE of every sampled token, normalised over the batch.

    `rewards`, `values` [B, N] float32, `completion_mask` and `turn_ids` [B, N] over sampled tokens;
    `gamma` discounts a turn; `episode_truncated` [B] bool; `group_ids` is GRPO's.
    Returns [B, N] float32, 0 off the mask. No gradient flows.
    """
    assert values is not None, "PPO needs the values of the sampled tokens"
    advantages = gae(
        rewards, completion_mask, turn_ids, values, episode_truncated, gamma, options.gae_lambda
    )
    return common.normalize(advantages, completion_mask)


def compute_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    weights: Tensor,
    scale: Tensor,
    options: Options,
    values: Tensor,
    old_values: Tensor,
    targets: Tensor,
) -> tuple[Tensor, dict[str, float]]:
    """The clipped surrogate, negated, plus the value loss, · scale, summed over sampled tokens.

    All tensors [b, T-1] float32 (the mask bool); gradients flow through `logprobs` and `values`
    alone. `weights` are importance weights of the sampler, `scale` from `token_scale`, `targets`
    from `value_targets`. Metrics are sums over tokens.
    """
    logprobs = torch.where(completion_mask, logprobs, 0.0)  # no gradient off the mask
    values = torch.where(completion_mask, values, 0.0)
    # exp(0) = 1 in value on the first pass, but its gradient is that of log π
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
    # the smaller of the two: clipping may take a gain away, never a loss
    per_token = -weights * torch.minimum(ratio * advantages, clipped * advantages)
    error = (values - targets) ** 2
    if options.value_clip:
        step = (values - old_values).clamp(-options.value_clip, options.value_clip)
        error = torch.maximum(error, (old_values + step - targets) ** 2)
    per_token = per_token + options.value_coef * error / 2
    loss = torch.where(completion_mask, per_token * scale, 0.0).sum()
    metrics = common.surrogate_metrics(
        ratio, logprobs, old_logprobs, advantages, completion_mask,
        options.clip, options.clip,
    )  # fmt: skip
    metrics["value/loss"] = torch.where(completion_mask, error, 0.0).sum().item() / 2
    return loss, metrics


def value_targets(
    rewards: Tensor, completion_mask: Tensor, turn_ids: Tensor, values: Tensor,
    episode_truncated: Tensor,    gamma: float, options: Options,
) -> Tensor:  # fmt: skip
    """What the values should have been: GAE + old value, [B, N] float32, 0 off the mask."""
    advantages = gae(
        rewards, completion_mask, turn_ids, values, episode_truncated, gamma, options.gae_lambda
    )
    return torch.where(completion_mask, advantages + values, 0.0)


def gae(
    rewards: Tensor, completion_mask: Tensor, turn_ids: Tensor, values: Tensor,
    episode_truncated: Tensor,    gamma: float, lam: float,
) -> Tensor:  # fmt: skip
    """Generalised advantage estimates, [B, N], 0 off the mask.

    Positions off the mask are stepped over, so a rollout may have gaps or padding anywhere.

    >>> r, v = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
    >>> gae(r, v > 0, torch.zeros(1, 2), v, torch.tensor([False]), gamma=1.0, lam=1.0)
    tensor([[0.5000, 0.5000]])
    """
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])  # A_t+1, carried from right to left
    next_turn = torch.full_like(turn_ids[:, 0], -1)  # what comes after the last token is another
    # V after the last token: 0 at a real end; where the episode was cut, the last value goes on
    columns = torch.arange(rewards.shape[1], device=rewards.device)
    last = torch.where(completion_mask, columns, 0).amax(1, keepdim=True)  # [B, 1]
    next_value = torch.where(episode_truncated, values.gather(1, last).squeeze(1), 0.0)
    for t in reversed(range(rewards.shape[1])):
        here = completion_mask[:, t]
        discount = torch.where(turn_ids[:, t] == next_turn, torch.ones_like(next_value), gamma)
        delta = rewards[:, t] + discount * next_value - values[:, t]
        advantage = delta + discount * lam * following
        advantages[:, t] = torch.where(here, advantage, 0.0)
        following = torch.where(here, advantage, following)
        next_value = torch.where(here, values[:, t], next_value)
        next_turn = torch.where(here, turn_ids[:, t], next_turn)
    return advantages
