"""Can a policy do after RL what it could not do before, in a thousand tries?

    python runs/parts/new_skill.py runs/compose_base/model runs/deep/model --depth 4

Samples 1,024 answers of the base to each held-out task of `compose`, as training samples them, and
asks the trained policy for its greedy answer to the tasks that the base never got right.
"""

import argparse
import sys
from pathlib import Path

from rich.progress import track

sys.path.append(str(Path(__file__).parents[2]))

from core.chat_template import prompt_ids
from core.loading import load_policy
from core.policy import Policy
from core.sampler import SamplingParams, TorchSampler
from environments.base import EVAL_SEEDS
from environments.compose import Compose

AT_ONCE = 64  # tasks whose answers are sampled in one batch


def right(
    policy: Policy, depth: int, seeds: list[int], samples: int, temperature: float
) -> list[int]:
    """For each task, how many of `samples` answers are right."""
    envs, sampler, found = [Compose(depth=depth) for _ in seeds], TorchSampler(policy), []
    openings = [env.reset(seed) for env, seed in zip(envs, seeds, strict=True)]
    prompts = [prompt_ids(policy.tokenizer, messages) for messages in openings]
    for start in track(range(0, len(seeds), AT_ONCE), f"{samples} answers each", transient=True):
        chosen = slice(start, start + AT_ONCE)
        repeated = [prompt for prompt in prompts[chosen] for _ in range(samples)]
        params = SamplingParams(40, temperature, seed=start)
        texts = [answer.text for answer in sampler.sample(repeated, params)]
        for i, env in enumerate(envs[chosen]):
            own = texts[i * samples : (i + 1) * samples]
            found.append(sum(own.count(text) for text in {*own} if env.step(text).reward == 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", help="a folder with a model, before RL")
    parser.add_argument("trained", help="the same after RL")
    parser.add_argument("--depth", type=int, default=3, help="number of functions")
    parser.add_argument("--tasks", type=int, default=256)
    parser.add_argument("--samples", type=int, default=1024)
    args = parser.parse_args()
    seeds = [*range(EVAL_SEEDS.start, EVAL_SEEDS.start + args.tasks)]
    base = load_policy(args.base, device="cpu")
    before = right(base, args.depth, seeds, args.samples, 1.0)
    after = right(load_policy(args.trained, device="cpu"), args.depth, seeds, 1, 0.0)
    never = [now for now, count in zip(after, before, strict=True) if count == 0]
    print(
        f"depth {args.depth}: {len(never)} of {args.tasks} tasks had no right answer among "
        f"{args.samples} before RL"
    )
    print(f"after RL the greedy answer is right for {sum(never)} of these, {sum(after)} of all")


if __name__ == "__main__":
    main()
