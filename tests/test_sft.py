"""The warm start: its loss by hand, and its schedule."""

import pytest
import torch

from algorithms.sft import compute_loss, schedule


def test_loss_is_minus_the_sum_of_demonstrated_logprobs_over_the_denominator():
    logprobs = torch.tensor([-1.0, -4.0, -8.0], requires_grad=True)
    loss = compute_loss(logprobs, 4)
    loss.backward()
    assert loss.item() == 13 / 4
    assert logprobs.grad.tolist() == [-0.25, -0.25, -0.25]  # descent raises them


def test_a_warm_start_of_less_than_50_steps_rises_until_the_learning_rate_falls():
    assert [schedule(s, 10) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 0.05])
