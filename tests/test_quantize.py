"""--quantize nf4: float32 adapters on a base model in 4 bits, sampled from and trained alike."""

import json

import pytest
import torch
from conftest import metrics_of
from safetensors.torch import load_file
from test_sampler import trainer_gap

from core.config import Config
from core.extras import chat
from core.optimizer import make_optimizer
from core.policy import is_quantized, num_weights
from core.run.folder import read_config
from core.run.models import load_policy
from core.run.quantize import num_bytes
from core.sampler import SamplingParams, TorchSampler

functional = pytest.importorskip("bitsandbytes.functional", reason="needs picorl[quantize]")
PROMPTS = [[65, 66, 67], [68] * 40, [70, 71]] * 4
# weights of the linear layers of one layer of tiny: q and o, k and v, gate, up and down
IN_A_LAYER = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384


def tiny(folder):
    cfg = Config(device="cpu", dtype="float32")
    return load_policy(cfg, "tiny", folder / "base", "nf4", lora_rank=4)


def bits_of_base(policy):
    """Every byte of the base model, by name."""
    named = policy.model.named_parameters()
    return {n: p.detach().flatten().view(torch.uint8).clone() for n, p in named if "lora" not in n}


def train(policy, steps):
    optimizer = make_optimizer(policy, lr=1e-2)
    ids = torch.tensor([[5, 77, 300, 12, 9, 41, 8] * 8])
    losses = []
    for _ in range(steps):
        logits = policy.to_logits(policy.hidden_states(ids)[0, :-1])
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_linear_layers_take_4_bits_per_weight_and_their_scales(tmp_path):
    policy = tiny(tmp_path)
    quantized = [p for p in policy.model.parameters() if is_quantized(p)]
    assert len(quantized) == 4 * 7
    assert sum(map(num_weights, quantized)) == 4 * IN_A_LAYER == 786_432
    # a byte per block of 64 weights, and 4 bytes per 256 blocks or fewer: 1 of each attention
    # matrix, 3 of each of the MLP
    scales = 786_432 // 64 + 4 * 4 * (4 * 1 + 3 * 3)
    assert sum(map(num_bytes, quantized)) == 786_432 // 2 + scales == 405_712
    assert policy.size() == "0.92M weights (0.79M in 4 bits), 0.04M trained, cpu"
    base = [p for n, p in policy.model.named_parameters() if "lora" not in n]
    kept = [p for p in base if not is_quantized(p)]
    assert {p.dtype for p in kept} == {torch.float32}
    assert sum(map(num_bytes, kept)) == 4 * (704 * 128 + 4 * (2 * 128 + 2 * 32) + 128)


def test_only_adapters_are_trained_and_the_sampler_computes_with_them(tmp_path):
    """On some CPUs bitsandbytes would repack the weights as soon as nothing needs a gradient."""
    policy, params = tiny(tmp_path), SamplingParams(max_tokens=30, seed=1)
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}
    assert all("lora" in name for name in policy.trainable()) and policy.zero_adapters() == 1
    before = bits_of_base(policy)
    losses = train(policy, steps=5)
    assert losses[-1] < 0.5 * losses[0] and policy.zero_adapters() == 0
    completions = TorchSampler(policy).sample(PROMPTS, params)
    gaps = trainer_gap(policy, completions, 1.0, PROMPTS)
    assert len(gaps) > 100 and gaps.max() < 1e-4
    after = bits_of_base(policy)
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    train(policy, steps=1)  # after sampling, gradients still flow


SMALL = (
    "--quantize nf4 --lora-rank 4 --kl-coef 0.01 --num-prompts 2 --group-size 2 --max-tokens 8 "
    "--max-turns 1 --eval-num-tasks 4 --microscope 0 --lr 1e-3 --save-every 1"
).split()


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_run_and_chat_loads_it(command, tmp_path):
    code, out, _ = command(*SMALL, "--num-updates", "3", "--run-name", "whole")
    assert code == 0 and "0.79M in 4 bits" in out
    assert command(*SMALL, "--num-updates", "2", "--run-name", "cut")[0] == 0
    assert command("--resume", "runs/cut", "--num-updates", "3")[0] == 0
    whole, cut = tmp_path / "runs/whole", tmp_path / "runs/cut"
    assert metrics_of(cut) == metrics_of(whole)
    records = metrics_of(whole)
    assert all(0 <= r["gap/logprob_max"] < 1e-4 for r in records if r["update"] > 0)
    # the reference is the base in 4 bits, so the KL starts at 0
    assert abs(records[1]["kl/reference"]) < 1e-6 < records[3]["kl/reference"]
    # only the adapters are exported, beside the name of the model that they belong to
    exported = load_file(whole / "model/adapter_model.safetensors")
    assert all("lora" in name for name in exported)
    adapter_config = json.loads((whole / "model/adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == str(whole.relative_to(tmp_path) / "base")
    policy, _ = chat.load_trained(read_config(whole / "config.yaml"), whole)
    assert policy.quantized
    trained = {n.replace(".default", ""): p for n, p in policy.trainable().items()}
    assert all(torch.equal(trained[name], tensor) for name, tensor in exported.items())
