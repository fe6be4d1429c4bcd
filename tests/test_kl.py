"""What k1, k2 and k3 estimate, and what each of them teaches, in the loss and in the reward.

Policies over four actions: expectations are sums over the actions, each weighed by its probability.
"""

import math

import pytest
import torch

import train
from algorithms import reinforce
from algorithms.common import Micro
from algorithms.kl import kl_estimate, weighted_kl
from core.batching import MicroBatch, RolloutBatch

POLICY = [1.2, -0.7, 0.4, -0.1]  # logits
REFERENCE = torch.tensor([-0.5, 0.6, 0.3, 0.9]).log_softmax(-1)
OLD = torch.tensor([0.5, 0.1, -0.6, 0.2]).log_softmax(-1)
SAMPLER = torch.tensor([0.4, 0.2, -0.5, 0.2]).log_softmax(-1)


def policy():
    """The logits, a leaf, and their log-probs."""
    logits = torch.tensor(POLICY, requires_grad=True)
    return logits, logits.log_softmax(-1)


def kl(p, q):
    """KL(p ‖ q) of two distributions, from their log-probs."""
    return (p.exp() * (p - q)).sum()


def gradient(value, logits):
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def test_kl_estimates_by_hand():
    # π = 1/4 and 1/2, other = 1/2 and 1/4: d = -log 2 and log 2, exp(-d) = 2 and 1/2
    pi, other, two = torch.tensor([0.25, 0.5]).log(), torch.tensor([0.5, 0.25]).log(), math.log(2)
    want = {"k1": [-two, two], "k2": [two**2 / 2] * 2, "k3": [1 - two, -0.5 + two]}
    for kind, numbers in want.items():
        assert kl_estimate(pi, other, kind).tolist() == pytest.approx(numbers, abs=1e-6)
    assert torch.equal(kl_estimate(pi, other), kl_estimate(pi, other, "k3"))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_loop_weights_kl_and_entropy_as_the_surrogate(kind):
    """`regularizers` on every action of π_old, with a sampler whose probabilities are others: the
    sampler's weight π_old / π_sampler and the ratio π / π_old give the expectation under π. The
    fifth token is masked."""
    logits, logprobs = policy()
    entropy = -(logprobs.exp() * logprobs).sum().expand(4)
    logprobs, other, old, sampler, entropy = (
        torch.nn.functional.pad(x[None], (0, 1), value=junk)
        for x, junk in (
            (logprobs, math.nan), (REFERENCE, -9.0), (OLD, 9.0), (SAMPLER, 0.0), (entropy, 7.0),
        )
    )  # fmt: skip
    micro = MicroBatch(
        input_ids=torch.zeros(1, 6), completion_mask=torch.arange(5)[None] < 4,
        index=torch.zeros(1, 5), nodes=torch.arange(6)[None], rows=[0], ref_logprobs=other,
        token_weights=sampler.exp(),
        old_logprobs=old, importance_weights=(old - sampler).exp(),
    )  # fmt: skip
    cfg = train.Config(kl_coef=0.3, kl_estimator=kind, entropy_coef=0.2)
    loss, sums = train.regularizers(cfg, reinforce, logprobs, entropy, micro)
    exact = 0.3 * kl(logprobs[0, :4], REFERENCE) - 0.2 * entropy[0, 0]
    torch.testing.assert_close(gradient(loss, logits), gradient(exact, logits), atol=1e-6, rtol=0)
    if kind != "k2":
        assert loss.item() == pytest.approx(exact.item(), abs=1e-6)
    ratio = (logprobs[0, :4] - OLD).exp()
    k3 = weighted_kl(logprobs[0, :4], ratio, REFERENCE, "k3").sum().item()
    assert sums == {"kl/reference": pytest.approx(k3)}  # a sum over tokens, without their weights
    cfg = train.Config(kl_coef=0.3, kl_in="reward", kl_estimator=kind)  # measured, and no loss
    loss, sums = train.regularizers(cfg, reinforce, logprobs, entropy, micro)
    assert loss == 0 and sums == {"kl/reference": pytest.approx(k3)}
    micro.ref_logprobs = None
    assert train.regularizers(cfg, reinforce, logprobs, entropy, micro)[1] == {}


def test_in_the_reward_k1_teaches_the_kl_and_the_others_do_not():
    logits, logprobs = policy()
    exact = gradient(kl(logprobs, REFERENCE), logits)
    logprobs = logprobs[:, None]
    old, zeros = logprobs.detach(), torch.zeros(4, 1)
    mask, turns, rows = zeros == 0, zeros.long(), zeros[:, 0].long()
    batch = RolloutBatch(
        sequences=[], completion_mask=mask, env_rewards=zeros, completion_lengths=turns,
        turns=turns, env_reward_parts=zeros, hit_token_limit=~mask, sampler_logprobs=old,
        group_ids=rows, old_logprobs=old, ref_logprobs=REFERENCE[:, None],
    )  # fmt: skip
    micro = Micro(completion_mask=mask, old_logprobs=old, importance_weights=torch.ones(4, 1),
                  token_weights=old.exp())  # fmt: skip
    for kind in ("k1", "k2", "k3"):
        options = reinforce.Options(baseline="none")
        cfg = train.Config(
            algo="reinforce", options=options, kl_coef=1.0, kl_in="reward", kl_estimator=kind
        )
        train.shape_rewards(cfg, batch)
        micro.advantages = reinforce.compute_advantages(batch, options)
        loss, _ = reinforce.compute_loss(logprobs, None, micro, options)
        off = (gradient(loss, logits) - exact).abs().max().item()
        assert off < 1e-6 if kind == "k1" else off > 0.3 * exact.abs().max()
