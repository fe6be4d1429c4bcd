"""One set of weights for two models: Hugging Face trains the tensors that vLLM computes with.

vLLM keeps q, k and v of a layer in one fused tensor, and gate and up of an MLP in another, where
Hugging Face has five. `share_weights` allocates each fused tensor once and makes the Hugging Face
parameters views of it:

    qkv_proj [q + k + v rows, D]   <-- vLLM multiplies by the whole tensor
      q_proj: the first rows       <-- the optimizer updates these views in place
      k_proj: the next rows
      v_proj: the last rows

Every other tensor has the same name and shape in both models. vLLM stores LoRA adapters in slots
padded to its own ranks, so they are not shared: `copy_adapters` copies a few megabytes.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

if TYPE_CHECKING:
    from vllm.config import ModelConfig

FUSED_PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
FUSED_INTO = {part: fused for fused, parts in FUSED_PARTS.items() for part in parts}
VOCABULARY_MULTIPLE = 64  # vLLM pads the rows of an embedding to a multiple of this
LOAD_FORMAT = "shared"  # the name of our loader in vLLM
CPU_GEMM = "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm"


def share_weights(model: Any) -> dict[str, Tensor]:
    """Returns the weights of a Hugging Face model under vLLM's names and in vLLM's layout.

    Makes the parameters that vLLM fuses or pads views of new tensors. Leaves out LoRA adapters.
    """
    parts: dict[str, list[tuple[int, nn.Parameter]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            layer, _, kind = name.replace(".base_layer.", ".").rpartition(".")
            fused, index = _fused_layer(layer)
            parts[f"{fused}.{kind}"].append((index, parameter))
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    shared = {}
    for name, indexed in parts.items():
        parameters = [parameter for _, parameter in sorted(indexed, key=lambda pair: pair[0])]
        num_rows = sum(map(len, parameters))
        if id(parameters[0]) in embeddings:
            num_rows = -(-num_rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        whole = num_rows == len(parameters[0])
        shared[name] = parameters[0].data if whole else _stack(parameters, num_rows)
    return shared


def register_loader(shared: dict[str, Tensor]) -> None:
    """Registers a vLLM weight loader that binds `shared`, under the name LOAD_FORMAT."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class SharedWeightsLoader(BaseModelLoader):
        def download_model(self, model_config: "ModelConfig") -> None:
            pass

        def load_weights(self, model: nn.Module, model_config: "ModelConfig") -> None:
            bind_weights(model, shared)

        def load_model(self, *args: Any, **kwargs: Any) -> nn.Module:
            hook = register_module_parameter_registration_hook(_drop_storage)
            try:
                with patch(CPU_GEMM, _use_unpacked_weight):
                    return super().load_model(*args, **kwargs)
            finally:
                hook.remove()

    register_model_loader(LOAD_FORMAT)(SharedWeightsLoader)


def bind_weights(engine_model: nn.Module, shared: dict[str, Tensor]) -> None:
    """Makes every parameter of vLLM's model the shared one; raises RuntimeError if they differ."""
    parameters = dict(engine_model.named_parameters())
    if unmatched := sorted(parameters.keys() ^ shared.keys()):
        raise RuntimeError(f"weights without a counterpart: {', '.join(unmatched[:4])}")
    for name, parameter in parameters.items():
        engine_kind, shared_kind = _describe(parameter), _describe(shared[name])
        if engine_kind != shared_kind:
            raise RuntimeError(f"{name} is {engine_kind} in vLLM and {shared_kind} in training")
    for name, parameter in parameters.items():
        parameter.data = shared[name]


def check_bound(engine_model: nn.Module, shared: dict[str, Tensor]) -> None:
    """Raises RuntimeError if a parameter of vLLM's model is not the shared tensor."""
    for name, parameter in engine_model.named_parameters():
        if parameter.data_ptr() != shared[name.replace(".base_layer.", ".")].data_ptr():
            raise RuntimeError(f"vLLM has a copy of {name} instead of the weight itself")


class AdapterSlot(NamedTuple):
    """A LoRA layer of rank r: the trained matrices, and vLLM's tensors that they are copied to."""

    A: Tensor  # [r, in]
    B: Tensor  # [out, r]
    engine_A: Tensor  # [r, in]
    engine_B: Tensor  # [out, r]
    scaling: float  # alpha / r


def adapter_slots(model: nn.Module, engine_model: nn.Module) -> list[AdapterSlot]:
    """Pairs each LoRA layer of a Hugging Face model with its tensors in vLLM's model."""
    from peft.tuners.lora import LoraLayer

    engine_layers: dict[str, Any] = dict(engine_model.named_modules())
    slots = []
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            A: Any = layer.lora_A["default"].weight
            B: Any = layer.lora_B["default"].weight
            fused, index = _fused_layer(name)
            # of the first adapter: [rank, in] and [out, rank], vLLM's rank being r or more
            engine_A = engine_layers[fused].lora_a_stacked[index][0, 0, : len(A)]
            engine_B = engine_layers[fused].lora_b_stacked[index][0, 0, :, : len(A)]
            slots.append(AdapterSlot(A, B, engine_A, engine_B, layer.scaling["default"]))
    return slots


@torch.no_grad()
def copy_adapters(slots: list[AdapterSlot]) -> None:
    """Copies A and (alpha / r) B of all layers into vLLM's tensors."""
    torch._foreach_copy_([s.engine_A for s in slots], [s.A.data for s in slots])
    scaled = torch._foreach_mul([s.B.data for s in slots], [s.scaling for s in slots])
    torch._foreach_copy_([s.engine_B for s in slots], scaled)


def _fused_layer(layer: str) -> tuple[str, int]:
    """Returns the name of the vLLM layer that contains a Hugging Face layer, and its index there.

    >>> _fused_layer("model.layers.0.self_attn.v_proj"), _fused_layer("lm_head")
    (('model.layers.0.self_attn.qkv_proj', 2), ('lm_head', 0))
    """
    parent, dot, part = layer.rpartition(".")
    fused = FUSED_INTO.get(part, part)
    return parent + dot + fused, FUSED_PARTS[fused].index(part) if fused in FUSED_PARTS else 0


def _stack(parameters: list[nn.Parameter], num_rows: int) -> Tensor:
    """Stacks the rows of the parameters, zero-padded to `num_rows`; each becomes a view."""
    stacked = parameters[0].data.new_zeros(num_rows, *parameters[0].shape[1:])
    sizes = [len(parameter) for parameter in parameters]
    for parameter, rows in zip(parameters, stacked[: sum(sizes)].split(sizes), strict=True):
        parameter.data = rows.copy_(parameter.data)
    return stacked


def _drop_storage(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Shrinks a new parameter of vLLM to one element, so that no second copy is ever allocated."""
    if parameter is not None:
        element = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
        parameter.data = element.expand(parameter.shape)


def _use_unpacked_weight(layer: Any, remove_weight: bool) -> None:
    """Replaces vLLM's packing of weights for CPUs, which would compute with a copy."""
    layer.cpu_linear = torch.nn.functional.linear


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
