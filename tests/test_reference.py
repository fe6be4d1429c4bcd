"""The reference policy of --kl-coef: a frozen copy, or the base without its adapters."""

from dataclasses import replace

import pytest
import torch
from conftest import load_small, save_small

from core.config import Config
from core.faults import UsageError
from core.loop.reference import freeze_reference, load_teacher, reference_bytes

IDS = torch.tensor([[5, 6, 7, 8]])


def hidden(policy):
    return policy.hidden_states(IDS).detach().clone()


def nudge(policy):
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.05)


def test_the_reference_stays_the_same_when_the_policy_is_trained(policy, tmp_path):
    before = hidden(policy)
    reference = freeze_reference(policy, tmp_path, next_update=0)
    nudge(policy)
    assert (hidden(policy) - before).abs().max() > 1e-3
    assert torch.equal(hidden(reference), before)
    assert not reference.hidden_states(IDS).requires_grad and not reference.trainable()
    assert torch.equal(hidden(freeze_reference(policy, tmp_path, next_update=2)), before)
    # a run that was stopped before update 1 ended, and resumed with another warm start
    again = freeze_reference(policy, tmp_path, next_update=1)
    assert torch.equal(hidden(again), hidden(policy))
    assert torch.equal(hidden(freeze_reference(policy, tmp_path, next_update=2)), hidden(policy))
    weights = sum(p.numel() * 4 for p in policy.model.parameters())
    assert reference_bytes(Config(kl_coef=1.0), policy) == weights
    assert reference_bytes(Config(), policy) == 0


def test_a_reference_that_cannot_be_read_is_refused(policy, tmp_path):
    with pytest.raises(UsageError, match=r"reference/weights.safetensors cannot be read"):
        freeze_reference(policy, tmp_path, next_update=2)


def test_with_lora_the_reference_is_the_base_and_needs_no_memory(qwen3_folder, tmp_path):
    base, policy = load_small(qwen3_folder), load_small(qwen3_folder, lora_rank=2)
    names = set(policy.trainable())
    nudge(policy)
    moved = hidden(policy)
    assert (moved - hidden(base)).abs().max() > 1e-3
    reference = freeze_reference(policy, tmp_path, next_update=0)
    assert torch.equal(hidden(reference), hidden(base))
    assert torch.equal(hidden(policy), moved)  # the policy itself keeps its adapters
    assert set(policy.trainable()) == names
    assert reference_bytes(Config(kl_coef=1.0), policy) == 0 and not list(tmp_path.iterdir())


def test_a_teacher_is_another_model_with_the_same_tokens(policy, tmp_path):
    folder = save_small("Llama", tmp_path / "llama", num_hidden_layers=1)
    cfg = Config(teacher=str(folder), kl_coef=1.0, max_model_len=512, lora_rank=2)
    teacher = load_teacher(cfg, policy)
    assert torch.equal(hidden(teacher), hidden(load_small(folder)))
    assert not teacher.trainable() and teacher.lora_rank == 0  # the adapters are the policy's
    assert reference_bytes(cfg, policy) == 0  # it is there already
    with pytest.raises(UsageError, match=r"^--teacher none/such[^\n]*$"):
        load_teacher(replace(cfg, teacher="none/such"), policy)
    teacher.tokenizer.add_tokens(["another"])
    teacher.tokenizer.save_pretrained(folder)
    with pytest.raises(UsageError, match="tokenizer differs"):
        load_teacher(cfg, policy)
