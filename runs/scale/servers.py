"""The time of 64 completions on two of vLLM's servers, beside that on one of them.

    python runs/scale/servers.py MODEL http://127.0.0.1:8201,http://127.0.0.1:8202

The servers are started as runs/scale/README.md says, with this model and --max-model-len 1200.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter

sys.path.append(str(Path(__file__).resolve().parents[2]))

from core.config import Config
from core.extras.server_sampler import ServerSampler
from core.loading import load_policy
from core.sampler import SamplingParams

PAIRS = 5


def main(model: str, urls: str) -> None:
    policy = load_policy(Config(device="cpu", max_model_len=1200, lora_rank=8), model)
    questions = [f"What is {i} + {3 * i}? Explain how you get there." for i in range(8)]
    prompts = [policy.tokenizer.encode(question) for question in questions for _ in range(8)]
    times: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        samplers = [ServerSampler(policy, u, folder) for u in (urls.partition(",")[0], urls)]
        for seed in range(1 + PAIRS):  # the first one warms up
            times.append([])
            for sampler in samplers:
                begun = perf_counter()
                with sampler:
                    sampler.sample(prompts, SamplingParams(max_tokens=64, seed=seed))
                times[-1].append(perf_counter() - begun)
            print("{:.1f} s, {:.1f} s".format(*times[-1]), flush=True)
        for sampler in samplers:
            sampler.close()
    ratios = sorted(two / one for one, two in times[1:])
    print(f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
