"""The optimizer that ranks divide among them, here with one rank; test_distributed.py has two."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.extras import sharded_optimizer
from core.extras.sharded_optimizer import ShardedAdamW, cut_into_buckets
from core.optimizer import MasterAdamW

SHAPES = [(30, 25), (7, 3), (1,), (90, 25), (13,), (700,), (2, 5, 11), (2657,)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch):
    monkeypatch.setattr(sharded_optimizer, "MIN_BUCKET", 2**10)


def make_weights():
    generator = torch.Generator().manual_seed(0)
    weights = [
        nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(DTYPES[n % 3]))
        for n, shape in enumerate(SHAPES)
    ]
    weights[3] = nn.Parameter(weights[3].detach().t().contiguous().t())  # rows are not contiguous
    return weights


def train(kind, steps, weights=None, state=None):
    """Steps of two passes; the gradients of step 1 overflow. Weight 4 has no gradient, and the last
    one, which has buckets of its own, none in step 3."""
    weights = [nn.Parameter(w.detach().clone()) for w in weights or make_weights()]
    groups = [{"params": weights[:6], "lr": 1e-3}, {"params": weights[6:], "lr": 1e-2}]
    optimizer, norms = kind(groups, loss_scale=2.0**10, weight_decay=0.0), []
    if state:
        optimizer.load_state_dict(state)
    optimizer.backward(sum(w.float().sum() for w in weights), reduce=False)  # as to probe memory
    optimizer.zero_grad()
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for _ in range(2):
            pull = [torch.randn(shape, generator=generator) for shape in SHAPES]
            terms = [(w.float() * g).sum() for w, g in zip(weights, pull, strict=True)]
            del terms[4], terms[len(terms) - (step == 3) :]
            optimizer.backward(sum(terms) * (torch.inf if step == 1 else 1.0))
        optimizer.sum_gradients()
        norm, stepped = optimizer.clip_and_step(50.0)
        norms.append(norm if stepped else 0.0)
    return weights, optimizer.state_dict(), norms


def test_pieces_of_weights_take_the_steps_of_the_whole_and_go_on_from_its_state():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole, _, norms = train(MasterAdamW, range(4))
        assert [norm > 0 for norm in norms] == [True, False, True, True]
        pieces, _, found = train(ShardedAdamW, range(4))
        assert found == pytest.approx(norms, rel=1e-5)
        resumed = [
            train(second, range(2, 4), *train(first, range(2))[:2])[0]
            for first, second in ((MasterAdamW, ShardedAdamW), (ShardedAdamW, MasterAdamW))
        ]
    finally:
        dist.destroy_process_group()
    for weights in (pieces, *resumed):
        for ours, theirs in zip(weights, whole, strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-5)
            # a rounding may differ here and there; the rest is equal
            assert (ours.float() - theirs.float()).abs().mean() < 1e-6
    assert torch.equal(pieces[4], make_weights()[4])


def test_each_element_has_one_owner():
    ranks = 3
    weights = make_weights()
    owners = {w: torch.zeros(w.numel(), dtype=torch.int64) for w in weights}
    for rank in range(ranks):
        for bucket in cut_into_buckets(weights, rank, ranks):
            for piece in bucket.pieces:
                owners[piece.weight][piece.owned] += 1
                values = piece.weight.detach().flatten()[piece.owned].float()
                assert torch.equal(values, piece.master.detach())
    assert all((count == 1).all() for count in owners.values())
