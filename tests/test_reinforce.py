"""REINFORCE: baselines, credit of turns, the loss and its gradient, by hand; a bandit in full."""

import itertools
import math

import pytest
import torch

from algorithms.reinforce import Options, compute_advantages, compute_loss

NAN = float("nan")
FACTORS = {"none": 1, "leave_one_out": 1, "group": 2 / 3, "batch": 2 / 3}  # with groups of three


def advantages_of(rewards, group_ids, options, turn_ids=None, mask=None, gamma=1.0):
    """`compute_advantages` of lists [B][N], all of one turn and all sampled if nothing is said."""
    rewards = torch.tensor(rewards)
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else torch.tensor(mask)
    turn_ids = mask.long() * 0 if turn_ids is None else torch.tensor(turn_ids)
    group_ids = torch.tensor(group_ids)
    return compute_advantages(rewards, mask, mask, turn_ids, group_ids, None, gamma, options)[0]


def loss_of(logprobs, advantages, mask, weights=None, scale=None, old=None):
    """The loss as a float, the gradient that reaches the log-probs, and the metrics."""
    logprobs = logprobs.clone().requires_grad_()
    ones = torch.ones_like(advantages)
    weights, scale = (ones if x is None else x for x in (weights, scale))
    old = logprobs.detach() if old is None else old
    loss, metrics = compute_loss(logprobs, old, advantages, mask, weights, scale, Options())
    loss.backward()
    return loss.item(), logprobs.grad, metrics


@pytest.mark.parametrize(
    "baseline, want",
    [
        ("none", [1, 6, 3, 0, 8, 6]),
        ("batch", [-3, 2, -1, -4, 4, 2]),  # all six: 24 / 6 = 4
        ("group", [-3, 3, -1, -3, 4, 0]),  # 1, 3, 8: mean 4; 6, 0: mean 3; 6 alone
        ("leave_one_out", [-4.5, 6, -1.5, -6, 6, 0]),  # 1 - (3+8)/2, 6 - 0, 3 - (1+8)/2, ...
    ],
)
def test_baselines_by_hand(baseline, want):
    returns, groups = [1.0, 6.0, 3.0, 0.0, 8.0, 6.0], [7, 3, 7, 3, 7, 5]
    got = advantages_of([[x] for x in returns], groups, Options(baseline))
    assert got.squeeze(1).tolist() == pytest.approx(want, abs=1e-6)


def test_an_episode_s_rewards_count_for_all_its_tokens_and_nothing_off_the_mask():
    got = advantages_of(
        [[0.25, 0.0, 0.75], [0.0, 0.5, 0.0]],  # returns 1 and 0.5
        group_ids=[0, 1],
        options=Options("batch"),
        mask=[[True, True, True], [True, True, False]],
    )
    assert got.tolist() == [[0.25, 0.25, 0.25], [-0.25, -0.25, 0.0]]


# Two turns, three, one, and two of another group. With γ = 1/2 what is paid from each turn on is
#   1 + 4/2 = 3, 4;    0 + (1 + 2/2)/2 = 1, 1 + 2/2 = 2, 2;    5;    4 + 6/2 = 7, 6
TURN_BY_TURN = {
    "rewards": [[0.0, 1.0, 4.0], [0.0, 1.0, 2.0], [5.0, 0.0, 0.0], [4.0, 0.0, 6.0]],
    "mask": [[True] * 3, [True] * 3, [True, False, False], [True] * 3],
    "turn_ids": [[0, 0, 1], [0, 1, 2], [0, 0, 0], [0, 1, 1]],
    "group_ids": [0, 0, 0, 1],
    "gamma": 0.5,
}


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
    got = advantages_of(**TURN_BY_TURN, options=Options(baseline))
    torch.testing.assert_close(got, torch.tensor(want).float(), atol=1e-6, rtol=0)


def test_normalize_is_over_tokens_not_over_rollouts():
    # returns 3 and 1, mean 2: tokens 1, -1, -1, -1, mean -1/2, variance (2.25 + 3 · 0.25) / 4
    got = advantages_of(
        [[3.0, 0.0, 0.0], [1.0, 0.0, 0.0]],
        group_ids=[0, 0],
        options=Options("batch", normalize=True),
        mask=[[True, False, False], [True] * 3],
    )
    high, low = (a / (math.sqrt(0.75) + 1e-4) for a in (1.5, -0.5))
    want = torch.tensor([[high, 0, 0], [low, low, low]])
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("baseline", FACTORS)
def test_normalize_shifts_and_scales_whatever_the_baseline(baseline):
    mask = torch.tensor(TURN_BY_TURN["mask"])
    raw, got = (
        advantages_of(**TURN_BY_TURN, options=Options(baseline, normalize=on))[mask]
        for on in (False, True)
    )
    want = (raw - raw.mean()) / (raw.std(correction=0) + 1e-4)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_loss_and_gradient_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0]])
    advantages, weights = torch.tensor([[3.0, -0.5]]), torch.tensor([[1.0, 2.0]])
    mask, scale = torch.tensor([[True, True]]), torch.tensor([[0.25, 0.5]])
    loss, gradient, _ = loss_of(logprobs, advantages, mask, weights, scale)
    assert loss == pytest.approx(3 * 1 / 4 - 2 * 0.5 * 2 / 2, abs=1e-6)
    assert gradient.tolist() == [[-0.75, 0.5]]  # descent raises what was good, lowers what wasn't


@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_nothing_is_clipped_however_far_the_policy_went(ratio, advantage):
    logprobs = torch.tensor([[-3.0]])
    old, mask = logprobs - math.log(ratio), torch.tensor([[True]])
    _, gradient, metrics = loss_of(logprobs, torch.tensor([[advantage]]), mask, old=old)
    assert gradient.item() == pytest.approx(
        -ratio * advantage
    )  # the importance weight of the token
    assert metrics["clip/low_fraction"] == metrics["clip/high_fraction"] == 0
    assert metrics["kl/approx"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-5)


def test_a_descent_step_raises_the_probability_of_the_better_action():
    logits = torch.zeros(2, requires_grad=True)
    advantages, mask = torch.tensor([1.0, -1.0]), torch.tensor([True, True])
    logprobs, ones = logits.log_softmax(0), torch.ones(2)
    loss, _ = compute_loss(logprobs, logprobs.detach(), advantages, mask, ones, ones, Options())
    loss.backward()
    after = (logits - logits.grad).softmax(0)
    assert after[0].item() == pytest.approx(1 / (1 + math.exp(-2)))  # logits go to ±1


def test_later_steps_have_the_gradient_of_the_new_policy():
    """Tokens of an old policy have the weight ρ = π / π_old: Σ_a π_old(a) ρ(a) A(a) ∇log π(a)."""
    logits, old = torch.tensor([0.9, -0.2, 0.1], requires_grad=True), torch.tensor([-0.5, 0.6, 0.3])
    advantages, logprobs = torch.tensor([1.0, -2.0, 0.5]), logits.log_softmax(0)
    want = torch.autograd.grad((logprobs.exp() * advantages).sum(), logits, retain_graph=True)[0]
    mask, chances = torch.ones(3, dtype=torch.bool), old.softmax(0)
    loss, _ = compute_loss(
        logprobs, old.log_softmax(0), advantages, mask, torch.ones(3), chances, Options()
    )
    torch.testing.assert_close(torch.autograd.grad(-loss, logits)[0], want)


# A bandit with two actions, paid 1.5 and 0.25: ∂J/∂z = ±p(1-p)(1.5 - 0.25)
LOGITS, PAYS = [0.4, -0.3], [1.5, 0.25]


def closed_form():
    p = 1 / (1 + math.exp(LOGITS[1] - LOGITS[0]))
    slope = p * (1 - p) * (PAYS[0] - PAYS[1])
    return torch.tensor([slope, -slope])


def bandit_loss(logprobs, actions, group_ids, baseline, scale):
    """The loss of rollouts of one token, `actions`, whose log-probs are given."""
    rewards = [[PAYS[a]] for a in actions]
    advantages = advantages_of(rewards, group_ids, Options(baseline))
    ones = torch.ones_like(advantages)
    logprobs = logprobs[:, None]
    return compute_loss(
        logprobs, logprobs.detach(), advantages, ones > 0, ones, ones * scale, Options()
    )[0]


@pytest.mark.parametrize("baseline", FACTORS)
def test_the_gradient_of_a_bandit_is_its_closed_form(baseline):
    """Expected over all outcomes of a group of three: leave-one-out leaves the gradient as it is,
    a mean that holds the rollout itself makes it smaller by 1/3."""
    logits = torch.tensor(LOGITS, requires_grad=True)
    for actions in itertools.product([0, 1], repeat=3):
        logprobs = logits.log_softmax(0)[list(actions)]
        chance = logprobs.sum().exp().item()
        bandit_loss(logprobs, actions, [0] * 3, baseline, chance / 3).backward()
    want = -FACTORS[baseline] * closed_form()  # of the loss: descent is ascent of what is paid
    torch.testing.assert_close(logits.grad, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("baseline", ["none", "group", "leave_one_out"])
def test_the_sampled_gradient_of_a_bandit_is_its_closed_form_within_four_errors(baseline):
    groups, generator = 1500, torch.Generator().manual_seed(0)
    chances = torch.tensor(LOGITS).softmax(0)
    actions = torch.multinomial(chances, 3 * groups, replacement=True, generator=generator)
    copies = torch.tensor(LOGITS).expand(3 * groups, 2).clone().requires_grad_()
    logprobs = copies.log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
    group_ids = [i // 3 for i in range(3 * groups)]
    bandit_loss(logprobs, actions.tolist(), group_ids, baseline, 1.0).backward()
    of_groups = copies.grad.view(groups, 3, 2).mean(1)  # its members are not independent
    error = 4 * of_groups.std(0) / math.sqrt(groups)
    off = of_groups.mean(0) + FACTORS[baseline] * closed_form()
    assert (off.abs() < error).all()
    assert (error < closed_form().abs() / 6).all()  # half of what a wrong factor would be off
