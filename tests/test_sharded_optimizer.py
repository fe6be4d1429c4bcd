"""Ranks that divide the optimizer among them train as one rank that has all of it.

This file, run as a program, imports torch once and then forks two ranks. The test compares what
they saved with one rank.
"""

import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from core import distributed
from core.extras import sharded_optimizer
from core.extras.sharded_optimizer import ShardedAdamW, cut_into_buckets
from core.optimizer import MasterAdamW

ROOT = Path(__file__).parent.parent
SHAPES = [(30, 25), (7, 3), (1,), (90, 25), (13,), (700,), (2, 5, 11), (2657,)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
UNUSED, HEAD_FROM = 4, 6  # a weight without gradient; the first of the second group
RANKS, STEPS, BUCKET = 2, 6, 2**10
OPTIONS = {"loss_scale": 2.0**10, "weight_decay": 0.0}


def make_weights():
    generator = torch.Generator().manual_seed(0)
    weights = [
        nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(DTYPES[n % 3]))
        for n, shape in enumerate(SHAPES)
    ]
    weights[3] = nn.Parameter(weights[3].detach().t().contiguous().t())  # rows are not contiguous
    return weights


def groups_of(weights):
    return [
        {"params": weights[:HEAD_FROM], "lr": 1e-3},
        {"params": weights[HEAD_FROM:], "lr": 1e-2},
    ]


def passes(step):
    """Losses of one step: gradients differ from step to step and from pass to pass."""
    generator = torch.Generator().manual_seed(step)
    return [
        [torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(2 + step % 2)
    ]


def train(optimizer, weights, steps, mine=lambda losses: losses):
    """Takes `steps`; `mine` chooses this rank's passes. Returns norms and whether it stepped."""
    results = []
    for step in steps:
        for directions in mine(passes(step)):
            terms = [
                (weight.float() * direction).sum()
                for n, (weight, direction) in enumerate(zip(weights, directions, strict=True))
                if n != UNUSED and not (step == 2 and n >= HEAD_FROM)
            ]
            optimizer.backward(sum(terms) * (torch.inf if step == 3 else 1.0))
        optimizer.sum_gradients()
        results.append(optimizer.clip_and_step(50.0, only_value_head=step == 4))
    return results


def uneven(losses):
    """All passes of a step in uneven parts: the last rank has one or none."""
    return losses[:2] if distributed.rank() == 0 else losses[2:]


def start_ranks(folder):
    """Runs `worker` in processes with the variables that torchrun sets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=worker, args=(folder, str(n), str(port))) for n in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode) for process in ranks)


def worker(folder, number, port):
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": str(RANKS),
        "RANK": number, "LOCAL_RANK": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    with distributed.process_group("cpu"):
        train_part(folder)


def train_part(folder):
    sharded_optimizer.MIN_BUCKET = BUCKET  # so that these few weights have several buckets
    weights = make_weights()
    optimizer = ShardedAdamW(groups_of(weights), **OPTIONS)
    optimizer.backward(sum(w.float().sum() for w in weights), reduce=False)
    optimizer.zero_grad()
    results = train(optimizer, weights, range(STEPS), uneven)
    moments = [t for s in optimizer.adamw.state.values() for t in s.values() if t.ndim]
    saved = optimizer.state_dict()
    # a second optimizer goes on from the state of one rank without shards
    again = make_weights()
    other = ShardedAdamW(groups_of(again), **OPTIONS)
    load(other, again, **torch.load(folder / "one.pt", weights_only=True))
    train(other, again, range(STEPS, STEPS + 2), uneven)
    found = {
        "weights": [w.data for w in weights],
        "results": results,
        "optimizer": saved,
        "resumed": [w.data for w in again],
        "owned": sum(m.numel() for m in optimizer.masters),
        "moments": sum(t.numel() for t in moments),
    }
    torch.save(found, folder / f"rank-{distributed.rank()}.pt")


@torch.no_grad()
def load(into, parameters, weights, optimizer):
    for parameter, value in zip(parameters, weights, strict=True):
        parameter.copy_(value)
    into.load_state_dict(optimizer)


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-2, atol=1e-5)
        # a rounding may differ here and there; the rest is equal
        assert (a.float() - b.float()).abs().mean() < 1e-6


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_ranks_with_parts_of_the_optimizer_train_as_one(tmp_path):
    weights = make_weights()
    unused = weights[UNUSED].detach().clone()
    one = MasterAdamW(groups_of(weights), **OPTIONS)
    results = train(one, weights, range(STEPS))
    assert [stepped for _, stepped in results] == [True, True, True, False, True, True]
    trained = [w.detach().clone() for w in weights]
    torch.save({"weights": trained, "optimizer": one.state_dict()}, tmp_path / "one.pt")
    train(one, weights, range(STEPS, STEPS + 2))
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    saved = [torch.load(tmp_path / f"rank-{r}.pt") for r in range(RANKS)]

    total = sum(w.numel() for w in weights)
    assert sum(s["owned"] for s in saved) == total
    assert all(s["moments"] == 2 * s["owned"] for s in saved)
    assert max(s["owned"] for s in saved) <= total / RANKS + 64  # padding of the buckets
    for rank in saved:
        for (norm, stepped), (expected, also) in zip(rank["results"], results, strict=True):
            assert stepped == also and norm == pytest.approx(expected, rel=1e-5, nan_ok=True)
        close(rank["weights"], trained)
        close(rank["resumed"], weights)
        assert all(map(torch.equal, rank["weights"], saved[0]["weights"]))
        assert torch.equal(rank["weights"][UNUSED], unused)

    # the state of several ranks is one that a single rank goes on with
    assert saved[1]["optimizer"] == {}
    again = make_weights()
    other = MasterAdamW(groups_of(again), **OPTIONS)
    load(other, again, saved[0]["weights"], saved[0]["optimizer"])
    train(other, again, range(STEPS, STEPS + 2))
    close(again, weights)


def test_each_element_has_one_owner(monkeypatch):
    ranks = 3
    monkeypatch.setattr(sharded_optimizer, "MIN_BUCKET", BUCKET)
    weights = make_weights()
    owners = {w: torch.zeros(w.numel(), dtype=torch.int64) for w in weights}
    for rank in range(ranks):
        for bucket in cut_into_buckets(weights, rank, ranks):
            for piece in bucket.pieces:
                owners[piece.weight][piece.owned] += 1
                values = piece.weight.detach().flatten()[piece.owned].float()
                assert torch.equal(values, piece.master.detach())
    assert all((count == 1).all() for count in owners.values())


if __name__ == "__main__":
    sys.exit(start_ranks(Path(sys.argv[1])))
