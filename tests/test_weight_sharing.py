"""Weights laid out for vLLM are still those of the Hugging Face model."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from core import weight_sharing
from core.load_trace import base_weights
from core.model import load_policy
from core.optimizer import make_optimizer

FUSED = {  # in vLLM's order
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
}  # fmt: skip
IDS = torch.tensor([[5, 77, 300, 12, 9, 41, 8]])


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def logits(policy):
    with torch.no_grad():
        return policy.to_logits(policy.hidden_states(IDS))


class EngineModel(nn.Module):
    """Loads weights as vLLM does: fuses q, k, v and gate, up; pads the vocabulary.

    Its parameters have the names of vLLM, with / for a dot.
    """

    def __init__(self, model):
        super().__init__()
        self.rows, self.shapes = {}, {}
        for name, weight in base_weights(model).items():
            name, _ = self.place(name)
            self.rows[name] = self.rows.get(name, 0) + len(weight)
            self.shapes[name] = weight.shape[1:]
        for name, rows in self.rows.items():
            if "embed" in name or "lm_head" in name:
                rows = -(-rows // 64) * 64
            parameter = nn.Parameter(torch.empty(rows, *self.shapes[name]), requires_grad=False)
            self.register_parameter(name.replace(".", "/"), parameter)

    def place(self, name):
        for part, fused in FUSED.items():
            if part in name:
                return name.replace(part, fused), list(FUSED).index(part)
        return name, 0

    def load_weights(self, weights):
        filled = {}
        for name, weight in sorted(weights, key=lambda item: self.place(item[0])[1]):
            name, _ = self.place(name)
            parameter = getattr(self, name.replace(".", "/"))
            start = filled.get(name, 0)
            filled[name] = start + len(weight)
            parameter.data.narrow(0, start, len(weight)).copy_(weight)
        for name, rows in filled.items():
            getattr(self, name.replace(".", "/"))[rows:].data.fill_(0)


def share(model):
    """The shared tensors by vLLM's names."""
    engine_model = EngineModel(model)
    shared, to_load = weight_sharing.share_weights(model, engine_model)
    assert not to_load
    assert {n: t.data_ptr() for n, t in shared.items()} == {
        n: p.data_ptr() for n, p in engine_model.named_parameters()
    }
    return {name.replace("/", "."): tensor for name, tensor in shared.items()}


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
def test_share_weights_keeps_the_logits_and_covers_every_base_weight(small_folder, lora_rank):
    policy = load_policy(str(small_folder), device="cpu", lora_rank=lora_rank)
    before = logits(policy)
    shared = share(policy.causal_lm)
    assert torch.equal(logits(policy), before)
    base = [p for name, p in policy.causal_lm.named_parameters() if "lora_" not in name]
    assert {storage(p) for p in base} == {storage(t) for t in shared.values()}
    assert sum(p.numel() for p in base) == sum(t.numel() for t in shared.values())


def test_fused_tensors_hold_the_parts_in_vllms_order_and_see_optimizer_steps(policy):
    attention = policy.causal_lm.model.layers[1].self_attn
    before = [getattr(attention, name).weight.clone() for name in ("q_proj", "k_proj", "v_proj")]
    shared = share(policy.causal_lm)
    assert torch.equal(shared["model.layers.1.self_attn.qkv_proj.weight"], torch.cat(before))
    assert {name for name in shared if ".mlp." in name and ".0." in name} == {
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    }
    fused = shared["model.layers.0.mlp.gate_up_proj.weight"]
    before_step = fused.clone()
    optimizer = make_optimizer(policy, lr=0.1)
    policy.to_logits(policy.hidden_states(IDS)).sum().backward()
    optimizer.step()
    up = policy.causal_lm.model.layers[0].mlp.up_proj.weight
    assert torch.equal(fused[-len(up) :], up)
    assert (fused != before_step).all()


@pytest.mark.parametrize(
    "load",
    [
        lambda p, w: p.data.copy_(w + 1),
        lambda p, w: p.data.view(2, 16).t().copy_(w.view(16, 2)),
        lambda p, w: p.data.copy_(w.double()),
    ],
    ids=["sum", "interleaved", "converted"],
)
def test_weight_without_a_view_is_copied_by_vllms_loader(policy, load):
    engine_model = EngineModel(policy.causal_lm)
    load_weights = engine_model.load_weights

    def load_norm_differently(weights):
        weights = dict(weights)
        if "model.norm.weight" in weights:
            norm = getattr(engine_model, "model/norm/weight")
            load(norm, weights.pop("model.norm.weight"))
        load_weights(weights.items())

    engine_model.load_weights = load_norm_differently
    norm = getattr(engine_model, "model/norm/weight")
    shared, to_load = weight_sharing.share_weights(policy.causal_lm, engine_model)
    assert to_load == {"model.norm.weight"}
    assert len(shared) == len(list(engine_model.parameters())) - 1
    weight = policy.causal_lm.model.norm.weight
    with torch.no_grad():
        weight.copy_(torch.arange(32))
    for _ in range(2):
        expected = torch.zeros(32)
        load(expected, weight.data)
        weight_sharing.load_weights(policy.causal_lm, engine_model, to_load)
        assert torch.equal(norm, expected)
        with torch.no_grad():
            weight.mul_(-2)
    assert storage(norm) != storage(weight)


class LoraLinear(nn.Module):
    """What vLLM's LoRA layers have; one adapter of rank 8."""

    def __init__(self, weight, slices):
        super().__init__()
        self.base_layer = nn.Linear(*weight.shape[::-1], bias=False)
        self.base_layer.weight.data = weight
        self.lora_a_stacked = [torch.zeros(1, 1, 8, weight.shape[1]) for _ in slices]
        self.lora_b_stacked = [torch.zeros(1, 1, rows, 8) for rows in slices]


@pytest.mark.parametrize("fused", ["engine", "both"])
def test_adapters_fill_the_slots_of_their_rows(policy, fused):
    """q, k and v are one layer in vLLM, gate and up too; `both`: q, k and v are one in training."""
    attention = policy.causal_lm.model.layers[0].self_attn
    sizes = [len(getattr(attention, name).weight) for name in ("q_proj", "k_proj", "v_proj")]
    weight = torch.randn(sum(sizes), 32)
    engine_layer = LoraLinear(weight, sizes)
    names = ["q_proj", "k_proj", "v_proj"] if fused == "engine" else ["qkv_proj"]
    model = nn.Module()
    row = 0
    for name, rows in zip(names, sizes if fused == "engine" else [sum(sizes)], strict=True):
        layer = nn.Linear(32, rows, bias=False)
        layer.weight.data = weight[row : row + rows]
        row += rows
        setattr(model, name, layer)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names, init_lora_weights=False)
    inject_adapter_in_model(config, model)
    slots = weight_sharing.adapter_slots(model, nn.ModuleList([engine_layer]))
    weight_sharing.copy_adapters(slots)
    x = torch.randn(3, 32)
    by_slot = zip(engine_layer.lora_a_stacked, engine_layer.lora_b_stacked, strict=True)
    found = torch.cat([x @ A[0, 0].T @ B[0, 0].T for A, B in by_slot], 1) + x @ weight.T
    expected = torch.cat([getattr(model, name)(x) for name in names], 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    engine_layer.base_layer.weight.data = weight.clone()
    with pytest.raises(RuntimeError, match=f"no LoRA adapter for the layer {names[0]}"):
        weight_sharing.adapter_slots(model, nn.ModuleList([engine_layer]))
