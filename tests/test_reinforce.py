"""REINFORCE: both baselines, the loss and its gradient, by hand."""

import math

import pytest
import torch

from algorithms.reinforce import Options, compute_advantages, compute_loss

NAN = float("nan")
LEAVE_ONE_OUT = Options(baseline="leave_one_out")


def advantages_of(returns, group_ids, options):
    """One token a rollout, so that advantages are a plain list."""
    rewards = torch.tensor(returns)[:, None]
    mask = torch.ones_like(rewards, dtype=torch.bool)
    cut = torch.zeros(len(returns), dtype=torch.bool)
    got = compute_advantages(rewards, mask, torch.tensor(group_ids), None, cut, options)
    return got.squeeze(1).tolist()


def loss_of(logprobs, advantages, mask, weights=None, denominator=1.0):
    """The loss as a float, and the gradient that reaches the log-probs."""
    logprobs = logprobs.clone().requires_grad_()
    weights = torch.ones_like(logprobs) if weights is None else weights
    old = torch.full_like(logprobs.detach(), NAN)  # not this algorithm's
    loss, _ = compute_loss(logprobs, old, advantages, mask, weights, Options(), denominator)
    loss.backward()
    return loss.item(), logprobs.grad


def test_advantages_are_returns_minus_the_mean_of_the_batch():
    # mean of 1, 0, 0.5, 0.5 is 0.5, whatever the groups
    assert advantages_of([1.0, 0.0, 0.5, 0.5], [0, 0, 1, 1], Options()) == [0.5, -0.5, 0, 0]


def test_advantages_sum_the_rewards_of_all_turns_and_are_zero_off_the_mask():
    rewards = torch.tensor([[0.25, 0.0, 0.75], [0.0, 0.5, 0.0]])  # returns 1 and 0.5
    mask = torch.tensor([[True, True, True], [True, True, False]])
    cut = torch.zeros(2, dtype=torch.bool)
    got = compute_advantages(rewards, mask, torch.tensor([0, 1]), None, cut, Options())
    assert got.tolist() == [[0.25, 0.25, 0.25], [-0.25, -0.25, 0.0]]


def test_leave_one_out_compares_with_the_mean_of_the_others():
    got = advantages_of([1.0, 0.0, 0.5], [7, 7, 7], LEAVE_ONE_OUT)
    assert got == [0.75, -0.75, 0.0]  # 1 - 0.25, 0 - 0.75, 0.5 - 0.5


def test_leave_one_out_never_looks_into_another_group():
    got = advantages_of([1.0, 100.0, 0.0, 102.0], [0, 1, 0, 1], LEAVE_ONE_OUT)
    assert got == [1, -2, -1, 2]


def test_leave_one_out_gives_a_group_of_one_no_advantage():
    assert advantages_of([1.0, 5.0, 3.0], [0, 1, 1], LEAVE_ONE_OUT) == [0, 2, -2]


def test_loss_and_gradient_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0]])
    advantages, weights = torch.tensor([[3.0, -0.5]]), torch.tensor([[1.0, 2.0]])
    mask = torch.tensor([[True, True]])
    loss, gradient = loss_of(logprobs, advantages, mask, weights, denominator=4)
    assert loss == pytest.approx((3 * 1 - 2 * 0.5 * 2) / 4, abs=1e-6)
    assert gradient.tolist() == [[-0.75, 0.25]]  # descent raises what was good, lowers what wasn't


def test_a_descent_step_raises_the_probability_of_the_better_action():
    logits = torch.zeros(2, requires_grad=True)
    advantages, mask = torch.tensor([1.0, -1.0]), torch.tensor([True, True])
    logprobs, ones = logits.log_softmax(0), torch.ones(2)
    compute_loss(logprobs, logprobs.detach(), advantages, mask, ones, Options(), 1)[0].backward()
    after = (logits - logits.grad).softmax(0)
    assert after[0].item() == pytest.approx(1 / (1 + math.exp(-2)))  # logits go to ±1


def test_masked_tokens_never_matter():
    mask = torch.tensor([[True, False], [False, True]])
    junk = torch.where(mask, 1.0, NAN)
    loss, gradient = loss_of(-2 * junk, 3 * junk, mask, junk, denominator=2)
    assert loss == 6
    assert gradient.tolist() == [[-1.5, 0], [0, -1.5]]


def test_micro_batches_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = torch.randn(2, 5, 4, generator=generator)
    mask = torch.rand(5, 4, generator=generator) < 0.6
    whole, gradient = loss_of(logprobs, advantages, mask, denominator=11)
    rows = torch.arange(5).split([1, 3, 1])
    parts = [loss_of(logprobs[r], advantages[r], mask[r], denominator=11) for r in rows]
    assert sum(part[0] for part in parts) == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)
