"""Weights laid out for vLLM are still those of the Hugging Face model."""

import pytest
import torch
from conftest import save_small
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from core import weight_sharing
from core.checkpoint import export_model, load_checkpoint, save_checkpoint
from core.load_trace import Copy, View, base_weights, whole_view
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

    def __init__(self, model, fused=FUSED):
        super().__init__()
        self.fused = fused
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
        for part, fused in self.fused.items():
            if part in name:
                return name.replace(part, fused), list(self.fused).index(part)
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


def share(model, fused=FUSED):
    """The shared tensors by vLLM's names, and vLLM's model."""
    engine_model = EngineModel(model, fused)
    shared, to_load = weight_sharing.share_weights(model, engine_model)
    assert not to_load
    assert {n: t.data_ptr() for n, t in shared.items()} == {
        n: p.data_ptr() for n, p in engine_model.named_parameters()
    }
    return {name.replace("/", "."): tensor for name, tensor in shared.items()}, engine_model


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
def test_share_weights_keeps_the_logits_and_covers_every_base_weight(small_folder, lora_rank):
    policy = load_policy(str(small_folder), device="cpu", lora_rank=lora_rank)
    before = logits(policy)
    shared, _ = share(policy.causal_lm)
    assert torch.equal(logits(policy), before)
    base = [p for name, p in policy.causal_lm.named_parameters() if "lora_" not in name]
    assert {storage(p) for p in base} == {storage(t) for t in shared.values()}
    assert sum(p.numel() for p in base) == sum(t.numel() for t in shared.values())


def test_fused_tensors_hold_the_parts_in_vllms_order_and_see_optimizer_steps(policy):
    attention = policy.causal_lm.model.layers[1].self_attn
    before = [getattr(attention, name).weight.clone() for name in ("q_proj", "k_proj", "v_proj")]
    shared, _ = share(policy.causal_lm)
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


def test_vocabulary_is_zero_padded_to_a_multiple_of_64(tmp_path):
    policy = load_policy(str(save_small("llama", tmp_path, vocab_size=710)), device="cpu")
    shared, _ = share(policy.causal_lm)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert shared[name].shape[0] == 768
        assert not shared[name][710:].any()
    assert policy.causal_lm.lm_head.weight.shape[0] == 710
    assert storage(policy.causal_lm.lm_head.weight) == storage(shared["lm_head.weight"])


def test_shared_weights_survive_checkpoint_and_export(tmp_path, small_folder):
    policy = load_policy(str(small_folder), device="cpu")
    share(policy.causal_lm)
    optimizer = make_optimizer(policy, lr=0.1)
    progress = {"update": 0, "sft_step": 0, "skipped_in_a_row": 0}
    before, places = logits(policy), [storage(p) for p in policy.model.parameters()]
    (tmp_path / "config.yaml").write_text("algo: grpo\n")
    saved = save_checkpoint(tmp_path, policy, optimizer, progress)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1)
    load_checkpoint(saved, policy, optimizer)
    assert torch.equal(logits(policy), before)
    assert [storage(p) for p in policy.model.parameters()] == places
    export_model(tmp_path, policy)
    assert torch.equal(logits(load_policy(str(tmp_path / "model"), device="cpu")), before)


def engine_that_loads_the_norm(model, load):
    """An EngineModel in which `load` fills the parameter model.norm.weight."""
    engine_model = EngineModel(model)
    load_weights = engine_model.load_weights

    def load_norm_differently(weights):
        weights = dict(weights)
        if "model.norm.weight" in weights:
            load(getattr(engine_model, "model/norm/weight"), weights.pop("model.norm.weight"))
        load_weights(weights.items())

    engine_model.load_weights = load_norm_differently
    return engine_model


def swap_halves(p, w):
    p[:16].data.copy_(w[16:])
    p[16:].data.copy_(w[:16])


@pytest.mark.parametrize(
    "load",
    [
        lambda p, w: p.data.copy_(w + 1),
        lambda p, w: p.data.copy_(w).add_(1),
        lambda p, w: p[1:].data.copy_(w[1:]),
        lambda p, w: p.data.copy_(w.flip(0)),
        swap_halves,
        lambda p, w: p.data.view(2, 16).t().copy_(w.view(16, 2)),
        lambda p, w: p.data.copy_(w.double()),
    ],
    ids=["sum", "changed", "incomplete", "copied", "swapped", "interleaved", "converted"],
)
def test_weight_without_a_view_is_copied_by_vllms_loader(policy, load):
    engine_model = engine_that_loads_the_norm(policy.causal_lm, load)
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


def test_nothing_is_shared_with_a_loader_that_reads_numbers(policy):
    engine_model = engine_that_loads_the_norm(
        policy.causal_lm, lambda p, w: p.data.copy_(w / w.max().item())
    )
    weights = base_weights(policy.causal_lm)
    shared, to_load = weight_sharing.share_weights(policy.causal_lm, engine_model)
    assert (shared, to_load) == ({}, weights.keys())
    norm = policy.causal_lm.model.norm.weight
    assert torch.equal(getattr(engine_model, "model/norm/weight"), norm / norm.max())
    head = getattr(engine_model, "lm_head/weight")
    assert torch.equal(head, weights["lm_head.weight"]) and storage(head) != storage(
        weights["lm_head.weight"]
    )


@pytest.mark.parametrize("which", ["weight", "parameter"])
def test_parameter_without_a_weight_and_the_reverse_are_refused_and_nothing_changes(policy, which):
    engine_model = engine_that_loads_the_norm(policy.causal_lm, lambda p, w: None)
    message = "vLLM loads no weight into model/norm/weight"
    if which == "weight":
        delattr(engine_model, "model/norm/weight")
        engine_model.register_parameter("model/norm/weight", None)
        message = r"vLLM does not load the weight model\.norm\.weight"
    before = {name: (p, p.data_ptr()) for name, p in engine_model.named_parameters()}
    places = [storage(p) for p in policy.model.parameters()]
    with pytest.raises(RuntimeError, match=message):
        weight_sharing.share_weights(policy.causal_lm, engine_model)
    assert [storage(p) for p in policy.model.parameters()] == places
    now = {name: (p, p.data_ptr()) for name, p in engine_model.named_parameters()}
    assert all(now[name][0] is p and now[name][1] == place for name, (p, place) in before.items())


def test_whole_view_of_parts_and_of_a_transposed_weight():
    def copy(rows, source, target, strides=(4, 1)):
        return Copy("w", View((rows, 4), (4, 1), source), View((rows, 4), strides, target))

    # rows 0 and 1..2 of a [3, 4] weight, copied to rows 5 and 6..7
    assert whole_view((3, 4), [copy(1, 0, 20), copy(2, 4, 24)]) == View((3, 4), (4, 1), 20)
    assert whole_view((3, 4), [copy(1, 0, 20), copy(2, 4, 28)]) is None  # row 6 is left out
    assert whole_view((3, 4), [copy(3, 0, 0, strides=(1, 3))]) == View((3, 4), (1, 3), 0)


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


def test_copy_adapters_scales_b_and_leaves_the_padding_zero():
    A, B = torch.randn(3, 5), torch.randn(7, 3)
    engine_A, engine_B = torch.zeros(8, 5), torch.zeros(7, 8)
    slot = weight_sharing.AdapterSlot(A, B, engine_A[:3], engine_B[:, :3], scaling=2.0)
    weight_sharing.copy_adapters([slot])
    assert torch.equal(engine_A[:3], A)
    assert torch.equal(engine_B[:, :3], 2 * B)
    assert not engine_A[3:].any()
    assert not engine_B[:, 3:].any()
