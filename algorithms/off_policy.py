"""The sampler is not quite the policy: importance weights between the two.

The sampler runs other kernels than the trainer, which round differently, so it draws its tokens
from a slightly different distribution (https://fengyao.notion.site/off-policy-rl). An importance
weight π_old / π_sampler makes a token of the sampler count as one of π_old, the trainer's policy
before the first gradient step. runs/off_policy has measured bias and variance of each kind.
"""

import torch
from torch import Tensor

from algorithms.options import WeightLevel, WeightMode
from algorithms.tokens import Tokens, group_mean, group_sum


def sampler_ratio(tokens: Tokens, level: WeightLevel) -> Tensor:
    """π_old / π_sampler [n], without gradient.

        token       the ratio of each token
        geometric   the geometric mean of the ratios in the sequence; does not grow with its length
        product     the product of the ratios in the sequence: its exact weight
                    (`sequence` in TRL and verl)

    Only the product, without a cap, is unbiased; its variance grows with the length.
    """
    log_ratio = (tokens.old_logprobs - tokens.sampler_logprobs).detach()
    if level == "geometric":
        log_ratio = group_mean(log_ratio, tokens.sequence)
    elif level == "product":
        log_ratio = group_sum(log_ratio, tokens.sequence)
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
