"""Checks in minutes that training and sampling work on this GPU, before anything is measured.

    python runs/benchmarks/gpu_check.py                     # on a GPU with 40 GB or more
    python runs/benchmarks/gpu_check.py --only lora updates # some of its steps
    python runs/benchmarks/gpu_check.py --cpu               # all steps on vLLM's CPU build

Each step is a process of its own with a time limit, so the crash of one engine does not end the
others. It prints one JSON line: its results, its seconds, and the memory of the device; or the
reason of its failure. Exit code 0 if all steps passed, else 1. All models but `tiny` have random
weights; nothing is downloaded. core/nanollm.py says what to change where an engine fails.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

from record import versions as package_versions  # noqa: E402
from vs_trl import save_model  # noqa: E402

from core import canary  # noqa: E402
from core.batching import Batch, to_tokens  # noqa: E402
from core.config import Config  # noqa: E402
from core.files.run_log import read_records  # noqa: E402
from core.loading import load_policy  # noqa: E402
from core.nanollm import NanoLLM  # noqa: E402
from core.optimizer import make_optimizer  # noqa: E402
from core.policy import Policy  # noqa: E402
from core.sampler import SamplingParams, TorchSampler  # noqa: E402
from core.scoring import score_tokens  # noqa: E402
from core.terminal import cli  # noqa: E402
from core.types import Completion, Rollout, Turn  # noqa: E402
from train import execute  # noqa: E402

ON_CPU = "--cpu" in sys.argv
PROMPTS = [[5 + i] * (8 + 30 * i) for i in range(4) for _ in range(4)]  # 4 groups of 4
PARAMS = SamplingParams(max_tokens=48, temperature=0.7, seed=1)
GREEDY = SamplingParams(max_tokens=48, temperature=0)
# nats by which rounding changes a log-prob on average: float32 on a CPU, bfloat16 on a GPU, where
# the kernels of a tree and a plain pass, and of another batch, add in another order
TOLERANCE = 1e-4 if ON_CPU else 5e-2
GROWTH = 0.0625  # GiB by which the memory in use may vary between cycles
ANSWER = "answer: "  # begins the line in which a step prints its results
Results = dict[str, Any]


@dataclass
class Args:
    """Which steps to run, and where."""

    cpu: bool = False  # run on vLLM's CPU build with tiny models
    only: tuple[str, ...] = ()  # names of steps; none: all
    step: str = ""  # runs this step in this process


def main(args: Args) -> int:
    if unknown := {*args.only} - {*STEPS}:
        raise SystemExit(f"no such step: {', '.join(sorted(unknown))}; choose {', '.join(STEPS)}")
    failed = []
    for name in args.only or STEPS:
        line = run_step(name)
        print(json.dumps(line), flush=True)
        if "error" in line:
            failed.append(name)
        if "versions" in failed:
            break  # nothing else can work
    print(json.dumps({"verdict": "failed" if failed else "passed", "failed": failed}))
    return int(bool(failed))


def run_step(name: str) -> Results:
    """Runs a step in a process of its own. Returns its results, or the reason of its failure."""
    command = [sys.executable, __file__, "--step", name, *["--cpu"] * ON_CPU]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    limit = 1500 if ON_CPU else 300
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        try:
            run = subprocess.run(command, stdout=output, stderr=output, timeout=limit, env=env)
            reason = f"exit code {run.returncode}" if run.returncode else ""
        except subprocess.TimeoutExpired:
            reason = f"stopped after {limit} s"
        output.seek(0)
        printed = output.read().splitlines()
    line = {"step": name, "seconds": round(time.perf_counter() - started, 1)}
    answers = [text.removeprefix(ANSWER) for text in printed if text.startswith(ANSWER)]
    if answers and not reason:
        return line | json.loads(answers[-1])
    last = [text for text in printed if text.strip()][-5:]
    return line | {"error": " | ".join([reason, *last])[-1000:]}


# --- the steps: each raises AssertionError, or any other exception, if something is wrong ---------


def versions() -> Results:
    """The packages and a compiler: all that the other steps need."""
    device = "cpu" if ON_CPU else torch.cuda.get_device_name()
    x = torch.arange(8.0, device="cpu" if ON_CPU else "cuda")
    assert torch.compile(lambda x: x * 2 + 1)(x).tolist() == list(range(1, 17, 2))
    return {"packages": package_versions(), "device": device, "cuda": torch.version.cuda}


def attention() -> Results:
    """Attention of a tree equals separate attention; its kernels."""
    policy = make_policy()
    train(policy, steps=1)
    kernels, logprobs = {}, {}
    fixed = [Completion([9 + i] * (5 + i), [0.0] * (5 + i), "", "length") for i in range(16)]
    for implementation in ("prefix_tree", "sdpa"):
        policy.causal_lm.set_attn_implementation(implementation)
        assert policy.shares_prefixes == (implementation == "prefix_tree")
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            logprobs[implementation] = score_tokens(policy, batch_of(fixed), 1.0)["logprobs"]
        called = {event.key for event in profiled.key_averages() if "attention" in event.key}
        kernels[implementation] = sorted(called)
        assert ON_CPU or not any("math" in name for name in called), f"slow attention: {kernels}"
    gap = (logprobs["prefix_tree"] - logprobs["sdpa"]).abs()
    assert gap.mean() < TOLERANCE, f"the attention of a tree differs by {gap.mean()} nats"
    return {"kernels": kernels, "gap_tree_max": gap.max().item()}


def greedy() -> Results:
    """An engine: shared weights, and the greedy tokens of the torch sampler."""
    policy = make_policy()
    sampler = NanoLLM(policy, 0.5)  # its start compares the addresses of the weights
    with sampler:
        completions = sampler.sample(PROMPTS, GREEDY)
    expected = TorchSampler(policy).sample(PROMPTS, GREEDY)
    equal = [a.token_ids == b.token_ids for a, b in zip(completions, expected, strict=True)]
    # in 16 bits the two likeliest tokens may be equal, and completions differ from then on
    assert all(equal) or not ON_CPU, f"only {sum(equal)} of {len(equal)} completions are equal"
    return gaps(policy, completions, 1.0) | {"equal": f"{sum(equal)} of {len(equal)}"}


def graphs() -> Results:
    """All weights, compiled, with CUDA graphs: five cycles, and an interrupt in the middle."""
    policy = make_policy()
    sampler = NanoLLM(policy, 0.5)
    for _ in range(5):
        with sampler:
            results = gaps(policy, sampler.sample(PROMPTS, PARAMS), 0.7)
        train(policy, steps=1)
    with sampler:
        first = sampler.sample(PROMPTS, PARAMS)
    ticks = iter(range(10))
    try:  # raises while a call samples, as Ctrl-C does
        with sampler:
            sampler.sample(PROMPTS, PARAMS, lambda: next(ticks))
        raise AssertionError("sampling ended before the interrupt")
    except StopIteration:
        pass
    with sampler:
        again = sampler.sample(PROMPTS, PARAMS)
    assert [c.token_ids for c in again] == [c.token_ids for c in first], "an interrupt had effects"
    mode = sampler.engine.vllm_config.compilation_config.cudagraph_mode
    return results | {"cuda_graphs": str(mode)}


def lora() -> Results:
    """Adapters trained while the engine is awake, and while it is asleep; base weights are kept.

    The canary tells whether the engine has the last step.
    """
    policy = make_policy(lora_rank=8)
    base = {n: p.clone() for n, p in policy.causal_lm.named_parameters() if "lora_" not in n}
    sampler, results = NanoLLM(policy, 0.5), Results()
    with sampler:
        train(policy, steps=1)  # away from B = 0
        sampler.sync()
        _, before = canary.compare(policy, sampler, {})
        train(policy, steps=1)
        for name in ("canary_stale", "canary"):
            metrics, _ = canary.compare(policy, sampler, before)
            results[name] = metrics.get("gap/canary")
            started = time.perf_counter()
            sampler.sync()
            results["sync_s"] = time.perf_counter() - started
        results["awake"] = gaps(policy, sampler.sample(PROMPTS, PARAMS), 0.7)
    train(policy, steps=3)
    sampler.sync()
    with sampler:
        results["asleep"] = gaps(policy, sampler.sample(PROMPTS, PARAMS), 0.7)
    assert results["canary_stale"] > 0.9, results
    # None: the new weights drew other tokens, so that no token can be compared
    assert results["canary"] is None or results["canary"] < 0.1, results
    trained = dict(policy.causal_lm.named_parameters())
    assert all(torch.equal(trained[name], weight) for name, weight in base.items()), "base changed"
    return results


def learns() -> Results:
    """Ten updates of the default run: most of the held-out words are right after them."""
    flags = "--num-updates 10 --eval-every 0 --sampler vllm --run-name check --device"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        code = execute([*flags.split(), "cpu" if ON_CPU else "cuda"])
        assert code == 0, f"train.py ended with code {code}"
        records = read_records(Path("runs/check/metrics.jsonl"))
        os.chdir(HERE)
    name = "eval/letter_counting/accuracy"
    accuracies = [record[name] for record in records if name in record]
    assert accuracies[0] < 0.6 and accuracies[-1] > 0.9, accuracies
    assert records[-1]["gap/logprob_mean"] < TOLERANCE, records[-1]
    return {"accuracy": accuracies, "train_s": [r.get("time/train_s") for r in records[1:]]}


def sleep() -> Results:
    """Sleep frees the KV cache, cycles keep no memory, and a step while asleep is seen after it.
    Two engines, one after the other."""
    policy, results = make_policy(), Results()
    for number in ("first", "second"):
        sampler = NanoLLM(policy, 0.5)
        used: list[float] = []  # GiB asleep, after each cycle
        for _ in range(4):
            with sampler:
                old = sampler.sample(PROMPTS, PARAMS)
                awake = memory_used()
            used.append(round(memory_used(), 3))
        assert ON_CPU or awake - used[-1] > 0.5, f"awake {awake}, asleep {used[-1]}"
        assert max(used[1:]) - used[1] < GROWTH, f"GiB asleep after each cycle: {used}"
        train(policy, steps=3)
        with sampler:
            results |= gaps(policy, sampler.sample(PROMPTS, PARAMS), 0.7)
        stale = sampling_gaps(policy, old, 0.7).mean().item()
        assert stale > 3 * TOLERANCE, f"the steps changed log-probs by {stale:.1e} nats only"
        sampler.close()
        closed = round(memory_used(), 3)
        results[number] = {"awake_gib": awake, "asleep_gib": used, "closed_gib": closed}
    return results


STEPS: dict[str, Callable[[], Results]] = {
    step.__name__: step for step in (versions, greedy, attention, graphs, lora, learns, sleep)
}


# --- shared by the steps --------------------------------------------------------------------------


def make_policy(lora_rank: int = 0) -> Policy:
    """A Qwen3 of two layers with random weights: float32 on a CPU, bfloat16 on a GPU."""
    device, dtype = ("cpu", "float32") if ON_CPU else ("cuda", "bfloat16")
    shape = (64, 128, 2, 4, 2, 32, 704) if ON_CPU else (512, 1536, 2, 8, 4, 128, 704)
    cfg = Config(device=device, dtype=dtype, max_model_len=512, lora_rank=lora_rank)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, shape, dtype)
        policy = load_policy(cfg, folder)
    with torch.no_grad():  # so that the log-probs of different tokens differ more than by rounding
        policy.causal_lm.get_input_embeddings().weight.mul_(4)
    return policy


def train(policy: Policy, steps: int) -> None:
    """Takes optimizer steps that change every trainable weight a little."""
    optimizer = make_optimizer(policy, lr=1e-3)
    ids = torch.tensor([[5, 77, 300, 12, 9, 41, 8] * 8], device=policy.device)
    for _ in range(steps):
        logits = policy.to_logits(policy.hidden_states(ids)[0, :-1])
        optimizer.backward(cross_entropy(logits, ids[0, 1:]))
        _, stepped = optimizer.clip_and_step(1.0)
        assert stepped, "the gradient was not finite, or zero"
    optimizer.release()


def gaps(policy: Policy, completions: list[Completion], temperature: float) -> Results:
    """|trainer - sampler| in nats; raises AssertionError if it is larger than rounding."""
    token_gaps = sampling_gaps(policy, completions, temperature)
    mean, largest = token_gaps.mean().item(), token_gaps.max().item()
    assert mean < TOLERANCE, f"gap of {mean:.1e} nats on average, {largest:.1e} at most"
    return {"gap_mean": mean, "gap_max": largest}


def sampling_gaps(policy: Policy, completions: list[Completion], temperature: float) -> Tensor:
    """|trainer - sampler| of every sampled token, the trainer with a tree."""
    batch = batch_of(completions)
    return (score_tokens(policy, batch, temperature)["logprobs"] - batch.sampler_logprobs).abs()


def batch_of(completions: list[Completion]) -> Batch:
    pairs = zip(PROMPTS, completions, strict=True)
    turns = [Turn(prompt, c.token_ids, c.logprobs, c.finish_reason) for prompt, c in pairs]
    return to_tokens([Rollout("", "", 0, 0, turns=[turn]) for turn in turns])


def memory_used() -> float:
    """The GiB in use on the GPU, or the resident memory of this process on a CPU."""
    import psutil

    gc.collect()
    if ON_CPU:
        return psutil.Process().memory_info().rss / 2**30
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


if __name__ == "__main__":
    cli.use_expandable_segments()  # as train.py does
    arguments = tyro.cli(Args, description=__doc__)
    if not arguments.step:
        sys.exit(main(arguments))
    result = STEPS[arguments.step]()
    print(ANSWER + json.dumps(result | {"memory_gib": round(memory_used(), 3)}), flush=True)
