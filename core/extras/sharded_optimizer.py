"""AdamW whose gradients, masters and moments are divided among the ranks (ZeRO, arXiv:1910.02054).

Every rank samples and computes gradients with all weights, but one rank is enough to update a
weight. So each of N ranks owns 1/N of the elements, and has gradients, masters and moments for
those alone. The weights are cut into buckets, in the order in which the backward pass reaches them:

    backward    last layer ................. first layer
    bucket 0         |reduce_scatter|                    while the backward pass goes on
    bucket 1                  |reduce_scatter|
    step        AdamW on the elements that this rank owns, all_gather of each bucket

reduce_scatter sums a bucket over the ranks and gives each rank its own part. It runs once per
backward pass, so gradients exist whole only in the few buckets under way (ZeRO stage 2). The new
weights are copied into the tensors of the old ones: a sampler that shares these needs nothing else.

PyTorch's FSDP2 shards the weights too, so there would be none for vLLM to share. Its
ZeroRedundancyOptimizer divides the moments alone (runs/optimizer_memory has measured it).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import distributed
from core.optimizer import MasterAdamW, dtype_of_master

MIN_BUCKET, MAX_BUCKET = 2**18, 2**23  # elements
NUM_BUCKETS = 64  # unless they would be smaller or larger than that
UNDER_WAY = 2  # reductions at the same time; each holds a bucket of float32 gradients


@dataclass
class Piece:
    """The elements of one weight, flattened, that are in a bucket."""

    weight: nn.Parameter
    part: slice  # these elements
    owned: slice  # those of them that this rank updates; may be none
    master: nn.Parameter  # in float32; of a float32 weight a view


@dataclass
class Bucket:
    """Consecutive elements of weights of one dtype, padded to a multiple of N elements."""

    pieces: list[Piece]
    size: int  # elements, padding included
    gradients: Tensor | None = None  # [size] of the current backward pass
    arrived: int = 0  # pieces that have their gradient
    used: bool = False  # whether a backward pass of this step gave a gradient
    summed: Tensor | None = None  # [size / N] this rank's, summed over ranks and passes


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
        device = torch.device("cpu") if self.offload else None
        buckets = cut_into_buckets(weights, distributed.rank(), distributed.num_ranks(), device)
        self.buckets += buckets
        for weight in weights:
            hook = partial(
                self._add, [b for b in buckets if any(p.weight is weight for p in b.pieces)]
            )
            self.hooks.append(weight.register_post_accumulate_grad_hook(hook))
        return [piece.master for bucket in buckets for piece in bucket.pieces]

    def _backward(
        self, tensors: list[Tensor], gradients: Sequence[Tensor] | None, reduce: bool
    ) -> None:
        """One pass. Without `reduce`, drops its gradient and waits for no other rank."""
        self.reduces = reduce
        if reduce:
            self._announce(passes=1)
        super()._backward(tensors, gradients, reduce)
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
                parts = _split(bucket.summed, [piece.owned for piece in bucket.pieces])
                for piece, part in zip(bucket.pieces, parts, strict=True):
                    piece.master.grad = part

    def total_norm(self) -> Tensor:
        """Norm of the gradients of all ranks together."""
        square = super().total_norm().double() ** 2
        distributed.all_reduce_sum([square])
        return square.sqrt().float()

    @torch.no_grad()
    def step(self) -> None:
        """A step of AdamW on this rank's masters, whose results all ranks exchange."""
        for bucket in self.buckets:
            for piece in bucket.pieces:
                # a view of the weight, which a sampler may have moved
                if piece.master.dtype == piece.weight.dtype and not self.offload:
                    piece.master.data = piece.weight.detach().flatten()[piece.owned]
        self.adamw.step()
        for bucket in self.buckets:
            dtype = bucket.pieces[0].weight.dtype
            for piece, values in _gather(bucket, [p.master for p in bucket.pieces], dtype):
                flat = piece.weight.detach().flatten()  # a view, so the sampler may share it
                flat[piece.part] = values
                if not piece.weight.is_contiguous():
                    piece.weight.copy_(flat.view_as(piece.weight))

    def zero_grad(self) -> None:
        """Drops all gradients, those of an interrupted backward pass included."""
        super().zero_grad()
        self.launched, self.reduces = 0, True
        for bucket in self.buckets:
            bucket.gradients, bucket.arrived, bucket.used, bucket.summed = None, 0, False, None
        for weight in self.weights:
            weight.grad = None

    def gradient_bytes(self) -> int:
        """Bytes of this rank's gradients, and of the buckets that are being reduced."""
        largest = max(bucket.size for bucket in self.buckets)
        return super().gradient_bytes() + 4 * largest * (UNDER_WAY + 1)

    def state_dict(self) -> dict[str, Any]:
        """What `MasterAdamW.state_dict` returns with one rank; {} on the ranks other than 0."""
        saved: dict[nn.Parameter, dict[str, Tensor]] = {weight: {} for weight in self.weights}
        for bucket in self.buckets:
            states = [self.adamw.state[p.master] | {"master": p.master} for p in bucket.pieces]
            for name in ("exp_avg", "exp_avg_sq", "master"):
                values = [state[name] for state in states]
                for piece, some in _gather(bucket, values, values[0].dtype):
                    if distributed.rank() == 0:
                        full = torch.empty(piece.weight.shape, dtype=some.dtype)
                        own = saved[piece.weight]
                        own.setdefault("step", states[0]["step"].clone())
                        own.setdefault(name, full).view(-1)[piece.part] = some.cpu()
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
        masters = iter(state["masters"])
        restored = {}
        for number, weight in enumerate(self.weights):
            restored[weight] = dict(state["adamw"]["state"][number])
            restored[weight]["master"] = weight  # already restored
            if weight.dtype != dtype_of_master(weight):
                restored[weight]["master"] = next(masters)
                weight.copy_(restored[weight]["master"])
        for piece in (piece for bucket in self.buckets for piece in bucket.pieces):
            own = self.adamw.state[piece.master] | {"master": piece.master}
            for name, values in restored[piece.weight].items():
                own[name].copy_(values if name == "step" else values.flatten()[piece.owned])
        self.loss_scale, self.steps_at_scale = state["scale"]

    def _add(self, buckets: list[Bucket], weight: Tensor) -> None:
        """Moves a gradient into its buckets as soon as the backward pass has computed it."""
        grad: Any = weight.grad
        for bucket in buckets:
            if bucket.gradients is None:
                bucket.gradients = grad.new_zeros(bucket.size, dtype=dtype_of_master(weight))
            places = _split(bucket.gradients, [piece.part for piece in bucket.pieces])
            for piece, place in zip(bucket.pieces, places, strict=True):
                if piece.weight is weight:
                    place.copy_(grad.flatten()[piece.part])
            bucket.arrived, bucket.used = bucket.arrived + 1, True
            self._launch()
        weight.grad = None

    def _launch(self, end_of_pass: bool = False) -> None:
        """Starts to reduce the next complete buckets, in the same order on all ranks.

        `end_of_pass`: all that are left; a weight that the pass did not reach has gradient 0.
        """
        for bucket in self.buckets[self.launched :]:
            if bucket.arrived < len(bucket.pieces) and not end_of_pass:
                return
            self.launched += 1
            if self.reduces:
                self._reduce(bucket)
            bucket.gradients, bucket.arrived = None, 0
        if end_of_pass:
            self.launched = 0

    def _reduce(self, bucket: Bucket) -> None:
        if bucket.gradients is None:
            bucket.gradients = bucket.pieces[0].weight.new_zeros(
                bucket.size, dtype=bucket.pieces[0].master.dtype
            )
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
        part = part.to(bucket.pieces[0].master.device)
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


def cut_into_buckets(
    weights: list[nn.Parameter], rank: int, num_ranks: int, device: torch.device | None = None
) -> list[Bucket]:
    """Buckets of `weights`, in about the order of the backward pass, with the masters of `rank`.

    `device`: of the masters; None: that of the weights.
    """
    total = sum(weight.numel() for weight in weights)
    limit = min(MAX_BUCKET, max(MIN_BUCKET, total // NUM_BUCKETS))
    parts: list[list[tuple[nn.Parameter, slice]]] = []  # of each bucket
    room, last_first = 0, weights[::-1]
    # the backward pass reaches a layer's first norm after its matrices, so norms come last
    for weight in sorted(last_first, key=lambda weight: weight.ndim < 2):
        start = 0
        while start < weight.numel():
            if room == 0 or parts[-1][0][0].dtype != weight.dtype:
                parts.append([])
                room = limit
            part = slice(start, min(weight.numel(), start + room))
            parts[-1].append((weight, part))
            room -= part.stop - start
            start = part.stop
    return [_make_bucket(own, rank, num_ranks, device) for own in parts]


def _make_bucket(
    parts: list[tuple[nn.Parameter, slice]], rank: int, num_ranks: int, device: torch.device | None
) -> Bucket:
    share = -(-sum(part.stop - part.start for _, part in parts) // num_ranks)  # rounded up
    bucket = Bucket([], share * num_ranks)
    first = -rank * share  # of a part, counted from the first element that this rank owns
    for weight, part in parts:
        length = part.stop - part.start
        begin = min(max(0, -first), length)
        end = max(begin, min(length, share - first))
        owned = slice(part.start + begin, part.start + end)
        values = weight.detach().flatten()[owned].to(device, dtype_of_master(weight))
        bucket.pieces.append(Piece(weight, part, owned, nn.Parameter(values)))
        first += length
    return bucket


@torch.no_grad()
def _gather(
    bucket: Bucket, values: Sequence[Tensor], dtype: torch.dtype
) -> Iterator[tuple[Piece, Tensor]]:
    """Each piece with what its owners have for its elements; `values` are this rank's."""
    whole = torch.zeros(bucket.size, dtype=dtype, device=bucket.pieces[0].weight.device)
    mine = whole.new_zeros(bucket.size // distributed.num_ranks())
    places = _split(mine, [piece.owned for piece in bucket.pieces])
    for place, some in zip(places, values, strict=True):
        place.copy_(some)
    with distributed.rank_lost():
        distributed.all_gather_tensor(whole, mine)
    parts = _split(whole, [piece.part for piece in bucket.pieces])
    return zip(bucket.pieces, parts, strict=True)


def _split(flat: Tensor, parts: list[slice]) -> list[Tensor]:
    """Consecutive pieces of `flat`, as long as `parts`."""
    lengths = [part.stop - part.start for part in parts]
    return list(flat[: sum(lengths)].split(lengths))
