"""How many tokens a training pass holds at one time, and whether it computes its layers twice.

What autograd keeps of a token is not guessed from the architecture but counted on the model itself:
the bytes that a short pass saves for its backward. Of the memory that is free when training begins,
less what is still to come, a micro-batch gets the part that fits. When not even the longest episode
would fit, each layer keeps its input only and is computed again in the backward: gradient
checkpointing, arXiv:1604.06174.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from core.model import LOGITS, Policy

PROBE = 64  # tokens of the short pass
ON_CPU = 8192  # tokens in a micro-batch where memory isn't asked
LEAST, MOST = 1024, 65536  # more at once is no faster
SHARE = (
    0.7  # of what is free; gradients of activations, fragmentation and vLLM's graphs have the rest
)
LOGIT_COPIES = 5  # float32, of those that exist at one time


def fit(policy: Policy, cfg: Any, to_come: int) -> list[str]:
    """Set how `policy` trains: as `cfg` (train.Config) says, or as memory allows; lines to show.

    `to_come`: bytes that optimizer and reference will take later.
    """
    free = free_bytes(policy.device)
    if cfg.gradient_checkpointing == "on":
        recompute_layers(policy)
    if free is None:
        policy.tokens_at_once = cfg.max_tokens_per_micro_batch or ON_CPU
        return []
    room = SHARE * (free - to_come - LOGIT_COPIES * 4 * LOGITS)
    needed = max(cfg.max_model_len, cfg.max_tokens_per_micro_batch or 0)
    if cfg.gradient_checkpointing == "auto" and room < needed * kept_bytes(policy):
        recompute_layers(policy)
    a_token = kept_bytes(policy)
    fitting = min(MOST, max(LEAST, int(room / a_token)))
    policy.tokens_at_once = cfg.max_tokens_per_micro_batch or fitting
    again = ", every layer computed again in the backward" if policy.recomputed else ""
    return [f"micro-batches of up to {policy.tokens_at_once} tokens: {a_token / 1e6:.2f} MB each, "
            f"{free / 1e9:.1f} GB free{again}"]  # fmt: skip


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU, PyTorch's own reserve included; None: not to be asked."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


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
    if not policy.recomputed:
        return bytes_
    layers, policy.recomputed = policy.recomputed, []
    try:
        return bytes_ + kept_bytes(policy) / len(layers)
    finally:
        policy.recomputed = layers


def recompute_layers(policy: Policy) -> None:
    """Gradient checkpointing, from here on, in every pass that makes gradients."""
    policy.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy.recomputed = [
        m for m in policy.causal_lm.modules() if isinstance(m, GradientCheckpointingLayer)
    ]
