"""core/canary.py says how much of the last update the sampler lacks."""

import copy
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import load_small

from core import canary, sampler
from core.faults import UsageError
from core.sampler import SamplingParams, TorchSampler
from core.types import Completion


def moved(policy, size):
    """A copy whose weights took a step in a fixed direction."""
    policy, generator = copy.deepcopy(policy), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.trainable().values():
            weight += size * torch.randn(weight.shape, generator=generator)
    return policy


@pytest.mark.parametrize(("lora_rank", "size"), [(0, 2e-6), (4, 1e-4)])
def test_it_is_the_number_of_updates_that_the_sampler_lacks(qwen3_folder, lora_rank, size):
    first = moved(load_small(qwen3_folder, lora_rank=lora_rank), 0.02)
    second = moved(first, size)
    third = moved(second, size)
    metrics, before = canary.compare(first, TorchSampler(first), {})
    assert metrics == {}  # nothing to compare with
    assert canary.compare(first, TorchSampler(first), before)[0] == {}  # nothing has moved
    _, before = canary.compare(second, TorchSampler(second), before)
    for own, lacking in ((third, 0), (second, 1), (first, 2)):
        found, _ = canary.compare(third, TorchSampler(own), before)
        assert found["gap/canary"] == pytest.approx(lacking, abs=0.1)


@pytest.mark.parametrize("stale", ["prompts", "steps"])
def test_old_weights_in_the_prompts_or_in_decoding_are_seen(policy, monkeypatch, stale):
    later = moved(policy, 1e-4)
    models = {"prompts": later.model, "steps": later.model, stale: policy.model}
    prefill = sampler.prefill

    def mixed(own, *args):
        cache = prefill(replace(own, model=models["prompts"]), *args)
        cache.model = replace(own, model=models["steps"]).causal_lm
        return cache

    _, before = canary.compare(policy, TorchSampler(policy), {})
    monkeypatch.setattr(sampler, "prefill", mixed)
    found, _ = canary.compare(later, TorchSampler(later), before)
    assert found["gap/canary"] > 0.3


def test_only_tokens_that_were_drawn_the_last_time_too_are_compared(policy):
    later = moved(policy, 1e-4)
    _, before = canary.compare(policy, TorchSampler(policy), {})
    for ids, logprobs in before["drawn"]:
        ids[-1], logprobs[-1] = ids[-1] + 1, -99.0  # another token
    found, _ = canary.compare(later, TorchSampler(policy), before)
    assert found["gap/canary"] == pytest.approx(1, abs=0.1)


def test_a_sampler_with_other_log_probs_or_tokens_is_refused(policy):
    """The completion where the mean gap is larger decides; 12 nats in one token of four."""
    params, prompts = SamplingParams(max_tokens=4), [[65, 66], [67]]
    drawn = TorchSampler(policy).sample(prompts, params)

    def check(second):
        sampler = SimpleNamespace(sample=lambda *_: [drawn[0], second])
        return canary.check_gap(policy, sampler, prompts, params, "it", "do that")

    assert check(drawn[1]) < 1e-5
    ids, logprobs = drawn[1].token_ids, [*drawn[1].logprobs]
    for found, gap in (
        (replace(drawn[1], logprobs=[logprobs[0] + 12, *logprobs[1:]]), r"3\.0e\+00"),
        (replace(drawn[1], logprobs=[float("nan")] * len(ids)), "nan"),
        (replace(drawn[1], token_ids=[10_000] * len(ids)), "inf"),
    ):
        with pytest.raises(UsageError, match=f"^it: .* {gap} nats .*: do that$"):
            check(found)


@pytest.mark.parametrize("size, measured", [(0.1, False), (1.0, True)])
def test_rounding_of_16_bits_is_no_lag(policy, monkeypatch, size, measured):
    """Both sides round as SmolLM2 does on an H200: a gap of 0.04 nats on average, up to 0.7."""
    policy.model.bfloat16()
    torch.manual_seed(0)
    exact, before, lags = torch.zeros(canary.PLACES, 4), {}, []

    def rounded():
        return (exact + 0.018 * torch.distributions.StudentT(2.0).sample(exact.shape)).tolist()

    monkeypatch.setattr(canary, "score", lambda *_: rounded())
    for _ in range(200):
        exact += size * torch.randn(exact.shape)
        drawn = [Completion([1] * 4, logprobs, "", "") for logprobs in rounded()]
        drawing = SimpleNamespace(sample=lambda *_, drawn=drawn: drawn)
        metrics, before = canary.compare(policy, drawing, before)
        lags.append(metrics.get("gap/canary", 0.0))
    assert (sum(lag != 0 for lag in lags) > 100) == measured
    assert max(map(min, pairwise(lags))) < 0.3
