"""Model families: training and sampling compute the log-probs of the model itself.

Some families scale or cap their logits, have layers without attention, or apply dropout themselves.
"""

import pytest
import torch
from conftest import load_small, save_small
from small_models import SHAPE, save_model

from core.faults import UsageError
from core.policy import Policy
from core.sampler import SamplingParams, TorchSampler

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
FAMILIES = {  # what each does to its logits, or which layers it has; the settings
    "Granite": {}, "Gemma2": {"final_logit_softcapping": 2.0},
    "Gemma3 with images": {"text_config": SHAPE | {"final_logit_softcapping": 2.0},
                           "vision_config": VISION, "mm_tokens_per_image": 1},
    "FalconH1": {"lm_head_multiplier": 0.3, "mamba_d_ssm": 32, "mamba_n_heads": 4,
                 "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "Qwen3Next": {"layer_types": ["linear_attention", "full_attention"],
                  "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                  "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2, "dropout": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_sampled_and_trained_log_probs_are_those_of_the_model(family, tmp_path):
    policy = load_small(save_model(family, tmp_path, **FAMILIES[family]))
    texts = ("count the letters of a long word", "a", "why") * 2
    prompts = [policy.tokenizer.encode(text) for text in texts]
    completions = TorchSampler(policy).sample(prompts, SamplingParams(max_tokens=10, seed=1))
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt + completion.token_ids])
        ours = policy.to_logits(policy.hidden_states(ids)[0]).log_softmax(-1)
        logits = policy.causal_lm(input_ids=ids, use_cache=False).logits[0]
        torch.testing.assert_close(ours, logits.log_softmax(-1), atol=1e-5, rtol=0)
        sampled = ours[range(len(prompt) - 1, ids.numel() - 1), completion.token_ids]
        assert completion.logprobs == pytest.approx(sampled.tolist(), abs=1e-4)


def test_a_model_whose_log_probs_training_would_change_is_refused(tmp_path, monkeypatch):
    def without_scaling(self, hidden):
        return self.causal_lm.get_output_embeddings()(hidden).float()

    monkeypatch.setattr(Policy, "to_logits", without_scaling)
    with pytest.raises(UsageError, match=r"not supported: log-probs .* nats off"):
        load_small(save_model("Granite", tmp_path))


ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0]}  # fmt: skip


@pytest.mark.parametrize("family", ["Phi3", "Qwen3"])  # the number at the top level, and within
def test_a_context_ends_where_longrope_would_look_at_the_other_sequences(tmp_path, family):
    """Beyond 96 tokens the longest sequence of a batch chooses the factors of all."""
    original = {"original_max_position_embeddings": 96}
    within, beside = (original, {}) if family == "Qwen3" else ({}, original)
    folder = save_small(
        family, tmp_path, max_position_embeddings=512, rope_parameters=ROPE | within, **beside
    )
    policy = load_small(folder, max_model_len=200)
    assert policy.max_length == 96 and "longrope" in policy.limited_by


@pytest.mark.parametrize("limit", [256, 1024])  # what config.json says beside it
def test_yarn_gives_a_context_its_factor_times_the_original_length(tmp_path, limit):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
            "original_max_position_embeddings": 256}  # fmt: skip
    folder = save_small("Qwen3", tmp_path, max_position_embeddings=limit, rope_parameters=rope)
    assert load_small(folder).max_length == 1024
    assert load_small(folder, max_model_len=1000).max_length == 1000
