"""--quantize nf4: float32 adapters on a base model in 4 bits, sampled from and trained alike."""

import json

import pytest
import torch
from safetensors.torch import load_file
from small_models import train
from test_sampler import trainer_gap

from core.config import Config
from core.files.checkpoint import export_model
from core.files.models import folder_of_model, load_exported
from core.loading import load_policy
from core.sampler import SamplingParams, TorchSampler

functional = pytest.importorskip("bitsandbytes.functional", reason="needs picorl[quantize]")
PROMPTS = [[65, 66, 67], [68] * 40, [70, 71]] * 4


def tiny(folder):
    cfg = Config(device="cpu", dtype="float32", quantize="nf4", lora_rank=4)
    return load_policy(cfg, folder_of_model("tiny", folder / "base"))


def test_only_adapters_are_trained_and_the_sampler_computes_with_them(tmp_path):
    """On some CPUs bitsandbytes would repack the weights as soon as nothing needs a gradient."""
    policy, trained = tiny(tmp_path), dict[str, torch.Tensor]()
    base = {}
    for name, weight in policy.model.named_parameters():
        (trained if "lora" in name else base)[name] = weight.detach()
    assert trained.keys() == policy.trainable().keys()
    before = {name: weight.clone() for name, weight in (base | trained).items()}
    losses = train(policy, steps=5, lr=1e-2)
    assert losses[-1] < 0.5 * losses[0]
    completions = TorchSampler(policy).sample(PROMPTS, SamplingParams(max_tokens=30, seed=1))
    gaps = trainer_gap(policy, completions, 1.0, PROMPTS)
    assert len(gaps) > 100 and gaps.max() < 1e-4
    for name, weight in before.items():
        assert torch.equal(weight, (base | trained)[name]) == (name in base)
    train(policy, steps=1)  # after sampling, gradients still flow
    resumed = tiny(tmp_path)
    assert "(0.79M in 4 bits)" in resumed.size()
    for name, weight in resumed.model.named_parameters():
        assert "lora" in name or torch.equal(weight, base[name])  # the same codes again


def test_the_exported_adapters_have_the_base_in_4_bits_that_they_were_trained_on(tmp_path):
    export_model(tmp_path, tiny(tmp_path))
    (tmp_path / "config.yaml").write_text("model_id: tiny\nlora_rank: 4\nquantize: nf4\n")
    assert load_exported(Config(device="cpu", dtype="float32"), tmp_path, "model").quantized
    # only the adapters are exported, beside the name of the model that they belong to
    assert all("lora" in name for name in load_file(tmp_path / "model/adapter_model.safetensors"))
    config = json.loads((tmp_path / "model/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
