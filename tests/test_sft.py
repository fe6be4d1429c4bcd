"""The warm start: its loss by hand, and its schedule."""

import pytest
import torch

from algorithms.sft import compute_loss, schedule


def test_loss_is_minus_the_sum_of_demonstrated_logprobs_over_the_denominator():
    logprobs = torch.tensor([[-1.0, float("nan")], [-4.0, -8.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    loss, metrics = compute_loss(logprobs, mask, 4)
    loss.backward()
    assert loss.item() == 13 / 4 and metrics == {}
    assert logprobs.grad.tolist() == [[-0.25, 0], [-0.25, -0.25]]  # descent raises them


def test_schedule_rises_over_50_steps_stays_and_falls_to_a_twentieth():
    assert schedule(0, 800) == 1 / 50
    assert schedule(24, 800) == 0.5
    assert {schedule(step, 800) for step in (49, 300, 479)} == {1.0}  # the last 320 steps fall
    assert schedule(799 - 160, 800) == pytest.approx(0.05 + 0.95 / 2)
    assert schedule(799, 800) == pytest.approx(0.05)
    assert [schedule(step, 4) for step in range(4)] == pytest.approx(
        [1 / 4, 1 / 2, 0.05 + 0.95 / 1.6, 0.05]
    )
    assert schedule(0, 1) == pytest.approx(0.05)
