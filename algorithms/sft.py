"""Supervised fine-tuning, the warm start: raise the log-probs of demonstrations.

    L = -Σ_t log π(x_t) / number of demonstrated tokens

It is REINFORCE with an advantage of 1 for every token, on text that the policy did not sample.
"""

from torch import Tensor


def compute_loss(logprobs: Tensor, num_tokens: float) -> Tensor:
    """-Σ log π / num_tokens over demonstrated tokens; [n] float32.

    `num_tokens` counts the demonstrated tokens of the whole step, so micro-batches add up.

    >>> import torch
    >>> compute_loss(torch.tensor([-1.0, -3.0]), 2.0)
    tensor(2.)
    """
    return -logprobs.sum() / num_tokens


def schedule(step: int, num_steps: int) -> float:
    """Fraction of the peak learning rate: up for 50 steps, flat, down to 5% in the last 40%.

    >>> [round(schedule(s, 800), 2) for s in (0, 49, 400, 799)]
    [0.02, 1.0, 1.0, 0.05]
    >>> [round(schedule(s, 10), 2) for s in (0, 4, 9)]  # so few rise until it falls
    [0.1, 0.5, 0.05]
    """
    warmup = min(1.0, (step + 1) / min(50, num_steps))
    remaining = (num_steps - 1 - step) / max(1.0, 0.4 * num_steps)
    return min(warmup, 0.05 + 0.95 * min(1.0, remaining))
