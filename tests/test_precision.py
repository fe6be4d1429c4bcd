"""--dtype float64, in which trainer and sampler agree on every log-prob; --fp32-head."""

import torch
from conftest import load_small, save_small
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
    for dtype, head in [
        ("float64", False), ("float32", False), ("float16", False), ("float16", True),
        ("bfloat16", False), ("bfloat16", True),
    ]:  # fmt: skip
        found = gaps(load_small(qwen3_folder, dtype=dtype, fp32_head=head))
        mean[dtype, head] = found.mean().item()
        print(f"| {dtype}{', --fp32-head' * head} | {found.mean():.1e} | {found.max():.1e} |")
    assert mean["float64", False] == 0 < mean["float32", False] < 1e-6
    assert 1e-4 < mean["float16", False] < mean["bfloat16", False] / 4
    assert mean["bfloat16", True] < mean["bfloat16", False]


def test_fp32_head_computes_exact_logits_from_16_bit_weights(tmp_path):
    folder = save_small("Qwen2", tmp_path, initializer_range=0.06)  # tied weights
    plain, exact = (load_small(folder, dtype="bfloat16", fp32_head=flag) for flag in (False, True))
    ids = torch.tensor([[5, 77, 300, 12]])
    hidden = plain.hidden_states(ids)[0]
    weight = exact.causal_lm.get_output_embeddings().weight
    assert weight.dtype == torch.bfloat16
    with torch.no_grad():
        logits, rounded = exact.to_logits(hidden), plain.to_logits(hidden)
        whole = exact.causal_lm(input_ids=ids).logits[0]
        wanted = hidden.float() @ weight.float().T
    torch.testing.assert_close(logits, wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(whole, wanted, atol=1e-6, rtol=1e-5)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert (rounded - wanted).abs().max() > 1e-4
