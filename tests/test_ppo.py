"""PPO: GAE against its definition as a double sum, the clip and the value loss by hand."""

import math

import pytest
import torch

from algorithms.ppo import Options, compute_advantages, compute_loss, gae, value_targets

NAN = float("nan")
ENDED = torch.tensor([False])
# gaps at the start, in the middle and at the end; a full row; a row of one token
GAPS = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0]]).bool()


def draw(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 6, generator=generator, dtype=dtype)
    return rewards, values


def double_sum(rewards, mask, values, truncated, gamma, lam):
    """A_t = Σ_k (γλ)^k δ_t+k over the sampled tokens of each row, in Python floats."""
    advantages = torch.zeros_like(rewards)
    for b in range(len(rewards)):
        places = mask[b].nonzero().flatten().tolist()
        r, v = rewards[b, places].tolist(), values[b, places].tolist()
        v.append(v[-1] if truncated[b] else 0.0)
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        for t, place in enumerate(places):
            advantages[b, place] = sum(
                (gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])
            )
    return advantages


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("cut", [[False, False, False], [True, False, True]])
def test_gae_equals_the_double_sum_with_gaps_in_the_mask(gamma, lam, cut):
    rewards, values = draw()
    truncated, options = torch.tensor(cut), Options(gamma=gamma, lam=lam)
    got = gae(rewards, GAPS, values, truncated, options)
    want = double_sum(rewards, GAPS, values, truncated, gamma, lam)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_gae_by_hand():
    # δ = (0 + 0.5 · 2 - 1, 4 - 2) = (0, 2), γλ = 0.25
    rewards, values = torch.tensor([[0.0, 4.0]]), torch.tensor([[1.0, 2.0]])
    got = gae(rewards, values > 0, values, ENDED, Options(gamma=0.5, lam=0.5))
    assert got.tolist() == [[0.5, 2.0]]


def test_gae_with_lam_1_is_the_return_to_go_minus_the_value():
    rewards, values = torch.tensor([[1.0, 0.0, 4.0]]), torch.tensor([[0.5, 3.0, 1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = gae(rewards, mask, values, ENDED, Options(lam=1.0))
    assert got.tolist() == [[4.5, 1.0, 3.0]]


def test_gae_with_gamma_0_sees_only_the_reward_of_the_token():
    rewards, values = torch.tensor([[1.0, 4.0]]), torch.tensor([[0.5, 3.0]])
    got = gae(rewards, values > 0, values, torch.tensor([True]), Options(gamma=0.0, lam=1.0))
    assert got.tolist() == [[0.5, 1.0]]


def test_a_truncated_rollout_goes_on_in_its_last_value():
    rewards, values = torch.zeros(2, 3), torch.tensor([[1.0, 3.0, 99.0]] * 2)
    mask = torch.tensor([[True, True, False]] * 2)  # 99 stands on padding
    got = gae(rewards, mask, values, torch.tensor([True, False]), Options(lam=1.0))
    assert got.tolist() == [[2, 0, 0], [-1, -3, 0]]


def test_value_targets_with_lam_1_are_the_returns_to_go():
    rewards = torch.tensor([[0.0, 0.25, 1.0]])
    mask = torch.tensor([[True, True, True]])
    got = value_targets(rewards, mask, torch.tensor([[0.3, -2.0, 5.0]]), ENDED, Options(lam=1.0))
    torch.testing.assert_close(got, torch.tensor([[1.25, 1.25, 1.0]]))


def test_advantages_are_normalised_gae():
    rewards, values = draw(torch.float32)
    cut, options = torch.zeros(3, dtype=torch.bool), Options()
    got = compute_advantages(rewards, GAPS, torch.zeros(3), values, cut, options)[GAPS]
    raw = gae(rewards, GAPS, values, cut, options)[GAPS]
    want = (raw - raw.mean()) / (raw.std(correction=0) + 1e-4)
    torch.testing.assert_close(got, want)


def test_advantages_and_targets_ignore_what_is_masked():
    rewards, values = draw()
    cut, options = torch.tensor([True, False, True]), Options()
    junk_rewards, junk_values = (x.masked_fill(~GAPS, NAN) for x in (rewards, values))
    for function in (gae, value_targets):
        got = function(junk_rewards, GAPS, junk_values, cut, options)
        want = function(rewards, GAPS, values, cut, options)
        assert torch.equal(got, want)
        assert (got[~GAPS] == 0).all()


def loss_of(ratio, advantages, values, old_values, targets, mask=None, **settings):
    """Loss, gradients of log-probs and values, metrics; π / π_old is `ratio`, from π_old = 0.2."""
    denominator, options = settings.pop("denominator", 1.0), Options(**settings)
    old = torch.full_like(ratio, math.log(0.2))
    logprobs, values = (old + ratio.log()).requires_grad_(), values.clone().requires_grad_()
    mask = torch.ones_like(ratio, dtype=torch.bool) if mask is None else mask
    weights = torch.where(mask, 1.0, NAN)
    loss, metrics = compute_loss(
        logprobs, old, advantages, mask, weights, options, denominator, values, old_values, targets
    )
    loss.backward()
    return loss.item(), logprobs.grad, values.grad, metrics


CASES = {
    # ratio, advantage: loss, gradient of the log-prob (-A · ratio, or 0 where clipped)
    "at 1": (1.0, 2.0, -2.0, -2.0),
    "high, good: clipped": (1.5, 2.0, -2.4, 0.0),
    "high, bad: pushed down": (1.5, -2.0, 3.0, 3.0),
    "low, good: pushed up": (0.5, 2.0, -1.0, -1.0),
    "low, bad: clipped": (0.5, -2.0, 1.6, 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_clip_in_each_case(case):
    ratio, advantage, want_loss, want_gradient = CASES[case]
    zero = torch.zeros(1)  # the value is right: no value loss
    loss, gradient, _, metrics = loss_of(
        torch.tensor([ratio]), torch.tensor([advantage]), zero, zero, zero, clip=0.2
    )
    assert loss == pytest.approx(want_loss, abs=1e-6)
    assert gradient.item() == pytest.approx(want_gradient, abs=1e-6)
    if want_gradient == 0:
        assert gradient.item() == 0  # not nearly
    stopped = metrics["clip/low_fraction"] + metrics["clip/high_fraction"]
    assert stopped == (want_gradient == 0)


VALUE_CASES = {
    # value, old value, target: larger of both squared errors, gradient of half of it
    "within the clip": (1.25, 1.0, 2.0, 0.75**2, -0.75),
    "beyond it, towards the target: stopped": (2.0, 1.0, 3.0, 1.5**2, 0.0),
    "beyond it, away from the target: pulled back": (0.0, 1.0, 3.0, 3.0**2, -3.0),
}


@pytest.mark.parametrize("case", VALUE_CASES)
def test_value_clip_in_each_case(case):
    value, old_value, target, error, want_gradient = VALUE_CASES[case]
    numbers = (torch.tensor([x]) for x in (value, old_value, target))
    loss, _, gradient, metrics = loss_of(
        torch.ones(1), torch.zeros(1), *numbers, value_clip=0.5, value_coef=0.2
    )
    assert loss == pytest.approx(0.2 * error / 2, abs=1e-6)
    assert gradient.item() == pytest.approx(0.2 * want_gradient, abs=1e-6)
    assert metrics["value/loss"] == pytest.approx(error / 2, abs=1e-6)


def test_value_clip_0_is_no_limit():
    numbers = (torch.tensor([x]) for x in (2.0, 1.0, 3.0))
    _, _, gradient, _ = loss_of(
        torch.ones(1), torch.zeros(1), *numbers, value_clip=0.0, value_coef=1.0
    )
    assert gradient.item() == -1


def test_value_coef_0_leaves_the_values_alone():
    numbers = (torch.tensor([x]) for x in (2.0, 1.0, 3.0))
    loss, _, gradient, _ = loss_of(torch.ones(1), torch.ones(1), *numbers, value_coef=0.0)
    assert loss == pytest.approx(-1, abs=1e-6)
    assert gradient.item() == 0


@pytest.mark.parametrize("value_clip", [0.0, 0.5])
def test_masked_tokens_never_matter(value_clip):
    mask = torch.tensor([[True, False], [False, True]])
    junk = torch.where(mask, 1.0, NAN)
    loss, gradient, value_gradient, metrics = loss_of(
        junk, 3 * junk, junk, junk, 2 * junk, mask,
        denominator=2, value_clip=value_clip, value_coef=1.0,
    )  # fmt: skip
    assert loss == pytest.approx(-3 + 0.5, abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([[-1.5, 0], [0, -1.5]]))
    torch.testing.assert_close(value_gradient, torch.tensor([[-0.5, 0], [0, -0.5]]))
    assert not any(math.isnan(value) for value in metrics.values())


def test_micro_batches_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(5, 5, 4, generator=generator)
    tensors[0] = 0.5 + torch.rand(5, 4, generator=generator)  # ratios, on both sides of the clip
    mask = torch.rand(5, 4, generator=generator) < 0.6
    whole = loss_of(*tensors, mask, denominator=11)
    parts = [
        loss_of(*tensors[:, rows], mask[rows], denominator=11)
        for rows in torch.arange(5).split([1, 3, 1])
    ]
    assert sum(part[0] for part in parts) == pytest.approx(whole[0], abs=1e-6)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([part[i] for part in parts]), whole[i])
    for name, value in whole[3].items():
        assert sum(part[3][name] for part in parts) == pytest.approx(value, abs=1e-6)
