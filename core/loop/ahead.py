"""--overlap: while an update trains, a thread plays the episodes of the next one.

The thread plays with the weights from before the update. --staleness 1 does the same, first playing
and then training, and has the same metrics, to the bit (unless an environment lets its episodes
move alone: then two runs differ by rounding). --overlap saves at most the shorter of these times.
The thread has a copy of the policy: with LoRA of its adapters, else of all weights.
"""

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from copy import deepcopy

from torch import Tensor

from core.calls import in_thread
from core.canary import Canary
from core.faults import Stopped
from core.policy import Policy, Weights, copy_weights
from core.terminal.interrupt import Interrupt
from core.types import Played

LINE = 64  # bytes of a cache line, and of a register of AVX-512


class Ahead:
    """The thread, and the rollouts that it has collected."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt  # of the run
        self.policy: Policy | None = None  # the copy, once it is needed
        self.playing: Future[tuple[Played, Canary]] | None = None
        self.closed = False

    @property
    def started(self) -> bool:
        """Whether `take` will return rollouts."""
        return self.playing is not None

    def policy_with(self, weights: Weights, policy: Policy) -> Policy:
        """The copy of `policy`, with these trainable weights."""
        if self.policy is None:
            self.policy = copy_of(policy)
        copy_weights(weights, self.policy.trainable())
        return self.policy

    def start(self, collect: Callable[[], tuple[Played, Canary]]) -> None:
        """Calls `collect` in the thread."""
        self.playing = in_thread(collect)

    def wait(self) -> None:
        """Waits until no episode is open, as when the weights of the sampler are to change."""
        if self.playing is not None:
            futures.wait([self.playing])

    def take(self) -> tuple[Played, Canary] | None:
        """What the thread has collected, or None if none was started. Raises what it raised."""
        self.wait()
        playing, self.playing = self.playing, None
        return playing.result() if playing else None

    def check(self) -> None:
        """Raises Stopped in the thread, if the run ends."""
        if self.closed or self.interrupt.requested:
            raise Stopped

    def close(self) -> None:
        self.closed = True
        self.wait()


def copy_of(policy: Policy) -> Policy:
    """A policy with trainable weights of its own; it shares the frozen ones and the tokenizer."""
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    copy = deepcopy(policy, {id(x): x for x in (*frozen, policy.tokenizer)})
    pairs = zip(copy.trainable().values(), policy.trainable().values(), strict=True)
    for weight, original in pairs:
        weight.data = _placed_as(original)
    return copy


def _placed_as(weight: Tensor) -> Tensor:
    """A copy at an address with the same remainder modulo LINE.

    Some kernels of CPUs round by where a weight begins, and safetensors' files have them anywhere.
    """
    size = weight.element_size()
    room = weight.new_empty(weight.numel() + LINE // size)
    start = (weight.data_ptr() - room.data_ptr()) % LINE // size
    return room[start : start + weight.numel()].view_as(weight).copy_(weight.detach())
