"""The time of an update on 8 to 512 GPUs, computed; scaling.py model prints and records it.

A rank of N samples and trains 1/N of an update's batch, which either stays the same or grows with
the GPUs (`grows`). Of the GPU only what its data sheet says is known here, and how much of that a
kernel reaches is an assumption (`Assumptions`). What each rank computes on its CPU is measured, in
CPU time of this machine (`controller`).

    sampling       decoding steps until the last completion of a rank ends, each the longer of
                   reading weights and the cache of keys and values, and of computing; mean of ranks
    stragglers     the slowest rank's sampling less the mean: lengths are drawn, log-normal
    training       6 operations per weight and token, 8 with gradient checkpointing
    communication  reduce-scatter of float32 gradients per backward pass, as far as it takes longer
                   than that pass; one all-gather of bfloat16 weights (core/sharded_optimizer.py)
    controller     every rank receives, unpickles and compares all rollouts; rank 0 writes them, and
                   the checkpoint with the masters and moments of all ranks
"""

import heapq
import math
import pickle
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[i]) for i in (2, 0)]

from workload import SHAPES, Shape

MOST_GPUS = 1024
PARTS = ("sampling", "stragglers", "training", "communication", "controller")
Costs = dict[str, float]


@dataclass(frozen=True)
class Assumptions:
    """Of GPUs, links and disks; peak rates are those of NVIDIA's data sheet of the H100 SXM."""

    gpus_per_node: int = 8
    peak_tflops: float = 989.0  # bfloat16, dense
    memory_gb_s: float = 3350.0
    compute_share: float = 0.4  # of the peak that training and decoding reach
    memory_share: float = 0.6  # that decoding reaches
    cache_gb: float = 40.0  # of a GPU's 80, for keys and values
    decode_overhead_s: float = 0.003  # of a decoding step, besides its kernels
    inside_gb_s: float = 300.0  # per GPU and direction: two thirds of NVLink's 450
    outside_gb_s: float = 35.0  # a 400 Gbit/s adapter per GPU: 70% of its 50
    latency_s: float = 2e-5  # per message
    rollouts_gb_s: float = 1.0  # at which a rank receives rollouts, over TCP
    disk_gb_s: float = 2.0  # of the shared folder
    save_every: int = 20  # updates, as --save-every


@dataclass(frozen=True)
class Batch:
    """One update, for all GPUs together."""

    num_prompts: int = 512
    group_size: int = 16
    prompt_tokens: int = 200
    median_tokens: int = 800  # per completion
    spread: float = 0.7  # standard deviation of the logarithm of the lengths
    max_tokens: int = 4096
    micro_batch_tokens: int = 16384

    @property
    def rollouts(self) -> int:
        return self.num_prompts * self.group_size


@dataclass
class Scale:
    """What to compute."""

    gpus: tuple[int, ...] = (8, 64, 512)
    shape: str = "4B"  # see workload.py
    rounds: int = 15  # measurements of the controller
    grows: bool = False  # prompts in proportion to the GPUs; `batch` is for the first number
    batch: Batch = field(default_factory=Batch)
    assumptions: Assumptions = field(default_factory=Assumptions)


def lengths_of(batch: Batch, seed: int = 0) -> list[int]:
    """Draws the tokens of each completion, in the order of the rollouts."""
    drawn = random.Random(seed)
    return [
        min(batch.max_tokens, max(1, round(batch.median_tokens * math.exp(z * batch.spread))))
        for z in (drawn.gauss(0, 1) for _ in range(batch.rollouts))
    ]


def weights_of(shape: Shape) -> int:
    """All weights of a model whose input and output embeddings are the same."""
    return shape.layer_weights + shape.width * shape.vocab


def sampling_seconds(lengths: list[int], batch: Batch, shape: Shape, a: Assumptions) -> float:
    """Seconds in which one rank samples completions of these lengths, in order.

    As many as the cache holds are sampled at the same time; where one ends, the next one starts.
    """
    weights = weights_of(shape)
    cached = 2 * 2 * shape.layers * shape.keys  # bytes of keys and values of one token
    average = batch.prompt_tokens + statistics.fmean(lengths)
    slots = max(1, int(a.cache_gb * 1e9 / (cached * average)))
    running = [(length, 0) for length in lengths[:slots]]  # the steps of its end and its start
    heapq.heapify(running)
    waiting = iter(lengths[slots:])
    total, step, starts = 0.0, 0, 0
    while running:  # until the next completion ends the number of rows stays the same
        end, start = running[0]
        rows = len(running)
        tokens = rows * (batch.prompt_tokens + (step + end) / 2) - starts
        moving = (2 * weights + cached * tokens) / (a.memory_gb_s * 1e9 * a.memory_share)
        computing = 2 * weights * rows / (a.peak_tflops * 1e12 * a.compute_share)
        total += (end - step) * (a.decode_overhead_s + max(moving, computing))
        step, starts = end, starts - start
        heapq.heappop(running)
        if length := next(waiting, 0):
            heapq.heappush(running, (step + length, step))
            starts += step
    return total


def scatter_seconds(num_bytes: float, gpus: int, a: Assumptions) -> float:
    """Seconds of a reduce-scatter, or an all-gather, of `num_bytes` over all GPUs.

    First within each node, (k-1)/k of the bytes of each of its k GPUs; then each GPU's part between
    the m nodes. Raises ValueError if the GPUs do not fill their nodes.
    """
    inside = min(gpus, a.gpus_per_node)
    if gpus % inside:
        raise ValueError(f"{gpus} GPUs do not fill nodes of {a.gpus_per_node}")
    nodes = gpus // inside
    within = (inside - 1) / inside * num_bytes / (a.inside_gb_s * 1e9)
    between = (nodes - 1) / nodes * num_bytes / inside / (a.outside_gb_s * 1e9)
    return within + between + a.latency_s * (inside - 1 + nodes - 1)


def update_seconds(gpus: int, scale: Scale, costs: Costs) -> dict[str, float]:
    """Seconds of each of PARTS of an update on `gpus` GPUs."""
    a, shape, batch = scale.assumptions, SHAPES[scale.shape], scale.batch
    if scale.grows:
        batch = replace(batch, num_prompts=batch.num_prompts * gpus // scale.gpus[0])
    weights, lengths = weights_of(shape), lengths_of(batch)
    share = batch.rollouts // gpus
    ranks = [sampling_seconds(lengths[i : i + share], batch, shape, a)
             for i in range(0, share * gpus, share)]  # fmt: skip
    mean = statistics.fmean(ranks)
    tokens = (sum(lengths) + batch.num_prompts * batch.prompt_tokens) / gpus  # prompts are shared
    training = 8 * weights * tokens / (a.peak_tflops * 1e12 * a.compute_share)
    passes = math.ceil(tokens / batch.micro_batch_tokens)
    backward = training / passes * 6 / 8  # recomputed, and two products instead of one
    exposed = passes * max(0.0, scatter_seconds(4 * weights, gpus, a) - backward)
    communication = exposed + scatter_seconds(2 * weights, gpus, a) if gpus > 1 else 0.0
    return {
        "sampling": mean,
        "stragglers": max(ranks) - mean,
        "training": training,
        "communication": communication,
        "controller": controller_seconds(gpus, weights, lengths, scale.assumptions, costs),
    }


def controller_seconds(
    gpus: int, weights: int, lengths: list[int], a: Assumptions, costs: Costs
) -> float:
    """Seconds that the CPU of rank 0 takes; with more GPUs it only pickles fewer rollouts."""
    exchange = costs["pickle_s"] / gpus + costs["bytes"] / (a.rollouts_gb_s * 1e9)
    per_token = costs["batch_s"] + costs["advantages_s"]
    if gpus > 1:
        per_token += exchange + costs["unpickle_s"]
    logged = (costs["metrics_s"] + costs["write_s"]) * len(lengths)
    saved = 14 * weights / (a.disk_gb_s * 1e9) / a.save_every  # bfloat16, master, two moments
    return per_token * sum(lengths) + logged + saved


def controller(rounds: int, batch: Batch, count: int = 256) -> Costs:
    """Measures medians on this CPU with `count` rollouts: per sampled token, or per rollout."""
    import torch

    from algorithms import common, grpo
    from core.batching import to_rollout_batch
    from core.metrics import rollout_metrics
    from core.run_log import RunLog
    from core.types import Rollout, Turn

    torch.set_num_threads(1)
    drawn = random.Random(0)
    rollouts, tokens = [], 0
    for i, length in enumerate(lengths_of(batch)[:count]):
        ids = [drawn.randrange(150_000) for _ in range(length)]
        prompt = [drawn.randrange(150_000) for _ in range(batch.prompt_tokens)]
        turn = Turn(
            prompt, ids, [-drawn.random() for _ in ids], "stop", float(drawn.random() > 0.5)
        )
        text = [{"role": "user", "content": "word " * batch.prompt_tokens},
                {"role": "assistant", "content": "word " * length}]  # fmt: skip
        group = i // batch.group_size
        rollouts.append(Rollout("test", "player", group, group, text, [turn]))
        tokens += length
    data, full = pickle.dumps(rollouts), to_rollout_batch(rollouts)

    def advantages() -> None:
        mask = full.completion_mask
        loss_mask = full.loss_mask(False)
        grpo.compute_advantages(
            full.rewards, mask, loss_mask, torch.zeros_like(full.turn_ids), full.group_ids, None,
            1.0, grpo.Options(),
        )  # fmt: skip
        common.token_weights(loss_mask, "token", batch.max_tokens, None, full.group_ids)

    with tempfile.TemporaryDirectory() as folder, RunLog(Path(folder), {}) as log:
        return {
            "bytes": len(data) / tokens,
            "pickle_s": median(lambda: pickle.dumps(rollouts), rounds) / tokens,
            "unpickle_s": median(lambda: pickle.loads(data), rounds) / tokens,
            "batch_s": median(lambda: to_rollout_batch(rollouts), rounds) / tokens,
            "advantages_s": median(advantages, rounds) / tokens,
            "metrics_s": median(lambda: rollout_metrics(rollouts), rounds) / count,
            "write_s": median(lambda: log.log_rollouts("train", 1, rollouts), rounds) / count,
        }


def median(work: Callable[[], Any], rounds: int) -> float:
    """The median CPU seconds of `rounds` calls, after one that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return statistics.median(taken[1:])


def half_wasted_at(scale: Scale, costs: Costs) -> int:
    """The fewest GPUs, a power of two, that do under half of the work per GPU of the first number.

    0: none up to MOST_GPUS.
    """
    alone = sum(update_seconds(scale.gpus[0], scale, costs).values())
    number = scale.gpus[0]
    while (number := 2 * number) <= MOST_GPUS:
        if work_per_gpu(alone, update_seconds(number, scale, costs), number, scale) < 0.5:
            return number
    return 0


def work_per_gpu(alone: float, parts: dict[str, float], gpus: int, scale: Scale) -> float:
    """Of one of `gpus` GPUs, relative to the first number, whose update takes `alone` seconds."""
    same_work = 1.0 if scale.grows else scale.gpus[0] / gpus
    return same_work * alone / sum(parts.values())


def compute(scale: Scale, costs: Costs) -> dict[str, Any]:
    """The settings, the costs, and what follows from them."""
    updates = {str(number): update_seconds(number, scale, costs) for number in scale.gpus}
    lengths = lengths_of(scale.batch)
    found = {"updates": updates, "limit": half_wasted_at(scale, costs)}
    return asdict(scale) | found | {"costs": costs, "mean_tokens": statistics.fmean(lengths)}


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per number of GPUs, what follows from it, and the assumptions, as Markdown."""
    lines: list[str] = []
    for case in cases:
        scale = scale_of(case)
        b, first = scale.batch, scale.gpus[0]
        grows = f" for {first} GPUs, in proportion for more" if scale.grows else " for all GPUs"
        lines += [
            f"**{b.num_prompts} prompts{grows}**, {b.group_size} completions each:", "",
            f"| GPUs | {', s | '.join(PARTS)}, s | update, s | work per GPU |",
            "| --- |" + " --- |" * 7,
        ]  # fmt: skip
        alone = sum(case["updates"][str(first)].values())
        for number in scale.gpus:
            parts = case["updates"][str(number)]
            cells = " | ".join(f"{parts[name]:.1f}" for name in PARTS)
            work = work_per_gpu(alone, parts, number, scale)
            lines.append(f"| {number} | {cells} | {sum(parts.values()):.1f} | {work:.0%} |")
        limit = case["limit"]
        found = f"from {limit} GPUs on" if limit else f"never up to {MOST_GPUS} GPUs"
        lines += [
            "", f"A GPU does less than half of the work that one of {first} does: {found}. What "
            f"grows most, compared with linear scaling, is the part '{largest_loss(case)}'.", "",
        ]  # fmt: skip
    return lines + (advice(cases) + assumptions(cases[0]) if cases else [])


def largest_loss(case: dict[str, Any]) -> str:
    """The part that takes most seconds more than linear scaling allows, with the most GPUs."""
    first, last = case["gpus"][0], case["gpus"][-1]
    shrinks = 1.0 if case["grows"] else first / last
    one, many = case["updates"][str(first)], case["updates"][str(last)]
    return max(PARTS, key=lambda part: many[part] - shrinks * one[part])


def advice(cases: list[dict[str, Any]]) -> list[str]:
    """From which size on another system is the better choice, as Markdown."""
    limits = [case["limit"] for case in cases if case["limit"]]
    if not limits:
        return []
    return [
        f"So from {min(limits)} GPUs on, or {max(limits)} if the batch can grow with them, use a "
        "system that samples while it trains and divides the controller's work, such as prime-rl "
        "or verl (neither was measured). rollouts.jsonl and model/, a folder with safetensors as "
        "the Hub has them, go with you.", "",
    ]  # fmt: skip


def assumptions(case: dict[str, Any]) -> list[str]:
    """What was measured and what was assumed, as Markdown."""
    scale, costs = scale_of(case), case["costs"]
    b, a = scale.batch, scale.assumptions
    unpickle, batch, advantages = (
        f"{1e9 * costs[name]:.0f} ns" for name in ("unpickle_s", "batch_s", "advantages_s")
    )
    metrics, write = (f"{1e6 * costs[name]:.0f} µs" for name in ("metrics_s", "write_s"))
    return [
        f"Measured in CPU time, medians of {scale.rounds}: a sampled token is {costs['bytes']:.0f} "
        f"bytes as a pickled object; every rank takes {unpickle} to unpickle it, {batch} to put it "
        f"into tensors, {advantages} for its advantage and weight; a rollout takes {metrics} for "
        f"metrics, and rank 0 {write} to write it.", "",
        f"Assumptions: {scale.shape}, all weights, bfloat16; prompts of {b.prompt_tokens} tokens, "
        f"completions of {case['mean_tokens']:,.0f} on average (log-normal) and at most "
        f"{b.max_tokens:,}; H100 SXM, {a.peak_tflops:g} Tflop/s and {a.memory_gb_s:g} GB/s (data "
        f"sheet), of which kernels reach {a.compute_share:.0%} and {a.memory_share:.0%}; "
        f"{a.cache_gb:g} GB for keys and values; {1e3 * a.decode_overhead_s:g} ms more per "
        f"decoding step; {a.gpus_per_node} GPUs per node; {a.inside_gb_s:g} GB/s inside and "
        f"{a.outside_gb_s:g} GB/s between nodes per GPU; {1e6 * a.latency_s:g} µs per message; "
        f"{a.rollouts_gb_s:g} GB/s for rollouts; {a.disk_gb_s:g} GB/s to disk, a checkpoint "
        f"every {a.save_every} updates; micro-batches of {b.micro_batch_tokens:,} tokens. "
        "Evaluations and slow environments are not counted.",
    ]  # fmt: skip


def scale_of(case: dict[str, Any]) -> Scale:
    """The recorded settings, which JSON stores as dictionaries and lists."""
    return Scale(
        tuple(case["gpus"]), case["shape"], case["rounds"], case["grows"],
        Batch(**case["batch"]), Assumptions(**case["assumptions"]),
    )  # fmt: skip


def draw(cases: list[dict[str, Any]], file: Path) -> None:
    """Stacked bars: where the time of an update goes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(cases), figsize=(9, 3.6), layout="constrained")
    for axis, case in zip(axes, cases, strict=True):
        bottom = [0.0] * len(case["gpus"])
        names = [f"{number} GPUs" for number in case["gpus"]]
        for part in PARTS:
            heights = [case["updates"][str(number)][part] for number in case["gpus"]]
            axis.bar(names, heights, 0.6, bottom, label=part)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        prompts = f"{case['batch']['num_prompts']} prompts"
        axis.set_title(
            f"{prompts} per {case['gpus'][0]} GPUs" if case["grows"] else f"{prompts} in all",
            fontsize=10,
        )
        axis.set_ylabel("seconds of an update (computed)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(file, dpi=120)
