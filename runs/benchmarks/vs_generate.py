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
from dataclasses import dataclass
from typing import Any

import tyro
from pairs import alternate, in_child, markdown, publish, ratios, run_child, spread, verdict
from workload import SHAPES, Workload, repeated_prompts, save_model

GOAL = 1.5  # times the tokens per second of `generate`


@dataclass
class Args(Workload):
    """What to measure."""

    calls: int = 3  # measured in each process, after one that is not


def main(args: Args) -> None:
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, SHAPES[args.model])
        for tokens in args.prompt_tokens:
            cases.append({"shape": args.model} | pair(args, folder, tokens))
    publish("vs_generate", cases, table, args.write)


def pair(args: Args, folder: str, prompt_tokens: int) -> dict[str, Any]:
    """Measures one row of the table. Raises RuntimeError if the sides did different work."""
    work = {k: getattr(args, k) for k in ("num_prompts", "group_size", "max_tokens", "calls")}
    work |= {"prompt_tokens": prompt_tokens}
    print(f"prompts of {prompt_tokens} tokens", flush=True)
    sides = {
        "TorchSampler": lambda: in_child(__file__, "ours", folder=folder, **work),
        "generate": lambda: in_child(__file__, "generate", folder=folder, **work),
    }
    results = alternate(sides, args.rounds, "tokens_per_s")
    budget = args.num_prompts * args.group_size * args.max_tokens
    for name, answers in results.items():
        if any(set(answer["sampled"]) != {budget} for answer in answers):
            raise RuntimeError(f"{name} sampled {answers[0]['sampled']} tokens, not {budget}")
    return work | {"budget": budget, "sides": results}


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per prompt length, as Markdown."""
    rows = []
    for case in cases:
        ours, theirs = (
            [answer["tokens_per_s"] for answer in case["sides"][name]]
            for name in ("TorchSampler", "generate")
        )
        ratio = ratios(ours, theirs)
        rows.append([
            case["shape"],
            f"{case['num_prompts']} x {case['group_size']} of {case['prompt_tokens']}",
            f"{case['budget']:,}",
            spread(ours, ",.0f"),
            spread(theirs, ",.0f"),
            spread(ratio),
            verdict(statistics.median(ratio), GOAL, at_most=False),
        ])  # fmt: skip
    return markdown("model | prompts | tokens | TorchSampler, tokens/s | generate, tokens/s | "
                    "TorchSampler / generate | goal", rows)  # fmt: skip


# --- child processes -----------------------------------------------------------------------------


def ours(folder: str, calls: int, max_tokens: int, **work: int) -> dict[str, Any]:
    """Measures TorchSampler."""
    from core.loading import load_policy
    from core.sampler import SamplingParams, TorchSampler

    policy = load_policy(folder)
    sampler, prompts = TorchSampler(policy), repeated_prompts(policy, **work)

    def sample(seed: int) -> int:
        completions = sampler.sample(prompts, SamplingParams(max_tokens, seed=seed))
        return sum(len(completion.token_ids) for completion in completions)

    return timed(sample, calls)


def generate(folder: str, calls: int, max_tokens: int, **work: int) -> dict[str, Any]:
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

    return timed(sample, calls)


def timed(sample: Callable[[int], int], calls: int) -> dict[str, Any]:
    """Median tokens per second over the calls after the first. `sample` returns its tokens."""
    import torch

    sample(0)
    rates, sampled = [], []
    for call in range(1, calls + 1):
        started = time.perf_counter()
        sampled.append(sample(call))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rates.append(sampled[-1] / (time.perf_counter() - started))
    return {"tokens_per_s": statistics.median(rates), "rates": rates, "sampled": sampled}


PARTS = {"ours": ours, "generate": generate}

if __name__ == "__main__" and not run_child(PARTS):
    main(tyro.cli(Args, description=__doc__))
