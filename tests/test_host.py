"""A host gets back what its guest changed."""

import logging
import os
import random
import signal

import numpy as np
import pytest
import torch

from core import process_state


def state():
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "logging": (logging.getLogger().level, list(logging.getLogger().handlers)),
        "environment": dict(os.environ),
    }


def disturb():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    torch.set_num_threads = lambda n: None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.DEBUG, force=True)
    os.environ["LD_PRELOAD_OF_GUEST"] = "1"
    del os.environ["PATH"]


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_put_back_whether_the_guest_succeeds_or_fails(fails):
    before = state()
    try:
        with process_state.preserve_process_state(ONLY_INSIDE="yes"):
            assert os.environ["ONLY_INSIDE"] == "yes"
            disturb()
            if fails:
                raise OSError
    except OSError:
        assert fails
    assert state() == before


def test_a_seed_decides_the_draws_inside_and_none_outside():
    def draws():
        return random.random(), np.random.rand(), torch.rand(1).item()

    before = state()
    with process_state.random_state_kept(7):
        first = draws()
    assert state() == before
    with process_state.random_state_kept(7):
        assert draws() == first
    with process_state.random_state_kept(8):
        assert draws() != first
