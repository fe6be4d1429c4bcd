"""Peak memory: of a training pass, and of a rank that shares the optimizer with others.

    python runs/benchmarks/memory.py  # 8 minutes on two cores; needs 16 GB; Linux
    python runs/benchmarks/memory.py ranks  # 3 minutes; needs 12 GB

pass: forward and backward, picoRL and a pass that keeps all logits.

One group in one micro-batch, the same token ids on both sides, and a model so small that the
vocabulary takes the share of memory that it takes in a large model. picoRL runs
`core.batching.micro_batches` and `train.forward`; the plain pass computes `model(ids).logits` at
every position, `log_softmax`, `gather`. The loss of both is the mean log-prob of the sampled
tokens. Memory is the peak of the resident memory of a fresh process on the CPU during the pass,
minus what was in use before it. It includes the gradients.

ranks: weights, gradients and optimizer of one of N ranks, --shard-optimizer on and off. The model
has 109M weights, 9% of them in the embedding, as in models of 4B. Memory is the peak of a fresh
process during two steps of two short backward passes each, minus what was in use before the model
was made; the largest of all ranks. It includes activations and gradients on their way.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from pairs import (
    ANSWER,
    Rounds,
    alternate,
    cells_of_pair,
    in_child,
    of,
    publish,
    run_child,
    status,
)
from record import markdown

if TYPE_CHECKING:
    from core.policy import Policy
    from core.types import Rollout

DTYPES = ("bfloat16", "float32")
SHARDED_GOAL = 0.45  # maximum of a rank's memory with / without shards, with 4 ranks
GOAL, GOAL_VOCAB = 0.35, 150_000  # maximum of picoRL's / the plain pass's memory; from this V on
MB = 2**20


# one setting changes at a time; the others keep their first value
SETTINGS = {
    "vocab": (150_000, 704, 8_000, 32_000), "group_size": (8, 4, 16),
    "completion_tokens": (64, 128, 256), "prompt_tokens": (200, 50),
}  # fmt: skip
RANKS = 4


@dataclass
class Args(Rounds):
    """What to measure; the cases of `pass` after the first are measured once."""

    what: tyro.conf.Positional[Literal["pass", "ranks"]] = "pass"


def main(args: Args) -> None:
    if args.what == "ranks":
        publish("ranks_memory", [measure_ranks(args, x) for x in DTYPES], ranks_table, args.write)
        return
    cases = []
    for case in grid():
        print(case, flush=True)
        sides = {name: partial(in_child, __file__, "measure", kind=name, **case)
                 for name in ("picoRL", "plain")}  # fmt: skip
        results = alternate(sides, 1 if cases else args.rounds, "peak_mb")
        loss = {round(a["loss"], 3) for answers in results.values() for a in answers}
        if len(loss) != 1:
            raise RuntimeError(f"the two passes computed different losses: {loss}")
        cases.append(case | {"sides": results})
    publish("memory", cases, table, args.write)


def grid() -> list[dict[str, int]]:
    """Returns the case with all first values, then those with one other value."""
    first = {name: values[0] for name, values in SETTINGS.items()}
    return [first, *(first | {name: x} for name, values in SETTINGS.items() for x in values[1:])]


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per case, as Markdown."""
    rows = []
    for case in cases:
        goal = GOAL if case["vocab"] >= GOAL_VOCAB else 0.0
        rows.append([
            f"{case['vocab']:,}", str(case["group_size"]), str(case["prompt_tokens"]),
            str(case["completion_tokens"]), *cells_of_pair(case["sides"], "peak_mb", ",.0f", goal),
        ])  # fmt: skip
    return markdown("vocabulary | group | prompt | completion | picoRL, MB | all logits, MB | "
                    "picoRL / all logits | goal", rows)  # fmt: skip


# --- ranks ---------------------------------------------------------------------------------------


def measure_ranks(args: Args, dtype: str) -> dict[str, Any]:
    """Runs N ranks with and without shards in turn; the peak of the largest rank in each."""
    print(dtype, flush=True)
    sides = {mode: partial(launch_ranks, dtype, mode) for mode in ("on", "off")}
    return {"dtype": dtype, "ranks": RANKS, "sides": alternate(sides, args.rounds, "peak_mb")}


def launch_ranks(dtype: str, mode: str) -> dict[str, Any]:
    """The answer of the rank that needed most memory."""
    settings = {"part": "rank", "dtype": dtype, "mode": mode}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        f"{RANKS}", __file__, "--child", json.dumps(settings),
    ]  # fmt: skip
    # glibc returns freed blocks of a megabyte to the system, so the peak is what is needed
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MB)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    answers = [json.loads(x) for x in re.findall(rf"{ANSWER}(\{{.*?\}})", done.stdout)]
    if done.returncode or len(answers) != RANKS:
        raise RuntimeError(f"the ranks failed: {done.stderr[-2000:]}")
    if len({answer["sum"] for answer in answers}) != 1:
        raise RuntimeError(f"the ranks have different weights: {answers}")
    return max(answers, key=lambda answer: answer["peak_mb"])


def rank(dtype: str, mode: str) -> dict[str, Any]:
    """In a process of torchrun: peak memory in MB, weights, and a sum that all ranks must share."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from core import distributed
    from core.extras.sharded_optimizer import ShardedAdamW
    from core.optimizer import MasterAdamW

    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=14, num_attention_heads=12,
        vocab_size=12288, tie_word_embeddings=True,
    )  # fmt: skip
    with distributed.process_group("cpu"):
        before = memory_in_use()
        torch.manual_seed(0)
        torch.set_default_dtype(getattr(torch, dtype))
        model = LlamaForCausalLM(config)
        kind = ShardedAdamW if mode == "on" else MasterAdamW
        optimizer = kind([{"params": list(model.parameters()), "lr": 1e-4}], weight_decay=0.0)
        ids = torch.arange(4)[None] + distributed.rank()
        for _ in range(2):
            for _ in range(2):
                optimizer.backward(model(input_ids=ids).logits.float().logsumexp(-1).sum())
            optimizer.sum_gradients()
            assert optimizer.clip_and_step(1.0)[1]
        total = sum(float(p.double().sum()) for p in model.parameters())
        weights = sum(p.numel() for p in model.parameters())
        return {"peak_mb": (status("VmHWM") - before) / MB, "weights": weights, "sum": total}


def ranks_table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per dtype, as Markdown."""
    rows = []
    for case in cases:
        weights = case["sides"]["on"][0]["weights"]
        sizes = [f"{statistics.median(of(answers, 'peak_mb')) * MB / weights:.1f}"
                 for answers in case["sides"].values()]  # fmt: skip
        on, off, *compared = cells_of_pair(case["sides"], "peak_mb", ",.0f", SHARDED_GOAL)
        name = f"{weights / 1e6:.0f}M {case['dtype']}"
        rows.append([name, str(case["ranks"]), on, sizes[0], off, sizes[1], *compared])
    return markdown("weights | ranks | sharded, MB a rank | bytes a weight | not sharded, "
                    "MB a rank | bytes a weight | sharded / not | goal", rows)  # fmt: skip


# --- child processes -----------------------------------------------------------------------------


def measure(
    kind: str, vocab: int, group_size: int, prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    """Returns the peak memory of one pass in MB, and its loss."""
    import tempfile

    from workload import Shape, save_model

    from core.loading import load_policy

    shape = Shape(64, 192, 2, 4, 2, 16, vocab)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, shape)
        policy = load_policy(folder)
    run = ours if kind == "picoRL" else plain
    whole = group_size * (prompt_tokens + completion_tokens)
    policy.micro_batch_tokens = whole
    run(policy, rollouts(2, 3, 3, shape.vocab))  # warm up
    policy.model.zero_grad(set_to_none=True)
    group = rollouts(group_size, prompt_tokens, completion_tokens, shape.vocab)
    before = memory_in_use()
    loss = run(policy, group)
    return {"peak_mb": (status("VmHWM") - before) / MB, "loss": loss}


def rollouts(
    group_size: int, prompt_tokens: int, completion_tokens: int, vocab: int
) -> list["Rollout"]:
    """Returns one group of random token ids; the same for the same arguments."""
    import random

    from core.types import Rollout, Turn

    rng = random.Random(0)
    opening = [rng.randrange(vocab) for _ in range(prompt_tokens)]
    made = []
    for _ in range(group_size):
        ids = [rng.randrange(vocab) for _ in range(completion_tokens)]
        turn = Turn(opening, ids, [-1.0] * completion_tokens, "length", reward=1.0)
        made.append(Rollout("speed", "player", seed=0, group_id=0, turns=[turn]))
    return made


def ours(policy: "Policy", group: list["Rollout"]) -> float:
    """One pass of picoRL. Returns the loss."""
    import train
    from core.batching import micro_batches, to_rollout_batch

    batch, total = to_rollout_batch(group), 0.0
    for micro in micro_batches(policy, batch):
        logprobs, _, _ = train.forward(policy, micro, temperature=1.0)
        loss = -logprobs.sum() / batch.num_tokens
        loss.backward()
        total += loss.item()
    return total


def plain(policy: "Policy", group: list["Rollout"]) -> float:
    """One pass with the logits of all positions. Returns the loss."""
    import torch

    turns = [rollout.turns[0] for rollout in group]
    ids = torch.tensor([t.prompt_ids + t.completion_ids for t in turns], device=policy.device)
    logits = policy.causal_lm(input_ids=ids, use_cache=False).logits.float()
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    loss = -logprobs[:, len(turns[0].prompt_ids) - 1 :].mean()
    loss.backward()
    return loss.item()


def memory_in_use() -> int:
    """Returns the bytes in use, and starts a new peak."""
    Path("/proc/self/clear_refs").write_text("5")  # 5: resets the peak of resident memory
    return status("VmRSS")


PARTS = {"measure": measure, "rank": rank}

if __name__ == "__main__" and not run_child(PARTS):
    main(tyro.cli(Args, description=__doc__))
