"""--overlap: while an update trains, a thread plays the episodes of the next one.

The thread plays with the weights from before the update. --staleness 1 does the same, first playing
and then training, and has the same metrics, to the bit (unless slow environments let each episode
move alone: then two runs differ by rounding). --overlap saves at most the shorter of these times.
The thread has a copy of the policy: with LoRA of its adapters, else of all weights.
"""

import threading
from collections.abc import Callable
from copy import deepcopy

from core.faults import Stopped
from core.policy import Policy, copy_weights
from core.run.interrupt import Interrupt
from core.run.staleness import Weights
from core.types import Rollout

Collected = tuple[list[Rollout], list[Rollout]]  # as `collect_rollouts` of train.py returns them


class Ahead:
    """The thread, and the rollouts that it has collected."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt  # of the run
        self.policy: Policy | None = None  # the copy, once it is needed
        self.thread: threading.Thread | None = None
        self.collected: Collected | None = None
        self.error: BaseException | None = None
        self.closed = False

    @property
    def started(self) -> bool:
        """Whether `take` will return rollouts."""
        return self.thread is not None

    def policy_with(self, weights: Weights, policy: Policy) -> Policy:
        """The copy of `policy`, with these trainable weights."""
        if self.policy is None:
            self.policy = copy_of(policy)
        copy_weights(weights, self.policy.trainable())
        return self.policy

    def start(self, collect: Callable[[], Collected]) -> None:
        """Calls `collect` in the thread."""

        def play() -> None:
            try:
                self.collected = collect()
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=play, daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Waits until no episode is open, as when the weights of the sampler are to change."""
        if self.thread is not None:
            self.thread.join()

    def take(self) -> Collected | None:
        """What the thread has collected, or None if none was started. Raises what it raised."""
        if self.thread is None:
            return None
        self.wait()
        self.thread = None
        if self.error is not None:
            raise self.error
        return self.collected

    def check(self) -> None:
        """Raises Stopped in the thread, if the run ends."""
        if self.closed or self.interrupt.requested:
            raise Stopped

    check_alone = check  # as an Interrupt has it

    def close(self) -> None:
        self.closed = True
        self.wait()


def copy_of(policy: Policy) -> Policy:
    """A policy with trainable weights of its own; it shares the frozen ones and the tokenizer."""
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    return deepcopy(policy, {id(x): x for x in (*frozen, policy.tokenizer)})
