"""Code from others does not run: in models, data sets, weights, settings and commands.

Each attack is real: a careless reader of the same file would run it, and create the file `marker`.
ruff's rules in pyproject.toml reject eval, exec, pickle, shells and unsafe YAML in our own source.
"""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import save_small

from core import checkpoint
from core.checkpoint import START, find_checkpoint, load_checkpoint, save_checkpoint
from core.model import load_policy
from core.optimizer import make_optimizer
from core.types import UsageError
from environments.adapters.remote import RemoteError
from environments.base import EnvFailure
from environments.registry import make

ROOT = Path(__file__).parent.parent


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


def change(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def own_code(tmp_path, marker, monkeypatch):
    """A function that saves a model with code of its own, with changes to its two configs."""
    modules = str(tmp_path / "modules")  # transformers copies the code to here
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setattr("builtins.input", lambda *args: "yes")  # answers any question

    def write(config=None, tokenizer=None):
        folder = save_small("qwen3", tmp_path / "model")
        (folder / "own.py").write_text(MODEL_CODE.format(marker=str(marker)))
        change(folder / "config.json", **(config or {}))
        change(folder / "tokenizer_config.json", **(tokenizer or {}))
        return str(folder)

    return write


OWN_MODEL = {
    "model_type": "own",
    "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
}
OWN_TOKENIZER = {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
NAMED_OWN_TOKENIZER = OWN_TOKENIZER | {"tokenizer_class": "OwnTokenizer"}


@pytest.mark.parametrize(
    ("config", "tokenizer", "loaded"),
    [
        (OWN_MODEL, {}, "OwnModel"),
        ({}, OWN_TOKENIZER, "OwnTokenizer"),
        ({}, NAMED_OWN_TOKENIZER, "OwnTokenizer"),
    ],
)
def test_code_of_a_model_runs_only_if_trusted(own_code, marker, config, tokenizer, loaded):
    folder = own_code(config, tokenizer)
    with pytest.raises(UsageError, match="--trust") as error:
        load_policy(folder, device="cpu")
    assert "\n" not in str(error.value) and not marker.exists()
    policy = load_policy(folder, device="cpu", trust_remote_code=True)
    assert marker.exists()
    assert loaded in (type(policy.model).__name__, type(policy.tokenizer).__name__)
    assert policy.trust_remote_code  # read by the vLLM sampler


def test_every_command_must_give_the_flag(own_code, marker, command):
    flags = ["--model-id", own_code(OWN_MODEL), "--device", "cpu", "--eval-num-tasks", "0"]
    flags += ["--num-updates", "0", "--run-name", "a"]
    assert command(*flags, "--trust")[0] == 0
    assert marker.exists()
    marker.unlink()
    assert "trust_remote_code" not in Path("runs/a/config.yaml").read_text()
    for args in (["--resume", "runs/a"], [*flags[:-1], "b"]):
        code, out, err = command(*args)
        assert (code, out) == (2, "") and err.count("\n") == 1 and "--trust" in err
        assert not marker.exists()
    assert command("--resume", "runs/a", "--trust")[0] == 0


def test_attention_kernels_are_not_downloaded(own_code):
    with pytest.raises(UsageError, match="--model-id"):
        load_policy(own_code({"attn_implementation": "somebody/kernel"}), device="cpu")


def test_the_script_of_a_dataset_does_not_run(tmp_path, marker, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "openai/gsm8k"  # load_dataset looks here before it asks the Hub
    folder.mkdir(parents=True)
    (folder / "gsm8k.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    with pytest.raises(UsageError, match="gsm8k"):
        make("math_qa:data=gsm8k")
    assert not marker.exists()


class Evil:
    """Creates the marker when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def assert_evil(file, marker):
    """A careless reader runs the code in `file`."""
    with file.open("rb") as opened:  # given a name, torch would read .safetensors as such
        torch.load(opened, weights_only=False)
    assert marker.exists()
    marker.unlink()


WEIGHTS = {  # files of a model's folder, and the setting that asks for them
    "pytorch_model.bin": {},
    "adapter_model.bin": {},
    "other.bin": {"transformers_weights": "other.bin"},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_pickled_weights_of_a_model_are_not_read(tmp_path, marker, name, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a message with a long path is cut
    folder = save_small("qwen3", Path("model"))
    change(folder / "config.json", **WEIGHTS[name])
    if name == "adapter_model.bin":
        adapter = {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "lora_alpha": 1}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
    else:
        (folder / "model.safetensors").unlink()
    torch.save({"weight": Evil(marker)}, folder / name)
    assert_evil(folder / name, marker)
    with pytest.raises(UsageError, match="safetensors") as error:
        load_policy(str(folder), device="cpu")
    assert "\n" not in str(error.value) and not marker.exists()


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.OPTIMIZER])
def test_a_checkpoint_is_read_without_running_it(tmp_path, policy, marker, name, monkeypatch):
    """Its checksums are right: an attacker who writes one file can write the other."""
    optimizer = make_optimizer(policy, 0.1)
    writer = optimizer
    if name == "optimizer.pt":
        writer = SimpleNamespace(state_dict=lambda: {"adamw": Evil(marker)})
    else:
        monkeypatch.setattr(checkpoint, "save_file", lambda _, to: torch.save(Evil(marker), to))
    (tmp_path / "config.yaml").write_text("algo: grpo\n")
    saved = save_checkpoint(tmp_path, policy, writer, START | {"update": 3})
    assert_evil(saved / name, marker)
    assert find_checkpoint(tmp_path).folder == saved
    with pytest.raises(UsageError):
        load_checkpoint(saved, policy, optimizer)
    assert not marker.exists()


def test_settings_are_read_without_running_them(tmp_path, marker, command):
    file = tmp_path / "evil.yaml"
    file.write_text(f"algo: !!python/object/apply:os.system ['touch {marker}']\n")
    code, _, err = command("--config", file)
    assert code == 2 and err.startswith(f"train.py: {file}: algo")
    assert not marker.exists()


@pytest.mark.parametrize("template", ["cat; touch {}", "cat `touch {}`", "cat > {}"])
def test_no_shell_reads_a_remote_command(marker, template):
    command = template.format(marker)
    subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert marker.exists()
    marker.unlink()
    env = make(f"remote:command={command},timeout=1")
    with pytest.raises((RemoteError, EnvFailure, UsageError)):
        env.reset(1)
    assert not marker.exists()


def test_no_shell_reads_the_name_of_a_remote_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    name = "`touch marker`"
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(30)]
    Path(name).write_text("\n".join(map(json.dumps, rows)))
    env = make(f"remote:env=math_qa:data={name}")  # the server process gets the same name
    assert "What is" in env.reset(1)[0]["content"]
    env.close()
    with pytest.raises(UsageError):
        make("remote:env=tic_tac_toe; touch marker")
    assert not Path("marker").exists()
