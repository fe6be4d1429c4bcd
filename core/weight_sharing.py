"""One set of weights for two models: Hugging Face trains the tensors that vLLM computes with.

vLLM keeps some weights in another layout than Hugging Face. In most families q, k and v of a layer
are one fused tensor, and gate and up of an MLP another. `share_weights` allocates each such tensor
once and makes the Hugging Face parameters views of it:

    qkv_proj [q + k + v rows, D]   <-- vLLM multiplies by the whole tensor
      q_proj: the first rows       <-- the optimizer updates these views in place
      k_proj: the next rows
      v_proj: the last rows

core/load_trace.py finds the views of any family. What vLLM keeps in another form, such as experts,
has memory of its own: it is copied once, and cannot be trained. vLLM stores LoRA adapters in slots
padded to its own ranks, so they are not shared either: `copy_adapters` copies a few megabytes.
"""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from core.load_trace import base_weights, find_views
from core.patches import unpacked_weights

LOAD_FORMAT = "shared"  # the name of our loader in vLLM


def share_weights(model: Any, engine_model: Any) -> None:
    """Makes both models use the same tensors.

    What vLLM fuses, pads or transposes becomes a new tensor in vLLM's layout, of which the Hugging
    Face parameters are views. LoRA adapters are left out. Parameters that are no such views get
    memory of their own, and vLLM's loader fills them. Raises RuntimeError, before it changes
    anything, if weights are trained that vLLM would have copies of.
    """
    weights = base_weights(model)
    all_views, to_load = find_views(model, engine_model)
    if trained := sorted(name for name in to_load if weights[name].requires_grad):
        raise RuntimeError(f"it would not see optimizer steps in its copy of {trained[0]}")
    for name, engine_parameter in engine_model.named_parameters():
        shape = tuple(engine_parameter.shape)
        if name not in all_views:
            place = {"dtype": engine_parameter.dtype, "device": engine_parameter.device}
            engine_parameter.data = torch.zeros(shape, **place)
            continue
        views = all_views[name]
        tensor = weights[next(iter(views))].data
        whole = (shape, tensor.stride(), 0)
        if list(views.values()) != [whole] or not tensor.is_contiguous():
            tensor = tensor.new_zeros(shape)
            for weight, view in views.items():
                part = tensor.as_strided(*view)
                weights[weight].data = part.copy_(weights[weight].data)
        engine_parameter.data = tensor
    if to_load:
        state = {name: weights[name].data for name in to_load}
        with torch.no_grad():
            engine_model.load_weights(iter(revert_weight_conversion(model, state).items()))


def register_loader(model: Any) -> None:
    """Registers a vLLM weight loader, LOAD_FORMAT, that shares the weights of a Hugging Face
    model."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class SharedWeightsLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_model(self, *args: Any, **kwargs: Any) -> nn.Module:
            with unpacked_weights(), ExitStack() as self.building:
                hook = register_module_parameter_registration_hook(_drop_storage)
                self.building.callback(hook.remove)
                self.building.enter_context(no_init_weights())  # there is no memory to write to
                return super().load_model(*args, **kwargs)

        def load_weights(self, engine_model: nn.Module, model_config: Any) -> None:
            self.building.close()  # vLLM registers the shared tensors again when it processes them
            trained = any(weight.requires_grad for weight in base_weights(model).values())
            if trained and model_config.use_mla:
                # its W_UK and W_UV are products of the weights at its start
                raise RuntimeError("it would not see optimizer steps in its latent attention (MLA)")
            share_weights(model, engine_model)

    register_model_loader(LOAD_FORMAT)(SharedWeightsLoader)


class AdapterSlot(NamedTuple):
    """A LoRA layer of rank r, or some of its rows: what is trained, and vLLM's tensors for it."""

    A: Tensor  # [r, in]
    B: Tensor  # [out, r]
    engine_A: Tensor  # [r, in]
    engine_B: Tensor  # [out, r]
    scaling: float  # alpha / r


def adapter_slots(model: nn.Module, engine_model: nn.Module) -> list[AdapterSlot]:
    """Pairs each LoRA layer of a Hugging Face model with its tensors in vLLM's model.

    A vLLM layer has a slot for each of its fused parts. The rows of the shared weight tell which
    slots belong to a Hugging Face layer: one, or several if that layer is fused as well (GLM-4).
    Raises RuntimeError if there is none.
    """
    from peft.tuners.lora import LoraLayer

    modules: Any = engine_model.modules()
    engine_layers = {
        layer.base_layer.weight.untyped_storage().data_ptr(): layer
        for layer in modules
        if hasattr(layer, "lora_a_stacked") and hasattr(layer.base_layer, "weight")
    }
    slots = []
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            weight: Any = layer.get_base_layer().weight
            engine_layer = engine_layers.get(weight.untyped_storage().data_ptr())
            found = _slots_of_layer(layer, weight, engine_layer) if engine_layer else []
            if sum(len(slot.B) for slot in found) != len(weight):
                raise RuntimeError(f"vLLM has no LoRA adapter for the layer {name}")
            slots += found
    return slots


@torch.no_grad()
def copy_adapters(slots: list[AdapterSlot]) -> None:
    """Copies A and (alpha / r) B of all layers into vLLM's tensors."""
    torch._foreach_copy_([s.engine_A for s in slots], [s.A for s in slots])
    scaled = torch._foreach_mul([s.B for s in slots], [s.scaling for s in slots])
    torch._foreach_copy_([s.engine_B for s in slots], scaled)


def _slots_of_layer(layer: Any, weight: Tensor, engine_layer: Any) -> list[AdapterSlot]:
    A, B = layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data
    rank, scaling = len(A), layer.scaling["default"]
    whole, slots = engine_layer.base_layer.weight, []
    if whole.stride() != weight.stride():
        return []
    start = (whole.storage_offset() - weight.storage_offset()) // weight.stride(0)
    stacked = engine_layer.lora_a_stacked, engine_layer.lora_b_stacked  # [adapters, 1, ..]
    for engine_A, engine_B in zip(*stacked, strict=True):  # vLLM's rank is `rank` or more
        end = start + engine_B.shape[2]
        if start >= 0 and end <= len(B):  # a slot for these rows of `weight`
            engine_tensors = engine_A[0, 0, :rank], engine_B[0, 0, :, :rank]
            slots.append(AdapterSlot(A, B[start:end], *engine_tensors, scaling))
        start = end
    return slots


def _drop_storage(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Shrinks a new parameter of vLLM to one element, so that no second copy is ever allocated."""
    if parameter is not None:
        element = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
        parameter.data = element.expand(parameter.shape)
