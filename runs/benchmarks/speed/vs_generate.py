"""Tokens a second of TorchSampler beside transformers' `generate`, on the CPU or a GPU.

    python runs/benchmarks/speed/vs_generate.py  # about 5 minutes on two cores
    python runs/benchmarks/speed/vs_generate.py --rounds 1 --no-write

The same folder, the same 8 prompts 8 times each, temperature 1, as many tokens (checked). Each
sampler is a process of its own, in turns, its first call left out. TorchSampler also returns the
log-prob of each token, which RL needs; `generate` is not asked for it.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tyro
from pairs import in_child, in_turn, play_part, publish, ratios, spread, verdict

GOAL = 1.5  # times generate's tokens a second


@dataclass
class Args:
    """What to measure."""

    rounds: int = 5  # pairs of fresh processes
    calls: int = 3  # measured in each process, after one that is not
    prompt_tokens: tuple[int, ...] = (50, 200)
    num_prompts: int = 8
    group_size: int = 8
    max_tokens: int = 64  # of every completion
    shape: str = "4M"  # see workload.py
    write: bool = True  # keep the figures as JSON and put the table in the README


def main(args: Args) -> None:
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        in_child(__file__, "make", folder=folder, shape=args.shape)
        for tokens in args.prompt_tokens:
            cases.append({"shape": args.shape} | pair(args, folder, tokens))
    publish("vs_generate", cases, table, args.write)


def pair(args: Args, folder: str, prompt_tokens: int) -> dict[str, Any]:
    """One line of the table. Raises RuntimeError if the two sides did not do the same work."""
    work = {k: getattr(args, k) for k in ("num_prompts", "group_size", "max_tokens", "calls")}
    work |= {"prompt_tokens": prompt_tokens}
    print(f"prompts of {prompt_tokens} tokens", flush=True)
    sides = {
        "TorchSampler": lambda: in_child(__file__, "ours", folder=folder, **work),
        "generate": lambda: in_child(__file__, "generate", folder=folder, **work),
    }
    found = in_turn(sides, args.rounds, "tokens_per_s")
    budget = args.num_prompts * args.group_size * args.max_tokens
    for name, answers in found.items():
        if any(set(answer["sampled"]) != {budget} for answer in answers):
            raise RuntimeError(f"{name} sampled {answers[0]['sampled']} tokens, not {budget}")
    return work | {"budget": budget, "sides": found}


def table(cases: list[dict[str, Any]]) -> list[str]:
    """Markdown lines."""
    lines = ["| model | prompts | tokens | TorchSampler, tokens/s | generate, tokens/s | "
             "TorchSampler is | goal |", "| --- |" + " --- |" * 6]  # fmt: skip
    for case in cases:
        ours, theirs = ([answer["tokens_per_s"] for answer in case["sides"][name]]
                        for name in ("TorchSampler", "generate"))  # fmt: skip
        share = ratios(ours, theirs)
        cells = [
            case["shape"], f"{case['num_prompts']} x {case['group_size']} of "
            f"{case['prompt_tokens']}", f"{case['budget']:,}", spread(ours, ",.0f"),
            spread(theirs, ",.0f"), f"{spread(share)} times as fast",
            verdict(statistics.median(share), GOAL, at_most=False),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# --- the children --------------------------------------------------------------------------------


def make(folder: str, shape: str) -> dict[str, Any]:
    from workload import SHAPES, save_model

    return {"weights": save_model(folder, SHAPES[shape])}


def timed(sample: Any, calls: int) -> dict[str, Any]:
    """Median tokens a second over the calls that follow the first; `sample` returns its tokens."""
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


def ours(folder: str, calls: int, max_tokens: int, **work: int) -> dict[str, Any]:
    from workload import grouped

    from core.model import load_policy
    from core.sampler import SamplingParams, TorchSampler

    policy = load_policy(folder)
    sampler, asked = TorchSampler(policy), asked_for(grouped, policy, work)

    def sample(seed: int) -> int:
        written = sampler.sample(asked, SamplingParams(max_tokens, seed=seed))
        return sum(len(completion.token_ids) for completion in written)

    return timed(sample, calls)


def generate(folder: str, calls: int, max_tokens: int, **work: int) -> dict[str, Any]:
    import torch
    from workload import grouped

    from core.model import load_policy

    policy = load_policy(folder)
    asked = torch.tensor(asked_for(grouped, policy, work), device=policy.device)
    ends = torch.tensor(policy.stop_ids, device=policy.device)

    @torch.no_grad()
    def sample(seed: int) -> int:
        torch.manual_seed(seed)
        written = policy.model.generate(
            asked, attention_mask=torch.ones_like(asked), do_sample=True, temperature=1.0, top_k=0,
            max_new_tokens=max_tokens, use_cache=True,
        )[:, asked.shape[1] :]  # fmt: skip
        assert not torch.isin(written, ends).any(), "a completion ended early"
        return written.numel()

    return timed(sample, calls)


def asked_for(grouped: Any, policy: Any, work: dict[str, int]) -> list[list[int]]:
    """The prompts, of the length that was meant."""
    asked = grouped(policy, work["num_prompts"], work["group_size"], work["prompt_tokens"])
    assert {len(ids) for ids in asked} == {work["prompt_tokens"]}
    return asked


PARTS = {"make": make, "ours": ours, "generate": generate}

if __name__ == "__main__":
    if not play_part(PARTS):
        main(tyro.cli(Args, description=__doc__))
