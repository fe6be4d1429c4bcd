"""GRPO's advantages; the loss of one token by hand, of all algorithms; test_trl.py has more."""

import math

import pytest
import torch

from algorithms import grpo, reinforce
from algorithms.grpo import EPS, Options, compute_advantages
from algorithms.tokens import Tokens, turns_of
from algorithms.variants import cispo, dppo, gspo


def of_tokens(rewards, rollout, turn, group, scale):
    """The advantages of tokens."""
    batch = Tokens(rewards=torch.tensor(rewards), rollout=torch.tensor(rollout),
                   turn=torch.tensor(turn), group=torch.tensor(group),
                   discounts=torch.ones(len(rewards)))  # fmt: skip
    assert turns_of(batch).returns.dtype == torch.float64
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
    def of_returns(returns, groups):
        return of_tokens(returns, range(len(returns)), [0] * len(returns), groups, scale)

    want = [0.5 / small, 3 / large, -0.5 / small, -3 / large, 0]
    got = of_returns([1.0, -2.0, 0.0, -8.0, 4.5], [4, 9, 4, 9, 7])
    assert got == pytest.approx(want, abs=1e-6)
    # three float32 returns of 1000.1 have a float32 mean that is 6e-5 away from them
    assert of_returns([1000.1] * 3 + [0.0] * 3, [0, 0, 0, 1, 1, 1]) == [0.0] * 6
    assert of_returns([3.0], [0]) == [0]
    # two rewards of 0.1 and 0.2, or one of 0.3, whose returns differ by rounding
    assert of_tokens([0.1, 0.2, 0.3], [0, 0, 1], [0] * 3, [0] * 3, scale) == [0] * 3
    # rewards that cancel are a return of 0; in float32 these four add up to 7e-9
    cancel = [-0.1, -0.1, -0.1, 0.3, 0.0]
    assert torch.tensor(cancel[:4]).double().sum() != 0
    assert of_tokens(cancel, [0, 0, 0, 0, 1], [0] * 5, [0] * 5, scale) == [0] * 5


def test_the_deviation_of_a_turn_in_the_batch_is_that_of_the_rollouts_that_have_it():
    """First turns that return 3, 1 and 2; second ones, which only two rollouts have, 3 and 1."""
    turns = [0, 0, 1, 1, 2], [0, 1, 0, 1, 0]
    got = of_tokens([0.0, 3.0, 0.0, 1.0, 2.0], *turns, [0] * 5, "batch")
    first, second = 1 / (1 + EPS), 1 / (math.sqrt(2) + EPS)
    assert got == pytest.approx([first, second, -first, -second, 0])


def test_scalerl_takes_the_deviation_of_the_batch_and_the_mean_of_each_group():
    options = cispo.Options("scalerl").with_preset()
    assert (options.scale_rewards, options.aggregation) == ("batch", "prompt")


GRPO = grpo.Options("grpo", clip_low=0.2, clip_high=0.3).with_preset()
PG, DPPO, ANY = reinforce.Options(), dppo.Options(limit=0.2), dppo.Options(limit=0.2, drop="any")


@pytest.mark.parametrize(
    "algorithm, options, old, now, sampled, advantage, want_loss, want_gradient, clipped",
    [  # probabilities of a token; the loss, and its gradient by the token's log-prob
        # -min(ρ A, clip(ρ) A); the gradient is -A ρ, or 0 where clipped
        (grpo, GRPO, 0.2, 0.3, 0.2, 2.0, -2.6, 0.0, "high"),  # ρ = 1.5, good: clipped at 1.3
        (grpo, GRPO, 0.2, 0.3, 0.2, -2.0, 3.0, 3.0, ""),  # bad: pushed down
        (grpo, GRPO, 0.2, 0.1, 0.2, 2.0, -1.0, -1.0, ""),  # ρ = 0.5, good: pushed up
        (grpo, GRPO, 0.2, 0.1, 0.2, -2.0, 1.6, 0.0, "low"),  # bad: clipped at 0.8
        (grpo, GRPO, 0.2, 0.25, 0.2, 2.0, -2.5, -2.5, ""),  # within
        (gspo, gspo.Options(), 0.2, 0.2, 0.2, 2.0, -2.0, -2.0, ""),
        # -sg[ρ] A log π, with CISPO up to 5, whatever the sign of A
        (cispo, cispo.Options(), 0.2, 0.3, 0.2, 2.0, -3 * math.log(0.3), -3.0, ""),
        (cispo, cispo.Options(), 0.1, 0.6, 0.1, -2.0, 10 * math.log(0.6), 10.0, "high"),
        (reinforce, PG, 0.1, 0.01, 0.1, -2.0, 0.2 * math.log(0.01), 0.2, ""),
        (reinforce, PG, 0.1, 0.9, 0.1, 2.0, -18 * math.log(0.9), -18.0, ""),
        # -ρ A, or 0 where the probability is too far from the sampler's
        (dppo, DPPO, 0.75, 0.9, 0.6, 1.0, 0.0, 0.0, "high"),
        (dppo, DPPO, 0.05, 0.1, 0.001, 1.0, -2.0, -2.0, ""),  # 100 times, but a small change
        (dppo, DPPO, 0.75, 0.9, 0.6, -1.0, 1.2, 1.2, ""),  # the step takes the change back
        (dppo, DPPO, 0.4, 0.3, 0.6, -1.0, 0.0, 0.0, "low"),
        (dppo, DPPO, 0.4, 0.3, 0.6, 0.0, 0.0, 0.0, ""),
        (dppo, DPPO, 0.5, 0.41, 0.6, -1.0, 0.82, 0.82, ""),  # 0.19, and the limit is 0.2
        (dppo, ANY, 0.75, 0.9, 0.6, -1.0, 0.0, 0.0, "high"),  # though it takes the change back
        (dppo, ANY, 0.4, 0.3, 0.6, 1.0, 0.0, 0.0, "low"),
        (dppo, ANY, 0.5, 0.79, 0.6, 1.0, -1.58, -1.58, ""),
    ],
)
def test_loss_and_gradient_of_a_token(
    algorithm, options, old, now, sampled, advantage, want_loss, want_gradient, clipped
):
    one = torch.ones(1)
    logprobs = (one * now).log().requires_grad_()
    tokens = Tokens(in_loss=one > 0, old_logprobs=(one * old).log(), logprobs=logprobs,
                    sampler_logprobs=(one * sampled).log(), advantages=one * advantage,
                    sequence=torch.zeros(1).long(), importance_weights=one * 5,
                    token_weights=one / 10)  # fmt: skip
    loss, metrics = algorithm.compute_loss(tokens, options)
    loss.backward()
    got = loss.item(), logprobs.grad.item(), *metrics.values()  # low, high and KL(π_old ‖ π)
    kl = now / old - 1 - math.log(now / old)
    want = want_loss / 2, want_gradient / 2, int(clipped == "low"), int(clipped == "high"), kl
    assert got == pytest.approx(want, abs=1e-5)
    tokens.in_loss = one > 1  # tokens out of the loss are not counted
    assert not any(algorithm.compute_loss(tokens, options)[1].values())


def test_the_ratio_of_gspo_is_the_geometric_mean_over_the_tokens_in_the_loss():
    """Ratios of 2 and 8, and one of 100 that is out of the loss."""
    one, in_loss = torch.ones(3), torch.tensor([True, True, False])
    tokens = Tokens(in_loss=in_loss, sequence=torch.zeros(3).long(), old_logprobs=-one,
                    logprobs=torch.tensor([2.0, 8.0, 100.0]).log() - 1, advantages=one,
                    importance_weights=one, token_weights=in_loss / 2)  # fmt: skip
    loss, metrics = gspo.compute_loss(tokens, gspo.Options(clip_high=9.0))
    assert loss.item() == pytest.approx(-4)
    assert metrics["kl/approx"] == pytest.approx(2 - 1 - math.log(2) + 8 - 1 - math.log(8))
