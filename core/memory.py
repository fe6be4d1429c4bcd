"""How many tokens a training pass holds at one time, and whether it computes its layers twice.

What autograd keeps of a token is not guessed from the architecture but counted on the model itself:
the bytes that a short pass saves for its backward. Of the memory that is free when training begins,
less what is still to come, a micro-batch gets the part that fits. When not even the longest episode
would fit, each layer keeps its input only and is computed again in the backward: gradient
checkpointing, arXiv:1604.06174.

Should memory run out all the same, the pass is made again with half as many tokens at one time:
losses are sums, so its gradients are the same.
"""

import ctypes
import gc
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from core import distributed
from core.batching import RolloutBatch, longest_update
from core.model import LOGITS, Policy
from core.types import Fault, OutOfMemory

T = TypeVar("T")

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # as glibc's malloc.h numbers them
PROBE = 64  # tokens of the short pass
ON_CPU = 8192  # tokens in a micro-batch where memory isn't asked
LEAST, MOST = 1024, 65536  # more at once is no faster
SHARE = (
    0.7  # of what is free; gradients of activations, fragmentation and vLLM's graphs have the rest
)
LOGIT_COPIES = 5  # float32, of those that exist at one time
# what PyTorch's allocators say, on the CPU and on Apple's GPUs
RAN_OUT = ("can't allocate memory", "not enough memory", "out of memory")


def keep_freed() -> None:
    """Have the C library keep what tensors give back, for the next ones, instead of the system.

    The system clears every page that it hands out anew, and that is time of the first to use it.
    What a process held at its peak it then holds to its end. glibc only; others stay as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, 32 << 20)  # bytes; more it doesn't take
        libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)


def fit(policy: Policy, cfg: Any, to_come: int) -> list[str]:
    """Set how `policy` trains: as `cfg` (train.Config) says, or as memory allows; lines to show.

    `to_come`: bytes that optimizer and reference will take later.
    """
    free = free_bytes(policy.device)
    policy.may_checkpoint_layers = cfg.gradient_checkpointing == "auto"
    if cfg.gradient_checkpointing == "on":
        checkpoint_layers(policy)
    if free is None:
        policy.micro_batch_tokens = cfg.max_tokens_per_micro_batch or ON_CPU
        return []
    room = SHARE * (free - to_come - LOGIT_COPIES * 4 * LOGITS)
    needed = max(cfg.max_model_len, cfg.max_tokens_per_micro_batch or 0)
    if cfg.gradient_checkpointing == "auto" and room < needed * kept_bytes(policy):
        checkpoint_layers(policy)
    a_token = kept_bytes(policy)
    fitting = min(MOST, max(LEAST, int(room / a_token)))
    policy.micro_batch_tokens = cfg.max_tokens_per_micro_batch or fitting
    again = ", every layer computed again in the backward" if policy.checkpointed_layers else ""
    return [f"micro-batches of up to {policy.micro_batch_tokens} tokens: "
            f"{a_token / 1e6:.2f} MB each, {free / 1e9:.1f} GB free{again}"]  # fmt: skip


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU, PyTorch's own reserve included; None: not to be asked."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def is_scarce(policy: Policy, tokens: int) -> bool:
    """Whether a training pass of so many tokens might not fit: always on a GPU; on the host, when
    it would take more than a quarter of what is free."""
    if policy.device.type != "cpu":
        return True
    free = host_free_bytes()
    return free is not None and tokens * kept_bytes(policy) > free / 4


def host_free_bytes() -> int | None:
    """Memory that this process may still take, by Linux; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    group = Path("/sys/fs/cgroup")  # a container's limit
    with suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free


def kept_bytes(policy: Policy) -> float:
    """Bytes that a training pass keeps of one token until its backward, besides the weights.

    Layers that are computed again need those of one layer while they are.
    """
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(1, PROBE, dtype=torch.int64, device=policy.device)
    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = policy.hidden_states(ids)  # held until all is counted, or storages would be reused
    bytes_ = sum(kept.values()) / PROBE
    del hidden
    if not policy.checkpointed_layers:
        return bytes_
    layers, policy.checkpointed_layers = policy.checkpointed_layers, []
    try:
        return bytes_ + kept_bytes(policy) / len(layers)
    finally:
        policy.checkpointed_layers = layers


def attempt(run: Any, longest: int, make: Callable[[], T]) -> T:
    """What `make`, a training pass of `run` (core.run.Run), makes: again with less at one time
    while memory runs out, again with a smaller scale while float16 overflows.

    `longest`: tokens of its longest sequence. Raises OutOfMemory when nothing more can give.
    """
    policy, optimizer = run.policy, run.optimizer
    while True:
        try:
            made = make()
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            reason = (str(error).strip() or "MemoryError").splitlines()[0][:200]
        else:
            if not optimizer.overflowed():
                return made
            continue
        optimizer.zero_grad()  # out of the except clause, which would hold on to the pass
        gc.collect()
        torch.cuda.empty_cache()
        run.display.say(f"out of memory with {_give_way(policy, longest, reason)}")


def probe_peak_memory(cfg: Any, run: Any, learn: Callable[[RolloutBatch], Any]) -> None:
    """Have `learn` make the largest micro-batch that may come, where memory is scarce: before the
    first update, not in the third hour. Its gradients are dropped."""
    policy, optimizer = run.policy, run.optimizer
    longest = min(cfg.max_model_len, policy.max_length)
    if not cfg.num_updates and not cfg.sft_steps:
        return  # nothing is learnt
    scarce = is_scarce(policy, max(longest, policy.micro_batch_tokens))
    if not any(distributed.all_gather([scarce])):
        return
    scale = optimizer.scale, optimizer.steps_at_scale

    def make() -> None:
        moments = optimizer.memory_to_come()  # bytes that its first step will take
        held = torch.empty(moments, dtype=torch.uint8, device=policy.device)
        learn(longest_update(longest, policy.micro_batch_tokens))
        del held

    attempt(run, longest, make)
    optimizer.zero_grad()
    optimizer.scale, optimizer.steps_at_scale = scale  # what has no meaning teaches nothing


@contextmanager
def explained() -> Iterator[None]:
    """Memory that runs out inside, where nothing can give way, is one line."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, Fault) or not ran_out(error):
            raise
        reason = (str(error).strip() or "MemoryError").splitlines()[0][:200]
        raise OutOfMemory(
            f"out of memory ({reason}); what was saved is whole. Take --lora-rank 16, a lower "
            "--gpu-memory-utilization or --max-model-len, or a smaller model"
        ) from error


def ran_out(error: BaseException) -> bool:
    """Whether it says that there is no memory left, on the GPU or on the host."""
    says_so = any(words in str(error).lower() for words in RAN_OUT)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or says_so


def _give_way(policy: Policy, longest: int, reason: str) -> str:
    """Make the next pass smaller; what with, in words. Raises OutOfMemory if there is no way."""
    before = policy.micro_batch_tokens
    if before > longest:
        policy.micro_batch_tokens = max(longest, before // 2)
        return f"{before} tokens at one time: from here on {policy.micro_batch_tokens}"
    if policy.may_checkpoint_layers and not policy.checkpointed_layers:
        checkpoint_layers(policy)
        return f"a sequence of {longest} tokens: from here on layers are computed twice"
    raise OutOfMemory(
        f"a sequence of {longest} tokens, alone, does not fit in memory ({reason}); what was saved "
        "is whole. Lower --max-tokens, --max-turns or --max-model-len, take --lora-rank 16 or "
        "--gradient-checkpointing on, or a smaller model"
    )


def checkpoint_layers(policy: Policy) -> None:
    """Gradient checkpointing, from here on, in every pass that makes gradients."""
    policy.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy.checkpointed_layers = [
        m for m in policy.causal_lm.modules() if isinstance(m, GradientCheckpointingLayer)
    ]
