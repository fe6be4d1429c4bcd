"""A checkpoint is complete or absent, and a damaged one is skipped."""

import copy
import shutil

import pytest
import torch
from test_files import small_files

from core.loading import load_policy
from core.optimizer import make_optimizer
from core.run import checkpoint
from core.run.checkpoint import START, find_checkpoint, load_checkpoint, save_checkpoint
from core.types import UsageError


@pytest.fixture
def run(tmp_path, policy):
    """A run folder, its policy and optimizer, and a function that takes a step and saves."""
    (tmp_path / "config.yaml").write_text("algo: grpo\n")
    optimizer = make_optimizer(policy, 0.1)

    def save(update):
        policy.to_logits(policy.hidden_states(torch.tensor([[65, 66]]))[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return save_checkpoint(tmp_path, policy, optimizer, progress(update))

    return tmp_path, policy, optimizer, save


def progress(update):
    return {"sft_step": 6, "update": update, "skipped_in_a_row": 0}


def test_weights_and_optimizer_are_restored_bit_for_bit(run, qwen3_folder):
    _folder, policy, optimizer, save = run
    saved = save(3)
    other = load_policy(str(qwen3_folder), device="cpu")
    other_optimizer = make_optimizer(other, 0.1)
    load_checkpoint(saved, other, other_optimizer)
    for name, parameter in policy.trainable().items():
        assert torch.equal(parameter, other.trainable()[name]), name
    before, after = optimizer.state_dict()["adamw"], other_optimizer.state_dict()["adamw"]
    for key, state in before["state"].items():
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(state[name], after["state"][key][name]), name


@pytest.mark.parametrize("damage", ["weights", "optimizer", "missing", "progress", "list"])
def test_a_damaged_checkpoint_is_skipped(run, damage):
    folder, _, _, save = run
    save(1)
    newest = save(2)
    weights, state = newest / checkpoint.WEIGHTS, newest / "state.json"
    if damage == "weights":
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "optimizer":
        file = newest / checkpoint.OPTIMIZER
        file.write_bytes(file.read_bytes()[:-9])
    elif damage == "missing":
        weights.unlink()
    elif damage == "progress":
        state.write_text(state.read_text().replace('"update": 2', '"update": 3'))
    else:
        state.write_text("[]")
    found = find_checkpoint(folder)
    assert found.progress == progress(1)
    assert len(found.remarks) == 1 and str(newest) in found.remarks[0]


def test_the_two_newest_checkpoints_are_kept_and_what_others_add_is_no_damage(run):
    folder, _, _, save = run
    save(-1)
    newest = save(2)
    (newest / ".DS_Store").touch()
    (newest / "@eaDir").mkdir()
    (folder / "checkpoint/2024-photos").mkdir()
    assert find_checkpoint(folder).folder == newest
    save(10)
    assert find_checkpoint(folder).progress == progress(10)
    names = sorted(path.name for path in (folder / "checkpoint").iterdir())
    assert names == ["000006-000003", "000006-000011", "2024-photos"]


def test_a_failed_write_leaves_the_older_checkpoint(run):
    folder, _, _, save = run
    save(1)
    with pytest.raises(OSError, match="File too large"), small_files(100_000):
        save(2)
    assert find_checkpoint(folder).progress == progress(1)
    assert len(list((folder / "checkpoint").iterdir())) == 1


def test_without_an_intact_checkpoint_a_run_is_not_resumed(run):
    folder, _, _, save = run
    metrics = folder / "metrics.jsonl"
    metrics.write_text('{"update": 0}\n{"update": 1}\n')  # killed while it saved first
    found = find_checkpoint(folder)
    assert (found.folder, found.progress, len(found.remarks)) == (None, START, 1)
    damaged = save(1)
    (damaged / "state.json").unlink()
    with pytest.raises(UsageError, match=damaged.name):
        find_checkpoint(folder)
    shutil.rmtree(damaged)
    metrics.write_text('{"update": 0}\n{"update": 1}\n{"update": 2}\n')
    with pytest.raises(UsageError, match="restore"):  # it would delete the records of all updates
        find_checkpoint(folder)
    with pytest.raises(UsageError, match="not a run folder"):
        find_checkpoint(folder / "elsewhere")


@pytest.mark.parametrize("change", ["shape", "no moment", "masters", "no state"])
def test_a_state_of_another_optimizer_is_rejected_before_it_is_loaded(run, change):
    """Its checksums are right. The fused step of torch reads beyond moments that are too small."""
    _, policy, optimizer, save = run
    file = save(1) / checkpoint.OPTIMIZER
    state = torch.load(file, weights_only=True)
    moments = state["adamw"]["state"][0]
    assert moments["exp_avg"].shape == (704, 32)
    if change == "shape":
        moments["exp_avg"] = torch.zeros(2)
    elif change == "no moment":
        del moments["exp_avg"]
    else:
        state["masters"].append(torch.zeros(1))
    torch.save(state, file)
    if change == "no state":
        file.write_bytes(b"no state")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UsageError, match=r"optimizer\.pt.* is not "):
        load_checkpoint(file.parent, policy, optimizer)
    checkpoint.check_state(optimizer.state_dict(), before, "unchanged")
