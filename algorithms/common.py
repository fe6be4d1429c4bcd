"""What all algorithms share: log-probs, returns, KL, importance weights, what a token counts.

Axes: B rollouts, N sampled tokens of each, K turns; b sequences of a micro-batch, T tokens; V
vocabulary. A sequence is what was trained in one context: a rollout, unless its turns dropped text.

Every loss is a *sum* over tokens, each times its `scale`, which is counted once for the whole step.
So gradients of micro-batches add up to the gradient of the step, however it was cut.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from algorithms.options import KL, Aggregation, Level


def token_logprobs(
    hidden: Tensor,
    input_ids: Tensor,
    completion_mask: Tensor,
    to_logits: Callable[[Tensor], Tensor],
    temperature: float = 1.0,
    chunk: int = 4096,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each sampled token and entropy of the distribution that it was drawn from.

        log π(x_t+1 | x_..t) = log softmax(logits_t / temperature)[x_t+1]

    `hidden` [b, T, D], `input_ids` [b, T], `completion_mask` [b, T-1]; `to_logits` maps [n, D] to
    [n, V]. Returns two float32 [b, T-1] in nats, 0 off the mask; gradients flow through both.
    Logits are made only where the next token was sampled, `chunk` of them at a time, in float32,
    and made again in the backward pass instead of being kept.
    """
    # the causal shift: what stands at t predicts the token at t+1
    predictors = hidden[:, :-1][completion_mask]  # [n, D]
    targets = input_ids[:, 1:][completion_mask]  # [n]

    def one_chunk(h: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        all_logprobs = (to_logits(h).float() / temperature).log_softmax(-1)  # [n, V]
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return all_logprobs.gather(1, target[:, None]).squeeze(1), entropy

    chunks = zip(predictors.split(chunk), targets.split(chunk), strict=True)
    pairs = [checkpoint(one_chunk, h, t, use_reentrant=False) for h, t in chunks]
    zeros = torch.zeros(completion_mask.shape, device=hidden.device)
    logprobs, entropy = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return zeros.masked_scatter(completion_mask, logprobs), zeros.masked_scatter(
        completion_mask, entropy
    )


def turn_returns(
    rewards: Tensor, completion_mask: Tensor, turn_ids: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """What was paid from each turn on, G_k = r_k + γ G_k+1, and which turns were played.

    `rewards` [B, N] float32, `completion_mask` [B, N], `turn_ids` [B, N] int64: the turn, from 0,
    that a sampled token is of. Returns [B, K] float32 and [B, K] bool.

    >>> rewards, turn_ids = torch.tensor([[0.0, 1.0, 4.0]]), torch.tensor([[0, 0, 1]])
    >>> turn_returns(rewards, turn_ids >= 0, turn_ids, gamma=0.5)[0]
    tensor([[3., 4.]])
    """
    empty = rewards.new_zeros(len(rewards), int(turn_ids.max()) + 1)
    returns = empty.scatter_add(1, turn_ids, torch.where(completion_mask, rewards, 0.0))
    played = empty.scatter_add(1, turn_ids, completion_mask.to(empty.dtype)) > 0
    for k in reversed(range(returns.shape[1] - 1)):
        returns[:, k] += gamma * returns[:, k + 1]
    return returns, played


def same_group(group_ids: Tensor) -> Tensor:
    """[B, B] float32, 1 where two rollouts are of one group: `same @ x` sums x over the group."""
    return (group_ids[:, None] == group_ids[None]).float()


def token_scale(completion_mask: Tensor, aggregation: Aggregation, max_tokens: int) -> Tensor:
    """What each token's loss is multiplied by, so that the sum is the mean that is meant; [B, N].

        token       1 / all tokens: each counts the same       DAPO, arXiv:2503.14476
        sequence    1 / (B · tokens of its rollout)            GRPO, arXiv:2402.03300
        constant    1 / (B · max_tokens)                       Dr. GRPO, arXiv:2503.20783

    The second gives a token of a long completion less weight, right or wrong: it goes easy on long
    wrong answers. The third takes the length out, and the learning rate has to fit `max_tokens`.

    >>> token_scale(torch.tensor([[True, True], [True, False]]), "sequence", 8)
    tensor([[0.2500, 0.2500],
            [0.5000, 0.0000]])
    """
    mask = completion_mask.float()
    if aggregation == "token":
        return mask / mask.sum().clamp(min=1)
    if aggregation == "sequence":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)
    return mask / (len(mask) * max_tokens)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is True, of all or along `dim` (kept); 0 where it never is.

    >>> masked_mean(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    kept = torch.where(mask, values, 0)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim, keepdim=True) / mask.sum(dim, keepdim=True).clamp(min=1)


def normalize(values: Tensor, mask: Tensor, eps: float = 1e-4) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over the mask; 0 off it."""
    mean = masked_mean(values, mask)
    std = masked_mean((values - mean) ** 2, mask).sqrt()
    return torch.where(mask, (values - mean) / (std + eps), 0)


def kl_estimate(logprobs: Tensor, other: Tensor, kind: KL = "k3") -> Tensor:
    """Per-token estimates of KL(π ‖ other) from samples of π, in nats; with d = log π - log other:

        k1 = d,    k2 = d²/2,    k3 = exp(-d) - 1 + d      http://joschu.net/blog/kl-approx.html

    As values k1 and k3 are unbiased, k3 is never negative; k2 is near them while d is small. What
    they teach is another matter. The gradient of KL(π ‖ other), by the score function, is
    E[d ∇ log π], so, on policy:

        in the loss:    E[∇ k1] = 0; E[∇ k2] is right; E[∇ k3] is that of KL(other ‖ π)
        in the reward:  k1 is right; k2 and k3 are not

    >>> kl_estimate(torch.tensor([0.0]), torch.tensor([-1.0]), "k2")
    tensor([0.5000])
    """
    difference = logprobs - other
    if kind == "k1":
        return difference
    return difference**2 / 2 if kind == "k2" else (-difference).exp() - 1 + difference


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """Soft overlong punishment: 0 up to `max_tokens - buffer`, then down to -1; DAPO eq. 13.

    >>> overlong_penalty(torch.tensor([10, 90, 95, 100]), max_tokens=100, buffer=10)
    tensor([-0.0000, -0.0000, -0.5000, -1.0000])
    """
    return -((lengths - (max_tokens - buffer)) / buffer).clamp(0, 1)


def sampler_ratio(
    old_logprobs: Tensor, sampler_logprobs: Tensor, completion_mask: Tensor, level: Level
) -> Tensor:
    """π_trainer / π_sampler of each token, or its geometric mean over the sequence; no gradient.

    The sampler computes with other kernels than the trainer, so tokens come from a slightly other
    distribution than the one whose gradient is taken (https://fengyao.notion.site/off-policy-rl).
    A product over the sequence would grow with its length; the geometric mean does not.
    """
    log_ratio = torch.where(completion_mask, old_logprobs - sampler_logprobs, 0.0).detach()
    if level == "sequence":
        log_ratio = masked_mean(log_ratio, completion_mask, dim=1).expand_as(log_ratio)
    return log_ratio.exp()


def importance_weights(ratio: Tensor, cap: float, masked: bool = False) -> Tensor:
    """The weights of `sampler_ratio`s: cut to `cap`, which bounds the variance; all 1 if cap is 0.

    `masked`: tokens whose ratio is not in [1/cap, cap] count nothing instead.

    >>> importance_weights(torch.tensor([0.1, 0.9, 3.0]), cap=2.0)
    tensor([0.1000, 0.9000, 2.0000])
    >>> importance_weights(torch.tensor([0.1, 0.9, 3.0]), cap=2.0, masked=True)
    tensor([0.0000, 0.9000, 0.0000])
    """
    if cap == 0:
        return torch.ones_like(ratio)
    if masked:
        return torch.where((ratio > cap) | (ratio < 1 / cap), 0.0, ratio)
    return ratio.clamp(max=cap)


def surrogate_metrics(
    ratio: Tensor, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor,
    clip_low: float, clip_high: float,
) -> dict[str, float]:  # fmt: skip
    """Tokens beyond the clip on the side that it acts on, and the KL from the old policy; sums."""
    low = mask & (ratio < 1 - clip_low) & (advantages < 0)
    high = mask & (ratio > 1 + clip_high) & (advantages > 0)
    kl = torch.where(mask, kl_estimate(old_logprobs, logprobs), 0)  # drawn from the old policy
    return {
        "clip/low_fraction": low.sum().item(),
        "clip/high_fraction": high.sum().item(),
        "kl/approx": kl.sum().item(),
    }
