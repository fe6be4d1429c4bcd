"""Finds where vLLM's loader puts each Hugging Face weight, without moving a number.

While vLLM loads a model it renames, fuses, pads and transposes weights, in code that differs from
family to family. `find_views` runs that code once on meta tensors, which have a shape but no
memory, and records every `copy_` of a block of a Hugging Face weight into a block of a vLLM
parameter. From the blocks follows how the whole weight lies in the parameter: as a view with
certain strides at a certain offset.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.core_model_loading import revert_weight_conversion


class View(NamedTuple):
    """How a tensor lies in the memory of another one: the arguments of `as_strided`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Copy(NamedTuple):
    """One `copy_` of the loader: a block of a weight, and one of a parameter, of equal shape."""

    weight: str
    source: View
    target: View


def base_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a Hugging Face model by the names that they have without LoRA adapters."""
    named = model.named_parameters()
    return {n.replace(".base_layer.", "."): p for n, p in named if "lora_" not in n}


def find_views(model: Any, engine_model: Any) -> tuple[dict[str, dict[str, View]], set[str]]:
    """Returns, by parameter of vLLM's model, the views of it that are Hugging Face weights.

    Leaves out each parameter that vLLM computes, pads with other numbers, or has in another dtype,
    and all if the loader reads numbers. The second result is the names of the weights that vLLM
    has to load into those. Changes neither model.
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
        found = None if name in trace.computed else _views(parameter, copies, weights)
        padding = parameter.numel() - sum(prod(copy.target.shape) for copy in copies)
        is_filled = padding == 0 or (padding > 0 and name in trace.zeroed)
        if found and found.keys() <= unused and is_filled:
            views[name] = found
            unused -= found.keys()
        else:
            to_load |= {copy.weight for copy in copies}
    return views, to_load | unused


def _views(
    parameter: Tensor, copies: list[Copy], weights: dict[str, nn.Parameter]
) -> dict[str, View] | None:
    """The view of `parameter` that each copied weight is; None if one is not."""
    views = {}
    for name in dict.fromkeys(copy.weight for copy in copies):
        parts = [copy for copy in copies if copy.weight == name]
        view = whole_view(tuple(weights[name].shape), parts)
        if view is None or weights[name].dtype != parameter.dtype:
            return None
        views[name] = view
    return views


def whole_view(shape: tuple[int, ...], copies: list[Copy]) -> View | None:
    """The view of a parameter that a weight is; None if its copied parts are not one view."""
    own_strides = torch.empty(shape, device="meta").stride()
    long = [stride for size, stride in zip(shape, own_strides, strict=True) if size > 1]
    steps: dict[int, int] = {}  # stride in the weight -> stride in the parameter
    for copy in copies:
        for size, source, target in zip(*copy.source[:2], copy.target.strides, strict=True):
            if size > 1 and steps.setdefault(source, target) != target:
                return None
    if steps.keys() != set(long) or sum(prod(copy.source.shape) for copy in copies) != prod(shape):
        return None
    offsets = set()  # of the weight's first number
    for copy in copies:
        offset, rest = copy.target.offset, copy.source.offset
        for stride in long:  # from the largest
            index, rest = divmod(rest, stride)
            offset -= index * steps[stride]
        offsets.add(offset)
    strides = tuple(steps.get(stride, 0) for stride in own_strides)
    return View(shape, strides, offsets.pop()) if len(offsets) == 1 else None


class _Trace(TorchDispatchMode):
    """Records what happens to the targets instead of doing it."""

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
            block = value.expand(target.shape)
            self.copies[name].append(Copy(weight, _view(block), _view(target)))
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


def _view(tensor: Tensor) -> View:
    return View(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
