"""One set of weights for two models: Hugging Face trains the tensors that vLLM computes with.

vLLM keeps some weights in another layout than Hugging Face. In most families q, k and v of a layer
are one fused tensor, and gate and up of an MLP another. `share_weights` allocates each such tensor
once and makes the Hugging Face parameters views of it:

    qkv_proj [q + k + v rows, D]   <-- vLLM multiplies by the whole tensor
      q_proj: the first rows       <-- the optimizer updates these views in place
      k_proj: the next rows
      v_proj: the last rows

No list of families says where the views are. While vLLM loads a model it renames, fuses, pads and
transposes weights, in code that differs from family to family. `find_views` runs that code once on
meta tensors, which have a shape but no memory, and records every `copy_` of a block of a Hugging
Face weight into a block of a vLLM parameter. From the blocks follows how the whole weight lies in
the parameter: as a view with certain strides at a certain offset.

What vLLM keeps in another form, such as experts, has memory of its own: it is copied once, and
cannot be trained. vLLM stores LoRA adapters in slots padded to its own ranks, so they are not
shared either: `copy_adapters` copies a few megabytes.
"""

from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from core.patches import unpacked_weights

LOAD_FORMAT = "shared"  # the name of our loader in vLLM


class View(NamedTuple):
    """The place of a tensor in the memory of another: the arguments of `as_strided`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Copy(NamedTuple):
    """One `copy_` of the loader: a block of a weight, and one of a parameter, of equal shape."""

    weight: str
    source: View
    target: View


class AdapterSlot(NamedTuple):
    """Weights of a LoRA layer of rank r, or some of its rows, and vLLM's tensors for them."""

    A: Tensor  # [r, in]
    B: Tensor  # [out, r]
    engine_A: Tensor  # [r, in]
    engine_B: Tensor  # [out, r]
    scaling: float  # alpha / r


def share_weights(model: Any, engine_model: Any) -> None:
    """Makes both models use the same tensors.

    What vLLM fuses, pads or transposes becomes a new tensor in vLLM's layout, of which the Hugging
    Face parameters are views; vLLM's loader fills its other parameters. Leaves LoRA adapters out.
    Raises RuntimeError, before it changes anything, if a weight that vLLM has to copy is trained.
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
            layer_slots = _slots_of_layer(layer, weight, engine_layer) if engine_layer else []
            if sum(len(slot.B) for slot in layer_slots) != len(weight):
                raise RuntimeError(f"vLLM has no LoRA adapter for the layer {name}")
            slots += layer_slots
    return slots


@torch.no_grad()
def copy_adapters(slots: list[AdapterSlot]) -> None:
    """Copies A and (alpha / r) B of all layers into vLLM's tensors."""
    torch._foreach_copy_([s.engine_A for s in slots], [s.A for s in slots])
    scaled = torch._foreach_mul([s.B for s in slots], [s.scaling for s in slots])
    torch._foreach_copy_([s.engine_B for s in slots], scaled)


def base_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a Hugging Face model by the names that they have without LoRA adapters."""
    named = model.named_parameters()
    return {n.replace(".base_layer.", "."): p for n, p in named if "lora_" not in n}


def find_views(model: Any, engine_model: Any) -> tuple[dict[str, dict[str, View]], set[str]]:
    """Returns, by parameter of vLLM's model, the views of it that are Hugging Face weights.

    Leaves out each parameter that vLLM computes, pads with other numbers, or has in another dtype,
    and all parameters if the loader reads values of weights. The second result is the names of the
    weights that vLLM has to load into these. Raises RuntimeError for a parameter without a weight.
    """
    weights = base_weights(model)
    try:
        trace = _trace_loading(model, engine_model, weights)
    except Exception:  # of the loader's code, which raises again when it loads
        return {}, set(weights)
    views: dict[str, dict[str, View]] = {}
    unused, to_load = set(weights), set()
    for name, parameter in engine_model.named_parameters():
        copies = trace.copies[name]
        if not copies and name not in trace.computed:
            raise RuntimeError(f"vLLM loads no weight into {name}")
        own_views = None if name in trace.computed else _views(parameter, copies, weights)
        padding = parameter.numel() - sum(prod(copy.target.shape) for copy in copies)
        is_filled = padding == 0 or (padding > 0 and name in trace.zeroed)
        if own_views and own_views.keys() <= unused and is_filled:
            views[name] = own_views
            unused -= own_views.keys()
        else:
            to_load |= {copy.weight for copy in copies}
    return views, to_load | unused


def _views(
    parameter: Tensor, copies: list[Copy], weights: dict[str, nn.Parameter]
) -> dict[str, View] | None:
    """For each weight that was copied into `parameter`, its view there; None if one has no view."""
    views = {}
    for name in dict.fromkeys(copy.weight for copy in copies):
        parts = [copy for copy in copies if copy.weight == name]
        view = whole_view(tuple(weights[name].shape), parts)
        if view is None or weights[name].dtype != parameter.dtype:
            return None
        views[name] = view
    return views


def whole_view(shape: tuple[int, ...], copies: list[Copy]) -> View | None:
    """The view of a parameter that holds a weight; None if its copied parts are not one view."""
    weight_strides = torch.empty(shape, device="meta").stride()
    long_strides = [s for size, s in zip(shape, weight_strides, strict=True) if size > 1]
    steps: dict[int, int] = {}  # stride in the weight -> stride in the parameter
    for copy in copies:
        for size, source, target in zip(*copy.source[:2], copy.target.strides, strict=True):
            if size > 1 and steps.setdefault(source, target) != target:
                return None
    num_copied = sum(prod(copy.source.shape) for copy in copies)
    if steps.keys() != set(long_strides) or num_copied != prod(shape):
        return None
    offsets = set()  # of the weight's first number
    for copy in copies:
        offset, rest = copy.target.offset, copy.source.offset
        for stride in long_strides:  # from the largest
            index, rest = divmod(rest, stride)
            offset -= index * steps[stride]
        offsets.add(offset)
    strides = tuple(steps.get(stride, 0) for stride in weight_strides)
    return View(shape, strides, offsets.pop()) if len(offsets) == 1 else None


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


class _Trace(TorchDispatchMode):
    """Records the operations on the targets, vLLM's parameters, instead of running them."""

    def __init__(self, sources: dict[str, Tensor], targets: dict[str, Tensor]):
        super().__init__()
        self.sources = {_storage(tensor): name for name, tensor in sources.items()}
        self.targets = {_storage(tensor): name for name, tensor in targets.items()}
        self.copies: dict[str, list[Copy]] = {name: [] for name in targets}
        self.zeroed: set[str] = set()  # targets of which a part is filled with zeros
        self.computed: set[str] = set()  # targets that are changed in any other way

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = func.overloadpacket.__name__
        first = _storage(args[0]) if args else 0
        if first in self.targets and operation.endswith("_"):
            self.record(self.targets[first], operation, *args)
            return args[0]
        is_copy = operation in ("clone", "_to_copy") and first in self.sources
        if is_copy and kwargs.get("dtype") in (None, args[0].dtype):
            return torch.ops.aten.alias(args[0])  # it is still the weight
        if operation == "_unsafe_view" and first in self.sources and not args[0].is_contiguous():
            return args[0].new_empty(args[1])  # `reshape` had to copy it
        return func(*args, **kwargs)

    def record(self, name: str, operation: str, target: Tensor, value: Any = None) -> None:
        weight = self.sources.get(_storage(value))
        if operation == "copy_" and weight is not None:
            pair = value.expand(target.shape), target
            views = [View(tuple(x.shape), tuple(x.stride()), int(x.storage_offset())) for x in pair]
            self.copies[name].append(Copy(weight, *views))
        elif operation == "zero_" or (operation == "fill_" and str(value) in ("0", "0.0")):
            self.zeroed.add(name)
        else:
            self.computed.add(name)


def _trace_loading(model: Any, engine_model: Any, weights: dict[str, nn.Parameter]) -> _Trace:
    """Runs vLLM's `load_weights` on meta tensors in place of all parameters."""
    sources = {name: p.new_empty(p.shape, device="meta") for name, p in weights.items()}
    named = dict(engine_model.named_parameters())
    targets = {id(p): _on_meta(p) for p in named.values()}
    places = [
        (module._parameters, name, parameter)
        for module in engine_model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    trace = _Trace(sources, {name: targets[id(p)] for name, p in named.items()})
    try:
        for parameters, name, parameter in places:
            parameters[name] = targets[id(parameter)]
        with trace, torch.no_grad():
            engine_model.load_weights(iter(revert_weight_conversion(model, sources).items()))
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter
    return trace


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter without memory, of the same class and attributes, such as vLLM's loader."""
    data = parameter.new_empty(parameter.shape, device="meta")
    copied = nn.Parameter(data, requires_grad=False)
    copied.__class__ = type(parameter)
    copied.__dict__.update(parameter.__dict__)
    return copied


def _storage(value: Any) -> int:
    """Identifies the storage of a meta tensor, which all of its views share; 0 for other values."""
    on_meta = isinstance(value, Tensor) and value.device.type == "meta"
    return value.untyped_storage()._cdata if on_meta else 0
