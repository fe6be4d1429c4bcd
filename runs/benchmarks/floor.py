"""A lower bound for the time of the step of vs_trl.py on this machine, beside the measured time.

    python runs/benchmarks/floor.py  # 3 minutes on two cores
    python runs/benchmarks/floor.py --rounds 1 --no-write

The floor counts operations and bytes from the shapes (a multiplication and an addition are two
operations) and divides them by rates measured here: matrix products of the same sizes, and copying.
The floor of a phase is the longer of the two times. B = P·G rollouts, prompts of n tokens,
completions of T; L layers of width D, queries Q, keys K, MLP F; W weights in the matrices of all
layers; vocabulary V.

    prefill      P·n tokens                 2W, and 4QLc in attention over c tokens; logits of P
                                            rows, 2DV each
    decode       B(T-1) tokens              the same per token; logits of B rows per step. Each step
                                            reads all weights and the cache of all rows
    training     P·n + B(T-1) tokens        one forward, and a backward of twice the operations;
                 or B(n+T-1), unpacked      B·T logits. In- and outputs of each layer move 3 times
    optimizer                               AdamW reads 4 floats per weight and writes 3

The floor leaves out logits that the backward pass computes again, copies of the sampler's cache,
norms, softmax and Python. PyTorch's profiler measures where the time goes, in a separate run
because profiling slows it down.
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
from pairs import in_child, publish, run_child, spread
from workload import SHAPES, Shape, Workload, result_name, tokenizer_of

FLOAT = 4  # bytes
KINDS = {  # kind of operation: parts of the names of PyTorch's operations
    "matrices": ("aten::mm", "aten::addmm"),
    "attention": ("aten::bmm", "scaled_dot_product", "aten::_softmax"),
}


@dataclass
class Args(Workload):
    """What to count and to measure."""

    rounds: int = 3  # processes of picoRL measured for each prompt length
    our_tokens: int = 2048  # padded tokens per micro-batch


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one phase."""

    operations: float
    bytes_moved: float

    def seconds(self, operations_per_s: float, bytes_per_s: float) -> float:
        return max(self.operations / operations_per_s, self.bytes_moved / bytes_per_s)


def main(args: Args) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # inherited by the children
    cases = []
    shape = SHAPES[args.model]
    rates = in_child(__file__, "measure_rates", shape=args.model,
                     rows=args.num_prompts * args.group_size, many=args.our_tokens)  # fmt: skip
    print({name: f"{rate:.3g}" for name, rate in rates.items()}, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(__file__).with_name("vs_trl.py"))
        in_child(script, "make", folder=folder, size=args.model, dtype="float32")
        for tokens in args.prompt_tokens:
            sizes = {"num_prompts": args.num_prompts, "group_size": args.group_size,
                     "prompt_tokens": tokens, "max_tokens": args.max_tokens}  # fmt: skip
            run = sizes | {"folder": folder, "gpu": False, "tokens": args.our_tokens,
                           "lora_rank": 0, "steps": 3,
                           "tokenizer": tokenizer_of(args.model)}  # fmt: skip
            measured = [in_child(script, "picorl", **run) for _ in range(args.rounds)]
            floor = {n: vars(work) for n, work in count(shape, **sizes).items()}
            spent = in_child(__file__, "profiled", **run)
            cases.append(sizes | {"rates": rates, "floor": floor, "measured": measured,
                                  "spent": spent})  # fmt: skip
            print(f"prompts of {tokens} tokens measured", flush=True)
    publish(result_name("floor", args), cases, table, args.write)


def count(
    shape: Shape, num_prompts: int, group_size: int, prompt_tokens: int, max_tokens: int
) -> dict[str, Work]:
    """Returns the work of each phase of one step, with float32 weights, all of them trained."""
    rollouts, n, t = num_prompts * group_size, prompt_tokens, max_tokens
    one_logits = 2 * shape.width * shape.vocab
    matrices = FLOAT * (shape.layer_weights + shape.width * shape.vocab)
    cached = FLOAT * 2 * shape.keys * shape.layers  # bytes of one token

    prompts = num_prompts * forward(shape, 0, n)
    completions = rollouts * forward(shape, n, t - 1)  # the last token is not fed back
    packed, unpacked = prompts + completions, rollouts * forward(shape, 0, n + t - 1)
    all_logits = rollouts * t * one_logits

    def training(operations: float, tokens: int) -> Work:
        moved = 3 * (tokens * activation_bytes(shape) + matrices)
        return Work(3 * (operations + all_logits), moved)

    contexts = span(n + 1, t - 1)  # summed over the tokens that are fed one by one
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
    """Returns the operations of `tokens` tokens after a context of `behind` tokens."""
    attention = 4 * shape.queries * shape.layers * span(behind + 1, tokens)
    return 2 * shape.layer_weights * tokens + attention


def span(first: int, number: int) -> int:
    """Returns first + (first + 1) + .., with `number` terms.

    >>> span(3, 2)
    7
    """
    return number * (2 * first + number - 1) // 2


def activation_bytes(shape: Shape) -> int:
    """Returns the bytes that the matrices of all layers read and write for one token, forward."""
    qkv = shape.width + shape.queries + 2 * shape.keys
    out = shape.queries + shape.width
    mlp = (shape.width + 2 * shape.mlp) + (shape.mlp + shape.width)
    return FLOAT * shape.layers * (qkv + out + mlp)


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per phase, then where the measured time goes, as Markdown."""
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
            bound = sum(floor[part] for part in parts)
            cells = ["", "", f"{bound:.3f}", spread(seconds),
                     f"{statistics.median(seconds) / bound:.2f}"]  # fmt: skip
            lines.append(f"| {case['prompt_tokens']} | **{name}** | {' | '.join(cells)} |")
    rates = cases[0]["rates"]
    return [*lines, "", *spent_table(cases), "",
            f"Measured rates: {rates['many'] / 1e9:,.1f} Gop/s in matrix products of many rows, "
            f"{rates['decode'] / 1e9:,.1f} Gop/s in those of decoding, {rates['copy'] / 1e9:,.1f} "
            "GB/s in copying (read plus written)."]  # fmt: skip


def spent_table(cases: list[dict[str, Any]]) -> list[str]:
    """The fraction of each kind of operation in a phase, as Markdown."""
    kinds = next(iter(cases[0]["spent"].values()))
    lines = [f"| prompt | phase | {' | '.join(kinds)} |", "| --- |" + " --- |" * (1 + len(kinds))]
    for case in cases:
        for phase, seconds in case["spent"].items():
            shares = [f"{s / sum(seconds.values()):.0%}" for s in seconds.values()]
            lines.append(f"| {case['prompt_tokens']} | {phase} | {' | '.join(shares)} |")
    return lines


# --- child processes -----------------------------------------------------------------------------


def profiled(**run: Any) -> dict[str, dict[str, float]]:
    """Returns the seconds of the last step of vs_trl.picorl, by phase and kind of operation."""
    import vs_trl
    from torch.profiler import ProfilerActivity, profile

    import train
    from core.run import Run

    spent: dict[str, dict[str, float]] = {}
    collect, log = train.collect_rollouts, Run.log
    phase: list[Any] = []  # of learning: when it began, and its profiler

    def begin() -> None:
        profiler = profile(activities=[ProfilerActivity.CPU])
        profiler.start()
        phase[:] = [time.perf_counter(), profiler]

    def end(name: str) -> None:
        took = time.perf_counter() - phase[0]
        phase[1].stop()
        spent[name] = by_kind(phase[1], took)

    def collect_rollouts(*args: Any) -> Any:
        begin()
        result = collect(*args)
        end("sampling")
        begin()
        return result

    def log_update(run: Run, update: int, metrics: dict[str, Any], rollouts: list) -> bool:
        if update > 0:
            end("learning")
        return log(run, update, metrics, rollouts)

    train.collect_rollouts, Run.log = collect_rollouts, log_update
    vs_trl.picorl(**run)
    return spent


def by_kind(profiler: Any, took: float) -> dict[str, float]:
    """Returns the seconds of each kind of operation, out of the `took` seconds of the profile."""
    seconds: Counter[str] = Counter()
    for event in profiler.key_averages():
        kinds = (k for k, names in KINDS.items() if any(name in event.key for name in names))
        seconds[next(kinds, "other operations")] += event.self_cpu_time_total / 1e6
    python = {"Python and the rest": max(0.0, took - sum(seconds.values()))}
    return {kind: seconds[kind] for kind in (*KINDS, "other operations")} | python


def measure_rates(shape: str, rows: int, many: int) -> dict[str, Any]:
    """Returns operations per second of the MLP, and bytes per second of a copy."""
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
        "many": matrix_rate(many, layers=1),  # with many rows the weights stay in the cache
        "decode": matrix_rate(rows, size.layers),  # every layer reads its weights from memory
        "copy": copied / best(lambda: target.copy_(source)),
    }


def best(call: Callable[[], Any], seconds: float = 2.0) -> float:
    """Returns the shortest time of one call within `seconds`: other load only adds time."""
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

if __name__ == "__main__" and not run_child(PARTS):
    main(tyro.cli(Args, description=__doc__))
