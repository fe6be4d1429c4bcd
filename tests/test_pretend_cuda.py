"""Whole runs on a pretended GPU, which find tensors on the wrong device where there is no GPU.

    pytest tests/test_pretend_cuda.py -m "slow or not slow"

Inside `pretend_cuda()` a tensor on "cuda" is an `OnCuda`: it holds a CPU tensor, computes with it,
and refuses the operands that CUDA refuses. PyTorch's C++ code still sees a CPU tensor and chooses
the kernels of the CPU. What a real GPU computes, runs/benchmarks/gpu_check.py checks.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from test_prefix_sharing import flash_attention
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from core import batching, prefix_sharing
from core.loading import load_policy

aten = torch.ops.aten
COPIES = {aten.copy_}  # from one device to the other
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
NO_CPU_SCALARS = {aten.cat, aten.stack, aten._fused_adamw_}  # others take 0-dim CPU tensors
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
GB = 2**30
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


class OnCuda(torch.Tensor):
    """A tensor whose `device` is cuda:0 in Python, and whose data is the CPU tensor `held`."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_cuda, is_cpu = (property(lambda self, x=x: x) for x in (CUDA, True, False))

    @staticmethod
    def __new__(cls, held):
        self = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=CPU,
        )  # fmt: skip
        self.held = held
        return self

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        refuse_cpu_operands(operation, args, kwargs)
        operands = {}  # by the id of the CPU tensor

        def held(x):
            on_cpu = x.held if isinstance(x, OnCuda) else x
            operands[id(on_cpu)] = x
            return on_cpu

        def on_cuda(x):  # an operation in place returns its operand
            return operands[id(x)] if id(x) in operands else OnCuda(x)

        result = operation(*map_tensors(held, args), **map_tensors(held, kwargs or {}))
        return map_tensors(on_cuda, result)

    def tolist(self):
        return self.held.tolist()

    def numpy(self, **options):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def untyped_storage(self):
        return self.held.untyped_storage()

    def __deepcopy__(self, memo):
        copied = OnCuda(self.held.clone()).requires_grad_(self.requires_grad)
        vars(copied).update({k: v for k, v in vars(self).items() if k != "held"})
        return copied

    def __reduce_ex__(self, protocol):  # saved, and loaded with map_location="cpu"
        return self.held.__reduce_ex__(protocol)

    def __repr__(self):
        return f"OnCuda({self.held})"


def map_tensors(function, x):
    """Applies `function` to all tensors (and generators) in lists, tuples and dicts."""
    if isinstance(x, (list, tuple)):
        return type(x)(map_tensors(function, y) for y in x)
    if isinstance(x, dict):
        return {key: map_tensors(function, y) for key, y in x.items()}
    return function(x) if isinstance(x, Tensor) or type(x) is torch.Generator else x


def refuse_cpu_operands(operation, args, kwargs):
    """Raises RuntimeError where CUDA does, for an operation with an operand on CUDA."""
    kind = operation.overloadpacket
    in_backward = torch._C._current_graph_task_id() != -1
    if kind in COPIES or (kind is aten.cat and in_backward):  # of gradients: C++ fills gaps with 0
        return
    if kind in INDEXING and isinstance(args[0], OnCuda):  # indices may be on either device
        args = (args[0], *args[2:])

    def refuse(x):
        scalar = isinstance(x, Tensor) and x.dim() == 0 and kind not in NO_CPU_SCALARS
        if not (isinstance(x, OnCuda) or scalar):
            raise RuntimeError(f"{operation}: expected all operands on cuda:0, found one on cpu")

    map_tensors(refuse, (args, kwargs))


class Move(torch.autograd.Function):
    """Copies a tensor to the other device, and its gradient back."""

    @staticmethod
    def forward(ctx, x):
        return x.held.clone() if isinstance(x, OnCuda) else OnCuda(x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return Move.apply(gradient)


class PretendCuda(TorchFunctionMode):
    """Makes `device="cuda"`, `.to`, `.cpu` and `.cuda` create OnCuda tensors and take them back."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.backward:
            with self:  # also while checkpointed parts are computed again
                return _engine_run_backward(
                    args, (torch.ones_like(args[0]),), False, False, (), accumulate_grad=True
                )
        if function is torch.Tensor.cpu:
            return self._move(args[0], CPU)
        if function is torch.Tensor.cuda:
            return self._move(args[0], CUDA)
        if function is torch.Tensor.to:
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
            device = next((x.device for x in args[1:] if isinstance(x, Tensor)), device)
            if device is None or device.type in ("cpu", "cuda"):
                moved = self._move(args[0], device)
                return moved if dtype is None else moved.to(dtype)
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return function(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        made = function(*args, **kwargs | {"device": CPU})
        return made if isinstance(made, OnCuda) else OnCuda(made)

    def _move(self, x, device):
        stays = device is None or (device.type == "cuda") == isinstance(x, OnCuda)
        return x if stays else Move.apply(x)


@contextmanager
def pretend_cuda():
    """One GPU of 24 GB that is 20 GB free, on which 16-bit attention takes parts of any length."""
    gpu = SimpleNamespace(total_memory=24 * GB, name="pretended")
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # module.to keeps tied weights
    try:
        with (
            patch.multiple(
                torch.cuda,
                is_available=lambda: True,
                device_count=lambda: 1,
                mem_get_info=lambda device=None: (20 * GB, 24 * GB),
                get_device_properties=lambda device=None: gpu,
                get_device_capability=lambda device=None: (8, 0),
            ),
            PretendCuda(),
        ):
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


SMALL = """--model-id tiny --sampler torch --num-updates 2 --num-prompts 2 --group-size 4
    --max-tokens 6 --max-model-len 160 --max-tokens-per-micro-batch 320 --eval-num-tasks 2
    --save-every 1 --dtype float32""".split()
RUNS = {
    "grpo": "",
    "ppo": "--algo ppo --num-epochs 2 --num-minibatches 2",
    "LoRA": "--lora-rank 4 --kl-coef 0.01",
    "bfloat16": "--dtype bfloat16 --kl-coef 0.01",
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
def test_a_run_on_cuda_ends_and_resumes(command, flags):
    with pretend_cuda(), patch.object(prefix_sharing, "varlen_attn", flash_attention):
        options = [*flags.split(), "--device", "cuda", "--run-name", "gpu"]
        code, out, err = command(*SMALL, *options, "--num-updates", 1)
        assert code == 0 and "trained, cuda" in out, err
        code, _, err = command("--resume", "runs/gpu", "--num-updates", 2)
        assert code == 0, err


def test_a_policy_on_cuda_uses_no_attention_of_cudnn(qwen3_folder):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        load_policy(str(qwen3_folder), device="cpu")
        assert torch.backends.cuda.cudnn_sdp_enabled()
        with pretend_cuda():
            load_policy(str(qwen3_folder), device="cuda")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_run_with_a_tensor_on_the_wrong_device_fails(command, monkeypatch):
    pad = batching._pad  # the sequences stay where they are, not on the device of the model
    monkeypatch.setattr(batching, "_pad", lambda sequences, device: pad(sequences, "cpu"))
    with pretend_cuda(), pytest.raises(RuntimeError, match="expected all operands on cuda:0"):
        command(*SMALL, "--device", "cuda", "--num-updates", 1, "--eval-num-tasks", 0)
