"""The attention of trees of prefixes on a GPU, by kernel: what each new shape costs.

    python runs/benchmarks/attention.py              # on a GPU, a minute
    python runs/benchmarks/attention.py --cpu        # the masked kernel alone, with small shapes

Micro-batches differ in their shapes. Each of these has 8 groups of 8 completions with random
lengths. Forward and backward pass of one layer of the shape of Qwen3-0.6B, in bfloat16: the first
time that a kernel sees a shape, and the second. Kernels:

    masked, cuDNN     blocks of queries with a mask, where PyTorch may take cuDNN's attention
    masked            the same without cuDNN, as a policy on CUDA computes it
    varlen            FlashAttention for parts of different lengths; where it takes as many heads of
                      keys as of queries (torch 2.11), the keys are repeated
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import tyro
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

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
        if args.out:
            Path(args.out).write_text(json.dumps(results) + "\n")
    for name in kernels(args):
        first, second = (statistics.median(results[name][w]) for w in ("first_ms", "second_ms"))
        print(f"{name:14} first {first:8.2f} ms   second {second:8.2f} ms   medians of "
              f"{args.shapes} shapes")  # fmt: skip


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


def milliseconds(kernel: Kernel, tree: PrefixTree, device: str) -> float:
    """Of a forward and a backward pass."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def random_heads(heads: int) -> Tensor:
        shape = (1, heads, len(tree), HEAD_DIM)
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    q, k, v = random_heads(HEADS), random_heads(KV_HEADS), random_heads(KV_HEADS)
    synchronize(device)
    started = perf_counter()
    kernel(q, k, v, tree).sum().backward()
    synchronize(device)
    return 1000 * (perf_counter() - started)


def masked(q: Tensor, k: Tensor, v: Tensor, tree: PrefixTree) -> Tensor:
    """core/prefix_sharing.py without FlashAttention."""
    takes_varlen = prefix_sharing.takes_varlen
    prefix_sharing.takes_varlen = lambda query: False
    try:
        module: Any = SimpleNamespace(layer_idx=0)
        return attend(module, q, k, v, None, HEAD_DIM**-0.5, tree)[0]
    finally:
        prefix_sharing.takes_varlen = takes_varlen


def varlen(q: Tensor, k: Tensor, v: Tensor, tree: PrefixTree) -> Tensor:
    options: dict[str, Any] = {"enable_gqa": True}
    if not prefix_sharing.VARLEN_TAKES_GQA:
        options, repeats = {}, HEADS // KV_HEADS
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    queries, keys, values = (x[0].transpose(0, 1) for x in (q, k, v))
    return varlen_attn(
        queries, keys[tree.key_index], values[tree.key_index], tree.query_ends, tree.key_ends,
        tree.max_queries, tree.max_keys, scale=HEAD_DIM**-0.5, window_size=(-1, 0), **options,
    )  # fmt: skip


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
