"""What picoRL does between two steps of vLLM's engine while 128 completions are being sampled.

    python runs/benchmarks/between_steps.py         # needs vLLM or its CPU build; 20 seconds

The engine is a stub whose steps take no time. Everything else is real: the loop around the
episodes, NanoLLM's `step`, the progress bar, the look at Ctrl-C, the pool of environments. With
Model Runner V2, as on GPUs, vLLM draws from a seed per request; with V1, as on vLLM's CPU build,
NanoLLM gives the engine its own random states before each step and takes them back after it.
"""

import itertools
import json
import os
import statistics
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from pairs import spread
from rich.console import Console

from core.config import Config
from core.episodes import RolloutCollector
from core.nanollm import NanoLLM
from core.process_state import random_state
from core.run.console import Display
from core.run.interrupt import Interrupt
from core.run.models import load_policy
from core.sampler import SamplingParams
from core.tasks import train_tasks

ROLLOUTS, STEPS, ROUNDS = 128, 256, 5
GOAL = 0.1  # ms


class StubEngine:
    """Ends all requests after STEPS steps; notes the time between its steps."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.num_steps, self.left_at, self.waits = 0, 0.0, list[float]()

    def add_request(self, request_id: str, *_: Any, **__: Any) -> None:
        self.requests.append(request_id)

    def step(self) -> list[Any]:
        entered = perf_counter()
        if self.num_steps:
            self.waits.append(entered - self.left_at)
        self.num_steps += 1
        ended = self.requests if self.num_steps == STEPS else []
        answer = SimpleNamespace(token_ids=[5], logprobs=SimpleNamespace(logprobs=[-0.1]))
        outputs = [SimpleNamespace(request_id=name, outputs=[answer]) for name in ended]
        self.left_at = perf_counter()
        return outputs

    def abort_request(self, _: list[str]) -> None:
        self.requests.clear()


def stub_sampler(policy: Any, draws_by_seed: bool) -> NanoLLM:
    """NanoLLM around a stub, without the start of an engine."""
    sampler = NanoLLM.__new__(NanoLLM)
    sampler.policy, sampler.with_kept_ids, sampler.lora_request = policy, False, None
    sampler.running, sampler.numbers, sampler.awake = {}, itertools.count(), True
    sampler.random_state, sampler.draws_by_seed = random_state(), draws_by_seed
    sampler.engine = StubEngine()
    return sampler


def measure(policy: Any, draws_by_seed: bool) -> float:
    """Mean of the milliseconds between two steps."""
    sampler = stub_sampler(policy, draws_by_seed)
    drawn = train_tasks(["letter_counting"], 0, 1, ROLLOUTS // 8, 8, 0)
    collector = RolloutCollector(policy, max_turns=1)
    params = SamplingParams(max_tokens=STEPS)
    with open(os.devnull, "w") as terminal:
        display = Display("stub", Console(file=terminal, force_terminal=True))
        with Interrupt() as interrupt, display, display.phase("rollouts", STEPS) as phase:
            collector.collect(drawn, sampler, params, phase.tick_and(interrupt.check_alone))
    collector.close()
    return 1000 * statistics.mean(sampler.engine.waits)


def main() -> None:
    policy = load_policy(Config(device="cpu", dtype="float32"), "tiny")
    found: dict[str, list[float]] = {"V1": [], "V2": []}
    for _ in range(ROUNDS):
        for runner, times in found.items():
            times.append(measure(policy, runner == "V2"))
    for runner, times in found.items():
        shown = spread(times, ".3f")
        print(f"Model Runner {runner}: {shown} ms between two steps, {ROLLOUTS} rollouts")
    print(json.dumps({"goal_ms": GOAL, "median_ms": found}))


if __name__ == "__main__":
    main()
