"""A checkpoint is complete or absent, and a damaged one is skipped."""

import copy
import json
import math

import pytest
import torch
from conftest import save_small
from safetensors.torch import load_file, save_file

from core import checkpoint, files
from core.checkpoint import START, find_checkpoint, load_adapters, load_checkpoint, save_checkpoint
from core.model import load_policy
from core.optimizer import make_optimizer
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
        assert torch.equal(state["exp_avg"], after["state"][key]["exp_avg"])


def test_the_two_newest_checkpoints_are_kept(run):
    folder, _, _, save = run
    for update in (-1, 2, 10):
        save(update)
    assert find_checkpoint(folder).progress == progress(10)
    names = sorted(path.name for path in (folder / "checkpoint").iterdir())
    assert names == ["000006-000003", "000006-000011"]


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.OPTIMIZER, "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_checkpoint_is_skipped(run, name, damage):
    folder, _, _, save = run
    save(1)
    newest = save(2)
    file = newest / name
    content = file.read_bytes()
    flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    file.write_bytes(flipped if damage == "flip" else content[:-9])
    if damage == "missing":
        file.unlink()
    check_skipped(folder, newest)


@pytest.mark.parametrize("damage", ["progress", "settings", "list"])
def test_a_checkpoint_with_another_state_is_skipped(run, damage):
    folder, _, _, save = run
    save(1)
    if damage == "settings":
        (folder / "config.yaml").write_text("algo: ppo\n")
    newest = save(2)
    (folder / "config.yaml").write_text("algo: grpo\nnum_updates: 9\n")  # this one may change
    file = newest / "state.json"
    if damage == "progress":
        file.write_text(file.read_text().replace('"update": 2', '"update": 3'))
    if damage == "list":
        file.write_text("[]")
    check_skipped(folder, newest)


def check_skipped(folder, newest):
    found = find_checkpoint(folder)
    assert found.progress == progress(1)
    assert len(found.remarks) == 1 and str(newest) in found.remarks[0]


def test_a_failed_write_leaves_the_older_checkpoint(run, monkeypatch):
    folder, _, _, save = run
    save(1)

    def full_disk(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(OSError):
        save(2)
    assert find_checkpoint(folder).progress == progress(1)
    assert len(list((folder / "checkpoint").iterdir())) == 1


def test_without_an_intact_checkpoint_a_run_is_not_resumed(run):
    folder, _, _, save = run
    found = find_checkpoint(folder)
    assert (found.folder, found.progress, len(found.remarks)) == (None, START, 1)
    damaged = save(1)
    (damaged / "state.json").unlink()
    with pytest.raises(UsageError, match=damaged.name):
        find_checkpoint(folder)
    with pytest.raises(UsageError, match="not a run folder"):
        find_checkpoint(folder / "elsewhere")


def test_weights_of_another_shape_are_rejected(run, tmp_path_factory):
    saved = run[3](1)
    other = save_small("qwen3", tmp_path_factory.mktemp("wide"), hidden_size=64)
    with pytest.raises(UsageError, match="differs"):
        load_checkpoint(saved, load_policy(str(other), device="cpu"), run[2])


def set_moment(value):
    def change(state):
        state["adamw"]["state"][0]["exp_avg"] = value

    return change


STATES = {
    "shape": set_moment(torch.zeros(2)),
    "empty": set_moment(torch.zeros(0)),
    "dtype": set_moment(torch.zeros(704, 32, dtype=torch.float64)),
    "NaN": set_moment(torch.full((704, 32), torch.nan)),
    "infinity": set_moment(torch.full((704, 32), -torch.inf)),
    "one infinity": lambda state: (
        state["adamw"]["state"][1]["exp_avg_sq"].view(-1)[-1].fill_(torch.inf)
    ),
    "infinite step": lambda state: state["adamw"]["state"][1]["step"].fill_(torch.inf),
    "text": set_moment("x"),
    "no moment": lambda state: state["adamw"]["state"][0].pop("exp_avg"),
    "no parameter": lambda state: state["adamw"]["state"].pop(3),
    "other parameters": lambda state: state["adamw"]["param_groups"][0]["params"].reverse(),
    "learning rate": lambda state: state["adamw"]["param_groups"][0].update(lr=math.nan),
    "no groups": lambda state: state["adamw"]["param_groups"].clear(),
    "masters": lambda state: state["masters"].append(torch.zeros(1)),
    "scale": lambda state: state.update(scale=["x", 0]),
    "infinite scale": lambda state: state.update(scale=[math.inf, 0]),
    "no AdamW": lambda state: state.pop("adamw"),
}


@pytest.mark.parametrize("change", STATES)
def test_a_state_of_another_optimizer_is_rejected_before_it_is_loaded(run, change):
    """Its checksums are right. The fused step of torch reads beyond moments that are too small."""
    _, policy, optimizer, save = run
    saved = save(1)
    assert optimizer.state_dict()["adamw"]["state"][0]["exp_avg"].shape == (704, 32)
    state = torch.load(saved / "optimizer.pt", weights_only=True)
    STATES[change](state)
    torch.save(state, saved / "optimizer.pt")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UsageError, match=r"optimizer\.pt.* is not of this optimizer") as error:
        load_checkpoint(saved, policy, optimizer)
    assert "\n" not in str(error.value)
    checkpoint.check_state(optimizer.state_dict(), before, "unchanged")


def test_a_file_that_is_no_state_is_rejected(run):
    _, policy, optimizer, save = run
    saved = save(1)
    (saved / "optimizer.pt").write_bytes(b"no state")
    with pytest.raises(UsageError, match=r"optimizer\.pt is not a state"):
        load_checkpoint(saved, policy, optimizer)
    (saved / "weights.safetensors").write_bytes(b"no weights")
    with pytest.raises(UsageError, match=r"weights\.safetensors cannot be read"):
        load_checkpoint(saved, policy, optimizer)


def test_settings_that_config_yaml_has_lost_are_noticed(run):
    """With their defaults the run would go on in another way."""
    folder, _, _, save = run
    (folder / "config.yaml").write_text("algo: grpo\nkl_coef: 0.1\nof_a_later_version: 1\n")
    save(1)
    (folder / "config.yaml").write_text("algo: grpo\nnum_updates: 9\n")
    with pytest.raises(UsageError, match=r"other settings than config\.yaml \(kl_coef\)"):
        find_checkpoint(folder)


def test_a_run_that_has_lost_its_checkpoints_does_not_begin_again(run):
    """It would delete the records of all its updates."""
    folder, _, _, _ = run
    (folder / "metrics.jsonl").write_text('{"update": 0}\n')
    assert find_checkpoint(folder).progress == START  # killed while it saved for the first time
    (folder / "metrics.jsonl").write_text('{"update": 0}\n{"update": 1}\n')
    with pytest.raises(UsageError, match="checkpoint/ is empty or missing: restore it"):
        find_checkpoint(folder)


@pytest.mark.parametrize("damage", ["names", "shape", "fewer", "bytes", "missing"])
def test_damaged_adapters_of_an_exported_model_are_refused(qwen3_folder, tmp_path, damage):
    policy = load_policy(str(qwen3_folder), device="cpu", lora_rank=2)
    for weight in policy.trainable().values():
        weight.data.fill_(0.5)
    exported = checkpoint.export_model(tmp_path, policy)
    again = load_policy(str(qwen3_folder), device="cpu", lora_rank=2, value_head=True)
    load_adapters(exported, again)
    assert all((again.trainable()[n] == 0.5).all() for n in policy.trainable())
    file = exported / checkpoint.ADAPTERS
    saved = load_file(file)
    first = min(saved)
    if damage == "names":
        save_file({f"x.{name}": weight for name, weight in saved.items()}, file)
    elif damage == "shape":
        save_file(saved | {first: torch.zeros(3)}, file)
    elif damage == "fewer":
        save_file({first: saved[first]}, file)
    elif damage == "bytes":
        file.write_bytes(b"{")
    else:
        file.unlink()
    with pytest.raises(UsageError, match=r"differs from the one configured|cannot be read"):
        load_adapters(exported, again)


@pytest.mark.parametrize("wrong", [
    {"update": "x"}, {"update": 1.5}, {"update": 10**400}, {"sft_step": -1}, {"level": [1]},
    {"sampled_tokens": None}, {"best": {}}, {"rollouts_sha256": ["a"]},
])  # fmt: skip
def test_progress_that_no_run_saves_is_damage_though_its_checksum_is_right(run, wrong):
    folder, policy, optimizer, save = run
    good = save(3)
    save_checkpoint(folder, policy, optimizer, progress(9))
    newest = max((folder / "checkpoint").iterdir())
    state = json.loads((newest / "state.json").read_text())
    del state["whole"]
    state["progress"] |= wrong
    state["whole"] = files._json_sha256(state)
    (newest / "state.json").write_text(json.dumps(state))
    point = find_checkpoint(folder)
    assert point.folder == good and "has a state.json that no run writes" in point.remarks[0]
