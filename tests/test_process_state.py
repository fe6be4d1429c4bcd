"""core/nanollm.py restores everything that vLLM changes in this process."""

import logging
import os
import random
import signal

import numpy as np
import pytest
import torch

from core.nanollm import preserve_process_state


def state():
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "logging": (logging.getLogger().level, list(logging.getLogger().handlers)),
        # but for what torch.compile sets at its first kernel
        "environment": {k: v for k, v in os.environ.items() if k[:14] != "_TORCHINDUCTOR"},
    }


def test_preserve_process_state_restores_all_on_an_error():
    before = state()
    with pytest.raises(OSError), preserve_process_state():
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        torch.set_num_threads(1)
        torch.set_num_threads = lambda n: None
        os.environ["LD_PRELOAD_OF_GUEST"] = "1"
        del os.environ["PATH"]
        raise OSError
    assert state() == before
