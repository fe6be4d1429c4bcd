"""REINFORCE: baselines and credit of turns by hand; test_grpo.py has its loss."""

import pytest
import torch

from algorithms.reinforce import Options, compute_advantages
from algorithms.tokens import Tokens

# Two turns, three, one, and two of another group. With γ = 1/2 what is paid from each turn on is
#   1 + 4/2 = 3, 4;    0 + (1 + 2/2)/2 = 1, 1 + 2/2 = 2, 2;    5;    4 + 6/2 = 7, 6
REWARDS = torch.tensor([0.0, 1.0, 4.0, 0.0, 1.0, 2.0, 5.0, 4.0, 0.0, 6.0])
ROLLOUT = torch.tensor([0, 0, 0, 1, 1, 1, 2, 3, 3, 3])
TURN = torch.tensor([0, 0, 1, 0, 1, 2, 0, 0, 1, 1])
ALL = TURN >= 0
GROUP = torch.tensor([0, 0, 0, 1])[ROLLOUT]
DISCOUNTS = torch.tensor([1, 0.5, 9, 0.5, 0.5, 9, 9, 0.5, 1, 9])  # nothing follows where it is 9


def advantages_of(options, in_loss=ALL):
    batch = Tokens(rewards=REWARDS, rollout=ROLLOUT, turn=TURN, in_loss=in_loss,
                   group=GROUP, discounts=DISCOUNTS)  # fmt: skip
    return compute_advantages(batch, options)


@pytest.mark.parametrize(
    "baseline, want",
    [
        ("none", [3, 3, 4, 1, 2, 2, 5, 7, 6, 6]),
        # of turn 0 (3+1+5+7)/4 = 4, of turn 1 (4+2+6)/3 = 4, of turn 2, which one played, 2
        ("batch", [-1, -1, 0, -3, -2, 0, 1, 3, 2, 2]),
        # (3+1+5)/3 = 3, (4+2)/2 = 3: who never came to turn 1 isn't asked; alone from there on
        ("group", [0, 0, 1, -2, -1, 0, 2, 0, 0, 0]),
        # 3 - (1+5)/2, 1 - (3+5)/2, 5 - (3+1)/2; 4 - 2, 2 - 4; alone
        ("leave_one_out", [0, 0, 2, -3, -2, 0, 3, 0, 0, 0]),
    ],
)
def test_a_turn_is_compared_with_the_like_turns_of_others(baseline, want):
    # what is in the loss has no part in it
    got = advantages_of(Options(baseline), ALL & False)
    torch.testing.assert_close(got, torch.tensor(want).float(), atol=1e-6, rtol=0)


def test_normalize_is_over_the_tokens_of_the_loss():
    in_loss = TURN != 1  # of returns minus means 0, -2, 2 and 0 at two, one, one and one of these
    got = advantages_of(Options("group", normalize=True), in_loss)
    want = torch.tensor([0, 0, 0, -2, 0, 0, 2, 0, 0, 0]) / ((8 / 6) ** 0.5 + 1e-4)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
