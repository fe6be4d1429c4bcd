"""A checkpoint is there whole or not at all."""

import json

import pytest
import torch

from core import checkpoint
from core.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from core.model import load_policy
from core.optimizer import make_optimizer
from core.types import UsageError


@pytest.fixture
def run(tmp_path, policy):
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


def test_weights_and_optimizer_come_back_bit_for_bit(run, qwen3_folder):
    _folder, policy, optimizer, save = run
    saved = save(3)
    again = load_policy(str(qwen3_folder), device="cpu")
    optimizer_again = make_optimizer(again, 0.1)
    load_checkpoint(saved, again, optimizer_again)
    for name, parameter in policy.trainable().items():
        assert torch.equal(parameter, again.trainable()[name]), name
    before, after = optimizer.state_dict()["adamw"], optimizer_again.state_dict()["adamw"]
    for key, state in before["state"].items():
        assert torch.equal(state["exp_avg"], after["state"][key]["exp_avg"])


def test_the_newest_is_found_and_only_two_are_kept(run):
    folder, _, _, save = run
    for update in (-1, 2, 10):
        save(update)
    assert find_checkpoint(folder).progress == progress(10)
    assert len(list((folder / "checkpoint").iterdir())) == 2


@pytest.mark.parametrize("name", checkpoint.FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing"])
def test_a_damaged_file_is_found_out(run, name, damage):
    check_passed_over(run, name, damage)


@pytest.mark.parametrize("damage", ["empty", "missing", "state", "state_kind", "progress"])
def test_a_damaged_state_is_found_out(run, damage):
    check_passed_over(run, "state.json", damage)


def test_one_of_other_settings_is_passed_over(run):
    folder, _, _, save = run
    older = save(1)
    (folder / "config.yaml").write_text("algo: ppo\n")
    newest = save(2)
    (folder / "config.yaml").write_text("algo: grpo\nnum_updates: 9\n")  # which may change
    found = find_checkpoint(folder)
    assert (found.folder, found.progress) == (older, progress(1))
    assert found.remarks == [
        f"{newest} is of other settings than config.yaml has: using an older one"
    ]


def check_passed_over(run, name, damage):
    folder, _, _, save = run
    save(1)
    newest = save(2)
    file = newest / name
    content = file.read_bytes()
    file.write_bytes({
        "flip": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], "cut": content[:-9],
        "empty": b"", "missing": content, "state": b"{", "state_kind": b"[]",
        "progress": content.replace(b'"update": 2', b'"update": 3'),
    }[damage])  # fmt: skip
    if damage == "missing":
        file.unlink()
    found = find_checkpoint(folder)
    assert found.progress == progress(1)
    assert len(found.remarks) == 1 and str(newest) in found.remarks[0]


def test_a_write_that_fails_leaves_the_older_one(run, monkeypatch):
    folder, _, _, save = run
    save(1)

    def full_disk(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(OSError):
        save(2)
    assert find_checkpoint(folder).progress == progress(1)


def test_without_a_whole_checkpoint_there_is_one_clear_error(run):
    folder, _, _, save = run
    (save(1) / "state.json").unlink()
    with pytest.raises(UsageError, match="no whole checkpoint"):
        find_checkpoint(folder)
    with pytest.raises(UsageError, match="not a run folder"):
        find_checkpoint(folder / "elsewhere")


def test_a_run_ended_before_its_first_checkpoint_begins_again(run):
    found = find_checkpoint(run[0])
    assert (found.folder, found.progress) == (None, checkpoint.NEW_RUN.progress)
    assert "from the beginning" in found.remarks[0]


def test_weights_of_another_shape_are_refused(run, tmp_path_factory):
    from conftest import save_small

    _, _, _, save = run
    saved = save(1)
    other = save_small("qwen3", tmp_path_factory.mktemp("wide"), hidden_size=64)
    with pytest.raises(UsageError, match="differs from the one configured"):
        load_checkpoint(saved, load_policy(str(other), device="cpu"))


def test_checksums_are_of_the_files(run):
    _, _, _, save = run
    state = json.loads((save(1) / "state.json").read_text())
    assert set(state["sha256"]) == set(checkpoint.FILES)
