"""Code from others does not run, and keys stay here.

Each attack is real: a careless reader of the same file would run it, and create the file `marker`.
ruff's rules in pyproject.toml reject eval, exec, pickle, shells and unsafe YAML in our own source.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import save_small
from test_openai_sampler import server  # noqa: F401

from core.config import Config
from core.faults import UsageError
from core.files.checkpoint import START, find_checkpoint, load_checkpoint, save_checkpoint
from core.loading import load_policy
from core.optimizer import make_optimizer
from environments.base import EnvFailure
from environments.plumbing.registry import make


@pytest.fixture
def marker(tmp_path):
    """A file that exists once foreign code has run."""
    return tmp_path / "marker"


MODEL_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Path({marker!r}).touch()

class OwnConfig(Qwen3Config):
    model_type = "own"

class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("name, own", [
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}),
    ("config.json", {"model_type": "own", "auto_map": {
        "AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}),
])  # fmt: skip
def test_code_of_a_model_runs_only_if_it_is_trusted(tmp_path, marker, monkeypatch, name, own):
    """A run does not save the trust, and no file of settings gives it (test_wrong_commands.py)."""
    modules = str(tmp_path / "modules")  # transformers copies the code to here
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setattr("builtins.input", lambda *args: "yes")  # answers any question
    folder = save_small("Qwen3", tmp_path / "model")
    (folder / "own.py").write_text(MODEL_CODE.format(marker=str(marker)))
    settings = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(settings | own))
    with pytest.raises(UsageError, match="add --trust-remote-code"):
        load_policy(Config(device="cpu"), str(folder))
    assert not marker.exists()
    load_policy(Config(device="cpu", trust_remote_code=True), str(folder))
    assert marker.exists()


class Evil:
    """Creates the marker when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def test_pickled_weights_of_a_model_are_not_read(tmp_path, marker, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a message with a long path is cut
    folder = save_small("Qwen3", Path("model"))
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Evil(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match="are not read"):
        load_policy(Config(device="cpu"), str(folder))
    assert not marker.exists()


def test_a_checkpoint_is_read_without_running_it(tmp_path, policy, marker):
    optimizer = make_optimizer(policy, 0.1)
    (tmp_path / "config.yaml").write_text("algo: grpo\n")
    evil = SimpleNamespace(state_dict=lambda: {"adamw": Evil(marker)})
    save_checkpoint(tmp_path, policy, evil, START | {"update": 3})
    saved = tmp_path / "checkpoint/000000-000004"
    torch.load(saved / "optimizer.pt", weights_only=False)  # as a careless reader
    marker.unlink()
    assert find_checkpoint(tmp_path)[0] == saved
    with pytest.raises(UsageError, match="not a state that torch saved"):
        load_checkpoint(saved, policy, optimizer)
    assert not marker.exists()


def test_no_shell_reads_a_remote_command(marker):
    env = make(f"remote:command=cat; touch {marker},timeout=1")
    with pytest.raises((EnvFailure, UsageError)):
        env.reset(1)
    assert not marker.exists()


SECRETS = {"OPENAI_API_KEY": "sk-openai-61f0c2", "FOO_SECRET": "foo-secret-c04e77"}


def test_a_run_with_a_server_writes_no_secret(command, monkeypatch, server):  # noqa: F811
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    flags = "--sampler openai --num-updates 0 --eval-num-tasks 4 --run-name a --model-id m".split()
    code, out, err = command(*flags, "--base-url", server.url)
    assert (code, err) == (0, "")
    assert {key for _, _, key in server.asked} == {f"Bearer {SECRETS['OPENAI_API_KEY']}"}
    files = [path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()]
    for secret in map(str.encode, SECRETS.values()):
        assert not any(secret in text for text in (out.encode(), *files))


def test_a_password_in_a_url_is_rejected_and_not_repeated(command):
    flags = "--sampler openai --num-updates 0 --base-url".split()
    code, out, err = command(*flags, f"http://user:{SECRETS['FOO_SECRET']}@127.0.0.1:9/v1")
    assert (code, out) == (2, "") and "--base-url" in err and SECRETS["FOO_SECRET"] not in err
