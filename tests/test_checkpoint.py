"""Checkpoints: which one a run resumes from, what it has, and what is refused.

tests/test_killed.py: a run that resumes has the metrics of one that never ended.
"""

import copy
import shutil

import pytest
import torch
from conftest import load_small
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.faults import UsageError
from core.files import checkpoint
from core.files.checkpoint import (
    START,
    export_model,
    find_checkpoint,
    layout_of,
    load_checkpoint,
    load_older,
    save_checkpoint,
)
from core.optimizer import make_optimizer


@pytest.fixture
def run(tmp_path, policy):
    """A run folder, its policy and optimizer, and a function that takes a step and saves."""
    optimizer = make_optimizer(policy, 0.1)

    def save(update, older=()):
        policy.to_logits(policy.hidden_states(torch.tensor([[65, 66]]))[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        save_checkpoint(tmp_path, policy, optimizer, progress(update), older)
        return find_checkpoint(tmp_path)[0]

    return tmp_path, policy, optimizer, save


def progress(update):
    return START | {"sft_step": 6, "update": update}


def test_the_two_newest_checkpoints_are_kept_and_what_others_add_is_no_damage(run):
    folder, _, _, save = run
    save(-1)
    newest = save(2)
    (newest / ".DS_Store").touch()
    (folder / "checkpoint/2024-photos").mkdir()
    assert find_checkpoint(folder) == (newest, progress(2))
    save(10)
    assert save(10) == folder / "checkpoint/000006-000011"  # replaces the one of before
    names = sorted(path.name for path in (folder / "checkpoint").iterdir())
    assert names == ["000006-000003", "000006-000011", "2024-photos"]


def test_older_weights_come_back_in_their_order(run):
    """Twelve: as texts, "10" and "11" would come before "2"."""
    older = [{"a": torch.full((2,), float(n)), "b": torch.tensor([n])} for n in range(12)]
    loaded = load_older(run[3](3, older))
    assert [int(weights["b"]) for weights in loaded] == list(range(12))
    assert all(torch.equal(x["a"], y["a"]) for x, y in zip(loaded, older, strict=True))


def test_the_exported_model_is_the_policy(tmp_path, small_folder):
    policy, ids = load_small(small_folder), torch.tensor([[65, 66, 67]])
    with torch.no_grad():
        next(iter(policy.trainable().values())).mul_(1.1)
    exported = export_model(tmp_path, policy)
    model, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(report.values())  # no weight is missing, none unexpected
    assert torch.equal(model(ids).logits, policy.model(ids).logits)
    assert AutoTokenizer.from_pretrained(exported).chat_template


def test_weights_of_another_dtype_are_refused_or_converted(tmp_path):
    checkpoint.save_weights(tmp_path, {"a": torch.ones(2)})
    weights = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(UsageError, match="differs"):
        checkpoint.copy_weights(tmp_path, weights)
    checkpoint.copy_weights(tmp_path, weights, same_dtype=False)
    assert weights["a"].tolist() == [1.0, 1.0]


def test_a_run_without_a_checkpoint_begins_again_or_is_refused(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"update": 0}\n{"update": 1}\n')  # killed while it saved first
    assert find_checkpoint(tmp_path) == (None, START)
    assert find_checkpoint(tmp_path)[1] is not START  # a run counts in it
    metrics.write_text('{"update": 0}\n{"update": 1}\n{"update": 2}\n')
    with pytest.raises(UsageError, match="restore"):  # it would delete the records of all updates
        find_checkpoint(tmp_path)


def test_a_checkpoint_that_cannot_be_read_is_one_line_that_leads_to_the_one_before(run):
    folder, policy, optimizer, save = run
    save(1)
    newest = save(2)
    (newest / checkpoint.WEIGHTS).write_bytes(b"")
    with pytest.raises(UsageError, match=r"weights.safetensors cannot be read .* the one before"):
        load_checkpoint(newest, policy, optimizer)
    (newest / "state.json").unlink()
    with pytest.raises(UsageError, match=r"state.json cannot be read .* the one before"):
        find_checkpoint(folder)
    shutil.rmtree(newest)
    assert find_checkpoint(folder)[1] == progress(1)


@pytest.mark.parametrize("change", [
    lambda state, moments: moments.update(exp_avg=torch.zeros(2)),  # the fused step reads beyond it
    lambda state, moments: moments.pop("exp_avg"),
    lambda state, moments: state["masters"].append(torch.zeros(1)),
    lambda state, moments: state.clear(),
], ids=range(4))  # fmt: skip
def test_a_state_of_another_optimizer_is_rejected_before_it_is_loaded(run, change):
    _, policy, optimizer, save = run
    folder = save(1)
    load_checkpoint(folder, policy, optimizer)
    state = torch.load(folder / checkpoint.OPTIMIZER, weights_only=True)
    change(state, state["adamw"]["state"][0])
    torch.save(state, folder / checkpoint.OPTIMIZER)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UsageError, match=r"optimizer\.pt.* is not of this optimizer"):
        load_checkpoint(folder, policy, optimizer)
    assert layout_of(optimizer.state_dict()) == layout_of(before)
    (folder / checkpoint.OPTIMIZER).write_bytes(b"no state")
    with pytest.raises(UsageError, match=r"optimizer\.pt.* is not a state"):
        load_checkpoint(folder, policy, optimizer)
