"""NanoLLM with families that vLLM fuses, renames or computes in other ways than the four of
test_nanollm.py: LoRA first, then all weights, on one engine each.

These tests need vLLM: `pytest -m vllm`. runs/families tries many more families.
"""

import sys

import pytest
import torch
from test_train import ROOT

from core.load_trace import base_weights
from core.model import load_policy
from core.nanollm import NanoLLM
from core.weight_sharing import check_bound

sys.path.append(str(ROOT / "runs/families"))
from families import gap, greedy_equal, save_model, train

pytestmark = pytest.mark.vllm

FAMILIES = ["Mistral", "Gemma", "OLMo 2", "SmolLM3", "Exaone4", "Glm4", "Phi3", "Granite"]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_sampled_from_the_weights_that_are_trained(family, tmp_path):
    policy = load_policy(str(save_model(family, tmp_path)), device="cpu", lora_rank=4)
    base = base_weights(policy.causal_lm)
    before = {name: weight.clone() for name, weight in base.items()}
    sampler = NanoLLM(policy)
    try:
        assert gap(policy, sampler) < 1e-5
        assert greedy_equal(policy, sampler)
        train(policy, lr=1e-2)
        assert policy.zero_adapters() == 0
        assert gap(policy, sampler) < 1e-5
        assert all(torch.equal(weight, before[name]) for name, weight in base.items())
        for weight in base.values():
            weight.requires_grad_()
        train(policy, lr=1e-3)
        assert not any(torch.equal(weight, before[name]) for name, weight in base.items())
        assert gap(policy, sampler) < 1e-5
        assert greedy_equal(policy, sampler)
        [engine_model] = sampler.engine.apply_model(lambda model: model)
        check_bound(engine_model, sampler.shared)
    finally:
        sampler.close()
    again = load_policy(str(tmp_path), device="cpu")  # vLLM left the class as it was
    ids = torch.tensor([[5, 77, 300]])
    with torch.no_grad():
        assert again.to_logits(again.hidden_states(ids)[0]).isfinite().all()
