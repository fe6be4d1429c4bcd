"""How many tokens one training pass computes on at a time, and whether it recomputes activations.

A short forward pass measures the bytes per token that autograd keeps for the backward pass. A
micro-batch gets as many tokens as fit into the memory that is free when training begins, minus
what will be allocated later. If not even the longest episode would fit, gradient checkpointing
(arXiv:1604.06174) is switched on: each layer keeps its input only, and computes its activations
again in the backward pass.

`probe_peak_memory` then runs the largest possible micro-batch before the first update, and halves
the budget until it fits. Losses are sums over tokens, so the budget does not change the gradients.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from core import distributed
from core.batching import largest_batch, micro_batches
from core.config import Config
from core.faults import Fault, OutOfMemory, ran_out
from core.optimizer import MasterAdamW
from core.patches import checkpoint_without_dropout
from core.policy import Policy
from core.prefix_sharing import PrefixTree, make_tree
from core.scoring import predict

PROBE_TOKENS = 64  # of the short pass that measures bytes per token
CPU_BUDGET = 8192  # tokens in a micro-batch where free memory cannot be measured
MIN_BUDGET, MAX_BUDGET = 1024, 65536  # tokens; larger micro-batches are no faster
USABLE = 0.7  # of free memory; the rest: gradients of activations, fragmentation, vLLM's graphs
# with which weights need less memory; vLLM has no code for nf4
SMALLER = "--lora-rank 16, with it --quantize nf4 --sampler torch"
LOGIT_COPIES = 5  # float32 copies of a chunk of logits that exist at the same time


def set_micro_batch_budget(policy: Policy, cfg: Config, future_bytes: int) -> list[str]:
    """Sets `policy.micro_batch_tokens` and gradient checkpointing, from `cfg` or from free memory.

    `future_bytes`: of the gradients and the reference. Returns lines to show.
    """
    free = free_bytes(policy.device)
    if cfg.gradient_checkpointing == "on":
        checkpoint_layers(policy)
    if free is None:
        policy.micro_batch_tokens = cfg.max_tokens_per_micro_batch or CPU_BUDGET
        return []
    available = USABLE * (free - future_bytes - LOGIT_COPIES * 4 * policy.max_logits)
    longest = max(min(cfg.max_model_len, policy.max_length), cfg.max_tokens_per_micro_batch or 0)
    if cfg.gradient_checkpointing == "auto" and available < longest * bytes_per_token(policy):
        checkpoint_layers(policy)
    per_token = bytes_per_token(policy, cfg.group_size)
    fitting = min(MAX_BUDGET, max(MIN_BUDGET, int(available / per_token)))
    policy.micro_batch_tokens = cfg.max_tokens_per_micro_batch or fitting
    recompute = ", with gradient checkpointing" if policy.checkpointed_layers else ""
    return [f"micro-batches of up to {policy.micro_batch_tokens} tokens: "
            f"{per_token / 1e6:.2f} MB per token, {free / 1e9:.1f} GB free{recompute}"]  # fmt: skip


def probe_peak_memory(
    cfg: Config,
    policy: Policy,
    optimizer: MasterAdamW,
    say: Callable[[str], None],
) -> None:
    """Runs forward and backward on the largest possible micro-batch, if memory is scarce.

    Halves `policy.micro_batch_tokens` until it fits; then switches gradient checkpointing on, if
    it may. Raises OutOfMemory if nothing is left to try. Drops the gradients.
    """
    longest = min(cfg.max_model_len, policy.max_length)
    trains = cfg.num_updates > 0 or cfg.sft_steps > 0
    # no micro-batch holds more than all rollouts of a gradient step
    rollouts = -(-cfg.num_prompts * cfg.group_size // cfg.num_minibatches) if cfg.num_updates else 1
    rollouts = max(rollouts, cfg.sft_batch_size if cfg.sft_steps else 1)
    policy.micro_batch_tokens = min(policy.micro_batch_tokens, rollouts * longest)
    free = host_free_bytes() if policy.device.type == "cpu" else 0  # 0: probe on every GPU
    # a tree has a bool and a float32 mask where FlashAttention does not take its chains
    per_token = 0.0
    if free is not None:
        per_token = bytes_per_token(policy, cfg.group_size) + 5 * longest * policy.shares_prefixes
    if free and (fitting := max(longest, int(free / 4 / per_token))) < policy.micro_batch_tokens:
        # not tried: Linux kills a process instead of raising
        say(f"micro-batches of {policy.micro_batch_tokens} tokens may not fit in memory: "
            f"taking {fitting}")  # fmt: skip
        policy.micro_batch_tokens = fitting
    tokens = max(longest, policy.micro_batch_tokens)
    scarce = free is not None and tokens * per_token > free / 4
    if not trains or not any(distributed.all_gather([scarce])):
        return
    while True:
        try:
            _largest_pass(policy, optimizer, longest)
            break
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            reason = _reason(error)
        # outside the except clause, whose traceback keeps the tensors of the pass alive
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        may_checkpoint = cfg.gradient_checkpointing == "auto"
        say(f"out of memory with {_reduce_memory(policy, longest, may_checkpoint, reason)}")
    optimizer.zero_grad()


def _largest_pass(policy: Policy, optimizer: MasterAdamW, longest: int) -> None:
    vocab_size = policy.causal_lm.config.get_text_config().vocab_size
    for micro in micro_batches(
        policy, largest_batch(longest, policy.micro_batch_tokens, vocab_size)
    ):
        logprobs = predict(policy, micro, 1.0)["logprobs"]
        optimizer.backward(logprobs.mean())


def _reduce_memory(policy: Policy, longest: int, may_checkpoint: bool, reason: str) -> str:
    """Makes the next pass smaller. Returns what was too much and what is tried next."""
    budget = policy.micro_batch_tokens
    if budget > longest:
        policy.micro_batch_tokens = max(longest, budget // 2)
        return f"micro-batches of {budget} tokens: trying {policy.micro_batch_tokens}"
    if may_checkpoint and not policy.checkpointed_layers:
        checkpoint_layers(policy)
        return f"a sequence of {longest} tokens: trying gradient checkpointing"
    raise OutOfMemory(
        f"one sequence of {longest} tokens does not fit in memory ({reason}). Lower --max-tokens, "
        f"--max-turns or --max-model-len, or use {SMALLER}, --gradient-checkpointing on or a "
        "smaller model"
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
    """Free memory of a CUDA device, PyTorch's cached blocks included; None for other devices."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def host_free_bytes() -> int | None:
    """Memory that this process may still allocate, on Linux; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    cgroup = Path("/sys/fs/cgroup")  # the limit of a container
    with suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        free = min(free, limit - int((cgroup / "memory.current").read_text(encoding="ascii")))
    return free


def bytes_per_token(policy: Policy, group_size: int = 1) -> float:
    """Bytes that a forward pass keeps per token for its backward pass, besides the weights.

    With gradient checkpointing, that includes the activations of the one layer that is recomputed.
    A pass over a tree keeps the keys and values of a prefix for each block of its queries, or for
    each sequence: this is for groups of `group_size` with long prompts and completions of one
    token, in blocks of a quarter of them, as long sequences have.
    """
    separate = _bytes_per_token(policy, None)
    if not policy.shares_prefixes:
        return separate
    size = min(group_size, PROBE_TOKENS // 2)
    prompt = [0] * (PROBE_TOKENS - size)
    tree = make_tree([[*prompt, i] for i in range(size)], min_block=1)
    return max(separate, _bytes_per_token(policy, tree.to(policy.device)))


def _bytes_per_token(policy: Policy, tree: PrefixTree | None) -> float:
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
        _hidden = policy.hidden_states(ids, tree)
    per_token = sum(saved.values()) / PROBE_TOKENS
    if not policy.checkpointed_layers:
        return per_token
    layers, policy.checkpointed_layers = policy.checkpointed_layers, []
    for layer in layers:
        layer.training = False
    try:
        return per_token + _bytes_per_token(policy, tree) / len(layers)
    finally:
        policy.checkpointed_layers = layers


def checkpoint_layers(policy: Policy) -> None:
    """Switches gradient checkpointing on for every pass that computes gradients."""
    policy.causal_lm.gradient_checkpointing_enable()
    policy.checkpointed_layers = [
        m for m in policy.causal_lm.modules() if isinstance(m, GradientCheckpointingLayer)
    ]
    for layer in policy.checkpointed_layers:
        checkpoint_without_dropout(layer)
