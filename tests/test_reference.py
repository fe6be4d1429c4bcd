"""What --kl-coef holds on to: a frozen copy, or the base without its adapters."""

import pytest
import torch

from core.model import load_policy
from core.reference import FILE, as_reference, make_reference, reference_memory
from core.types import UsageError

IDS = torch.tensor([[5, 6, 7, 8]])


def hidden(policy):
    return policy.hidden_states(IDS).detach().clone()


def nudge(policy):
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.05)


def test_a_frozen_copy_stays_when_the_policy_moves_on(qwen3_folder, tmp_path):
    policy = load_policy(str(qwen3_folder), device="cpu")
    before = hidden(policy)
    reference = make_reference(policy, tmp_path, update=-1)
    nudge(policy)
    with as_reference(reference) as held:
        assert torch.equal(hidden(held), before)
        assert not held.hidden_states(IDS).requires_grad
    assert (hidden(policy) - before).abs().max() > 1e-3
    assert not reference.trainable()
    weights = sum(p.numel() * 4 for p in policy.model.parameters())
    assert reference_memory(policy) == weights


@pytest.mark.parametrize("update", [0, 3])
def test_a_resumed_run_has_the_reference_of_its_beginning(qwen3_folder, tmp_path, update):
    policy = load_policy(str(qwen3_folder), device="cpu")
    before = hidden(policy)
    make_reference(policy, tmp_path, update=-1)
    nudge(policy)
    with as_reference(make_reference(policy, tmp_path, update)) as held:
        assert torch.equal(hidden(held), before)


def test_a_reference_that_is_gone_is_told_and_not_made_anew(qwen3_folder, tmp_path):
    policy = load_policy(str(qwen3_folder), device="cpu")
    with pytest.raises(UsageError, match=f"{FILE} is gone"):
        make_reference(policy, tmp_path, update=1)


def test_under_lora_the_reference_is_the_base_and_costs_nothing(qwen3_folder, tmp_path):
    base = load_policy(str(qwen3_folder), device="cpu")
    policy = load_policy(str(qwen3_folder), device="cpu", lora_rank=2)
    names = set(policy.trainable())
    nudge(policy)
    moved = hidden(policy)
    assert (moved - hidden(base)).abs().max() > 1e-3
    with as_reference(make_reference(policy, tmp_path, update=-1)) as held:
        assert torch.equal(hidden(held), hidden(base))
    assert torch.equal(hidden(policy), moved)  # the adapters are back,
    assert set(policy.trainable()) == names  # and learn
    assert reference_memory(policy) == 0 and not list(tmp_path.iterdir())
