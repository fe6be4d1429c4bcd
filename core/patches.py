"""What picoRL changes in other libraries while it runs. It does so here and nowhere else.

Each patch does something that the library has no argument and no hook for; its docstring says why,
and when it can go. Found in transformers 5.17 to 5.24 and vLLM 0.32 and 0.33.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

CPU_GEMM = "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm"


class DecoderOutput(BaseModelOutputWithPast):
    """The output of a decoder of any family: fields that a family adds are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def decoder_that_returns(decoder: Any, hidden: Tensor) -> AbstractContextManager[Any]:
    """Inside, the decoder of a causal LM computes nothing and returns `hidden`, [1, n, D].

    So the model's own forward makes logits of hidden states that exist already. It can go once
    every family has a method for what it does between the two, such as a scale or a cap.
    """
    output = DecoderOutput(last_hidden_state=hidden)
    return patch.object(decoder, "forward", lambda *args, **kwargs: output)


def checkpoint_without_dropout(layer: Any) -> None:
    """Lets a layer compute its forward twice, now and in the backward pass, without dropout.

    transformers checkpoints layers whose `training` is True, and some families (OPT) read that flag
    for their dropout, too. It can go once a layer in evaluation mode can be checkpointed.
    """

    def compute(forward: Callable[..., Any], *args: Any) -> Any:
        def without_dropout(*inputs: Any) -> Any:
            with patch.object(layer, "training", False):
                return forward(*inputs)

        return checkpoint(without_dropout, *args, use_reentrant=False)

    layer._gradient_checkpointing_func = compute


def pool_of_the_cache_alone() -> AbstractContextManager[Any]:
    """vLLM's memory pool gets the KV cache only.

    Otherwise all tensors that vLLM allocates for its model are in it: sleep(level=1) would free
    them, and the shutdown, which frees the pool before the model's buffers, would crash. It can go
    once vLLM's sleep leaves out tensors that somebody else uses.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    use_memory_pool = CuMemAllocator.use_memory_pool

    def pool_of_cache(allocator: Any, tag: str | None = None) -> AbstractContextManager[Any]:
        return use_memory_pool(allocator, tag) if tag == "kv_cache" else nullcontext()

    return patch.object(CuMemAllocator, "use_memory_pool", pool_of_cache)


def size_of_the_cache(
    plenty: int, size: Callable[[Any, Any, int], int]
) -> AbstractContextManager[Any]:
    """The KV cache gets as many bytes as `size` returns.

    Otherwise it takes all free memory, which takes a GPU longer to map at every wake-up. `size`
    gets vLLM's config, its plan for `plenty` bytes, which shows what a sequence needs, and the free
    bytes. It can go once vLLM's `kv_cache_memory_bytes` may be decided when the model is loaded.
    """
    from vllm.v1.engine import core as core_module

    get_kv_cache_configs = core_module.get_kv_cache_configs

    def configs_that_fit(
        vllm_config: Any, specs: list[dict[str, Any]], available: list[int], *groups: Any
    ) -> Any:
        [plan] = get_kv_cache_configs(vllm_config, specs, [plenty], *groups)
        num_bytes = size(vllm_config, plan, available[0])
        return get_kv_cache_configs(vllm_config, specs, [num_bytes], *groups)

    return patch.object(core_module, "get_kv_cache_configs", configs_that_fit)


@contextmanager
def undecorated(decoder_class: Any) -> Iterator[None]:
    """Keeps a Hugging Face class usable when vLLM builds its own model from that class.

    For families that vLLM has no code for, it changes the class in place so that it compiles
    itself, which only vLLM's instances can do. A later engine of this class runs uncompiled. It can
    go once vLLM decorates a subclass.
    """
    init = decoder_class.__init__
    try:
        yield
    finally:
        if decoder_class.__init__ is not init:
            decoder_class.__init__ = init
            decoder_class.do_not_compile = True  # vLLM's instances have an attribute of their own


def unpacked_weights() -> AbstractContextManager[Any]:
    """Inside, vLLM for CPUs does not pack weights into copies, with which it would compute.

    It can go once vLLM has an option for that.
    """

    def use_unpacked_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    return patch(CPU_GEMM, use_unpacked_weight)
