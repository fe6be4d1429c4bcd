"""The steps of gpu_check.py, each of which checks one thing and returns what it found.

    python runs/benchmarks/gpu_steps.py graphs cuda                 # only this step
    python runs/benchmarks/gpu_steps.py graphs cuda "eager mode"    # in a variant

A step raises AssertionError, or any other exception, if something is wrong.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from gpu_check import ANSWER  # noqa: E402
from record import versions as package_versions  # noqa: E402
from workload import SHAPES, Shape, memory_used, save_model  # noqa: E402

from core import canary, nanollm  # noqa: E402
from core.batching import Batch, to_tokens  # noqa: E402
from core.config import Config  # noqa: E402
from core.loading import load_policy  # noqa: E402
from core.nanollm import NanoLLM  # noqa: E402
from core.optimizer import make_optimizer  # noqa: E402
from core.policy import Policy  # noqa: E402
from core.sampler import SamplingParams, TorchSampler  # noqa: E402
from core.scoring import score_tokens  # noqa: E402
from core.types import Completion, Rollout, Turn  # noqa: E402
from train import execute  # noqa: E402

ON_CPU = sys.argv[2:3] == ["cpu"]
VARIANT = "".join(sys.argv[3:4])  # of gpu_check.VARIANTS, or none
PROMPTS = [[5 + i] * (8 + 30 * i) for i in range(4) for _ in range(4)]  # 4 groups of 4
PARAMS = SamplingParams(max_tokens=48, temperature=0.7, seed=1)
GREEDY = SamplingParams(max_tokens=48, temperature=0)
# nats by which rounding changes a log-prob on average: float32 on a CPU, bfloat16 on a GPU, where
# the kernels of a tree and a plain pass, and of another batch, add in another order
TOLERANCE = 1e-4 if ON_CPU else 5e-2
GROWTH = 0.0625  # GiB by which the memory in use may vary between cycles
ENGINES: list[NanoLLM] = []  # started by the step
Found = dict[str, Any]


def versions() -> Found:
    """The driver, the packages and a compiler: all that the other steps need."""
    import vllm

    found: Found = {"packages": package_versions(), "vllm": vllm.__version__}
    if not ON_CPU:
        properties = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = shutil.which(query[0]) and subprocess.run(query, capture_output=True, text=True)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "driver": driver.stdout.strip() if driver else "nvidia-smi is missing",
        }
    numbers = torch.arange(8.0, device="cpu" if ON_CPU else "cuda")
    assert torch.compile(lambda x: x * 2 + 1)(numbers).tolist() == list(range(1, 17, 2))
    return found


def attention() -> Found:
    """Attention of a tree equals separate attention; its kernels."""
    policy = make_policy()
    train(policy, steps=1)
    kernels, logprobs = {}, {}
    for implementation in ("prefix_tree", "sdpa"):
        policy.causal_lm.set_attn_implementation(implementation)
        assert policy.shares_prefixes == (implementation == "prefix_tree")
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            logprobs[implementation] = log_probs(policy)
        called = {event.key for event in profiled.key_averages() if "attention" in event.key}
        kernels[implementation] = sorted(called)
        assert ON_CPU or not any("math" in name for name in called), f"slow attention: {kernels}"
    gap = (logprobs["prefix_tree"] - logprobs["sdpa"]).abs()
    assert gap.mean() < TOLERANCE, f"the attention of a tree differs by {gap.mean()} nats"
    return {"kernels": kernels, "gap_tree_max": gap.max().item()}


def eager() -> Found:
    """An engine in eager mode: bound pointers, and the greedy tokens of the torch sampler."""
    policy = make_policy()
    sampler = make_engine(policy, eager=True)  # its start compares the pointers
    with sampler:
        completions = sampler.sample(PROMPTS, GREEDY)
    expected = TorchSampler(policy).sample(PROMPTS, GREEDY)
    equal = [a.token_ids == b.token_ids for a, b in zip(completions, expected, strict=True)]
    # in 16 bits the two likeliest tokens may be equal, and completions differ from then on
    assert all(equal) or not ON_CPU, f"only {sum(equal)} of {len(equal)} completions are equal"
    lost = max(nats_below_best(policy, *pair) for pair in zip(PROMPTS, completions, strict=True))
    assert lost < 5 * TOLERANCE, f"a greedy token is {lost:.1e} nats below the likeliest"
    found = engine_facts(sampler) | gaps(policy, completions, 1.0)
    return found | {"equal": f"{sum(equal)} of {len(equal)}", "nats_below_best": lost}


def sleep() -> Found:
    """Sleep frees the KV cache, cycles keep no memory, and a step while asleep is seen after it.

    Alone on the GPU, with two engines one after the other: all engines of other steps are small.
    """
    policy, closed = make_policy(), list[float]()
    found: Found = {}
    for number in ("first", "second"):
        sampler, used = make_engine(policy, eager=True), list[float]()
        for _ in range(4):
            with sampler:
                old, awake = sampler.sample(PROMPTS, PARAMS), memory_used()
            used.append(round(memory_used(), 3))
        assert awake - used[-1] > (0.05 if ON_CPU else 0.5), f"awake {awake}, asleep {used[-1]}"
        assert max(used[1:]) - used[1] < GROWTH, f"GiB asleep after each cycle: {used}"
        train(policy, steps=3)
        with sampler:
            found |= gaps(policy, sampler.sample(PROMPTS, PARAMS), 0.7)
        stale = sampling_gaps(policy, old, 0.7).mean().item()
        assert stale > 3 * TOLERANCE, f"the steps changed log-probs by {stale:.1e} nats only"
        sampler.close()
        closed.append(round(memory_used(), 3))
        found[number] = {"awake_gib": awake, "asleep_gib": used, "gap_to_old_weights": stale}
    # what one process keeps of its first engine: compiled code, the context of CUDA
    assert ON_CPU or closed[1] - closed[0] < 4 * GROWTH, f"GiB after each engine: {closed}"
    return found | {"closed_gib": closed}


def graphs() -> Found:
    """Compiled, with CUDA graphs: five cycles, and an interrupt in the middle."""
    policy = make_policy()
    sampler = make_engine(policy)
    found: Found = engine_facts(sampler)
    for cycle in range(5):
        with sampler:
            found |= gaps(policy, sampler.sample(PROMPTS, PARAMS), 0.7)
        train(policy, steps=1)
        if cycle == 2:
            interrupt(sampler)
    with sampler:
        first = sampler.sample(PROMPTS, PARAMS)
    interrupt(sampler)
    with sampler:
        again = sampler.sample(PROMPTS, PARAMS)
    assert [c.token_ids for c in again] == [c.token_ids for c in first], "an interrupt had effects"
    return found


def lora() -> Found:
    """Adapters trained while the engine is awake, and while it is asleep; base weights are kept.

    The canary tells whether the engine has the last step.
    """
    policy = make_policy(lora_rank=8)
    base = {n: p.clone() for n, p in policy.causal_lm.named_parameters() if "lora_" not in n}
    sampler = make_engine(policy)
    found: Found = engine_facts(sampler)
    with sampler:
        train(policy, steps=1)  # away from B = 0
        sampler.sync()
        _, before = canary.compare(policy, sampler, {})
        train(policy, steps=1)
        for name in ("canary_stale", "canary"):
            metrics, _ = canary.compare(policy, sampler, before)
            found[name] = metrics.get("gap/canary")
            sampler.sync()
        old = sampler.sample(PROMPTS, PARAMS)
        found["awake"] = gaps(policy, old, 0.7)
    train(policy, steps=3)
    sampler.sync()
    with sampler:
        found["asleep"] = gaps(policy, sampler.sample(PROMPTS, PARAMS), 0.7)
    assert found["canary_stale"] > 0.9, found
    # None: the new weights drew other tokens, so that nothing can be compared
    assert found["canary"] is None or found["canary"] < 0.1, found
    stale = sampling_gaps(policy, old, 0.7).mean().item()
    assert stale > 3 * TOLERANCE, f"the steps changed log-probs by {stale:.1e} nats only"
    now = dict(policy.causal_lm.named_parameters())
    assert all(torch.equal(now[name], weight) for name, weight in base.items()), "base changed"
    return found | {"gap_to_old_weights": stale}


def reopen() -> Found:
    """A sleeping engine is closed, and another one started on the same weights."""
    policy, found = make_policy(), Found()
    for number in ("first", "second"):
        sampler = make_engine(policy)
        with sampler:
            found[number] = gaps(policy, sampler.sample(PROMPTS, PARAMS), 0.7)
        sampler.close()
        train(policy, steps=1)
    return found


def updates() -> Found:
    """Three updates of `train.py` on four layers of the shape of Qwen3-0.6B; with --cpu: of tiny.

    All weights: a checkpoint has 3.9 GB, with all 28 layers it would have 10.7 GB.
    """
    shape = SHAPES["tiny"] if ON_CPU else replace(SHAPES["0.6B"], layers=4)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, shape, "float32" if ON_CPU else "bfloat16")
        records = run_of(f"""--model-id {folder} --num-updates 3 --num-prompts 4 --group-size 4
            --max-tokens 64 --max-model-len 512 --eval-num-tasks 0 --seed 1
            --entropy-coef 0.01""")  # its gradient is never 0
    last = records[-1]
    assert last["update"] == 3 and last["grad/norm"] > 0, last
    assert last["gap/logprob_mean"] < TOLERANCE, last
    shown = ("gap/", "time/", "tokens/sampled", "grad/norm")
    found = {name: value for name, value in last.items() if name.startswith(shown)}
    return found | {k: v for k, v in records[0].items() if k.startswith("time/start_")}


def learns() -> Found:
    """Ten updates of the default run: most of the held-out words are right after them."""
    records = run_of("--num-updates 10 --eval-every 0")
    name = "eval/letter_counting/accuracy"
    accuracies = [record[name] for record in records if name in record]
    assert accuracies[0] < 0.6 and accuracies[-1] > 0.9, accuracies
    return {"accuracy": accuracies, "train_s": [r.get("time/train_s") for r in records[1:]]}


# --- what the steps share -------------------------------------------------------------------------


def make_policy(lora_rank: int = 0) -> Policy:
    """A Qwen3 of two layers with random weights: float32 on a CPU, bfloat16 on a GPU."""
    device, dtype = ("cpu", "float32") if ON_CPU else ("cuda", "bfloat16")
    shape = Shape(64, 128, 2, 4, 2, 32, 704) if ON_CPU else Shape(512, 1536, 2, 8, 4, 128, 704)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, shape, dtype)
        policy = load_policy(
            Config(device=device, dtype=dtype, max_model_len=512, lora_rank=lora_rank), folder
        )
    with torch.no_grad():  # so that the log-probs of different tokens differ more than by rounding
        policy.causal_lm.get_input_embeddings().weight.mul_(4)
    return policy


def run_of(flags: str) -> list[Found]:
    """The records of a run of train.py that samples with vLLM."""
    flags += f" --sampler vllm --run-name check --device {'cpu' if ON_CPU else 'cuda'}"
    flags += " --vllm-eager" * (VARIANT == "eager mode")
    with tempfile.TemporaryDirectory() as folder, in_variant():
        os.chdir(folder)
        code = execute(flags.split())
        assert code == 0, f"train.py ended with code {code}"
        lines = Path("runs/check/metrics.jsonl").read_text().splitlines()
        os.chdir(HERE)
    return [json.loads(line) for line in lines]


def make_engine(policy: Policy, eager: bool = False) -> NanoLLM:
    with in_variant():
        ENGINES.append(NanoLLM(policy, 0.5, eager=eager or VARIANT == "eager mode"))
    return ENGINES[-1]


@contextmanager
def in_variant() -> Iterator[None]:
    """Inside, engines start with little memory, as several steps share the GPU, but for `sleep`.

    In that variant they take the Triton attention backend.
    """
    original = nanollm._engine_arguments

    def arguments(*given: Any) -> Any:
        made = original(*given)
        if VARIANT == "Triton attention":
            made.attention_backend = "TRITON_ATTN"
        return made

    def memory_of(*given: Any) -> dict[str, Any]:
        if ON_CPU or sys.argv[1] == "sleep":
            return nanollm_memory(*given)
        return {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05}

    nanollm_memory = nanollm._memory_arguments
    with patch.multiple(nanollm, _engine_arguments=arguments, _memory_arguments=memory_of):
        yield


def engine_facts(sampler: NanoLLM) -> Found:
    """What vLLM chose: the attention kernel, the model runner, CUDA graphs."""
    [model] = sampler.engine.apply_model(lambda model: model)
    kernels = {type(m.impl).__name__ for m in model.modules() if hasattr(m, "impl")}
    vllm_config = sampler.engine.vllm_config
    runner = "V2" if vllm_config.use_v2_model_runner else "V1"
    mode = str(vllm_config.compilation_config.cudagraph_mode)
    return {"attention": sorted(kernels), "model_runner": runner, "cuda_graphs": mode}


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


def interrupt(sampler: NanoLLM) -> None:
    """Raises while a call samples, as Ctrl-C does."""
    ticks = iter(range(10))
    try:
        with sampler:
            sampler.sample(PROMPTS, PARAMS, lambda: next(ticks))
    except StopIteration:
        return
    raise AssertionError("sampling ended before the interrupt")


def gaps(policy: Policy, completions: list[Completion], temperature: float) -> Found:
    """|trainer - sampler| in nats; raises AssertionError if it is larger than rounding."""
    found = sampling_gaps(policy, completions, temperature)
    mean, largest = found.mean().item(), found.max().item()
    assert mean < TOLERANCE, f"gap of {mean:.1e} nats on average, {largest:.1e} at most"
    return {"gap_mean": mean, "gap_max": largest}


def sampling_gaps(policy: Policy, completions: list[Completion], temperature: float) -> Tensor:
    """|trainer - sampler| of every sampled token, the trainer with a tree."""
    batch = batch_of(completions)
    return (score_tokens(policy, batch, temperature)["logprobs"] - batch.sampler_logprobs).abs()


@torch.no_grad()
def nats_below_best(policy: Policy, prompt: list[int], completion: Completion) -> float:
    """Largest difference between the log-prob of the likeliest token and of the sampled one."""
    ids = torch.tensor([prompt + completion.token_ids], device=policy.device)
    logprobs = policy.to_logits(policy.hidden_states(ids)[0]).log_softmax(-1)[len(prompt) - 1 : -1]
    sampled = logprobs.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    return (logprobs.max(-1).values - sampled).max().item()


def log_probs(policy: Policy) -> Tensor:
    """The trainer's log-probs of fixed completions: float32 [S]."""
    fixed = [Completion([9 + i] * (5 + i), [0.0] * (5 + i), "", "length") for i in range(16)]
    return score_tokens(policy, batch_of(fixed), 1.0)["logprobs"]


def batch_of(completions: list[Completion]) -> Batch:
    pairs = zip(PROMPTS, completions, strict=True)
    turns = [Turn(prompt, c.token_ids, c.logprobs, c.finish_reason) for prompt, c in pairs]
    return to_tokens([Rollout("", "", 0, 0, turns=[turn]) for turn in turns])


STEPS: dict[str, Callable[[], Found]] = {
    step.__name__: step
    for step in (versions, attention, eager, sleep, graphs, lora, reopen, updates, learns)
}

if __name__ == "__main__":
    result = STEPS[sys.argv[1]]()
    print(ANSWER + json.dumps(result | {"memory_gib": round(memory_used(), 3)}), flush=True)
    for engine in ENGINES:
        engine.close()
