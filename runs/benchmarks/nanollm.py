"""Tokens per second of NanoLLM and of plain vLLM; the cost of a sync; the log-prob gap.

    python runs/benchmarks/nanollm.py                   # on a GPU: 0.6B
    python runs/benchmarks/nanollm.py --sizes 0.6B 1.7B 4B --rounds 3
    python runs/benchmarks/nanollm.py --sizes tiny      # the default on a CPU

Each turn of a sampler is a process of its own with a warm engine, and the samplers take turns, so
that other load on the machine falls on all of them. The models have random weights in the shapes of
vs_trl.py; nothing is downloaded. All engines run in the process that calls them. The last line is
JSON.
"""

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

from record import markdown, spread, versions  # noqa: E402
from vs_trl import SHAPES, in_fresh_process, save_model  # noqa: E402

from core import canary  # noqa: E402
from core.config import Config  # noqa: E402
from core.loading import load_policy  # noqa: E402
from core.sampler import SamplingParams  # noqa: E402

Sample = Callable[[], int]  # samples all completions, returns the number of tokens
ON_GPU = torch.cuda.is_available()
MEMORY_SHARE = 0.5  # of the GPU, for an engine


@dataclass
class Args:
    """The models and the work to measure."""

    sizes: tuple[str, ...] = ("0.6B",) if ON_GPU else ("tiny",)
    rounds: int = 5  # turns of each sampler
    num_prompts: int = 16  # different prompts
    group_size: int = 8  # completions of each prompt
    prompt_tokens: int = 256
    max_tokens: int = 256  # tokens of every completion


def main(args: Args) -> None:
    results: dict[str, Any] = {"versions": versions(), "settings": vars(args)}
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            in_fresh_process(save_model, folder, SHAPES[size], "bfloat16" if ON_GPU else "float32")
            rates: dict[str, list[float]] = {name: [] for name in SAMPLERS}
            for turn, name in itertools.product(range(args.rounds), SAMPLERS):
                rates[name].append(in_fresh_process(rate, name, args, folder))
                print(f"round {turn + 1}: {name:34} {rates[name][-1]:9.0f} tokens/s", flush=True)
            costs = {
                f"sync, LoRA of rank {r}": in_fresh_process(sync, args, folder, r) for r in (0, 32)
            }
            costs["gap"] = in_fresh_process(gap, args, folder)
        ours = statistics.median(rates["NanoLLM"])
        rows = []
        for name, values in rates.items():
            rows.append([name, spread(values, ",.0f"), f"{ours / statistics.median(values):.2f}"])
        head = f"{size} | tokens/s: median [lowest, highest] | NanoLLM / sampler"
        print("\n".join(["", *markdown(head, rows), "", *map(str, costs.items())]), flush=True)
        results[size] = {"tokens_per_s": rates} | costs
    print(json.dumps(results))


def rate(name: str, args: Args, folder: str) -> float:
    """The tokens per second of a sampler whose engine is warm."""
    sample = SAMPLERS[name](args, folder)
    num_tokens = sample()  # compiles and captures graphs
    return num_tokens / timed(sample)


def prompts(args: Args) -> list[list[int]]:
    """P random prompts, each repeated G times in a row."""
    generator = torch.Generator().manual_seed(0)
    shape = (args.num_prompts, args.prompt_tokens)
    distinct = torch.randint(0, 256, shape, generator=generator).tolist()
    return [prompt for prompt in distinct for _ in range(args.group_size)]


def make_nanollm(args: Args, folder: str, **options: Any) -> tuple[Any, Any]:
    from core.nanollm import NanoLLM

    length = args.prompt_tokens + args.max_tokens
    policy = load_policy(Config(max_model_len=length, **options), folder)
    return policy, NanoLLM(policy, MEMORY_SHARE, num_rollouts=args.num_prompts * args.group_size)


def with_nanollm(args: Args, folder: str) -> Sample:
    _, sampler = make_nanollm(args, folder)
    batch = prompts(args)
    sampler.__enter__()

    def sample() -> int:
        sampler.sync()  # as after an update: empties the prefix cache
        completions = sampler.sample(batch, SamplingParams(args.max_tokens, seed=1))
        return sum(len(completion.token_ids) for completion in completions)

    return sample


def with_vllm(args: Args, folder: str) -> Sample:
    import vllm

    on_gpu = {"dtype": "bfloat16", "gpu_memory_utilization": MEMORY_SHARE}
    on_cpu = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 27, "block_size": 32}
    options = on_gpu if ON_GPU else on_cpu | {"enforce_eager": True}
    options["max_model_len"] = args.prompt_tokens + args.max_tokens
    options |= {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs"}
    llm = vllm.LLM(model=folder, generation_config="vllm", **options)
    batch = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts(args)]
    params = vllm.SamplingParams(
        temperature=1.0, max_tokens=args.max_tokens, logprobs=0, detokenize=False, ignore_eos=True
    )

    def sample() -> int:
        llm.reset_prefix_cache()
        completions = llm.generate(batch, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in completions)

    return sample


SAMPLERS = {"NanoLLM": with_nanollm, "plain vLLM": with_vllm}


def sync(args: Args, folder: str, lora_rank: int) -> dict[str, Any]:
    """The seconds and bytes of a sync; without LoRA it moves no data."""
    _, sampler = make_nanollm(args, folder, lora_rank=lora_rank)
    with sampler:
        seconds = statistics.median(timed(sampler.sync) for _ in range(20))
    num_bytes = sum(s.engine_A.nbytes + s.engine_B.nbytes for s in sampler.slots)
    return {"seconds": seconds, "bytes": num_bytes}


def gap(args: Args, folder: str) -> dict[str, Any]:
    """|trainer - sampler| log-prob in nats, in bfloat16."""
    policy, sampler = make_nanollm(args, folder, dtype="bfloat16")
    batch = prompts(args)[:: args.group_size]
    with sampler:
        completions = sampler.sample(batch, SamplingParams(args.max_tokens, seed=1))
    pairs = zip(batch, completions, strict=True)
    gaps = torch.cat([canary.gaps(policy, *pair) for pair in pairs])
    return {"mean": gaps.mean().item(), "max": gaps.max().item(), "tokens": len(gaps)}


def timed(call: Callable[[], Any]) -> float:
    """The seconds of a call, with the work of the GPU."""
    wait = torch.cuda.synchronize if ON_GPU else bool
    wait()
    started = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
