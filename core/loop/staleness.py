"""--staleness k: sample with the weights of k updates ago, to study what asynchronous systems do.

A system that samples and trains at the same time learns from samples of older weights. Here one
process does both in turn: the policy gets its older weights back while it samples. So a run is as
exact, seeded and resumable as with k = 0. What corrects for the difference between sampler and
trainer (algorithms/off_policy.py) then corrects for the age too, and gap/* measures it.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from core.policy import Policy, Weights, borrowed, copy_weights
from core.sampler import Sampler


@contextmanager
def older_weights(
    policy: Policy, sampler: Sampler, older: deque[Weights], sampled: bool = False
) -> Iterator[None]:
    """Inside, the policy has its weights of `older.maxlen` updates ago, or at first its first ones.

    `older` has the weights of the last updates, the oldest first; those of this update join it at
    the end, unless the sampling fails. With `maxlen` 0 nothing happens. `sampled`: the sampler has
    done so before (core/loop/ahead.py), so the policy keeps its weights.
    """
    if older.maxlen == 0:
        yield
        return
    weights = policy.trainable()
    with borrowed(weights) as present:
        if not sampled:
            copy_weights(older[0] if older else present, weights)
            sampler.sync()
        yield
    if not sampled:
        sampler.sync()
    older.append(present)
