"""A checkpoint is complete or absent, and a damaged one is skipped."""

import copy

import pytest
import torch
from conftest import save_small
from safetensors.torch import load_file, save_file
from test_files import small_files

from core import checkpoint
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
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(state[name], after["state"][key][name]), name


def test_the_two_newest_checkpoints_are_kept(run):
    folder, _, _, save = run
    for update in (-1, 2, 10):
        save(update)
    assert find_checkpoint(folder).progress == progress(10)
    names = sorted(path.name for path in (folder / "checkpoint").iterdir())
    assert names == ["000006-000003", "000006-000011"]


@pytest.mark.parametrize(("name", "damage"), [
    (checkpoint.WEIGHTS, "flip"), (checkpoint.OPTIMIZER, "cut"), ("state.json", "cut"),
    (checkpoint.OPTIMIZER, "missing"), ("state.json", "missing"),
])  # fmt: skip
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


def test_a_checkpoint_with_another_state_is_skipped(run):
    folder, _, _, save = run
    save(1)
    newest = save(2)
    file = newest / "state.json"
    for text in (file.read_text().replace('"update": 2', '"update": 3'), "[]"):
        file.write_text(text)
        check_skipped(folder, newest)


def test_what_the_system_or_the_user_adds_to_a_checkpoint_is_no_damage(run):
    folder, _, _, save = run
    newest = save(2)
    for name in (".DS_Store", "NOTE.txt"):
        (newest / name).touch()
    (newest / "@eaDir").mkdir()
    (folder / "checkpoint/2024-photos").mkdir()
    assert find_checkpoint(folder).folder == newest
    save(3)
    save(4)
    left = sorted(path.name for path in (folder / "checkpoint").iterdir())
    assert left == ["000006-000004", "000006-000005", "2024-photos"]


def check_skipped(folder, newest):
    found = find_checkpoint(folder)
    assert found.progress == progress(1)
    assert len(found.remarks) == 1 and str(newest) in found.remarks[0]


def test_a_failed_write_leaves_the_older_checkpoint(run):
    folder, _, _, save = run
    save(1)
    with pytest.raises(OSError, match="File too large"), small_files(100_000):
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
    "dtype": set_moment(torch.zeros(704, 32, dtype=torch.float64)),
    "no moment": lambda state: state["adamw"]["state"][0].pop("exp_avg"),
    "no parameter": lambda state: state["adamw"]["state"].pop(3),
    "no groups": lambda state: state["adamw"]["param_groups"].clear(),
    "masters": lambda state: state["masters"].append(torch.zeros(1)),
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


def test_a_run_that_has_lost_its_checkpoints_does_not_begin_again(run):
    """It would delete the records of all its updates."""
    folder, _, _, _ = run
    (folder / "metrics.jsonl").write_text('{"update": 0}\n')
    assert find_checkpoint(folder).progress == START  # killed while it saved for the first time
    (folder / "metrics.jsonl").write_text('{"update": 0}\n{"update": 1}\n')
    with pytest.raises(UsageError, match="checkpoint/ is empty or missing: restore it"):
        find_checkpoint(folder)


def test_damaged_adapters_of_an_exported_model_are_refused(qwen3_folder, tmp_path):
    policy = load_policy(str(qwen3_folder), device="cpu", lora_rank=2)
    for weight in policy.trainable().values():
        weight.data.fill_(0.5)
    exported = checkpoint.export_model(tmp_path, policy)
    again = load_policy(str(qwen3_folder), device="cpu", lora_rank=2, value_head=True)
    load_adapters(exported, again)
    assert all((again.trainable()[n] == 0.5).all() for n in policy.trainable())
    file = exported / checkpoint.ADAPTERS
    saved = load_file(file)
    renamed = {f"x.{name}": weight for name, weight in saved.items()}
    for damaged in (renamed, saved | {min(saved): torch.zeros(3)}, None):
        save_file(damaged, file) if damaged else file.write_bytes(b"{")
        with pytest.raises(UsageError, match=r"differs from the one configured|cannot be read"):
            load_adapters(exported, again)
