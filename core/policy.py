"""A policy: a causal language model, its tokenizer, and how to sample from it and train it.

    hidden = policy.hidden_states(input_ids)    # [B, T] int64 -> [B, T, D]
    logits = policy.to_logits(hidden[0])        # [T, V] float32

core/loading.py loads one.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from core.patches import decoder_that_returns
from core.prefix_sharing import ATTENTION, PrefixTree

Weights = dict[str, Tensor]  # every trainable parameter by name, on the CPU


@dataclass
class Policy:
    """A model with what sampling and training need to know about it."""

    model: Any  # a PreTrainedModel, or a PeftModel around one; they share no base class
    tokenizer: Tokenizer
    device: torch.device
    stop_ids: list[int]  # each of these token ids ends a completion
    end_of_turn_id: int  # the token with which the assistant ends its turn
    max_length: int  # limit on the tokens of prompt and completion together
    value_head: nn.Linear | None = None  # PPO: last hidden state -> value
    micro_batch_tokens: int = 2048  # tokens in one forward and backward pass, padding included
    checkpointed_layers: list[nn.Module] = field(default_factory=list)  # see core/memory.py
    trust_remote_code: bool = False  # True: Python code that comes with the model may run
    disables_adapters: bool = False  # True: compute without the LoRA adapters (the reference)
    limited_by: str = "--max-model-len"  # the setting that `max_length` comes from
    remarks: list[str] = field(default_factory=list)  # lines about this model, shown at the start

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The Hugging Face model; its linear layers contain the LoRA adapters, if there are any."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the base weights; with --quantize, the one in which they are multiplied."""
        return cast(nn.Embedding, self.causal_lm.get_input_embeddings()).weight.dtype

    @property
    def lora_rank(self) -> int:
        """The highest rank of a layer's LoRA adapters; 0 without adapters."""
        if not hasattr(self.model, "peft_config"):
            return 0
        config = self.model.peft_config["default"]
        return max(config.r, *config.rank_pattern.values(), 0)

    @property
    def quantized(self) -> bool:
        """Whether some of the base weights have 4 bits."""
        return any(is_quantized(parameter) for parameter in self.model.parameters())

    @property
    def shares_prefixes(self) -> bool:
        """Whether `hidden_states` accepts a tree, which has each distinct prefix once."""
        return self.causal_lm.config.get_text_config()._attn_implementation == ATTENTION

    def adapters(self) -> AbstractContextManager[None]:
        """Inside this context the model computes without LoRA adapters if `disables_adapters`."""
        return self.model.disable_adapter() if self.disables_adapters else nullcontext()

    def hidden_states(self, input_ids: Tensor, tree: PrefixTree | None = None) -> Tensor:
        """Last hidden states [B, T, D] of right-padded `input_ids` [B, T] int64; differentiable.

        Needs no padding mask, as no token attends to the padding after it. With a `tree`, those of
        its nodes in place of `input_ids`: [1, U, D].
        """
        for layer in self.checkpointed_layers:  # not layer.train(), which would enable dropout
            layer.training = torch.is_grad_enabled()
        decoder = self.causal_lm.get_decoder()
        with self.adapters():
            if tree is None:
                return decoder(input_ids=input_ids, use_cache=False).last_hidden_state
            return decoder(**tree.inputs(), use_cache=False).last_hidden_state

    @property
    def logits_chunk(self) -> int:
        """Number of tokens whose logits may exist at one time."""
        return max(1, self.max_logits // self.causal_lm.config.get_text_config().vocab_size)

    @property
    def max_logits(self) -> int:
        """Float32 logits that may exist at one time, without copies in the softmax."""
        if self.device.type != "cuda":
            return max_logits()
        return max_logits(torch.cuda.get_device_properties(self.device).total_memory)

    def to_logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [n, V] of hidden states [n, D], equal to those that the model returns.

        Calls the model's own forward with `hidden` as the output of its decoder, because some
        families scale or cap the logits there (Granite, Cohere, Gemma).
        """
        with decoder_that_returns(self.causal_lm.get_decoder(), hidden[None]), self.adapters():
            return self.causal_lm(inputs_embeds=hidden[None], use_cache=False).logits[0].float()

    def size(self) -> str:
        """Weights and device for the title line, such as '0.88M weights, 0.88M trained, cpu'."""
        weights = sum(num_weights(p) for p in self.model.parameters())
        in_4_bits = sum(num_weights(p) for p in self.model.parameters() if is_quantized(p))
        quantized = f" ({in_4_bits / 1e6:.2f}M in 4 bits)" if in_4_bits else ""
        trained = f"{sum(p.numel() for p in self.trainable().values()) / 1e6:.2f}M trained"
        return f"{weights / 1e6:.2f}M weights{quantized}, {trained}, {self.device}"

    def trainable(self) -> dict[str, nn.Parameter]:
        """All trainable parameters by name, including the value head."""
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if self.value_head is not None:
            named |= {f"value_head.{n}": p for n, p in self.value_head.named_parameters()}
        return named


def max_logits(gpu_bytes: int = 0) -> int:
    """2^25 logits (128 MiB); on a GPU 1/64 of its `gpu_bytes`, from 128 MiB to 1 GiB.

    In full fine-tuning each chunk of logits computes a gradient of the whole output layer, so a
    GPU with the memory for larger chunks is faster with them.
    """
    return min(2**28, max(2**25, gpu_bytes // (64 * 4)))


def is_quantized(tensor: Any) -> bool:
    """Whether the elements of a parameter are codes of 4 bits (--quantize), two in a byte."""
    return getattr(tensor, "quant_state", None) is not None


def num_weights(parameter: Any) -> int:
    """Number of weights that a parameter stands for."""
    return parameter.quant_state.shape.numel() if is_quantized(parameter) else parameter.numel()


@contextmanager
def borrowed(weights: Mapping[str, Tensor]) -> Iterator[Weights]:
    """Inside, the tensors may be changed; on exit they have their old values, bit for bit. Yields
    these, on the CPU."""
    old = {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}
    try:
        yield old
    finally:
        copy_weights(old, weights)


@torch.no_grad()
def copy_weights(source: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    """Gives the tensors of `into` the values of `source`."""
    for name, weight in into.items():
        weight.copy_(source[name])
