"""Weights laid out for vLLM are still those of the Hugging Face model."""

import copy

import pytest
import torch
from conftest import save_small
from torch import nn

from core import weight_sharing
from core.checkpoint import export_model, load_checkpoint, save_checkpoint
from core.model import load_policy
from core.optimizer import make_optimizer

IDS = torch.tensor([[5, 77, 300, 12, 9, 41, 8]])


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def logits(policy):
    with torch.no_grad():
        return policy.to_logits(policy.hidden_states(IDS))


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
def test_share_weights_keeps_the_logits_and_covers_every_base_weight(small_folder, lora_rank):
    policy = load_policy(str(small_folder), device="cpu", lora_rank=lora_rank)
    before = logits(policy)
    shared = weight_sharing.share_weights(policy.causal_lm)
    assert torch.equal(logits(policy), before)
    base = [p for name, p in policy.causal_lm.named_parameters() if "lora_" not in name]
    assert {storage(p) for p in base} == {storage(t) for t in shared.values()}
    assert sum(p.numel() for p in base) == sum(t.numel() for t in shared.values())


def test_fused_tensors_hold_the_parts_in_vllms_order_and_see_optimizer_steps(policy):
    attention = policy.causal_lm.model.layers[1].self_attn
    before = [getattr(attention, name).weight.clone() for name in ("q_proj", "k_proj", "v_proj")]
    shared = weight_sharing.share_weights(policy.causal_lm)
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
    shared = weight_sharing.share_weights(policy.causal_lm)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert shared[name].shape[0] == 768
        assert not shared[name][710:].any()
    assert policy.causal_lm.lm_head.weight.shape[0] == 710
    assert storage(policy.causal_lm.lm_head.weight) == storage(shared["lm_head.weight"])


def test_shared_weights_survive_checkpoint_and_export(tmp_path, small_folder):
    policy = load_policy(str(small_folder), device="cpu")
    weight_sharing.share_weights(policy.causal_lm)
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


class EngineModel(nn.Module):
    """Two parameters with names of vLLM."""

    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(4, 12, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)


@pytest.fixture
def engine_model():
    return EngineModel()


@pytest.fixture
def shared(engine_model):
    return {name: torch.randn_like(p) for name, p in engine_model.named_parameters()}


def test_bind_weights_leaves_no_copy_and_check_bound_finds_one(engine_model, shared):
    weight_sharing.bind_weights(engine_model, shared)
    assert all(storage(p) == storage(shared[name]) for name, p in engine_model.named_parameters())
    weight_sharing.check_bound(engine_model, shared)
    engine_model.norm.weight.data = engine_model.norm.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"a copy of norm\.weight"):
        weight_sharing.check_bound(engine_model, shared)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": None}, "without a counterpart: norm.weight"),
        ({"experts": torch.ones(2)}, "without a counterpart: experts"),
        ({"norm.weight": torch.ones(5)}, r"norm.weight is \[4\] float32 on cpu"),
        ({"norm.weight": torch.ones(4).half()}, r"and \[4\] float16 on cpu"),
    ],
)
def test_bind_weights_refuses_a_mismatch_and_binds_nothing(engine_model, shared, change, message):
    before = copy.deepcopy(engine_model.state_dict())
    shared = {name: tensor for name, tensor in (shared | change).items() if tensor is not None}
    with pytest.raises(RuntimeError, match=message):
        weight_sharing.bind_weights(engine_model, shared)
    assert all(torch.equal(before[name], p) for name, p in engine_model.named_parameters())


def test_copy_adapters_scales_b_and_leaves_the_padding_zero():
    A, B = torch.randn(3, 5), torch.randn(7, 3)
    engine_A, engine_B = torch.zeros(8, 5), torch.zeros(7, 8)
    slot = weight_sharing.AdapterSlot(A, B, engine_A[:3], engine_B[:, :3], scaling=2.0)
    weight_sharing.copy_adapters([slot])
    assert torch.equal(engine_A[:3], A)
    assert torch.equal(engine_B[:, :3], 2 * B)
    assert not engine_A[3:].any()
    assert not engine_B[:, 3:].any()
