"""AdamW whose gradients, masters and moments are divided among the ranks (ZeRO, arXiv:1910.02054).

Every rank samples and computes gradients with all weights, but one rank is enough to update a
weight. So each of N ranks owns 1/N of the elements, and has gradients, masters and moments for
those alone. Weights are put into buckets in the order in which the backward pass reaches them:

    backward    last layer ................. first layer
    bucket 0         |reduce_scatter|                    while the backward pass goes on
    bucket 1                  |reduce_scatter|
    step        AdamW on the elements that this rank owns, all_gather of each bucket

reduce_scatter sums a bucket over the ranks and gives each rank its own part. It runs once per
backward pass, so gradients exist whole only in the few buckets under way (ZeRO stage 2). The new
weights are copied into the tensors of the old ones: a sampler that shares these needs nothing else.

PyTorch's FSDP2 shards the weights too, so there would be none for vLLM to share.
ZeroRedundancyOptimizer keeps whole gradients on each rank and has no masters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import distributed
from core.optimizer import MasterAdamW, dtype_of_master

MIN_BUCKET, MAX_BUCKET = 2**16, 2**23  # elements; a larger weight has a bucket of its own
NUM_BUCKETS = 8  # at least, if that makes them no smaller than MIN_BUCKET
UNDER_WAY = 2  # reductions at the same time; each holds a bucket of float32 gradients


@dataclass
class Bucket:
    """Flattened weights of one dtype, one after another, padded to a multiple of N elements."""

    weights: list[nn.Parameter]
    size: int  # elements, padding included
    owned: list[slice]  # the elements of each weight that this rank updates; may be none
    masters: list[nn.Parameter]  # these elements in float32; of float32 weights a view
    gradients: Tensor | None = None  # [size] of the current backward pass
    arrived: int = 0  # weights that have their gradient
    used: bool = False  # whether a backward pass of this step gave a gradient
    summed: Tensor | None = None  # [size / N] this rank's part, summed over ranks and passes

    def split(self, whole: Tensor) -> list[Tensor]:
        """[size] elements as views with the shapes of the weights."""
        parts = _split(whole, self.weights)
        return [part.view(w.shape) for part, w in zip(parts, self.weights, strict=True)]


class ShardedAdamW(MasterAdamW):
    """MasterAdamW whose masters are the elements that this rank owns.

    All ranks call `sum_gradients`, `clip_and_step` and `state_dict` in the same order. The number
    of backward passes before them may differ.
    """

    def __init__(self, groups: list[dict[str, Any]], *args: Any, **options: Any):
        self.buckets: list[Bucket] = []
        self.launched, self.reduces = 0, True  # buckets of the current pass; see `backward`
        self.under_way: list[tuple[Any, Bucket, Tensor, Tensor]] = []
        self.announced: list[tuple[Any, Tensor]] = []
        self.weights = [weight for group in groups for weight in group["params"]]
        numbers = iter(range(len(self.weights)))  # in a checkpoint
        self.numbers = [[next(numbers) for _ in group["params"]] for group in groups]
        super().__init__(groups, *args, **options)

    def _make_masters(self, weights: list[nn.Parameter]) -> list[nn.Parameter]:
        buckets = cut_into_buckets(weights, distributed.rank(), distributed.num_ranks())
        if self.offload:
            for bucket in buckets:
                bucket.masters = [nn.Parameter(m.detach().cpu()) for m in bucket.masters]
        self.buckets += buckets
        for bucket in buckets:
            for number, weight in enumerate(bucket.weights):
                hook = partial(self._add, bucket, number)
                self.hooks.append(weight.register_post_accumulate_grad_hook(hook))
        return [master for bucket in buckets for master in bucket.masters]

    def backward(self, loss: Tensor, reduce: bool = True) -> None:
        """Adds the gradient of `loss`. Without `reduce`, drops it and waits for no other rank."""
        self.reduces = reduce
        if reduce:
            self._announce(passes=1)
        super().backward(loss)
        self._launch(end_of_pass=True)
        self.reduces = True

    def sum_gradients(self) -> None:
        """Gives each master the sum of its gradients over the ranks; None if no rank has one.

        A rank with fewer backward passes than another adds zeros for those that it lacks.
        """
        while (totals := self._announce(passes=0))[0] > 0:
            self._launch(end_of_pass=True)
        while self.under_way:
            self._collect()
        self.announced.clear()
        for bucket, users in zip(self.buckets, totals[1:], strict=True):
            if bucket.summed is not None and users > 0:
                parts = _split(bucket.summed, bucket.masters)
                for master, part in zip(bucket.masters, parts, strict=True):
                    master.grad = part

    def total_norm(self) -> Tensor:
        """Norm of the gradients of all ranks together."""
        square = super().total_norm().double() ** 2
        distributed.all_reduce_sum([square])
        return square.sqrt().float()

    @torch.no_grad()
    def step(self) -> None:
        """A step of AdamW on this rank's masters, whose results all ranks exchange."""
        for bucket in self.buckets:
            bucket_parts = zip(bucket.weights, bucket.owned, bucket.masters, strict=True)
            for weight, owned, master in bucket_parts:
                # a view of the weight, which a sampler may have moved
                if weight.dtype == master.dtype and not self.offload:
                    master.data = weight.data.flatten()[owned]
        self.adamw.step()
        for bucket in self.buckets:
            whole = _gather(bucket, bucket.masters, bucket.weights[0].dtype)
            for weight, values in zip(bucket.weights, bucket.split(whole), strict=True):
                weight.copy_(values)  # in place: the sampler may share the tensor

    def zero_grad(self) -> None:
        """Drops all gradients, those of an interrupted backward pass included."""
        super().zero_grad()
        self.launched, self.reduces = 0, True
        for bucket in self.buckets:
            bucket.gradients, bucket.arrived, bucket.used, bucket.summed = None, 0, False, None
            for weight in bucket.weights:
                weight.grad = None

    def gradient_bytes(self) -> int:
        """Bytes of this rank's gradients, and of the buckets that are being reduced."""
        largest = max(bucket.size for bucket in self.buckets)
        return super().gradient_bytes() + 4 * largest * (UNDER_WAY + 1)

    def state_dict(self) -> dict[str, Any]:
        """What `MasterAdamW.state_dict` returns with one rank; {} on the ranks other than 0."""
        saved: dict[nn.Parameter, dict[str, Tensor]] = {weight: {} for weight in self.weights}
        for bucket in self.buckets:
            states = [self.adamw.state[m] | {"master": m} for m in bucket.masters]
            for name in ("exp_avg", "exp_avg_sq", "master"):
                parts = [state[name] for state in states]
                whole = _gather(bucket, parts, bucket.masters[0].dtype)
                for weight, values in zip(bucket.weights, bucket.split(whole), strict=True):
                    if distributed.rank() == 0:
                        saved[weight]["step"] = states[0]["step"].clone()
                        saved[weight][name] = values.cpu().clone()
        if distributed.rank() > 0:
            return {}
        masters = [(weight, saved[weight].pop("master")) for weight in self.weights]
        groups = zip(self.adamw.param_groups, self.numbers, strict=True)
        return {
            "adamw": {
                "state": dict(enumerate(saved.values())),
                "param_groups": [group | {"params": numbers} for group, numbers in groups],
            },
            "masters": [master for weight, master in masters if master.dtype != weight.dtype],
            "scale": [self.loss_scale, self.steps_at_scale],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned with any number of ranks, sharded or not."""
        groups = zip(self.adamw.param_groups, state["adamw"]["param_groups"], strict=True)
        for group, saved in groups:
            group |= {name: value for name, value in saved.items() if name != "params"}
        masters = iter(state["masters"])
        restored = {}
        for number, weight in enumerate(self.weights):
            restored[weight] = dict(state["adamw"]["state"][number])
            restored[weight]["master"] = weight  # already restored
            if weight.dtype != dtype_of_master(weight):
                restored[weight]["master"] = next(masters)
                weight.copy_(restored[weight]["master"])
        for bucket in self.buckets:
            bucket_parts = zip(bucket.weights, bucket.owned, bucket.masters, strict=True)
            for weight, owned, master in bucket_parts:
                own = self.adamw.state[master] | {"master": master}
                for name, values in restored[weight].items():
                    own[name].copy_(values if name == "step" else values.flatten()[owned])
        self.loss_scale, self.steps_at_scale = state["scale"]

    def _add(self, bucket: Bucket, number: int, weight: Tensor) -> None:
        """Moves a gradient into its bucket as soon as the backward pass has computed it."""
        grad: Any = weight.grad
        weight.grad = None
        if bucket.gradients is None:
            bucket.gradients = grad.new_zeros(bucket.size, dtype=dtype_of_master(weight))
        bucket.split(bucket.gradients)[number].copy_(grad)
        bucket.arrived, bucket.used = bucket.arrived + 1, True
        self._launch()

    def _launch(self, end_of_pass: bool = False) -> None:
        """Starts to reduce the next complete buckets, in the same order on all ranks.

        `end_of_pass`: all that are left; a weight that the pass did not reach has gradient 0.
        """
        for bucket in self.buckets[self.launched :]:
            if bucket.arrived < len(bucket.weights) and not end_of_pass:
                return
            self.launched += 1
            if self.reduces:
                self._reduce(bucket)
            bucket.gradients, bucket.arrived = None, 0
        if end_of_pass:
            self.launched = 0

    def _reduce(self, bucket: Bucket) -> None:
        if bucket.gradients is None:
            bucket.gradients = bucket.masters[0].new_zeros(bucket.size)
        part = bucket.gradients.new_empty(bucket.size // distributed.num_ranks())
        with distributed.rank_lost():
            work = distributed.reduce_scatter(part, bucket.gradients, async_op=True)
        self.under_way.append((work, bucket, bucket.gradients, part))
        if len(self.under_way) > UNDER_WAY:
            self._collect()

    def _collect(self) -> None:
        """Waits for the oldest reduction, and adds its result to the sum over passes."""
        work, bucket, _, part = self.under_way.pop(0)
        with distributed.rank_lost():
            work.wait()
        part = part.to(bucket.masters[0].device)
        bucket.summed = part if bucket.summed is None else bucket.summed.add_(part)

    def _announce(self, passes: int) -> Tensor:
        """Sums over the ranks: the passes that begin (0 or 1 each), and the users of each bucket.

        Waits for the sums only if this rank begins no pass.
        """
        totals = torch.tensor([passes, *(bucket.used for bucket in self.buckets)])
        with distributed.rank_lost():
            work = dist.all_reduce(totals, async_op=True)
            self.announced.append((work, totals))
            if passes == 0:
                work.wait()
        return totals


def cut_into_buckets(weights: list[nn.Parameter], rank: int, num_ranks: int) -> list[Bucket]:
    """Buckets of `weights`, the last weight first, with the elements and masters of `rank`."""
    total = sum(weight.numel() for weight in weights)
    limit = min(MAX_BUCKET, max(MIN_BUCKET, total // NUM_BUCKETS))
    members: list[list[nn.Parameter]] = []
    for weight in reversed(weights):
        filled = sum(w.numel() for w in members[-1]) if members else limit
        if filled + weight.numel() > limit or members[-1][0].dtype != weight.dtype:
            members.append([])
        members[-1].append(weight)
    buckets = []
    for part in members:
        share = -(-sum(w.numel() for w in part) // num_ranks)  # of each rank, rounded up
        bucket = Bucket(part, share * num_ranks, [], [])
        first = -rank * share  # of a weight's elements in this rank's share
        for weight in part:
            start, end = max(0, -first), min(weight.numel(), share - first)
            bucket.owned.append(slice(start, max(start, end)))
            values = weight.detach().flatten()[bucket.owned[-1]].to(dtype_of_master(weight))
            bucket.masters.append(nn.Parameter(values))
            first += weight.numel()
        buckets.append(bucket)
    return buckets


@torch.no_grad()
def _gather(bucket: Bucket, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[size] of what all ranks have for the elements that they own; `parts` are this rank's."""
    whole = torch.zeros(bucket.size, dtype=dtype, device=bucket.weights[0].device)
    mine = whole.new_zeros(bucket.size // distributed.num_ranks())
    for place, part in zip(_split(mine, parts), parts, strict=True):
        place.copy_(part)
    with distributed.rank_lost():
        distributed.all_gather_tensor(whole, mine)
    return whole


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive parts of `flat` with as many elements as the tensors in `like`."""
    ends = list(accumulate(tensor.numel() for tensor in like))
    return [flat[end - t.numel() : end] for end, t in zip(ends, like, strict=True)]
