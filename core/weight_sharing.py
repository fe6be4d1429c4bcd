"""One set of weights for two models: Hugging Face trains the tensors that vLLM computes with.

vLLM keeps some weights in another layout than Hugging Face. In most families q, k and v of a layer
are one fused tensor, and gate and up of an MLP another. `share_weights` allocates each such tensor
once and makes the Hugging Face parameters views of it:

    qkv_proj [q + k + v rows, D]   <-- vLLM multiplies by the whole tensor
      q_proj: the first rows       <-- the optimizer updates these views in place
      k_proj: the next rows
      v_proj: the last rows

core/load_trace.py finds the views of any family. What vLLM keeps in another form has memory of its
own: weights that its loader computes, and those of experts, if their kernel needs another layout.
`EngineWeights.refresh` copies them after a step. vLLM stores LoRA adapters in slots padded to its
own ranks, so they are not shared either: `copy_adapters` copies a few megabytes.
"""

import copy
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from core.load_trace import base_weights, find_views, like
from core.patches import unpacked_weights

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

LOAD_FORMAT = "shared"  # the name of our loader in vLLM


def share_weights(model: Any, engine_model: Any) -> tuple[dict[str, Tensor], set[str]]:
    """Makes both models use the same tensors, and returns these by vLLM's names.

    What vLLM fuses, pads or transposes becomes a new tensor in vLLM's layout, of which the Hugging
    Face parameters are views. LoRA adapters are left out. Parameters that are no such views get
    memory of their own, and vLLM's loader fills them; the second result is the names of the weights
    that it needs. Raises RuntimeError, before it changes anything, as `find_views` does.
    """
    weights, shared = base_weights(model), {}
    all_views, to_load = find_views(model, engine_model)
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
        engine_parameter.data = shared[name] = tensor
    load_weights(model, engine_model, to_load)
    return shared, to_load


@torch.no_grad()
def load_weights(model: Any, engine_model: Any, names: set[str]) -> None:
    """Copies these weights of a Hugging Face model with vLLM's own loader."""
    state = {name: weight.data for name, weight in base_weights(model).items() if name in names}
    if state:
        engine_model.load_weights(iter(revert_weight_conversion(model, state).items()))


class EngineWeights:
    """The weights that vLLM computes with: those of the trainer, and copies in another form."""

    def __init__(self, model: Any):
        """`model`: of Hugging Face, which is trained."""
        self.model = model
        self.trained = any(weight.requires_grad for weight in base_weights(model).values())
        self.shared: dict[str, Tensor] = {}  # by vLLM's names
        self.to_load: set[str] = set()  # weights whose copies vLLM's loader fills
        # layers that vLLM lays out again after loading, with their parameters as it loads them
        self.laid_out: list[tuple[Any, dict[str, Tensor]]] = []
        self.engine_model: Any = nn.Module()
        self.vllm_config: Any = None

    def share(self, engine_model: Any, vllm_config: "VllmConfig") -> None:
        """Shares the weights; called while vLLM loads its model."""
        if self.trained and vllm_config.model_config.use_mla:
            # its W_UK and W_UV are products of the weights at its start
            raise RuntimeError("it would not see optimizer steps in its latent attention (MLA)")
        self.engine_model, self.vllm_config = engine_model, vllm_config
        self.shared, self.to_load = share_weights(self.model, engine_model)
        for prefix, layer in engine_model.named_modules():
            if hasattr(getattr(layer, "quant_method", None), "moe_kernel"):
                self._process_copies(prefix, layer)

    def copied(self) -> dict[str, Tensor]:
        """The parameters of vLLM's model that are not shared."""
        named = self.engine_model.named_parameters()
        return {n: p for n, p in named if n.replace(".base_layer.", ".") not in self.shared}

    @torch.no_grad()
    def refresh(self) -> None:
        """Fills the copies again, in place, because CUDA graphs know their addresses."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            kernels = [
                (layer, loaded, {name: getattr(layer, name).data for name in loaded})
                for layer, loaded in self.laid_out
            ]
            for layer, loaded, _ in kernels:
                _set_data(layer, loaded)
            load_weights(self.model, self.engine_model, self.to_load)
            for layer, loaded, kernel in kernels:
                _set_data(layer, kernel)
                again = copy.copy(layer)  # a layer that has not been processed yet
                quant_method = copy.copy(layer.quant_method)
                quant_method.moe_kernel = None
                parameters = {n: like(getattr(layer, n), t.clone()) for n, t in loaded.items()}
                modules = layer._modules | {"quant_method": quant_method}
                vars(again).update(_parameters=layer._parameters | parameters, _modules=modules)
                quant_method.process_weights_after_loading(again)
                for name, tensor in kernel.items():
                    tensor.copy_(getattr(again, name))

    def _process_copies(self, prefix: str, layer: Any) -> None:
        """Lets vLLM lay out copies of a layer's parameters; keeps those that it changes."""
        loaded = {name: p.data for name, p in layer.named_parameters(recurse=False)}
        quant_method = layer.quant_method

        def process(_: Any) -> None:
            del quant_method.process_weights_after_loading  # what follows is of its class
            _set_data(layer, {name: tensor.clone() for name, tensor in loaded.items()})
            quant_method.process_weights_after_loading(layer)
            if all(torch.equal(getattr(layer, name), tensor) for name, tensor in loaded.items()):
                _set_data(layer, loaded)
                return
            self.laid_out.append((layer, loaded))
            for name in loaded:
                self.shared.pop(f"{prefix}.{name}", None)

        quant_method.process_weights_after_loading = process


def register_loader(engine_weights: EngineWeights) -> None:
    """Registers a vLLM weight loader, LOAD_FORMAT, that calls `engine_weights.share`."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class SharedWeightsLoader(BaseModelLoader):
        def download_model(self, model_config: "ModelConfig") -> None:
            pass

        def load_model(self, vllm_config: "VllmConfig", *args: Any, **kwargs: Any) -> nn.Module:
            self.vllm_config = vllm_config
            with unpacked_weights(), ExitStack() as self.building:
                hook = register_module_parameter_registration_hook(_drop_storage)
                self.building.callback(hook.remove)
                self.building.enter_context(no_init_weights())  # there is no memory to write to
                return super().load_model(vllm_config, *args, **kwargs)

        def load_weights(self, engine_model: nn.Module, model_config: "ModelConfig") -> None:
            self.building.close()  # vLLM registers the shared tensors again when it processes them
            engine_weights.share(engine_model, self.vllm_config)

    register_model_loader(LOAD_FORMAT)(SharedWeightsLoader)


def check_bound(engine_model: nn.Module, shared: dict[str, Tensor]) -> None:
    """Raises RuntimeError if a parameter of vLLM's model is not the shared tensor of its name."""
    for name, parameter in engine_model.named_parameters():
        tensor = shared.get(name.replace(".base_layer.", "."))
        if tensor is not None and parameter.data_ptr() != tensor.data_ptr():
            raise RuntimeError(f"vLLM has a copy of {name} instead of the weight itself")


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


def _set_data(layer: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        getattr(layer, name).data = tensor


def _drop_storage(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Shrinks a new parameter of vLLM to one element, so that no second copy is ever allocated."""
    if parameter is not None:
        element = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
        parameter.data = element.expand(parameter.shape)
