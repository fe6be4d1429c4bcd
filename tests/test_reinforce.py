"""REINFORCE: baselines, credit of turns, the loss without a clip, by hand."""

import math

import pytest
import torch

from algorithms.common import Batch, Micro
from algorithms.reinforce import Options, compute_advantages, compute_loss

# Two turns, three, one, and two of another group. With γ = 1/2 what is paid from each turn on is
#   1 + 4/2 = 3, 4;    0 + (1 + 2/2)/2 = 1, 1 + 2/2 = 2, 2;    5;    4 + 6/2 = 7, 6
REWARDS = torch.tensor([[0.0, 1.0, 4.0], [0.0, 1.0, 2.0], [5.0, 0.0, 0.0], [4.0, 0.0, 6.0]])
MASK = torch.tensor([[True] * 3, [True] * 3, [True, False, False], [True] * 3])
TURN_IDS = torch.tensor([[0, 0, 1], [0, 1, 2], [0, 0, 0], [0, 1, 1]])
GROUP_IDS = torch.tensor([0, 0, 0, 1])


def advantages_of(options, loss_mask=MASK, junk=0.0):
    rewards = REWARDS.masked_fill(~MASK, junk)
    batch = Batch(rewards=rewards, completion_mask=MASK, loss_mask=loss_mask, turn_ids=TURN_IDS,
                  group_ids=GROUP_IDS, gamma=0.5)  # fmt: skip
    return compute_advantages(batch, options)


@pytest.mark.parametrize(
    "baseline, want",
    [
        ("none", [[3, 3, 4], [1, 2, 2], [5, 0, 0], [7, 6, 6]]),
        # of turn 0 (3+1+5+7)/4 = 4, of turn 1 (4+2+6)/3 = 4, of turn 2, which one played, 2
        ("batch", [[-1, -1, 0], [-3, -2, 0], [1, 0, 0], [3, 2, 2]]),
        # (3+1+5)/3 = 3, (4+2)/2 = 3: who never came to turn 1 isn't asked; alone from there on
        ("group", [[0, 0, 1], [-2, -1, 0], [2, 0, 0], [0, 0, 0]]),
        # 3 - (1+5)/2, 1 - (3+5)/2, 5 - (3+1)/2; 4 - 2, 2 - 4; alone
        ("leave_one_out", [[0, 0, 2], [-3, -2, 0], [3, 0, 0], [0, 0, 0]]),
    ],
)
def test_a_turn_is_compared_with_the_like_turns_of_others(baseline, want):
    # the loss mask has no part in it
    got = advantages_of(Options(baseline), MASK & False, junk=math.nan)
    torch.testing.assert_close(got, torch.tensor(want).float(), atol=1e-6, rtol=0)


def test_normalize_is_over_the_tokens_of_the_loss():
    in_loss = MASK & (TURN_IDS != 1)
    raw = advantages_of(Options("group"))[in_loss]
    got = advantages_of(Options("group", normalize=True), in_loss)
    want = (raw - raw.mean()) / (raw.std(correction=0) + 1e-4)
    torch.testing.assert_close(got[in_loss], want, atol=1e-6, rtol=0)
    assert (got[~in_loss] == 0).all()


@pytest.mark.parametrize("ratio, advantage", [(0.1, -2.0), (10.0, 2.0)])
def test_nothing_is_clipped_however_far_the_policy_went(ratio, advantage):
    """The gradient has the weight π / π_old; the weight itself has none."""
    logprobs, one = torch.tensor([[-3.0]], requires_grad=True), torch.ones(1, 1)
    old = logprobs.detach() - math.log(ratio)
    micro = Micro(completion_mask=one > 0, old_logprobs=old, advantages=one * advantage,
                  importance_weights=one, token_weights=one)  # fmt: skip
    loss, metrics = compute_loss(logprobs, None, micro, Options())
    loss.backward()
    assert loss.item() == pytest.approx(3 * ratio * advantage)
    assert logprobs.grad.item() == pytest.approx(-ratio * advantage)
    assert metrics["clip/low_fraction"] == metrics["clip/high_fraction"] == 0
    assert metrics["kl/approx"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-5)
