"""How many tokens one training pass computes on at a time, and whether it recomputes activations.

A short forward pass measures the bytes per token that autograd keeps for the backward pass; a
micro-batch gets as many tokens as fit into a part of the memory that is free when training begins.
On a GPU `probe_peak_memory` then runs the largest possible micro-batch before the first update, and
halves the budget until it fits. If not even the longest episode does, it switches gradient
checkpointing (arXiv:1604.06174) on: each layer keeps its input only, and computes its activations
again in the backward pass. Losses are sums over tokens: the budget does not change the gradients.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from core.batching import Sequence, cut
from core.config import Config
from core.faults import Fault, OutOfMemory, ran_out
from core.optimizer import MasterAdamW
from core.patches import checkpoint_without_dropout
from core.policy import Policy
from core.scoring import predict

PROBE_TOKENS = 64  # of the short pass that measures bytes per token
MIN_BUDGET, CPU_BUDGET, GPU_BUDGET = 1024, 8192, 65536  # tokens; with more it is no faster
# fraction of free memory for activations; the rest: gradients, fragmentation, vLLM, other programs
USABLE = {"cuda": 0.7, "cpu": 0.25}
RAISES = {"cuda"}  # devices that raise when memory is full; Linux ends a process instead
# flags with which weights need less memory; vLLM has no code for nf4
SMALLER = "--lora-rank 16, with it --quantize nf4 --sampler torch"
LOGIT_COPIES = 5  # float32 copies of a chunk of logits that exist at the same time


def set_micro_batch_budget(policy: Policy, cfg: Config, future_bytes: int) -> list[str]:
    """Sets `policy.micro_batch_tokens` from `cfg` or from free memory.

    `future_bytes`: of the gradients and the reference. Returns lines to show.
    """
    kind = policy.device.type
    lines: list[str] = []
    most = GPU_BUDGET if kind == "cuda" else CPU_BUDGET
    if (free := free_bytes(policy.device)) is not None:
        room = USABLE[kind] * (free - future_bytes - LOGIT_COPIES * 4 * policy.max_logits)
        per_token = bytes_per_token(policy)
        most = min(most, max(MIN_BUDGET, int(room / per_token)))
        size = f"{per_token / 1e6:.2f} MB per token, {free / 1e9:.1f} GB free"
        lines = [f"micro-batches of up to {most} tokens: {size}"]
    # no micro-batch holds more than all rollouts of a gradient step
    rollouts = -(-cfg.num_prompts * cfg.group_size // cfg.num_minibatches) if cfg.num_updates else 1
    rollouts = max(rollouts, cfg.sft_batch_size if cfg.sft_steps else 1)
    budget = cfg.max_tokens_per_micro_batch or most
    policy.micro_batch_tokens = min(budget, rollouts * policy.max_length)
    return lines if kind == "cuda" else []


def probe_peak_memory(
    cfg: Config, policy: Policy, optimizer: MasterAdamW, say: Callable[[str], None]
) -> None:
    """Runs forward and backward on the largest possible micro-batch.

    Halves `policy.micro_batch_tokens` until it fits; then switches gradient checkpointing on.
    Raises OutOfMemory if that is not enough. Drops the gradients.
    """
    if policy.device.type not in RAISES or not cfg.num_updates + cfg.sft_steps:
        return
    vocab_size = policy.causal_lm.config.get_text_config().vocab_size
    while True:
        reason = ""
        try:
            rest = [0] * (policy.max_length - 1)
            count = max(1, policy.micro_batch_tokens // policy.max_length)
            rows = [Sequence(i, [i % vocab_size, *rest], [-1, *rest]) for i in range(count)]
            for micro in cut(rows, policy):
                optimizer.backward(predict(policy, micro, 1.0)["logprobs"].mean())
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            reason = _reason(error)
        # outside the except clause, whose traceback keeps the tensors of the pass alive
        optimizer.zero_grad()
        if not reason:
            return
        gc.collect()
        torch.cuda.empty_cache()
        say(f"out of memory with {_reduce_memory(policy, reason)}")


def _reduce_memory(policy: Policy, reason: str) -> str:
    """Makes the next pass smaller. Returns a text: the size that failed, and the next attempt."""
    budget, longest = policy.micro_batch_tokens, policy.max_length
    if budget > longest:
        policy.micro_batch_tokens = max(longest, budget // 2)
        return f"micro-batches of {budget} tokens: trying {policy.micro_batch_tokens}"
    if not policy.checkpointed_layers:
        checkpoint_layers(policy)
        return f"a sequence of {longest} tokens: trying gradient checkpointing"
    raise OutOfMemory(
        f"one sequence of {longest} tokens does not fit in memory ({reason}). Lower --max-tokens, "
        f"--max-turns or --max-model-len, or use {SMALLER} or a smaller model"
    )


@contextmanager
def out_of_memory_as_one_line(advice: Callable[[], str]) -> Iterator[None]:
    """Turns an out-of-memory error inside into an OutOfMemory of one line that ends in `advice`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, Fault) or not ran_out(error):
            raise
        raise OutOfMemory(f"out of memory ({_reason(error)}). {advice()}") from error


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a CUDA device, PyTorch's cached blocks included, or of this process for a CPU;
    None where it is not known."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    free = psutil.virtual_memory().available
    cgroup = Path("/sys/fs/cgroup")  # the limit of a container
    with suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        free = min(free, limit - int((cgroup / "memory.current").read_text(encoding="ascii")))
    return free


def bytes_per_token(policy: Policy) -> float:
    """Bytes that a forward pass keeps per token for its backward pass, besides the weights."""
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    saved: dict[int, int] = {}  # storage -> bytes

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device=policy.device)
    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        # kept alive: freed storages would be miscounted
        _hidden = policy.hidden_states(ids)
    return sum(saved.values()) / PROBE_TOKENS


def checkpoint_layers(policy: Policy) -> None:
    """Switches gradient checkpointing on for every pass that computes gradients."""
    policy.causal_lm.gradient_checkpointing_enable()
    policy.checkpointed_layers = [
        m for m in policy.causal_lm.modules() if isinstance(m, GradientCheckpointingLayer)
    ]
    for layer in policy.checkpointed_layers:
        checkpoint_without_dropout(layer)
