"""What all algorithms share: token log-probs, masked means, KL, importance weights.

Axes: B rollouts, N sampled tokens of each; b sequences of a micro-batch, T tokens; V vocabulary.

Every loss is a *sum* over tokens divided by a `denominator` that is counted once for the whole
update. So gradients of micro-batches add up to the gradient of the update, however it was cut.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 4096  # sampled tokens whose logits exist at one time


def token_logprobs(
    hidden: Tensor,
    input_ids: Tensor,
    completion_mask: Tensor,
    to_logits: Callable[[Tensor], Tensor],
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each sampled token and entropy of the distribution that it was drawn from.

        log π(x_t+1 | x_..t) = log softmax(logits_t / temperature)[x_t+1]

    `hidden` [b, T, D], `input_ids` [b, T], `completion_mask` [b, T-1]; `to_logits` maps [n, D] to
    [n, V]. Returns two float32 [b, T-1] in nats, 0 off the mask; gradients flow through both.
    Logits are made only where the next token was sampled, in chunks, in float32, and made again in
    the backward pass instead of being kept.
    """
    # the causal shift: what stands at t predicts the token at t+1
    predictors = hidden[:, :-1][completion_mask]  # [n, D]
    targets = input_ids[:, 1:][completion_mask]  # [n]

    def one_chunk(h: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        all_logprobs = (to_logits(h).float() / temperature).log_softmax(-1)  # [n, V]
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return all_logprobs.gather(1, target[:, None]).squeeze(1), entropy

    chunks = zip(predictors.split(CHUNK), targets.split(CHUNK), strict=True)
    pairs = [checkpoint(one_chunk, h, t, use_reentrant=False) for h, t in chunks]
    zeros = torch.zeros(completion_mask.shape, device=hidden.device)
    logprobs, entropy = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return zeros.masked_scatter(completion_mask, logprobs), zeros.masked_scatter(
        completion_mask, entropy
    )


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` where `mask` is True, as a scalar; 0 where it never is.

    >>> masked_mean(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def normalize(values: Tensor, mask: Tensor, eps: float = 1e-4) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over the mask; 0 off it."""
    mean = masked_mean(values, mask)
    std = masked_mean((values - mean) ** 2, mask).sqrt()
    return torch.where(mask, (values - mean) / (std + eps), 0)


def kl_k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """Per-token estimate of KL(π ‖ other) from samples of π, in nats: r - 1 - log r, r = other/π.

    Never negative, and unbiased as a value (http://joschu.net/blog/kl-approx.html).

    >>> kl_k3(torch.tensor([0.0]), torch.tensor([0.0]))
    tensor([0.])
    """
    log_ratio = other - logprobs
    return log_ratio.exp() - 1 - log_ratio


def importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    """Token-level truncated importance weights, min(π_trainer / π_sampler, cap); all 1 if cap is 0.

    The sampler computes with other kernels than the trainer, so tokens come from a slightly other
    distribution than the one whose gradient is taken. No gradient flows. The cap bounds the
    variance (https://fengyao.notion.site/off-policy-rl).
    """
    if cap == 0:
        return torch.ones_like(old_logprobs)
    return (old_logprobs - sampler_logprobs).exp().clamp(max=cap).detach()


def surrogate_metrics(
    ratio: Tensor, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor,
    clip_low: float, clip_high: float, denominator: float,
) -> dict[str, float]:  # fmt: skip
    """Shares of tokens at which the clip stops the gradient, and the KL from the old policy."""
    low = mask & (ratio < 1 - clip_low) & (advantages < 0)
    high = mask & (ratio > 1 + clip_high) & (advantages > 0)
    kl = torch.where(mask, kl_k3(old_logprobs, logprobs), 0)  # samples came from the old policy
    return {
        "clip/low_fraction": low.sum().item() / denominator,
        "clip/high_fraction": high.sum().item() / denominator,
        "kl/old_policy": kl.sum().item() / denominator,
    }
