"""What a step of vs_trl.py's case must take at least on this machine, beside what it takes.

    python runs/benchmarks/speed/floor.py  # about 3 minutes on two cores
    python runs/benchmarks/speed/floor.py --rounds 1 --no-write

Operations and bytes are counted from the shapes (a multiplication and an addition are two), and
divided by rates measured here: of matrix multiplication at the sizes in question, and of copying.
The floor of a phase is the longer of the two. B = P G rollouts, prompts of n tokens, completions of
T; L layers of width D, queries Q, keys K, MLP F; W weights of all layers' matrices; vocabulary V.

    prefill      P n tokens                 2 W, and 4 Q L c in attention over c tokens; P rows of
                                            logits, 2 D V each
    decode       B (T-1) tokens             the same a token; B rows of logits a step. Each step
                                            reads all weights and the cache of all rows
    training     P n + B (T-1) tokens       forward once and backward twice that; B T logits.
                 or B (n + T-1), unpacked   Each layer's inputs and outputs pass three times
    optimiser                               AdamW: 4 floats of a weight read, 3 written

Logits that are made again in the backward, the sampler's cache as it is copied to grow, norms,
softmax and all that Python does are not in the floor: they are what could be saved. Where the time
went instead is asked of PyTorch's profiler, in a step of its own, which it slows.
"""

import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tyro
from pairs import in_child, play_part, publish, spread
from workload import SHAPES, Shape

FLOAT = 4  # bytes
KINDS = {  # PyTorch's operations, by a part of their names
    "matrices": ("aten::mm", "aten::addmm"),
    "attention": ("aten::bmm", "scaled_dot_product", "aten::_softmax"),
}


@dataclass
class Args:
    """What to count and to measure."""

    rounds: int = 3  # processes of picoRL that are measured for each length of prompt
    prompt_tokens: tuple[int, ...] = (50, 200)
    num_prompts: int = 8
    group_size: int = 8
    max_tokens: int = 64  # of every completion
    our_tokens: int = 2048  # padded tokens of our micro-batches
    shape: str = "4M"  # see workload.py
    write: bool = True  # keep the figures as JSON and put the table in the README


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one phase."""

    operations: float
    bytes_moved: float

    def seconds(self, operations_per_s: float, bytes_per_s: float) -> float:
        return max(self.operations / operations_per_s, self.bytes_moved / bytes_per_s)


def main(args: Args) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the CPU; inherited by the children
    cases = []
    shape = SHAPES[args.shape]
    rates = in_child(__file__, "measure_rates", shape=args.shape,
                     rows=args.num_prompts * args.group_size, many=args.our_tokens)  # fmt: skip
    print({name: f"{rate:.3g}" for name, rate in rates.items()}, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(__file__).with_name("vs_trl.py"))
        in_child(script, "make", folder=folder, size=args.shape, dtype="float32")
        for tokens in args.prompt_tokens:
            sizes = {"num_prompts": args.num_prompts, "group_size": args.group_size,
                     "prompt_tokens": tokens, "max_tokens": args.max_tokens}  # fmt: skip
            run = sizes | {"folder": folder, "gpu": False, "tokens": args.our_tokens,
                           "lora_rank": 0, "steps": 3}  # fmt: skip
            measured = [in_child(script, "picorl", **run) for _ in range(args.rounds)]
            floor = {n: vars(work) for n, work in count(shape, **sizes).items()}
            spent = in_child(__file__, "profiled", **run)
            cases.append(sizes | {"rates": rates, "floor": floor, "measured": measured,
                                  "spent": spent})  # fmt: skip
            print(f"prompts of {tokens} tokens measured", flush=True)
    publish("floor", cases, table, args.write)


def count(
    shape: Shape, num_prompts: int, group_size: int, prompt_tokens: int, max_tokens: int
) -> dict[str, Work]:
    """Work of each phase of one step, float32 weights, all of them trained."""
    rollouts, n, t = num_prompts * group_size, prompt_tokens, max_tokens
    one_logits = 2 * shape.width * shape.vocab
    matrices = FLOAT * (shape.layer_weights + shape.width * shape.vocab)
    cached = FLOAT * 2 * shape.keys * shape.layers  # bytes of one token

    prompts = num_prompts * forward(shape, 0, n)
    completions = rollouts * forward(shape, n, t - 1)  # nothing follows the last token
    packed, unpacked = prompts + completions, rollouts * forward(shape, 0, n + t - 1)
    all_logits = rollouts * t * one_logits

    def training(operations: float, tokens: int) -> Work:
        moved = 3 * (tokens * passed_on(shape) + matrices)
        return Work(3 * (operations + all_logits), moved)

    contexts = span(n + 1, t - 1)  # of the tokens fed one by one
    weights = shape.layer_weights + shape.width * shape.vocab
    return {
        "prefill": Work(prompts + num_prompts * one_logits, matrices),
        "decode": Work(
            completions + rollouts * (t - 1) * one_logits,
            (t - 1) * matrices + rollouts * contexts * cached,
        ),
        "training, packed": training(packed, num_prompts * n + rollouts * (t - 1)),
        "training, unpacked": training(unpacked, rollouts * (n + t - 1)),
        "optimiser": Work(0, 7 * FLOAT * weights),
    }


def forward(shape: Shape, behind: int, tokens: int) -> float:
    """Operations of one sequence's tokens through all layers, with so many tokens behind them."""
    attention = 4 * shape.queries * shape.layers * span(behind + 1, tokens)
    return 2 * shape.layer_weights * tokens + attention


def span(first: int, number: int) -> int:
    """first + (first + 1) + .. of so many terms.

    >>> span(3, 2)
    7
    """
    return number * (2 * first + number - 1) // 2


def passed_on(shape: Shape) -> int:
    """Bytes of what the matrices of all layers read and write of one token, forward."""
    qkv = shape.width + shape.queries + 2 * shape.keys
    out = shape.queries + shape.width
    mlp = (shape.width + 2 * shape.mlp) + (shape.mlp + shape.width)
    return FLOAT * shape.layers * (qkv + out + mlp)


def table(cases: list[dict[str, Any]]) -> list[str]:
    """Markdown lines."""
    lines = ["| prompt | phase | Gop | MB | floor, s | measured, s | measured / floor |",
             "| --- |" + " --- |" * 6]  # fmt: skip
    for case in cases:
        rates = case["rates"]
        floor = {}
        for name, work in case["floor"].items():
            speed = rates["decode" if name == "decode" else "many"]
            floor[name] = Work(**work).seconds(speed, rates["copy"])
        sampling = [answer["sampling_s"] for answer in case["measured"]]
        steps = [answer["step_s"] for answer in case["measured"]]
        rest = [step - part for step, part in zip(steps, sampling, strict=True)]
        totals = {
            "sampling": (("prefill", "decode"), sampling),
            "the rest, packed": (("training, packed", "optimiser"), rest),
            "the rest, unpacked": (("training, unpacked", "optimiser"), rest),
            "step, packed": (("prefill", "decode", "training, packed", "optimiser"), steps),
        }
        for name, work in case["floor"].items():
            cells = [f"{work['operations'] / 1e9:,.1f}", f"{work['bytes_moved'] / 1e6:,.0f}",
                     f"{floor[name]:.3f}", "", ""]  # fmt: skip
            lines.append(f"| {case['prompt_tokens']} | {name} | {' | '.join(cells)} |")
        for name, (parts, seconds) in totals.items():
            least = sum(floor[part] for part in parts)
            cells = ["", "", f"{least:.3f}", spread(seconds),
                     f"{statistics.median(seconds) / least:.2f}"]  # fmt: skip
            lines.append(f"| {case['prompt_tokens']} | **{name}** | {' | '.join(cells)} |")
    rates = cases[0]["rates"]
    return [*lines, "", *spent_table(cases), "",
            f"Measured rates: {rates['many'] / 1e9:,.1f} Gop/s in matrices of many "
            f"rows, {rates['decode'] / 1e9:,.1f} in those of decoding, {rates['copy'] / 1e9:,.1f} "
            "GB/s in copying (read and written)."]  # fmt: skip


def spent_table(cases: list[dict[str, Any]]) -> list[str]:
    """Markdown lines: the share of each kind of operation in a phase."""
    kinds = next(iter(cases[0]["spent"].values()))
    lines = [f"| prompt | phase | {' | '.join(kinds)} |", "| --- |" + " --- |" * (1 + len(kinds))]
    for case in cases:
        for phase, seconds in case["spent"].items():
            shares = [f"{s / sum(seconds.values()):.0%}" for s in seconds.values()]
            lines.append(f"| {case['prompt_tokens']} | {phase} | {' | '.join(shares)} |")
    return lines


# --- the child -----------------------------------------------------------------------------------


def profiled(**run: Any) -> dict[str, dict[str, float]]:
    """Seconds of the last step of vs_trl's picorl, by phase and kind of operation."""
    import vs_trl

    import train

    spent: dict[str, dict[str, float]] = {}
    train.play = watched(train.play, "sampling", spent)
    train.learn = watched(train.learn, "learning", spent)
    vs_trl.picorl(**run)
    return spent


def watched(call: Callable, phase: str, spent: dict[str, dict[str, float]]) -> Callable:
    """The call; what it spent last time is put into `spent`."""
    from torch.profiler import ProfilerActivity, profile

    def profiled_call(*args: Any) -> Any:
        started = time.perf_counter()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            result = call(*args)
            took = time.perf_counter() - started
        found: Counter[str] = Counter()
        for event in profiler.key_averages():
            kinds = (k for k, names in KINDS.items() if any(name in event.key for name in names))
            found[next(kinds, "other operations")] += event.self_cpu_time_total / 1e6
        rest = {"Python and the rest": max(0.0, took - sum(found.values()))}
        spent[phase] = {kind: found[kind] for kind in (*KINDS, "other operations")} | rest
        return result

    return profiled_call


def measure_rates(shape: str, rows: int, many: int) -> dict[str, Any]:
    """Operations a second through the MLP, by rows at a time; bytes a second of a copy."""
    import torch

    size = SHAPES[shape]
    up = [torch.randn(size.mlp, size.width) for _ in range(size.layers)]
    down = [torch.randn(size.width, size.mlp) for _ in range(size.layers)]

    def matrix_rate(number: int, layers: int) -> float:
        x = torch.randn(number, size.width)

        def through() -> None:
            for a, b in zip(up[:layers], down[:layers], strict=True):
                torch.nn.functional.linear(torch.nn.functional.linear(x, a), b)

        return 4 * number * size.width * size.mlp * layers / best(through)

    source, target = torch.ones(2**26), torch.zeros(2**26)
    copied = 2 * FLOAT * source.numel()
    return {
        "many": matrix_rate(many, layers=1),  # the rows outweigh the weights: one is as good
        "decode": matrix_rate(rows, size.layers),  # each layer's weights are read in turn
        "copy": copied / best(lambda: target.copy_(source)),
    }


def best(call: Any, seconds: float = 2.0) -> float:
    """The least time of one call, of as many as fit: the machine's own, without its other work."""
    import torch

    with torch.no_grad():
        call()
        times, until = [], time.perf_counter() + seconds
        while time.perf_counter() < until or len(times) < 5:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return min(times)


PARTS = {"measure_rates": measure_rates, "profiled": profiled}

if __name__ == "__main__":
    if not play_part(PARTS):
        main(tyro.cli(Args, description=__doc__))
