"""Data parallelism under torchrun: each rank samples and trains on its shard of every update.

    torchrun --nproc-per-node 2 train.py

All ranks run the same loop. Each rank samples the rollouts of its shard of the tasks. The ranks
then exchange their rollouts, so every rank computes the advantages and metrics of the whole batch.
Each rank computes the gradient of its shard of the sequences. Losses are sums over a denominator of
the whole batch, so the sum of the ranks' gradients is the gradient of the batch, however many
ranks there are. Only rank 0 writes files and prints. Without torchrun there is one rank. Several
machines: core/README.md.
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

from core.faults import RankLost, UsageError

T = TypeVar("T")
LAUNCHED = "TORCHELASTIC_RUN_ID"  # set by torchrun, as are RANK and WORLD_SIZE
PATIENCE = timedelta(hours=1)  # how long one rank waits for another


def rank() -> int:
    """Number of this process, from 0."""
    return int(os.environ["RANK"]) if LAUNCHED in os.environ else 0


def num_ranks() -> int:
    """Number of processes that train together."""
    return int(os.environ["WORLD_SIZE"]) if LAUNCHED in os.environ else 1


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Connects the ranks; inside, each rank sees one GPU, its own, as GPU 0.

    Raises UsageError if this machine has GPUs, but fewer than processes.
    """
    if num_ranks() == 1:
        yield
        return
    if device != "cpu" and not device.startswith("mps"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        if 0 < len(gpus) < int(os.environ["LOCAL_WORLD_SIZE"]):
            limit = f"at most {len(gpus)}, the number of GPUs here"
            raise UsageError(f"torchrun --nproc-per-node: {limit}, or use --device cpu")
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(os.environ["LOCAL_RANK"])]
    on_gpu = device != "cpu" and torch.cuda.is_available()
    with rank_lost("not all ranks joined"):
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=PATIENCE)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def shard(items: Sequence[T], weight: Callable[[T], int] = lambda item: 1) -> list[T]:
    """This rank's contiguous part of a list that all ranks hold; all parts weigh about the same."""
    if num_ranks() == 1:
        return list(items)
    ends = list(itertools.accumulate(weight(item) for item in items))
    middles = [end - weight(item) / 2 for item, end in zip(items, ends, strict=True)]
    ranks = [int(middle * num_ranks() / ends[-1]) for middle in middles]
    return [item for item, r in zip(items, ranks, strict=True) if r == rank()]


def all_gather(mine: list[T]) -> list[T]:
    """The concatenated lists of all ranks, in the order of `shard`."""
    if num_ranks() == 1:
        return mine
    parts: list[list[T]] = [[] for _ in range(num_ranks())]
    with rank_lost():
        dist.all_gather_object(parts, mine)
    return [item for part in parts for item in part]


def broadcast_from_rank_0(decide: Callable[[], T]) -> T:
    """The result of `decide` on rank 0, on all ranks; a UsageError there is raised on all ranks."""
    if num_ranks() == 1:
        return decide()
    result: list[Any] = [None]
    if rank() == 0:
        try:
            result = [decide()]
        except UsageError as error:
            result = [error]
    with rank_lost():
        dist.broadcast_object_list(result)
    if isinstance(result[0], UsageError):
        raise result[0]
    return result[0]


def rank_0_first(make: Callable[[], T]) -> T:
    """The result of `make` on each rank; the other ranks call it after rank 0.

    Returns when all ranks are ready: an error of rank 0 may remove the files that the others read.
    """
    results = [make()] if rank() == 0 else []
    all_gather([0])
    results = results or [make()]
    all_gather([0])
    return results[0]


def all_reduce_sum(tensors: list[Tensor]) -> None:
    """Replaces each tensor by its sum over the ranks."""
    if num_ranks() == 1:
        return
    with rank_lost():
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()


def all_reduce_gradients(parameters: list[Tensor]) -> None:
    """Replaces each gradient by its sum over the ranks; None where no rank has a gradient."""
    if num_ranks() == 1:
        return
    num_gradients = torch.tensor([float(p.grad is not None) for p in parameters])
    all_reduce_sum([num_gradients])
    counted = zip(parameters, num_gradients.tolist(), strict=True)
    trained = [parameter for parameter, count in counted if count > 0]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    all_reduce_sum([p.grad for p in trained])  # type: ignore[misc]


def all_reduce_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Sums each metric over the ranks, by its name."""
    sums: dict[str, float] = defaultdict(float)
    for part in all_gather([metrics]):
        for name, value in part.items():
            sums[name] += value
    return sums


@contextmanager
def rank_lost(reason: str = "another rank died, so this rank ends") -> Iterator[None]:
    """Turns the error of a collective operation inside into a RankLost of one line."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"{reason}: {str(error).strip().splitlines()[0][:200]}") from error
