"""Guests in this process: what a library changes while it starts, its host gets back as it was.

>>> import random
>>> before = random.getstate()
>>> with preserve_process_state():
...     random.seed(1)
>>> random.getstate() == before
True
"""

import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import numpy as np
import torch


@contextmanager
def preserve_process_state(**environment: str) -> Iterator[None]:
    """Put back seeds, thread counts, signal handlers, logging and environment variables.

    Inside, the given environment variables are set, and warnings are not shown.
    """
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    root, variables = logging.getLogger(), dict(os.environ)
    level, log_handlers = root.level, list(root.handlers)
    os.environ.update(environment)
    try:
        # a notebook's stdout, or a test's, is no file; a guest may want its number
        with random_state_kept(), warnings.catch_warnings(), redirect_stdout(sys.__stdout__):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM puts a stand-in there
        torch.set_num_threads(num_threads)
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        root.setLevel(level)
        root.handlers[:] = log_handlers
        os.environ.clear()
        os.environ.update(variables)


@contextmanager
def random_state_kept(seed: int | None = None) -> Iterator[None]:
    """Draw from generators of one's own, seeded if a seed is given: Python, NumPy and PyTorch."""
    python, numpy = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=gpus):
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
