"""Restores global process state that vLLM changes: random generators, threads, environment."""

import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import numpy as np
import torch


@contextmanager
def preserve_process_state(**environment: str) -> Iterator[None]:
    """Restores random generators, the number of threads and environment variables on exit.

    Inside, the given environment variables are set and Python warnings are hidden.
    """
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    variables = dict(os.environ)
    os.environ.update(environment)
    try:
        # vLLM needs a stdout with a file descriptor; in a notebook, sys.stdout has none
        hidden = warnings.catch_warnings(action="ignore")
        with preserve_random_state(), redirect_stdout(sys.__stdout__), hidden:
            yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM replaces the function
        torch.set_num_threads(num_threads)
        os.environ.clear()
        os.environ.update(variables)


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restores the generators of Python, NumPy and PyTorch, and of a GPU in use, on exit."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
