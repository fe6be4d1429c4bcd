"""Every derived random seed of a run: numpy's SeedSequence of the run's seed and a purpose.

A purpose is one of the numbers below. Update, step or stream follow it, so that each draw of a run
has a seed of its own that depends on no other draw:

>>> derive_seed(0, TASKS, 1) == derive_seed(0, TASKS, 1)
True
>>> len({derive_seed(seed, stream, 1) for seed in range(100) for stream in (TASKS, SAMPLING)})
200
"""

from functools import lru_cache

import numpy as np

# purposes
TASKS, DEMONSTRATIONS, SAMPLING, MINIBATCHES = range(1, 5)
OTHER_AGENTS = 7


@lru_cache(maxsize=4096)  # the episodes of a round share theirs
def derive_seed(*key: int) -> int:
    """A seed below 2**63 from non-negative integers; other integers give an independent seed."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1
