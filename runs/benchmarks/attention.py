"""The attention of trees of prefixes on a GPU, by kernel: what each new shape costs.

    python runs/benchmarks/attention.py              # on a GPU, a minute
    python runs/benchmarks/attention.py --cpu        # the masked kernel alone, with small shapes

Micro-batches differ in their shapes. Each of these has 8 groups of 8 completions with random
lengths. Forward and backward pass of one layer of the shape of Qwen3-0.6B, in bfloat16: the first
time that a kernel sees a shape, and the second. Kernels:

    masked, cuDNN     blocks of queries with a mask, where PyTorch may take cuDNN's attention
    masked            the same without cuDNN, as a policy in float32 computes it
    varlen            FlashAttention for parts of different lengths, as a policy in 16 bits does
"""

import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import tyro
from torch import Tensor

from core import prefix_sharing
from core.prefix_sharing import PrefixTree, attend, make_tree

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
Kernel = Callable[[Tensor, Tensor, Tensor, PrefixTree], Tensor]


@dataclass
class Args:
    """What to measure."""

    shapes: int = 20  # micro-batches
    cpu: bool = False
    out: str = ""  # also write the results as JSON to this file


def main(args: Args) -> None:
    device = "cpu" if args.cpu else "cuda"
    rng = random.Random(0)
    results: dict[str, Any] = {name: {"first_ms": [], "second_ms": []} for name in kernels(args)}
    for _ in range(args.shapes):
        tree = random_tree(rng, small=args.cpu).to(device)
        results.setdefault("nodes", []).append(len(tree))
        for name, (kernel, cudnn) in kernels(args).items():
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            for when in ("first_ms", "second_ms"):
                results[name][when].append(milliseconds(kernel, tree, device))
        if not args.cpu:
            results.setdefault("gap", []).append(gap(tree, device))
        if args.out:
            Path(args.out).write_text(json.dumps(results) + "\n")
    for name in kernels(args):
        first, second = (statistics.median(results[name][w]) for w in ("first_ms", "second_ms"))
        print(f"{name:14} first {first:8.2f} ms   second {second:8.2f} ms   medians of "
              f"{args.shapes} shapes")  # fmt: skip
    if not args.cpu:
        largest = max(results["gap"])
        print(f"varlen and masked differ by up to {largest:.1e} of the largest value")


def kernels(args: Args) -> dict[str, tuple[Kernel, bool]]:
    """The kernels, and whether PyTorch may take cuDNN's attention."""
    found: dict[str, tuple[Kernel, bool]] = {"masked": (masked, False)}
    if not args.cpu:
        found |= {"masked, cuDNN": (masked, True), "varlen": (varlen, False)}
    return found


def random_tree(rng: random.Random, small: bool) -> PrefixTree:
    """8 prompts with 8 completions each, of random tokens and lengths."""
    longest, completions = (20, 30) if small else (300, 512)
    sequences = []
    for group in range(8):
        prompt = [group, *rng.choices(range(1000), k=rng.randint(longest // 2, longest))]
        for _ in range(8):
            length = rng.randint(completions // 8, completions)
            sequences.append(prompt + rng.choices(range(1000), k=length))
    return make_tree(sequences)


def gap(tree: PrefixTree, device: str) -> float:
    """Largest difference of both kernels in outputs and gradients, as a part of the largest."""
    inputs = random_qkv(tree, device)
    found, expected = (kernel(*inputs, tree) for kernel in (varlen, masked))
    pull = torch.randn_like(expected)
    pairs = [(found, expected), *zip(*(torch.autograd.grad(output, inputs, pull)
                                       for output in (found, expected)), strict=True)]  # fmt: skip
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def milliseconds(kernel: Kernel, tree: PrefixTree, device: str) -> float:
    """Of a forward and a backward pass."""
    q, k, v = random_qkv(tree, device)
    synchronize(device)
    started = perf_counter()
    kernel(q, k, v, tree).sum().backward()
    synchronize(device)
    return 1000 * (perf_counter() - started)


def random_qkv(tree: PrefixTree, device: str) -> list[Tensor]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = [(1, heads, len(tree), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def masked(q: Tensor, k: Tensor, v: Tensor, tree: PrefixTree) -> Tensor:
    return with_varlen(False, q, k, v, tree)


def varlen(q: Tensor, k: Tensor, v: Tensor, tree: PrefixTree) -> Tensor:
    return with_varlen(True, q, k, v, tree)


def with_varlen(varlen: bool, q: Tensor, k: Tensor, v: Tensor, tree: PrefixTree) -> Tensor:
    """core/prefix_sharing.py with and without FlashAttention."""
    module: Any = SimpleNamespace(layer_idx=0)
    with patch.object(prefix_sharing, "takes_varlen", lambda query: varlen):
        return attend(module, q, k, v, None, HEAD_DIM**-0.5, tree)[0][0]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
