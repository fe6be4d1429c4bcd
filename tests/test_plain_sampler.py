"""core/workshop/plain_sampler.py draws what TorchSampler draws."""

import pytest
import torch

from core.sampler import SamplingParams, TorchSampler
from core.workshop.plain_sampler import PlainSampler

PROMPTS = [[65, 66, 67], [68] * 11, [65, 66, 67], [70, 71]]


@pytest.mark.parametrize("given", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 20}])
def test_completions_are_those_of_torch_sampler(policy, monkeypatch, given):
    monkeypatch.setattr(policy, "stop_ids", [*range(0, 704, 20)])  # so that some end early
    params = SamplingParams(max_tokens=12, seed=3, **given)
    plain, ours = (s(policy).sample(PROMPTS, params) for s in (PlainSampler, TorchSampler))
    for a, b in zip(plain, ours, strict=True):
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
        assert torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5)
    assert "temperature" in given or {c.finish_reason for c in plain} == {"stop", "length"}
