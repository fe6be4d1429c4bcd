"""Supervised fine-tuning, the warm start: raise the log-prob of what was demonstrated.

    L = -Σ_t log π(x_t) / number of demonstrated tokens

It is REINFORCE with every advantage 1, on text that somebody else wrote.
"""

import torch
from torch import Tensor


def compute_loss(
    logprobs: Tensor, completion_mask: Tensor, denominator: float
) -> tuple[Tensor, dict[str, float]]:
    """-Σ log π / denominator, over demonstrated tokens; [b, T-1] float32 and bool.

    >>> compute_loss(torch.tensor([[-1.0, -3.0]]), torch.tensor([[True, True]]), 2.0)[0]
    tensor(2.)
    """
    return -torch.where(completion_mask, logprobs, 0.0).sum() / denominator, {}


def schedule(step: int, num_steps: int) -> float:
    """Share of the full learning rate at `step` (0-based): 50 steps up, flat, last 40% down to 5%.

    >>> [round(schedule(s, 800), 2) for s in (0, 49, 400, 799)]
    [0.02, 1.0, 1.0, 0.05]
    """
    warm = min(1.0, (step + 1) / min(50, num_steps))
    left = (num_steps - 1 - step) / max(1.0, 0.4 * num_steps)
    return min(warm, 0.05 + 0.95 * min(1.0, left))
