"""Token log-probs, masked statistics, KL and importance weights, against sums done by hand."""

import math

import pytest
import torch

from algorithms import common
from algorithms.common import (
    importance_weights,
    kl_k3,
    masked_mean,
    normalize,
    surrogate_metrics,
    token_logprobs,
)

NAN, INF = float("nan"), float("inf")
IDS = torch.tensor([[3, 1, 4, 1, 0], [2, 0, 4, 3, 1]])
# each sequence's first and last predicted token are sampled in one of the rows
MASK = torch.tensor([[True, True, False, True], [False, True, True, True]])
EDGES = torch.tensor([[True, False, False, True], [False, False, False, True]])


def small_head(seed=0):
    """Hidden states [2, 5, 3] and a head [5 words, 3], both leaves that take gradients."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 5, 3, generator=generator).requires_grad_()
    return hidden, torch.randn(5, 3, generator=generator).requires_grad_()


def by_hand(hidden, head, mask, temperature):
    """The same by loops: the hidden state at t scores the token at t+1."""
    logprobs, entropy = torch.zeros(2, 4), torch.zeros(2, 4)
    for b in range(2):
        for t in range(4):
            if mask[b, t]:
                row = torch.log_softmax(hidden[b, t] @ head.T / temperature, -1)
                logprobs[b, t] = row[IDS[b, t + 1]]
                entropy[b, t] = -(row.exp() * row).sum()
    return logprobs, entropy


@pytest.mark.parametrize("mask", [MASK, EDGES, torch.ones(2, 4, dtype=torch.bool)])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("chunk", [1, 2, 4096])
def test_token_logprobs_equal_the_plain_shift_and_gather(mask, temperature, chunk, monkeypatch):
    monkeypatch.setattr(common, "CHUNK", chunk)
    hidden, head = small_head()
    got = token_logprobs(hidden, IDS, mask, lambda h: h @ head.T, temperature)
    want = by_hand(hidden, head, mask, temperature)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    pull = torch.linspace(-1, 2, 8).view(2, 4)  # an uneven gradient, through both results
    got_grads = torch.autograd.grad((got[0] * pull + got[1] * pull**2).sum(), (hidden, head))
    want_grads = torch.autograd.grad((want[0] * pull + want[1] * pull**2).sum(), (hidden, head))
    torch.testing.assert_close(got_grads, want_grads, atol=1e-5, rtol=0)


def test_token_logprobs_of_even_logits_are_minus_log_of_the_vocabulary():
    hidden = torch.zeros(2, 5, 3)
    logprobs, entropy = token_logprobs(hidden, IDS, MASK, lambda h: h @ torch.ones(3, 5))
    assert logprobs[MASK].tolist() == pytest.approx([-math.log(5)] * 6)
    assert entropy[MASK].tolist() == pytest.approx([math.log(5)] * 6)


def test_token_logprobs_are_zero_off_the_mask_and_take_no_gradient_there():
    hidden, head = small_head()
    logprobs, entropy = token_logprobs(hidden, IDS, MASK, lambda h: h @ head.T)
    assert (logprobs[~MASK] == 0).all() and (entropy[~MASK] == 0).all()
    (logprobs + entropy).sum().backward()
    reached = hidden.grad.abs().sum(-1) > 0
    assert torch.equal(reached[:, :4], MASK)
    assert not reached[:, 4].any()  # the last position predicts nothing


def test_token_logprobs_make_logits_only_for_sampled_tokens_in_chunks(monkeypatch):
    monkeypatch.setattr(common, "CHUNK", 4)
    hidden, head = small_head()
    sizes = []

    def to_logits(h):
        sizes.append(len(h))
        return h @ head.T

    token_logprobs(hidden, IDS, MASK, to_logits)
    assert sizes == [4, 2]  # 6 tokens were sampled, of 10 positions


def test_token_logprobs_of_half_precision_logits_are_float32():
    hidden, head = (x.detach().bfloat16() for x in small_head())
    logprobs, entropy = token_logprobs(hidden, IDS, MASK, lambda h: h @ head.T)
    want, _ = by_hand(hidden, head, MASK, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, want, atol=0.05, rtol=0)


def test_token_logprobs_of_nothing_sampled_are_zero():
    hidden, head = small_head()
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    logprobs, entropy = token_logprobs(hidden, IDS, nothing, lambda h: h @ head.T)
    assert torch.equal(logprobs, torch.zeros(2, 4)) and torch.equal(entropy, torch.zeros(2, 4))


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_masked_mean_ignores_what_is_masked(junk):
    values = torch.tensor([1.0, junk, 4.0], requires_grad=True)
    mean = masked_mean(values, torch.tensor([True, False, True]))
    mean.backward()
    assert mean.item() == 2.5
    assert values.grad.tolist() == [0.5, 0, 0.5]


def test_masked_mean_of_nothing_is_zero():
    assert masked_mean(torch.tensor([NAN, 3.0]), torch.tensor([False, False])).item() == 0


def test_normalize_gives_mean_0_and_deviation_1_over_the_mask_and_0_off_it():
    values = torch.tensor([[3.0, 5.0, NAN], [INF, 10.0, -2.0]])
    mask = values.isfinite()
    normal = normalize(values, mask)
    assert (normal[~mask] == 0).all()
    assert normal[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert normal[mask].std(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert normal.argmax() == 4 and normal.argmin() == 5  # the order is kept


def test_normalize_by_hand():
    normal = normalize(torch.tensor([2.0, 6.0]), torch.tensor([True, True]), eps=2.0)
    assert normal.tolist() == [-0.5, 0.5]  # (2 - 4) / (2 + eps)


def test_normalize_without_spread_is_zero():
    assert normalize(torch.tensor([7.0, 7.0]), torch.tensor([True, True])).tolist() == [0, 0]


def test_kl_k3_by_hand():
    # r = other / π = 2 and 1/2: r - 1 - log r
    pi, other = torch.tensor([0.25, 0.5]).log(), torch.tensor([0.5, 0.25]).log()
    assert kl_k3(pi, other).tolist() == pytest.approx([1 - math.log(2), -0.5 + math.log(2)])


def test_kl_k3_is_never_negative():
    logprobs = torch.linspace(-9, 0, 50)
    assert (kl_k3(logprobs[:, None], logprobs[None]) >= -1e-6).all()


def test_kl_k3_is_unbiased():
    pi, other = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.3, 0.3, 0.4]).log()
    exact = (pi.exp() * (pi - other)).sum().item()
    assert (pi.exp() * kl_k3(pi, other)).sum().item() == pytest.approx(exact)


def test_importance_weights_are_trainer_over_sampler_up_to_the_cap():
    trainer = torch.tensor([0.3, 0.2, 0.9], requires_grad=True)
    sampler = torch.tensor([0.2, 0.4, 0.1])
    weights = importance_weights(trainer.log(), sampler.log(), cap=2.0)
    assert weights.tolist() == pytest.approx([1.5, 0.5, 2.0])
    assert not weights.requires_grad


def test_importance_weights_with_cap_0_are_ones():
    weights = importance_weights(torch.tensor([-1.0, -9.0]), torch.tensor([-5.0, -1.0]), cap=0)
    assert weights.tolist() == [1, 1]


def test_surrogate_metrics_count_the_tokens_that_the_clip_stops():
    ratio = torch.tensor([0.5, 0.5, 0.85, 1.25, 1.25, 1.5, 1.5])
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    mask = torch.tensor([True] * 6 + [False])
    old = torch.full((7,), -1.0)
    got = surrogate_metrics(
        ratio, old + ratio.log(), old, advantages, mask, clip_low=0.2, clip_high=0.3, denominator=8
    )
    assert got["clip/low_fraction"] == 1 / 8  # 0.5 with -1; 0.85 is within
    assert got["clip/high_fraction"] == 1 / 8  # 1.5 with +1; 1.25 is within, the last masked
    k3 = sum(r - 1 - math.log(r) for r in [0.5, 0.5, 0.85, 1.25, 1.25, 1.5])
    assert got["kl/old_policy"] == pytest.approx(k3 / 8, abs=1e-6)


def test_surrogate_metrics_ignore_what_is_masked():
    junk, mask = torch.tensor([NAN, 1.0]), torch.tensor([False, True])
    got = surrogate_metrics(junk, junk.log(), junk.log(), junk, mask, 0.2, 0.2, denominator=1)
    assert got == {"clip/low_fraction": 0, "clip/high_fraction": 0, "kl/old_policy": 0}
