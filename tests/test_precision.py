"""--dtype float64, in which trainer and sampler agree on every log-prob."""

from conftest import load_small
from test_sampler import trainer_gap

from core.sampler import SamplingParams, TorchSampler

PROMPTS = [[65, 66, 67], [68] * 70, [70, 71]] * 4


def gaps(policy):
    """|trainer - sampler| of each sampled token, in nats."""
    params = SamplingParams(max_tokens=48, temperature=0.8, seed=1)
    completions = TorchSampler(policy).sample(PROMPTS, params)
    found = trainer_gap(policy, completions, params.temperature, PROMPTS)
    assert len(found) > 300
    return found


def test_the_gap_by_precision(qwen3_folder):
    """-rP prints it as a table."""
    mean = {}
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        found = gaps(load_small(qwen3_folder, dtype=dtype))
        mean[dtype] = found.mean().item()
        print(f"| {dtype} | {found.mean():.1e} | {found.max():.1e} |")
    assert mean["float64"] == 0 < mean["float32"] < 1e-6
    assert 1e-4 < mean["float16"] < mean["bfloat16"] / 4
