"""--overlap: while an update trains, a thread plays the episodes of the next one.

The thread plays with the weights from before the update. --staleness 1 does the same, first playing
and then training, and has the same metrics, to the bit (unless slow environments let each episode
move alone: then two runs differ by rounding). --overlap saves at most the shorter of these times.
The thread has a copy of the policy: with LoRA of its adapters, else of all weights.
"""

import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from time import perf_counter
from typing import Any

from core.faults import Stopped, UsageError
from core.policy import Policy, copy_weights
from core.sampler import TorchSampler
from core.types import Rollout
from environments import rewarded

Collected = tuple[list[Rollout], list[Rollout]]  # as `collect_rollouts` of train.py returns them


class Ahead:
    """The rollouts of the next update, while a thread plays them."""

    def __init__(self) -> None:
        self.policy: Policy | None = None  # a copy, once it is needed
        self.run: Any = None  # what the thread sees as the run
        self.interrupt: Any = None  # of the run
        self.thread: threading.Thread | None = None
        self.collected: Collected | None = None
        self.error: BaseException | None = None
        self.closed = False

    @property
    def started(self) -> bool:
        """Whether `take` will return rollouts."""
        return self.thread is not None

    def start(self, run: Any, collect: Callable[..., Collected]) -> None:
        """Begins to collect the next update's rollouts with the weights that the policy has now."""
        if self.policy is None:
            self.policy = copy_of(run.policy)
        copy_weights(run.older[-1], self.policy.trainable())  # they joined it in this update
        sampler = run.sampler
        if isinstance(sampler, TorchSampler):
            sampler = TorchSampler(self.policy, sampler.draw_function)
            sampler.say = run.say
        rewarded.STATE.global_step = run.next_update  # updates complete when the next begins
        progress = {**run.progress, "canary": run.canary[1]}  # as the update before leaves it
        # `self` takes the place of the Interrupt: see check_alone
        self.run = replace(
            run, policy=self.policy, sampler=sampler, progress=progress, interrupt=self
        )
        self.interrupt = run.interrupt

        def play() -> None:
            try:
                self.collected = collect(run=self.run)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=play, daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Waits until no episode is open, as when the weights of the sampler are to change."""
        if self.thread is not None:
            self.thread.join()

    def take(self, run: Any) -> Collected | None:
        """What `start` has collected, or None. Raises what the thread raised."""
        if self.thread is None:
            return None
        self.wait()
        self.thread = None
        error, self.error = self.error, None
        if isinstance(error, UsageError):
            raise run.after_saving(error)
        if error is not None:
            raise error
        run.canary, run.sampled_at = self.run.canary, perf_counter()
        return self.collected

    def check_alone(self) -> None:
        """Ends the thread, in the place of `Interrupt.check_alone`, if the run ends."""
        if self.closed or self.interrupt.requested:
            raise Stopped

    def plays_in(self, run: Any) -> bool:
        """Whether `run` is what the thread sees, which must not save: the weights are changing."""
        return run is self.run

    def close(self) -> None:
        self.closed = True
        self.wait()


def copy_of(policy: Policy) -> Policy:
    """A policy with trainable weights of its own; it shares the frozen ones and the tokenizer."""
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    return deepcopy(policy, {id(x): x for x in (*frozen, policy.tokenizer)})
