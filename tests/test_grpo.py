"""GRPO: advantages within the group, its clips and DPPO's; test_trl.py has other variants."""

import math

import pytest
import torch

from algorithms import grpo
from algorithms.grpo import EPS, Options, compute_advantages
from algorithms.tokens import Tokens, turns_of
from algorithms.variants import cispo, dppo, gspo


def of_returns(returns, group_ids, scale):
    """The advantages of rollouts of one token."""
    rollout = torch.arange(len(returns))
    batch = Tokens(rewards=torch.tensor(returns), rollout=rollout, turn=rollout * 0,
                   group=torch.tensor(group_ids), discounts=torch.ones(len(returns)))  # fmt: skip
    return compute_advantages(batch, Options(scale_rewards=scale)).tolist()


@pytest.mark.parametrize(
    "scale, small, large",
    [
        ("none", 1, 1),
        ("group", math.sqrt(0.5) + EPS, math.sqrt(18) + EPS),  # of a sample: of 1, 0; of -2, -8
        # all: mean -0.9, squares 3.61, 1.21, 0.81, 50.41, 29.16
        ("batch", *[math.sqrt(85.2 / 4) + EPS] * 2),
        ("mean", 0.5, 5),
    ],
)
def test_advantages_are_returns_minus_the_mean_of_the_group_over_a_deviation(scale, small, large):
    got = of_returns([1.0, -2.0, 0.0, -8.0, 4.5], [4, 9, 4, 9, 7], scale)
    want = [0.5 / small, 3 / large, -0.5 / small, -3 / large, 0]
    assert got == pytest.approx(want, abs=1e-6)
    # three float32 returns of 1000.1 have a float32 mean that is 6e-5 away from them
    assert of_returns([1000.1] * 3 + [0.0] * 3, [0, 0, 0, 1, 1, 1], scale) == [0.0] * 6
    assert of_returns([3.0], [0], scale) == [0]
    # two rewards of 0.1 and 0.2, or one of 0.3
    batch = Tokens(
        rewards=torch.tensor([0.1, 0.2, 0.3]), rollout=torch.tensor([0, 0, 1]),
        turn=torch.tensor([0, 0, 0]), group=torch.tensor([0, 0, 0]), discounts=torch.ones(3),
    )  # fmt: skip
    assert turns_of(batch).returns.unique().numel() == 2
    assert not compute_advantages(batch, Options(scale_rewards=scale)).any()
    # rewards that cancel are a return of 0; in float32 these four add up to 7e-9
    batch = Tokens(rewards=torch.tensor([-0.1, -0.1, -0.1, 0.3, 0.0]), discounts=torch.ones(5),
                   rollout=torch.tensor([0, 0, 0, 0, 1]), turn=torch.zeros(5).long(),
                   group=torch.zeros(5).long())  # fmt: skip
    assert batch.rewards[:4].double().sum() != 0
    assert not compute_advantages(batch, Options(scale_rewards=scale)).any()


def test_the_deviation_of_a_turn_in_the_batch_is_that_of_the_rollouts_that_have_it():
    """First turns that return 3, 1 and 2; second ones, which only two rollouts have, 3 and 1."""
    batch = Tokens(
        rewards=torch.tensor([0.0, 3.0, 0.0, 1.0, 2.0]), rollout=torch.tensor([0, 0, 1, 1, 2]),
        turn=torch.tensor([0, 1, 0, 1, 0]), group=torch.zeros(5).long(), discounts=torch.ones(5),
    )  # fmt: skip
    got = compute_advantages(batch, Options(scale_rewards="batch"))
    first, second = 1 / (1 + EPS), 1 / (math.sqrt(2) + EPS)
    want = torch.tensor([first, second, -first, -second, 0])
    torch.testing.assert_close(got, want)


def test_scalerl_takes_the_deviation_of_the_batch_and_the_mean_of_each_group():
    options = cispo.Options("scalerl").with_preset()
    assert (options.scale_rewards, options.aggregation) == ("batch", "prompt")


def loss_of(ratio, advantage, **settings):
    """Of one token: loss, gradient of the log-prob and metrics; π / π_old is `ratio`."""
    one = torch.ones(1)
    old = one * math.log(0.2)
    logprobs = (old + math.log(ratio)).requires_grad_()
    tokens = Tokens(old_logprobs=old, logprobs=logprobs, advantages=one * advantage,
                    importance_weights=one, token_weights=one, in_loss=one > 0)  # fmt: skip
    loss, metrics = grpo.compute_loss(tokens, Options(**settings).with_preset())
    loss.backward()
    return loss.item(), logprobs.grad.item(), metrics


@pytest.mark.parametrize(
    "ratio, advantage, want_loss, want_gradient",
    [
        # -min(ρ A, clip(ρ) A); the gradient of the log-prob is -A ρ, or 0 where clipped
        (1.5, 2.0, -2.6, 0.0),  # high, good: clipped at 1.3
        (1.5, -2.0, 3.0, 3.0),  # high, bad: pushed down
        (0.5, 2.0, -1.0, -1.0),  # low, good: pushed up
        (0.5, -2.0, 1.6, 0.0),  # low, bad: clipped at 0.8
        (1.25, 2.0, -2.5, -2.5),  # within
    ],
)
def test_clip_in_each_case(ratio, advantage, want_loss, want_gradient):
    clips = {"loss_type": "grpo", "clip_low": 0.2, "clip_high": 0.3}
    loss, gradient, metrics = loss_of(ratio, advantage, **clips)
    assert loss == pytest.approx(want_loss, abs=1e-6)
    assert gradient == pytest.approx(want_gradient, abs=1e-6)
    stopped = want_gradient == 0
    high, low = metrics["clip/high_fraction"], metrics["clip/low_fraction"]
    assert (high, low) == (stopped and ratio > 1, stopped and ratio < 1)
    assert metrics["kl/approx"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)


def test_the_ratio_of_gspo_is_the_geometric_mean_over_the_tokens_in_the_loss():
    """Ratios of 2 and 8, and one of 100 that is out of the loss."""
    one, in_loss = torch.ones(3), torch.tensor([True, True, False])
    tokens = Tokens(in_loss=in_loss, sequence=torch.zeros(3).long(), old_logprobs=-one,
                    logprobs=torch.tensor([2.0, 8.0, 100.0]).log() - 1, advantages=one,
                    importance_weights=one, token_weights=in_loss / 2)  # fmt: skip
    loss, metrics = gspo.compute_loss(tokens, gspo.Options(clip_high=9.0))
    assert loss.item() == pytest.approx(-4)
    assert metrics["kl/approx"] == pytest.approx(2 - 1 - math.log(2) + 8 - 1 - math.log(8))


@pytest.mark.parametrize(
    "drop, sampled, now, advantage, dropped",
    [
        ("further", 0.6, 0.9, 1.0, True),  # a ratio of 1.5: GRPO's clip at 1.28 drops it, too
        ("further", 0.001, 0.1, 1.0, False),  # a ratio of 100, but a small change
        ("further", 0.6, 0.9, -1.0, False),  # the step takes the change back
        ("further", 0.6, 0.3, -1.0, True),
        ("further", 0.6, 0.3, 0.0, False),
        ("further", 0.6, 0.41, -1.0, False),  # 0.19, and the limit is 0.2
        ("any", 0.6, 0.9, 1.0, True),
        ("any", 0.6, 0.9, -1.0, True),  # though the step takes the change back
        ("any", 0.6, 0.3, -1.0, True),
        ("any", 0.6, 0.3, 1.0, True),
        ("any", 0.6, 0.79, 1.0, False),
    ],
)
def test_dppo_drops_a_token_whose_probability_has_moved_too_far(
    drop, sampled, now, advantage, dropped
):
    """π_old lies between both; the difference is that to the sampler."""
    old = torch.tensor([math.log((sampled + now) / 2)])
    logprobs = torch.tensor([math.log(now)], requires_grad=True)
    one = torch.ones(1)
    tokens = Tokens(in_loss=one > 0, old_logprobs=old, logprobs=logprobs,
                    advantages=one * advantage,
                    sampler_logprobs=torch.tensor([math.log(sampled)]),
                    importance_weights=one, token_weights=one)  # fmt: skip
    assert dppo.Options() == dppo.Options(limit=0.2, drop="further")
    options = dppo.Options(drop=drop)
    loss, metrics = dppo.compute_loss(tokens, options)
    loss.backward()
    ratio = now / ((sampled + now) / 2)
    assert loss.item() == pytest.approx(0.0 if dropped else -ratio * advantage, abs=1e-6)
    assert logprobs.grad.item() == pytest.approx(loss.item(), abs=1e-6)
    counted = metrics["clip/high_fraction"], metrics["clip/low_fraction"]
    assert counted == (dropped and now > sampled, dropped and now < sampled)
    tokens.in_loss = ~tokens.in_loss  # tokens out of the loss are not counted
    metrics = dppo.compute_loss(tokens, options)[1]
    assert metrics["clip/high_fraction"] == metrics["clip/low_fraction"] == 0
