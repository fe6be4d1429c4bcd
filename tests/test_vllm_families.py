"""NanoLLM with a model whose weights vLLM has to copy; test_nanollm.py has those that it shares.

These tests need vLLM: `pytest -m vllm`. runs/families has many more families.
"""

import re

import pytest
from small_models import gaps, greedy_equal, save_model, train

from core.config import Config
from core.loading import load_policy
from core.nanollm import NanoLLM

pytestmark = pytest.mark.vllm


def is_rounding(policy, sampler):
    return gaps(policy, sampler).max() < 1e-5


def test_weights_without_a_view_are_copied_after_each_step(tmp_path):
    """vLLM lays out experts for its CPU kernel."""
    policy = load_policy(Config(device="cpu"), str(save_model("Qwen3Moe", tmp_path)))
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
        assert sampler.sync_seconds is not None
        now = sampler.weights.copied()
        assert {name: tensor.data_ptr() for name, tensor in now.items()} == addresses
    finally:
        sampler.close()
