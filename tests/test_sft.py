"""The warm start: its loss by hand, and the ends of its schedule."""

import pytest
import torch

from algorithms.sft import compute_loss, schedule


def test_loss_is_minus_the_sum_of_demonstrated_logprobs_over_the_denominator():
    logprobs = torch.tensor([[-1.0, -2.0], [-4.0, -8.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    loss, metrics = compute_loss(logprobs, mask, 4)
    loss.backward()
    assert loss.item() == 13 / 4
    assert logprobs.grad.tolist() == [[-0.25, 0], [-0.25, -0.25]]  # descent raises them
    assert metrics == {}


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf")])
def test_masked_tokens_never_matter(junk):
    logprobs = torch.tensor([[-1.0, junk]], requires_grad=True)
    loss, _ = compute_loss(logprobs, torch.tensor([[True, False]]), 1)
    loss.backward()
    assert loss.item() == 1
    assert logprobs.grad.tolist() == [[-1, 0]]


def test_micro_batches_add_up_to_the_whole():
    logprobs, mask = -torch.arange(6.0).view(3, 2), torch.tensor([[True, False]] * 3)
    parts = [compute_loss(logprobs[i : i + 1], mask[i : i + 1], 3)[0].item() for i in range(3)]
    assert sum(parts) == pytest.approx(compute_loss(logprobs, mask, 3)[0].item()) == 2


def test_schedule_rises_over_50_steps_stays_and_falls_to_a_twentieth():
    assert schedule(0, 800) == 1 / 50
    assert schedule(24, 800) == 0.5
    assert {schedule(step, 800) for step in (49, 300, 479)} == {1.0}  # the last 320 steps fall
    assert schedule(799 - 160, 800) == pytest.approx(0.05 + 0.95 / 2)
    assert schedule(799, 800) == pytest.approx(0.05)


@pytest.mark.parametrize("num_steps", [2, 3, 10, 50, 51, 200])
def test_schedule_of_short_runs_ends_low_and_stays_within_bounds(num_steps):
    shares = [schedule(step, num_steps) for step in range(num_steps)]
    assert shares[-1] == pytest.approx(0.05)
    assert all(0 < share <= 1 for share in shares)
    peak = shares.index(max(shares))
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
