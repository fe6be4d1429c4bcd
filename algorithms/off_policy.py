"""The sampler is not quite the policy: importance weights between the two.

The sampler runs other kernels than the trainer, which round differently, so it draws its tokens
from a slightly different distribution (https://fengyao.notion.site/off-policy-rl). An importance
weight π_old / π_sampler makes a token of the sampler count as one of π_old, the trainer's policy
before the first gradient step. runs/off_policy has measured bias and variance of each kind.
"""

import torch
from torch import Tensor

from algorithms.common import Micro, masked_mean
from algorithms.options import WeightLevel, WeightMode


def set_weights(micro: Micro, level: WeightLevel, cap: float, mode: WeightMode) -> None:
    """Sets `micro.sampler_ratio` and the importance weights made of it."""
    micro.sampler_ratio = sampler_ratio(micro, level)
    micro.importance_weights = importance_weights(micro.sampler_ratio, cap, mode)


def sampler_ratio(micro: Micro, level: WeightLevel) -> Tensor:
    """π_old / π_sampler [b, T-1], without gradient.

        token       the ratio of each token
        geometric   the geometric mean of the ratios in the row; does not grow with its length
        product     the product of the ratios in the row: the exact weight of the sequence
                    (`sequence` in TRL and verl)

    Only the product with an infinite cap leaves the expected gradient unbiased, at a variance that
    grows with the length.
    """
    mask = micro.completion_mask
    log_ratio = torch.where(mask, micro.old_logprobs - micro.sampler_logprobs, 0.0).detach()
    if level == "geometric":
        log_ratio = masked_mean(log_ratio, mask, dim=1).expand_as(log_ratio)
    elif level == "product":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    return log_ratio.exp()


def importance_weights(ratio: Tensor, cap: float, mode: WeightMode = "truncate") -> Tensor:
    """Weights that correct for the sampler's distribution, from `sampler_ratio`.

    truncate: ratios above `cap` become `cap`, which bounds the variance (truncated importance
    sampling). mask: tokens with a ratio outside [1/cap, cap] have weight 0, the others their ratio.
    cap 0 switches the correction off: all weights are 1.

    >>> importance_weights(torch.tensor([0.1, 0.9, 3.0]), cap=2.0)
    tensor([0.1000, 0.9000, 2.0000])
    >>> importance_weights(torch.tensor([0.1, 0.9, 3.0]), cap=2.0, mode="mask")
    tensor([0.0000, 0.9000, 0.0000])
    """
    if cap == 0:
        return torch.ones_like(ratio)
    if mode == "mask":
        return torch.where((ratio > cap) | (ratio < 1 / cap), 0.0, ratio)
    return ratio.clamp(max=cap)
