"""Token log-probs, returns, masked statistics, weights and metrics, against sums done by hand."""

from functools import partial

import pytest
import torch

from algorithms.token_logprobs import token_logprobs
from algorithms.tokens import Tokens, group_mean, group_std, minus, sums, token_weights
from core.sampler import SamplingParams, draw

IDS = torch.tensor([[3, 1, 4, 1, 0], [2, 0, 4, 3, 1]])
MASK = torch.tensor([[True, True, False, True], [False, True, True, True]])
NODES = torch.arange(10).view(2, 5)  # of their hidden states


def small_head():
    """Hidden states [10, 3] of two sequences of 5, and a head [5 words, 3]; both take gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 3, generator=generator).requires_grad_()
    return hidden, torch.randn(5, 3, generator=generator).requires_grad_()


def places(mask):
    """Where the tokens of the mask are predicted from, and their ids."""
    return NODES[:, :-1][mask], IDS[:, 1:][mask]


def by_hand(hidden, head, mask, temperature, kept_ids=None):
    """The same by loops: the hidden state at t scores the token at t+1."""
    rows = []
    for n, (b, t) in enumerate(mask.nonzero().tolist()):
        logits = hidden[NODES[b, t]] @ head.T / temperature
        ids = (kept_ids and kept_ids[n]) or list(range(5))
        row = logits[ids] - logits[ids].logsumexp(0)
        entropy = -(row.exp() * row).sum()
        varentropy = (row.exp() * (-row - entropy) ** 2).sum().detach()
        rows.append(torch.stack([row[ids.index(IDS[b, t + 1])], entropy, varentropy]))
    return tuple(torch.stack(rows, 1))


@pytest.mark.parametrize(
    "mask, temperature, chunk, kept_ids, sizes",
    [
        (MASK, 0.5, 2, None, [2, 2, 2]),  # 6 tokens were sampled, of 10 positions
        # top-k or top-p kept these ids at each of the six places, the sampled one among them
        (MASK, 0.5, 4, [[1, 2], [4], None, [0, 1, 4], [0, 1, 3, 4], [1, 2, 3]], [4, 2]),
        (MASK & False, 1.0, 4, None, []),
    ],
)
def test_token_logprobs_equal_the_plain_shift_and_gather(mask, temperature, chunk, kept_ids, sizes):
    (hidden, head), chunks = small_head(), []

    def to_logits(h):
        chunks.append(len(h))
        return h @ head.T

    got = token_logprobs(hidden, *places(mask), to_logits, temperature, chunk, kept_ids)
    assert chunks == sizes and [len(x) for x in got] == [sum(sizes)] * 3
    if not sizes:
        return
    want = by_hand(hidden, head, mask, temperature, kept_ids)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    pull = torch.linspace(-1, 2, len(got[0]))  # an uneven gradient, through log-probs and entropies
    got_grads, want_grads = (
        torch.autograd.grad((x * pull + y * pull**2).sum(), (hidden, head))
        for x, y, _ in (got, want)
    )
    torch.testing.assert_close(got_grads, want_grads, atol=1e-5, rtol=0)
    rest = to_logits, temperature, chunk, kept_ids
    _, entropy, _ = token_logprobs(hidden, *places(mask), *rest, entropy_grad=False)
    assert not entropy.requires_grad  # and so it needs no backward pass


def test_the_trainer_has_the_samplers_distribution_of_16_bit_logits():
    """Both make logits float32 before they divide them by the temperature: quotients of 8 bits
    would be up to 0.1 nats off, in the log-prob of a token that both agree on."""
    logits = (torch.randn(64, 5, generator=torch.Generator().manual_seed(0)) * 20).bfloat16()
    uniform, places = torch.linspace(0, 0.98, 64, dtype=torch.float64), torch.arange(64)
    drawn, sampled = draw(logits, SamplingParams(1, temperature=0.7), uniform)
    trained, *_ = token_logprobs(logits, places, drawn, lambda hidden: hidden, 0.7)
    assert len({*drawn.tolist()}) > 1 and torch.equal(trained, sampled)
    rounded = (logits / 0.7).float().log_softmax(-1)[places, drawn]
    assert (rounded - sampled).abs().max() > 0.01


# Rollouts of 1, 2, 3 and no tokens, at most 8; the last counts, although it has none. The first and
# the third are a group.
ROLLOUT = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 3])
TRAINED = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1, 0]).bool()
GROUPS = torch.tensor([4, 7, 4, 9])


@pytest.mark.parametrize(
    "aggregation, want, want_of_two",  # each token of the rollouts of 1, 2, 3; of the first two
    [
        ("token", [1 / 6, 1 / 6, 1 / 6], [1 / 3, 1 / 3]),
        ("sequence", [1 / 4, 1 / 8, 1 / 12], [1 / 2, 1 / 4]),
        ("prompt", [1 / 12, 1 / 6, 1 / 12], [1 / 2, 1 / 4]),  # 3 groups, of 4, 2 and no tokens
        ("constant", [1 / 32, 1 / 32, 1 / 32], [1 / 16, 1 / 16]),
    ],
)
def test_token_weights_by_hand(aggregation, want, want_of_two):
    batch = Tokens(rollout=ROLLOUT, in_loss=TRAINED, group=GROUPS[ROLLOUT])
    alone = 1 / 8 if aggregation == "constant" else 1  # one token in all
    for rollouts, weights in (([0, 1, 2, 3], want), ([0, 1], want_of_two), ([0], [alone])):
        want = torch.tensor(weights + [0.0] * (4 - len(weights)))
        got = token_weights(batch, rollouts, aggregation, 8)
        torch.testing.assert_close(got, TRAINED * want[ROLLOUT])
    batch.in_loss = TRAINED & False
    assert not token_weights(batch, [0, 1, 2, 3], aggregation, 8).any()
    with pytest.raises(AttributeError, match="Options: needs = "):
        _ = batch.old_logprobs


def test_sums_means_and_deviations_of_groups():
    x, ids = torch.tensor([1.0, 4.0, 3.0, 9.0]), torch.tensor([5, 2, 5, 7])
    assert group_mean(x, ids).tolist() == [2, 4, 2, 9]
    assert group_std(x, ids).tolist() == pytest.approx([2**0.5, 0, 2**0.5, 0])  # of a sample
    x, ids = torch.tensor([1e8, 1.0, -1e8, 5.0]), torch.tensor([0, 0, 0, 2])
    assert sums(x, ids).tolist() == [1, 0, 5] and sums(x, ids).dtype == torch.float32


@pytest.mark.parametrize("value, baseline, want", [
    (3.0, 5.0, -2), (5.0, 5.0, 0), (0.0, 1e-30, -1e-30),
    *((size, size * (1 + sign * 5e-8), 0) for size in (1e-9, -1.0, 1e15) for sign in (-1, 1)),
    *((size, size * (1 - 2e-7), size * 2e-7) for size in (1e-9, -1.0, 1e15)),
])  # fmt: skip
def test_minus_is_0_up_to_rounding_and_no_further(value, baseline, want):
    value, baseline = torch.tensor([value, baseline], dtype=torch.float64)
    assert minus(value, baseline).item() == pytest.approx(want, rel=1e-6, abs=0)


def test_gradients_of_tokens_with_one_prefix_add_up_to_the_same_bits_each_time(request):
    """With kept ids, each token has a row of logits of its own, and many have one prefix."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(4)
    head, hidden = torch.randn(128, 5), torch.randn(2, 128)
    nodes, ids = torch.zeros(4000, dtype=torch.int64), torch.randint(5, (4000,))
    found = set()
    for _ in range(10):
        inputs = hidden.clone().requires_grad_()
        logprobs, *_ = token_logprobs(
            inputs, nodes, ids, lambda h: h @ head, kept_ids=[[0, 1, 2, 3, 4]] * 4000
        )
        (logprobs * torch.linspace(-1, 1, 4000)).sum().backward()
        found.add(inputs.grad.numpy().tobytes())
    assert len(found) == 1
