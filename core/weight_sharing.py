"""One set of weights for two models: tensors laid out once, as both can read them.

vLLM keeps q, k and v of a layer in one tensor, and gate and up of an MLP in another, where Hugging
Face keeps five. So the fused tensor is allocated once and the Hugging Face parameters become views
of it:

    qkv_proj [q + k + v rows, D]   <-- vLLM multiplies by all of it
      q_proj = the first rows      <-- the optimiser writes here, in place
      k_proj = the next
      v_proj = the last

All other tensors have one name and one shape in both. Adapters are no such case: vLLM has slots of
its own for them, padded to its ranks, and gets copies of a few megabytes.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
FUSED_INTO = {part: fused for fused, parts in FUSED.items() for part in parts}
VOCABULARY_STEP = 64  # vLLM rounds the rows of an embedding up to a multiple of this


def share_weights(model: Any) -> dict[str, Tensor]:
    """The weights of a Hugging Face model by vLLM's names, laid out as vLLM wants them.

    Tensors that are fused or padded there are allocated here and filled, and the model's parameters
    become views of their rows; any other is the parameter's own. Adapters are left out.
    """
    parts: dict[str, list[tuple[int, nn.Parameter]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            layer, _, kind = name.replace(".base_layer.", ".").rpartition(".")
            fused, order = _place(layer)
            parts[f"{fused}.{kind}"].append((order, parameter))
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    shared = {}
    for name, numbered in parts.items():
        parameters = [p for _, p in sorted(numbered, key=lambda pair: pair[0])]
        num_rows = sum(len(p) for p in parameters)
        if id(parameters[0]) in embeddings:
            num_rows = -(-num_rows // VOCABULARY_STEP) * VOCABULARY_STEP
        if num_rows == len(parameters[0]):
            shared[name] = parameters[0].data
        else:
            shared[name] = _stacked(parameters, num_rows)
    return shared


def bind(model: nn.Module, shared: dict[str, Tensor]) -> None:
    """Make the parameters of vLLM's model the shared tensors.

    Raises RuntimeError unless every parameter and every tensor has its counterpart, of the same
    shape, precision and device.
    """
    theirs = dict(model.named_parameters())
    if theirs.keys() != shared.keys():
        alone = sorted(theirs.keys() ^ shared.keys())
        raise RuntimeError(f"weights without a counterpart: {', '.join(alone[:4])}")
    for name, parameter in theirs.items():
        wanted, there = _kind(parameter), _kind(shared[name])
        if wanted != there:
            raise RuntimeError(f"{name} is {wanted} in vLLM and {there} in training")
        parameter.data = shared[name]


def check_bound(model: nn.Module, shared: dict[str, Tensor]) -> None:
    """Raise RuntimeError unless each parameter of vLLM's model still is the shared tensor."""
    for name, parameter in model.named_parameters():
        if parameter.data_ptr() != shared[name.replace(".base_layer.", ".")].data_ptr():
            raise RuntimeError(f"vLLM has a copy of {name} instead of the weight itself")


def register_loader(shared: dict[str, Tensor]) -> str:
    """A loader that gives vLLM's model the shared weights; returns vLLM's name for it."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class SharedWeights(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            bind(model, shared)

        def load_model(self, *args: Any, **kwargs: Any) -> nn.Module:
            hook = register_module_parameter_registration_hook(_without_storage)
            pack = "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm"
            try:
                with patch(pack, _use_the_weight):
                    return super().load_model(*args, **kwargs)
            finally:
                hook.remove()

    register_model_loader("shared")(SharedWeights)
    return "shared"


@dataclass
class Slot:
    """One adapter of rank r: trained as A [r, in] and B [out, r], sampled from as a and b."""

    A: Tensor
    B: Tensor
    a: Tensor
    b: Tensor
    scaling: float  # alpha / r


def adapter_slots(model: nn.Module, engine_model: nn.Module) -> list[Slot]:
    """A slot for each LoRA layer of a Hugging Face model, in the model of an engine."""
    from peft.tuners.lora import LoraLayer

    engine_layers: dict[str, Any] = dict(engine_model.named_modules())
    slots = []
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            fused, part = _place(name)
            there = engine_layers[
                fused
            ]  # stacked: [adapters, 1, rank, in], [adapters, 1, out, rank]
            adapter: Any = layer
            A, B = adapter.lora_A["default"].weight, adapter.lora_B["default"].weight
            a, b = there.lora_a_stacked[part][0, 0], there.lora_b_stacked[part][0, 0]
            slots.append(Slot(A, B, a[: len(A)], b[:, : len(A)], adapter.scaling["default"]))
    return slots


@torch.no_grad()
def copy_adapters(slots: list[Slot]) -> None:
    """a <- A and b <- (alpha / r) B, for all layers at once."""
    torch._foreach_copy_([s.a for s in slots], [s.A.data for s in slots])
    scaled = torch._foreach_mul([s.B.data for s in slots], [s.scaling for s in slots])
    torch._foreach_copy_([s.b for s in slots], scaled)


def _place(layer: str) -> tuple[str, int]:
    """The layer's name in vLLM, and which part of it the layer is.

    >>> _place("model.layers.0.self_attn.v_proj"), _place("lm_head")
    (('model.layers.0.self_attn.qkv_proj', 2), ('lm_head', 0))
    """
    owner, dot, leaf = layer.rpartition(".")
    fused = FUSED_INTO.get(leaf, leaf)
    return owner + dot + fused, FUSED[fused].index(leaf) if fused in FUSED else 0


def _stacked(parameters: list[nn.Parameter], num_rows: int) -> Tensor:
    """One tensor of the parameters' rows, zeros behind them; the parameters become views of it."""
    whole = parameters[0].data.new_zeros(num_rows, *parameters[0].shape[1:])
    start = 0
    for parameter in parameters:
        rows = whole[start : start + len(parameter)]
        rows.copy_(parameter.data)
        parameter.data = rows
        start += len(rows)
    return whole


def _without_storage(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """vLLM's parameters weigh nothing until they are bound: there is never a second copy."""
    if parameter is not None:
        one = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
        parameter.data = one.expand(parameter.shape)


def _use_the_weight(layer: Any, remove_weight: bool) -> None:
    """In place of vLLM's packing for CPUs, which would compute with a copy of the weight."""
    layer.cpu_linear = torch.nn.functional.linear


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
