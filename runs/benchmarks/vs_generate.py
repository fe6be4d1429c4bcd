"""Tokens per second of TorchSampler and of transformers' `generate`, on a CPU or a GPU.

    python runs/benchmarks/vs_generate.py      # 5 minutes on two cores
    python runs/benchmarks/vs_generate.py --rounds 1 --no-write

Both sides load the same model and sample the same number of tokens (checked) from the same 8
prompts, 8 times each, at temperature 1. Each process runs one side; its first call is left out.
TorchSampler also returns the log-prob of each token, which RL needs; `generate` does not.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import tyro
from pairs import Rounds, alternate, cells_of_pair, in_child, publish, run_child
from record import markdown
from workload import BUDGET, PROMPT_TOKENS, SHAPES, WORK, repeated_prompts, save_model

GOAL = 1.5  # times the tokens per second of `generate`
CALLS = 3  # measured in each process, after one that is not


def main(args: Rounds) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, SHAPES["4M"])
        cases = [pair(args, folder, tokens) for tokens in PROMPT_TOKENS]
    publish("vs_generate", cases, table, args.write)


def pair(args: Rounds, folder: str, prompt_tokens: int) -> dict[str, Any]:
    """Measures one row of the table. Raises RuntimeError if the sides did different work."""
    work = WORK | {"prompt_tokens": prompt_tokens}
    print(f"prompts of {prompt_tokens} tokens", flush=True)
    sides = {name: partial(in_child, __file__, part, folder=folder, **work)
             for name, part in (("TorchSampler", "ours"), ("generate", "generate"))}  # fmt: skip
    results = alternate(sides, args.rounds, "tokens_per_s")
    for name, answers in results.items():
        if any(set(answer["sampled"]) != {BUDGET} for answer in answers):
            raise RuntimeError(f"{name} sampled {answers[0]['sampled']} tokens, not {BUDGET}")
    return work | {"shape": "4M", "budget": BUDGET, "sides": results}


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per prompt length, as Markdown."""
    rows = [
        [
            case["shape"],
            f"{case['num_prompts']} x {case['group_size']} of {case['prompt_tokens']}",
            f"{case['budget']:,}",
            *cells_of_pair(case["sides"], "tokens_per_s", ",.0f", GOAL, at_most=False),
        ]
        for case in cases
    ]
    return markdown("model | prompts | tokens | TorchSampler, tokens/s | generate, tokens/s | "
                    "TorchSampler / generate | goal", rows)  # fmt: skip


# --- child processes -----------------------------------------------------------------------------


def ours(folder: str, max_tokens: int, **work: int) -> dict[str, Any]:
    """Measures TorchSampler."""
    from core.loading import load_policy
    from core.sampler import SamplingParams, TorchSampler

    policy = load_policy(folder)
    sampler, prompts = TorchSampler(policy), repeated_prompts(policy, **work)

    def sample(seed: int) -> int:
        completions = sampler.sample(prompts, SamplingParams(max_tokens, seed=seed))
        return sum(len(completion.token_ids) for completion in completions)

    return timed(sample)


def generate(folder: str, max_tokens: int, **work: int) -> dict[str, Any]:
    """Measures transformers' `generate`."""
    import torch

    from core.loading import load_policy

    policy = load_policy(folder)
    prompts = torch.tensor(repeated_prompts(policy, **work), device=policy.device)
    end_ids = torch.tensor(policy.stop_ids, device=policy.device)

    @torch.no_grad()
    def sample(seed: int) -> int:
        torch.manual_seed(seed)
        completions = policy.model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0,
            top_k=0, max_new_tokens=max_tokens, use_cache=True,
        )[:, prompts.shape[1] :]  # fmt: skip
        assert not torch.isin(completions, end_ids).any(), "a completion ended early"
        return completions.numel()

    return timed(sample)


def timed(sample: Callable[[int], int]) -> dict[str, Any]:
    """Median tokens per second over the calls after the first. `sample` returns its tokens."""
    import torch

    sample(0)
    rates, sampled = [], []
    for call in range(1, CALLS + 1):
        started = time.perf_counter()
        sampled.append(sample(call))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rates.append(sampled[-1] / (time.perf_counter() - started))
    return {"tokens_per_s": statistics.median(rates), "rates": rates, "sampled": sampled}


PARTS = {"ours": ours, "generate": generate}

if __name__ == "__main__" and not run_child(PARTS):
    main(tyro.cli(Rounds, description=__doc__))
