"""Tokens per second of episodes with slow environments: without rounds, and in rounds.

    python runs/benchmarks/continuous.py       # 13 minutes on two cores
    python runs/benchmarks/continuous.py --rounds 1 --no-write

Each episode has 1 to 8 turns, each completion ends after any token with probability 1/24 and after
96 at the latest, and each step of the environment takes 50 to 500 ms: all drawn from seeds. In
rounds every episode waits for the longest completion and the slowest step of the round; without
rounds an episode joins the running batch when its own step has ended (`ContinuousPlay` in
core/rollouts.py). Both sides play the same tasks in turn, in one process, and sample the same
number of tokens (checked). With `instances` so many environments exist at the same time, as with
--env-instances; a row of the table is one pair of `episodes` and `instances`.
"""

import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import tyro
from pairs import alternate, publish, ratios, spread, verdict
from torch import Tensor

from core.model import load_policy
from core.rollouts import RolloutCollector
from core.sampler import SamplingParams, TorchSampler, draw
from core.tasks import Task
from core.types import Message
from environments.base import Env, Step
from environments.registry import register

GOAL = 1.5  # times the tokens per second in rounds
SIDES = ("without rounds", "in rounds")


@dataclass
class Args:
    """What to measure."""

    rounds: int = 5  # pairs
    episodes: tuple[int, ...] = (32, 64, 64)  # one row of the table each
    instances: tuple[int, ...] = (0, 0, 16)  # 0: no limit
    max_turns: int = 8
    latency: tuple[float, float] = (0.05, 0.5)  # seconds
    mean_tokens: int = 24  # of the completions, if they had no limit
    max_tokens: int = 96  # limit of each
    model: str = "tiny"  # or smollm2
    write: bool = True  # save the results as JSON and write the table into README.md


class Uneven(Env):
    """Sleeps at every step; the seed determines the number of turns and how long each takes."""

    def __init__(self, max_turns: int = 8, shortest: float = 0.05, longest: float = 0.5):
        self.max_turns, self.latency = max_turns, (shortest, longest)

    def reset(self, seed: int) -> list[Message]:
        self.rng = random.Random(seed)
        self.left = self.rng.randint(1, self.max_turns)
        return [{"role": "user", "content": f"{seed:>40}"}]

    def step(self, response: str) -> Step:
        time.sleep(self.rng.uniform(*self.latency))
        self.left -= 1
        message: Message = {"role": "user", "content": f"{self.left:>20}"}
        return Step(message if self.left else None, 1.0, not self.left)


@register("uneven")
class Light(Uneven):
    pass


@register("uneven_heavy")
class Heavy(Uneven):
    heavy = True


def main(args: Args) -> None:
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for episodes, instances in zip(args.episodes, args.instances, strict=True):
            cases.append(measure(args, folder, episodes, instances))
    publish("continuous", cases, table, args.write)


def measure(args: Args, folder: str, episodes: int, instances: int) -> dict[str, Any]:
    """Measures one row of the table. Raises RuntimeError if the sides did different work."""
    policy = load_policy(args.model, device="cpu", tiny_folder=f"{folder}/tiny")
    end_id = policy.end_of_turn_id

    def draw_or_end(
        logits: Tensor, params: SamplingParams, uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `draw`, but ends a completion with probability 1 / `mean_tokens`."""
        token_ids, logprobs = draw(logits, params, uniform)
        ends = uniform < 1 / args.mean_tokens
        token_ids = torch.where(token_ids == end_id, end_id - 1, token_ids)
        return torch.where(ends, end_id, token_ids), logprobs

    sampler, (shortest, longest) = TorchSampler(policy, draw_or_end), args.latency
    options = f"max_turns={args.max_turns},shortest={shortest},longest={longest}"
    spec = f"uneven{'_heavy' if instances else ''}:{options}"
    work = {k: getattr(args, k) for k in ("max_turns", "latency", "mean_tokens", "max_tokens")}
    work |= {"shape": args.model, "episodes": episodes, "instances": instances}
    print(f"{episodes} episodes, {instances or 'all'} at the same time", flush=True)

    def play(without_rounds: bool, seeds: range) -> dict[str, Any]:
        collector = RolloutCollector(policy, args.max_turns, env_instances=instances or episodes)
        # what they would know after the first round
        collector.calls.slow.add(("step", spec))
        collector.calls.seconds[spec].extend([longest if without_rounds else 0.0] * 64)
        if not without_rounds:
            collector.calls.answers_late = lambda spec: False  # type: ignore[method-assign]
        tasks = [Task(spec, seed, seed) for seed in seeds]
        started = time.perf_counter()
        rollouts = collector.collect(tasks, sampler, SamplingParams(args.max_tokens))
        seconds = time.perf_counter() - started
        sampled = sum(rollout.num_tokens for rollout in rollouts)
        return {"seconds": seconds, "tokens": sampled, "tokens_per_s": sampled / seconds}

    play(True, range(8))  # not measured
    counts = dict.fromkeys(SIDES, 0)

    def side(name: str) -> dict[str, Any]:
        first = counts[name] * episodes
        counts[name] += 1
        return play(name == SIDES[0], range(first, first + episodes))

    sides = {name: lambda name=name: side(name) for name in SIDES}
    results = alternate(sides, args.rounds, "tokens_per_s")
    tokens = [[answer["tokens"] for answer in results[name]] for name in SIDES]
    if tokens[0] != tokens[1]:
        raise RuntimeError(f"the sides sampled {tokens[0]} and {tokens[1]} tokens")
    return work | {"sides": results}


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per case, as Markdown."""
    lines = [
        "| model | episodes | environments at once | tokens | without rounds, tokens/s | "
        "in rounds, tokens/s | without / in rounds | goal |",
        "| --- |" + " --- |" * 7,
    ]
    for case in cases:
        ours, theirs = (
            [answer["tokens_per_s"] for answer in case["sides"][name]] for name in SIDES
        )
        ratio = ratios(ours, theirs)
        tokens = statistics.median(answer["tokens"] for answer in case["sides"][SIDES[0]])
        cells = [
            case["shape"],
            f"{case['episodes']} of 1 to {case['max_turns']} turns",
            f"{case['instances'] or 'all'}",
            f"{tokens:,.0f}",
            spread(ours, ",.0f"),
            spread(theirs, ",.0f"),
            spread(ratio),
            verdict(statistics.median(ratio), GOAL, at_most=False),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
