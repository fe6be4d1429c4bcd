"""Two models, one set of weights: laid out for vLLM, still the Hugging Face model's own."""

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


def hidden(policy):
    with torch.no_grad():
        return policy.to_logits(policy.hidden_states(IDS))


@pytest.fixture(params=[0, 4], ids=["full", "lora"])
def family_policy(request, small_folder):
    return load_policy(str(small_folder), device="cpu", lora_rank=request.param)


def test_the_model_computes_the_same_from_shared_weights(family_policy):
    before = hidden(family_policy)
    weight_sharing.share_weights(family_policy.causal_lm)
    assert torch.equal(hidden(family_policy), before)


def test_every_weight_lies_in_a_shared_tensor_and_nothing_else_does(family_policy):
    shared = weight_sharing.share_weights(family_policy.causal_lm)
    base = {n: p for n, p in family_policy.causal_lm.named_parameters() if "lora_" not in n}
    assert {storage(p) for p in base.values()} == {storage(t) for t in shared.values()}
    assert sum(p.numel() for p in base.values()) == sum(t.numel() for t in shared.values())


def test_parts_are_rows_of_the_fused_tensor_in_vllms_order(policy):
    weights = dict(policy.causal_lm.named_parameters())
    names = ["q_proj", "k_proj", "v_proj"]
    before = [weights[f"model.layers.1.self_attn.{n}.weight"].clone() for n in names]
    shared = weight_sharing.share_weights(policy.causal_lm)
    assert torch.equal(shared["model.layers.1.self_attn.qkv_proj.weight"], torch.cat(before))
    assert {n for n in shared if ".mlp." in n and ".0." in n} == {
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    }


def test_an_optimiser_step_is_seen_in_the_fused_tensor(policy):
    shared = weight_sharing.share_weights(policy.causal_lm)
    optimizer = make_optimizer(policy, lr=0.1)
    fused = shared["model.layers.0.mlp.gate_up_proj.weight"]
    before = fused.clone()
    policy.to_logits(policy.hidden_states(IDS)).sum().backward()
    optimizer.step()
    up = policy.causal_lm.model.layers[0].mlp.up_proj.weight
    assert torch.equal(fused[-len(up) :], up)
    assert (fused != before).all()


def test_a_vocabulary_is_padded_with_zeros_to_the_step(tmp_path):
    policy = load_policy(str(save_small("llama", tmp_path, vocab_size=390)), device="cpu")
    shared = weight_sharing.share_weights(policy.causal_lm)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert shared[name].shape[0] == 448
        assert not shared[name][390:].any()
    assert policy.causal_lm.lm_head.weight.shape[0] == 390
    assert storage(policy.causal_lm.lm_head.weight) == storage(shared["lm_head.weight"])


def test_shared_weights_are_saved_loaded_and_exported_as_any_others(tmp_path, small_folder):
    policy = load_policy(str(small_folder), device="cpu")
    weight_sharing.share_weights(policy.causal_lm)
    optimizer = make_optimizer(policy, lr=0.1)
    progress = {"update": 0, "sft_step": 0, "skipped_in_a_row": 0}
    before, places = hidden(policy), [storage(p) for p in policy.model.parameters()]
    (tmp_path / "config.yaml").write_text("algo: grpo\n")
    saved = save_checkpoint(tmp_path, policy, optimizer, progress)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1)
    load_checkpoint(saved, policy, optimizer)
    assert torch.equal(hidden(policy), before)
    assert [storage(p) for p in policy.model.parameters()] == places
    export_model(tmp_path, policy)
    assert torch.equal(hidden(load_policy(str(tmp_path / "model"), device="cpu")), before)


class Engine(nn.Module):
    """A stand-in with vLLM's names: two parameters of its own storage."""

    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(4, 12, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)

    def tensors(self):
        return {n: torch.randn_like(p) for n, p in self.named_parameters()}


def test_bind_makes_the_parameters_the_tensors_themselves():
    engine = Engine()
    shared = engine.tensors()
    weight_sharing.bind(engine, shared)
    assert all(p.data_ptr() == shared[n].data_ptr() for n, p in engine.named_parameters())
    weight_sharing.check_bound(engine, shared)


def test_a_copy_is_found_out():
    engine = Engine()
    shared = engine.tensors()
    weight_sharing.bind(engine, shared)
    engine.norm.weight.data = engine.norm.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"a copy of norm\.weight"):
        weight_sharing.check_bound(engine, shared)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("norm.weight"), "without a counterpart: norm.weight"),
        (lambda s: s.update(experts=torch.ones(2)), "without a counterpart: experts"),
        (
            lambda s: s.update({"norm.weight": torch.ones(5)}),
            r"norm.weight is \[4\] float32 on cpu",
        ),
        (lambda s: s.update({"norm.weight": torch.ones(4).half()}), r"and \[4\] float16 on cpu"),
    ],
)
def test_what_does_not_match_is_refused_and_nothing_bound(change, message):
    engine = Engine()
    before = copy.deepcopy(engine)
    shared = engine.tensors()
    change(shared)
    with pytest.raises(RuntimeError, match=message):
        weight_sharing.bind(engine, shared)
    assert torch.equal(engine.norm.weight, before.norm.weight)


def test_adapters_are_copied_with_their_scaling_and_padding_stays_zero():
    A, B = torch.randn(3, 5), torch.randn(7, 3)
    a, b = torch.zeros(8, 5), torch.zeros(7, 8)
    weight_sharing.copy_adapters([weight_sharing.Slot(A, B, a[:3], b[:, :3], scaling=2.0)])
    assert torch.equal(a[:3], A)
    assert torch.equal(b[:, :3], 2 * B)
    assert not a[3:].any()
    assert not b[:, 3:].any()
