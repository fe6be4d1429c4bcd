"""Weights laid out for vLLM are still those of the Hugging Face model."""

import pytest
import torch
from torch import nn

from core import weight_sharing
from core.config import Config
from core.loading import load_policy
from core.weight_sharing import Copy, View, base_weights, whole_view

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


def fused(name):
    """vLLM's name, with / for a dot, and the place of the weight in that parameter."""
    for place, (part, whole) in enumerate(FUSED.items()):
        if part in name:
            return name.replace(part, whole).replace(".", "/"), place
    return name.replace(".", "/"), 0


class EngineModel(nn.Module):
    """Loads weights as vLLM does: fuses q, k, v and gate, up; pads the vocabulary."""

    def __init__(self, model):
        super().__init__()
        self.parts, weights = {}, base_weights(model)
        for name in sorted(weights, key=lambda name: fused(name)[1]):
            self.parts.setdefault(fused(name)[0], []).append(name)
        for name, parts in self.parts.items():
            rows = sum(len(weights[part]) for part in parts)
            rows += -rows % 100 if "embed" in name or "lm_head" in name else 0
            empty = torch.empty(rows, *weights[parts[0]].shape[1:])
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def load_weights(self, weights):
        weights = dict(weights)
        for name, parts in self.parts.items():
            rows = getattr(self, name).data
            for weight in [weights[part] for part in parts if part in weights]:
                rows[: len(weight)].copy_(weight)
                rows = rows[len(weight) :]
            if weights.keys() & parts:
                rows.fill_(0)


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
def test_share_weights_keeps_the_logits_and_covers_every_base_weight(small_folder, lora_rank):
    policy = load_policy(Config(device="cpu", lora_rank=lora_rank), str(small_folder))
    before = logits(policy)
    engine_model = EngineModel(policy.causal_lm)
    weight_sharing.share_weights(policy.causal_lm, engine_model)
    assert torch.equal(logits(policy), before)
    base, theirs = base_weights(policy.causal_lm).values(), [*engine_model.parameters()]
    assert {storage(p) for p in base} == {storage(p) for p in theirs}


def interleaved(engine_model):
    """Its loader lays out the numbers of a norm in another order, which is no view."""
    name, load_weights = "model/norm/weight", engine_model.load_weights

    def load(weights):
        weights = dict(weights)
        if "model.norm.weight" in weights:
            norm = getattr(engine_model, name)
            norm.data.view(2, 16).t().copy_(weights.pop("model.norm.weight").view(16, 2))
        load_weights(weights.items())

    engine_model.load_weights = load
    return getattr(engine_model, name), torch.arange(32.0).view(16, 2).t().flatten()


def in_float64(engine_model):
    norm = nn.Parameter(torch.empty(32, dtype=torch.float64), requires_grad=False)
    engine_model.register_parameter("model/norm/weight", norm)
    return norm, torch.arange(32.0, dtype=torch.float64)


@pytest.mark.parametrize("change", [interleaved, in_float64])
def test_a_weight_in_another_form_is_copied_unless_it_is_trained(policy, change):
    engine_model = EngineModel(policy.causal_lm)
    norm, expected = change(engine_model)
    weights = {name: p.data for name, p in policy.causal_lm.named_parameters()}
    weights["model.norm.weight"].copy_(torch.arange(32))
    with pytest.raises(RuntimeError, match=r"its copy of model\.norm\.weight"):
        weight_sharing.share_weights(policy.causal_lm, engine_model)
    now = policy.causal_lm.named_parameters()
    assert all(p.data_ptr() == weights[name].data_ptr() for name, p in now)  # nothing has changed
    policy.model.requires_grad_(False)
    weight_sharing.share_weights(policy.causal_lm, engine_model)
    ours = {storage(p) for p in policy.causal_lm.parameters()}
    assert [p is norm for p in engine_model.parameters() if storage(p) not in ours] == [True]
    assert torch.equal(norm, expected)


@pytest.mark.parametrize(
    ("places", "view"),
    [  # where in the parameter, and with which strides, the upper and the lower two rows are
        ([(30, (3, 1)), (36, (3, 1))], View((4, 3), (3, 1), 30)),
        ([(30, (1, 4)), (32, (1, 4))], View((4, 3), (1, 4), 30)),  # transposed
        ([(30, (3, 1))], None),  # the lower ones are not copied
        ([(30, (3, 1)), (39, (3, 1))], None),  # not one after the other
        ([(30, (3, 1)), (36, (1, 4))], None),
    ],
)
def test_a_weight_copied_in_parts_is_a_view_where_these_fit_together(places, view):
    copies = [
        Copy("w", View((2, 3), (3, 1), 6 * half), View((2, 3), strides, offset))
        for half, (offset, strides) in enumerate(places)
    ]
    assert whole_view((4, 3), copies) == view
