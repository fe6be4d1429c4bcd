"""All weights for one of vLLM's servers, by vLLM's own weight transfer: NCCL, from GPU to GPU.

The trainer is rank 0 of a group with the server's workers. Each server has a group of its own, so
that one which is restarted disturbs no other. Written against vLLM 0.32. The tests run it with
vLLM's servers on CPUs, where a file takes the place of NCCL. On a GPU it has run up to NCCL, which
vLLM could not use there (2.28, of torch 2.11).
"""

import socket
from collections.abc import Callable
from concurrent import futures
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from core import distributed
from core.calls import T, in_thread
from core.faults import UsageError
from core.policy import Policy

CONNECT_S, SEND_S = 120.0, 600.0  # NCCL would wait for a server without end
Post = Callable[[str, dict[str, Any]], None]  # asks the server: a path and a JSON body


def check(policy: Policy) -> None:
    """Raises UsageError if this process cannot send the weights of `policy`."""
    if str(policy.device) not in ("cuda", "cuda:0") or distributed.num_ranks() > 1:
        raise UsageError("--sampler server sends all weights from one process on GPU 0: add "
                         "--lora-rank, or choose the GPU with CUDA_VISIBLE_DEVICES")  # fmt: skip


class WeightTransfer:
    """The connection for the weights of `model` to the server at `url` with this many workers.

    Also the `client` of vLLM's engine: it calls the four last methods. Raises TimeoutError if the
    server does not join.
    """

    def __init__(self, model: nn.Module, url: str, workers: int, post: Post) -> None:
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        self.post, self.version = post, ""
        self.post("/shutdown_weight_transfer_engine", {})  # of a trainer that was killed
        group = NCCLTrainerInitInfo(*own_address(url), world_size=1 + workers, rank=0)
        join = NCCLTrainerWeightTransferEngine.trainer_init
        self.engine: Any = within(
            CONNECT_S, lambda: join(group, client=self, source=ModuleSource(model))
        )
        if self.engine.model_update_group.disabled:  # vLLM would send nothing, without an error
            raise UsageError("vLLM cannot use NCCL here, so it sends no weights: install the torch "
                             "that it needs, on the servers, too, or add --lora-rank")  # fmt: skip

    def send(self, version: str) -> None:
        """Gives the server the present weights and calls them `version`.

        The server gives up what it samples, and forgets the keys and values in its cache. Raises
        TimeoutError if it does not take them.
        """
        self.version = version
        self.post("/pause?mode=abort", {})
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # of GPU 0; vLLM reads them in streams of its own
        try:
            within(SEND_S, self.engine.send_weights)
        except TimeoutError:
            self.close()  # ends what waits on the GPU
            raise
        self.post("/resume", {})

    def close(self) -> None:
        self.engine.shutdown()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.post("/start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        self.post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.post("/finish_weight_update", {"weight_version": weight_version or self.version})


def within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises, in a thread; TimeoutError if it takes longer."""
    future = in_thread(call)
    futures.wait([future], seconds)
    if not future.done():
        raise TimeoutError(f"weights by NCCL: the server did not answer within {seconds:g} s")
    return future.result()


def own_address(url: str) -> tuple[str, int]:
    """The address of this machine as the host of `url` sees it, and a free port."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.create_connection((parts.hostname or "", port)) as connection:
        family, (address, *_) = connection.family, connection.getsockname()
    with socket.create_server((address, 0), family=family) as free:
        return address, free.getsockname()[1]
