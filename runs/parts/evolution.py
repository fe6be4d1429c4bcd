"""Evolution strategies: learning from rewards without a gradient, a contrast to all else here.

    python runs/parts/evolution.py          # two minutes on one core
    python runs/parts/evolution.py 1        # with another seed

Noise is added to all weights, the policy answers, and the weights move towards the noise with which
it answered best. So there are no log-probs, no advantages of tokens and no backward pass.

    θ ← θ + η · 1/N Σ_n z_n ε_n      ε_n ~ N(0, 1), z_n the mean reward of θ + σ ε_n, normalized

after arXiv:2509.24372, with every ε_n also as -ε_n. The seed of ε_n stands for it in memory.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2]))

from core.chat_template import prompt_ids
from core.config import Config
from core.loading import load_policy
from core.policy import Policy
from core.sampler import SamplingParams, TorchSampler
from core.seeds import derive_seed
from core.tiny import PRETRAINED
from environments.base import EVAL_SEEDS
from environments.letter_counting import LetterCounting

UPDATES, PAIRS, TASKS = 12, 12, 48  # pairs of ε and -ε in an update; tasks for each of them
SIGMA, STEP = 0.01, 0.006  # σ; the standard deviation of the change of a weight in an update
HELD_OUT = range(EVAL_SEEDS.start, EVAL_SEEDS.start + 256)


def play(policy: Policy, seeds: range) -> tuple[float, float]:
    """The mean reward of the policy's greedy answers to these tasks, and how many are right."""
    envs = [LetterCounting() for _ in seeds]
    openings = [env.reset(seed) for env, seed in zip(envs, seeds, strict=True)]
    prompts = [prompt_ids(policy.tokenizer, messages) for messages in openings]
    greedy = SamplingParams(max_tokens=64, temperature=0.0)
    answers = TorchSampler(policy).sample(prompts, greedy)
    steps = [env.step(answer.text) for env, answer in zip(envs, answers, strict=True)]
    correct = [step.info["correct"] for step in steps]
    return sum(step.reward for step in steps) / len(steps), sum(correct) / len(steps)


def noise(policy: Policy, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter, and its ε."""
    generator = torch.Generator().manual_seed(seed)
    for weight in policy.model.parameters():
        yield weight, torch.randn(weight.shape, generator=generator)


@torch.no_grad()
def main(policy: Policy, run_seed: int = 0) -> None:
    print(f"before: held-out accuracy {play(policy, HELD_OUT)[1]:.2f}")
    for update in range(UPDATES):
        first = derive_seed(run_seed, update) % 100_000_000
        tasks, seeds = range(first, first + TASKS), range(first, first + PAIRS)
        differences = []
        for seed in track(seeds, f"update {update + 1}", transient=True):
            rewards = []
            for sign in (1, -1):
                for weight, epsilon in noise(policy, seed):
                    weight += sign * SIGMA * epsilon
                rewards.append(play(policy, tasks)[0])
                for weight, epsilon in noise(policy, seed):
                    weight -= sign * SIGMA * epsilon
            differences.append(rewards[0] - rewards[1])
        z = torch.tensor(differences)
        z = z / (z.square().mean().sqrt() + 1e-8)  # ε and -ε: their mean is 0
        for seed, factor in zip(seeds, z.tolist(), strict=True):
            for weight, epsilon in noise(policy, seed):
                weight += STEP / PAIRS**0.5 * factor * epsilon
        print(f"update {update + 1}: {play(policy, HELD_OUT)[1]:.2f}", flush=True)


if __name__ == "__main__":
    policy = load_policy(Config(device="cpu"), str(PRETRAINED))
    main(policy, int(sys.argv[1]) if sys.argv[1:] else 0)
