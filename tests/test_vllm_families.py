"""NanoLLM with families that vLLM fuses, renames or computes in other ways than the four of
test_nanollm.py: LoRA first, then all weights, on one engine each.

These tests need vLLM: `pytest -m vllm`. runs/families tries many more families.
"""

import re
import sys
from pathlib import Path

import pytest
import torch

from core.load_trace import base_weights
from core.loading import load_policy
from core.nanollm import NanoLLM
from core.weight_sharing import check_bound

sys.path.append(str(Path(__file__).parent.parent / "runs/families"))
from families import gaps, greedy_equal, save_model, train

pytestmark = pytest.mark.vllm


def is_rounding(policy, sampler):
    return gaps(policy, sampler).max() < 1e-5


def load(family, folder, **options):
    return load_policy(str(save_model(family, folder)), device="cpu", **options)


@pytest.mark.parametrize("family", ["Glm4", "Phi3"])
def test_family_is_sampled_from_the_weights_that_are_trained(family, tmp_path):
    policy = load(family, tmp_path, lora_rank=4)
    base = base_weights(policy.causal_lm)
    before = {name: weight.clone() for name, weight in base.items()}
    sampler = NanoLLM(policy)
    try:
        assert is_rounding(policy, sampler)
        assert greedy_equal(policy, sampler)
        train(policy, lr=1e-2)
        assert policy.zero_adapters() == 0
        assert is_rounding(policy, sampler)
        assert all(torch.equal(weight, before[name]) for name, weight in base.items())
        for weight in base.values():
            weight.requires_grad_()
        train(policy, lr=1e-3)
        assert not any(torch.equal(weight, before[name]) for name, weight in base.items())
        assert is_rounding(policy, sampler)
        assert greedy_equal(policy, sampler)
        [engine_model] = sampler.engine.apply_model(lambda model: model)
        assert not sampler.weights.copied() and not sampler.remark
        check_bound(engine_model, sampler.weights.shared)
    finally:
        sampler.close()
    again = load_policy(str(tmp_path), device="cpu")  # vLLM left the class as it was
    ids = torch.tensor([[5, 77, 300]])
    with torch.no_grad():
        assert again.to_logits(again.hidden_states(ids)[0]).isfinite().all()


def test_weights_without_a_view_are_copied_after_each_step(tmp_path):
    """vLLM lays out experts for its CPU kernel."""
    policy = load("Qwen3Moe", tmp_path)
    sampler = NanoLLM(policy)
    try:
        names = sampler.weights.copied()
        assert names and all(re.search(r"\.w(13|2)_weight", name) for name in names)
        assert "copied after each step" in sampler.remark
        addresses = {name: tensor.data_ptr() for name, tensor in names.items()}
        assert is_rounding(policy, sampler)
        for _ in range(2):
            train(policy, steps=1)
            assert not is_rounding(policy, sampler)
            sampler.sync()
            assert is_rounding(policy, sampler)
        assert greedy_equal(policy, sampler)
        assert sampler.sync_seconds > 0
        now = sampler.weights.copied()
        assert {name: tensor.data_ptr() for name, tensor in now.items()} == addresses
    finally:
        sampler.close()
