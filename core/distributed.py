"""Data parallel under torchrun: each rank plays and learns from its share of every update.

    torchrun --nproc-per-node 2 train.py
    torchrun --nproc-per-node 8 --max-restarts 3 train.py --run-name mine    # resumes by itself

All ranks run the same loop. A rank plays its share of the tasks; then all tell each other what was
played, so that every rank knows all rewards, and baselines, scales and metrics are those of the
whole batch. Each computes the gradient of its share of the sequences. Losses are sums over a
denominator that was counted once, so the sum over the ranks is the gradient of the batch, however
many there are. Rank 0 alone writes and speaks. Without torchrun there is one rank, and nothing here
acts.
"""

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from core.types import RankLost, UsageError

T = TypeVar("T")
LAUNCHED = "TORCHELASTIC_RUN_ID"  # torchrun sets it, and RANK and WORLD_SIZE
PATIENCE = timedelta(hours=1)  # one rank's longest lead on another


def rank() -> int:
    return int(os.environ["RANK"]) if LAUNCHED in os.environ else 0


def num_ranks() -> int:
    return int(os.environ["WORLD_SIZE"]) if LAUNCHED in os.environ else 1


def is_restarted() -> bool:
    """Whether torchrun has started this run before, and a rank of it died."""
    return LAUNCHED in os.environ and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0


def may_restart() -> bool:
    return LAUNCHED in os.environ and int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) > 0


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Inside, the ranks can talk to each other; each sees one GPU, its own, as GPU 0."""
    if num_ranks() == 1:
        yield
        return
    if device != "cpu" and not device.startswith("mps"):
        here = int(os.environ["LOCAL_RANK"])
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[here] if visible else str(here)
    on_gpu = device != "cpu" and torch.cuda.is_available()
    with _rank_lost():
        store, number, count = next(rendezvous("env://"))
        # torchrun keeps its store through a restart, with the addresses of the dead in it
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=number, world_size=count,
            timeout=PATIENCE,
        )  # fmt: skip
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def shard(items: Sequence[T], weight: Callable[[T], int] = lambda item: 1) -> list[T]:
    """This rank's part of a list that all ranks hold: neighbours stay together, and the parts weigh
    about the same."""
    if num_ranks() == 1:
        return list(items)
    ends = list(itertools.accumulate(weight(item) for item in items))
    middles = [end - weight(item) / 2 for item, end in zip(items, ends, strict=True)]
    return [
        x for x, m in zip(items, middles, strict=True) if int(m * num_ranks() / ends[-1]) == rank()
    ]


def all_gather(mine: list[T]) -> list[T]:
    """What all ranks have, in the order of `shard`."""
    if num_ranks() == 1:
        return mine
    parts: list[list[T]] = [[] for _ in range(num_ranks())]
    with _rank_lost():
        dist.all_gather_object(parts, mine)
    return [item for part in parts for item in part]


def broadcast_from_rank_0(decide: Callable[[], T]) -> T:
    """What rank 0 decides; a UsageError of its is raised on all."""
    if num_ranks() == 1:
        return decide()
    told: list[Any] = [None]
    if rank() == 0:
        try:
            told = [decide()]
        except UsageError as error:
            told = [error]
    with _rank_lost():
        dist.broadcast_object_list(told)
    if isinstance(told[0], UsageError):
        raise told[0]
    return told[0]


def rank_0_first(make: Callable[[], T]) -> T:
    """What `make` makes on each rank; rank 0 has done so, and written its files, before others."""
    if rank() == 0:
        made = make()
        all_gather([0])
        return made
    all_gather([0])
    return make()


def all_reduce_sum(tensors: list[Tensor]) -> None:
    """Each tensor becomes its sum over the ranks, in place."""
    if num_ranks() == 1:
        return
    with _rank_lost():
        running = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in running:
            work.wait()


def all_reduce_gradients(parameters: list[Tensor]) -> None:
    """The gradients become those of all ranks' losses; one that no rank has stays None."""
    if num_ranks() == 1:
        return
    has = torch.tensor([float(p.grad is not None) for p in parameters])
    all_reduce_sum([has])
    learnt = [p for p, n in zip(parameters, has.tolist(), strict=True) if n > 0]
    for parameter in learnt:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    all_reduce_sum([p.grad for p in learnt])  # type: ignore[misc]


def all_reduce_metrics(numbers: dict[str, float]) -> dict[str, float]:
    """The sums over the ranks, number by number."""
    if num_ranks() == 1:
        return numbers
    sums: dict[str, float] = defaultdict(float)
    for part in all_gather([dict(numbers)]):
        for name, value in part.items():
            sums[name] += value
    return sums


@contextmanager
def _rank_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise RankLost(f"another rank is gone, so this one ends: {reason}") from error
