"""Nothing that somebody else wrote is run.

Each attack is real: what is refused here is first shown to work on a reader that takes less care.
"""

import ast
import json
import subprocess
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import save_small
from jinja2.exceptions import SecurityError
from safetensors import SafetensorError

from core import checkpoint, reference, warm_cache
from core.checkpoint import START, find_checkpoint, load_checkpoint, save_checkpoint
from core.model import load_policy
from core.optimizer import make_optimizer
from core.types import UsageError
from environments.adapters.remote import RemoteError
from environments.registry import make

ROOT = Path(__file__).parent.parent


@pytest.fixture
def marker(tmp_path):
    """A file that is there once foreign code has run."""
    return tmp_path / "marker"


# --- code that comes with a model or a dataset

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
    """Make a model's folder with code in it; changes go to its config and its tokenizer's."""
    modules = str(tmp_path / "modules")  # where transformers copies what it runs
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setattr("builtins.input", lambda *args: "yes")  # nobody is to be asked

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
def test_code_in_a_model_folder_runs_only_if_trusted(own_code, marker, config, tokenizer, loaded):
    folder = own_code(config, tokenizer)
    with pytest.raises(UsageError, match="--trust-remote-code") as error:
        load_policy(folder, device="cpu")
    assert "\n" not in str(error.value)
    assert not marker.exists()
    policy = load_policy(folder, device="cpu", trust_remote_code=True)
    assert marker.exists()
    assert loaded in (type(policy.model).__name__, type(policy.tokenizer).__name__)
    assert policy.trust_remote_code  # for the engine that samples


def test_the_flag_of_the_command_is_the_only_way(own_code, marker, command):
    flags = ["--model-id", own_code(OWN_MODEL), "--device", "cpu", "--eval-num-tasks", "0"]
    flags += ["--num-updates", "0"]
    code, out, err = command(*flags)
    assert (code, out) == (2, "")
    assert err.startswith("train.py: --model-id") and err.count("\n") == 1
    assert "--trust-remote-code" in err and not marker.exists()
    assert command(*flags, "--trust-remote-code", "--run-name", "trusted")[0] == 0
    assert marker.exists()
    assert "trust_remote_code: true" in Path("runs/trusted/config.yaml").read_text()


def test_a_type_that_transformers_knows_is_made_by_its_code(own_code, marker):
    folder = own_code({"auto_map": {"AutoModelForCausalLM": "own.OwnModel"}})
    policy = load_policy(folder, device="cpu")
    assert type(policy.model) is transformers.Qwen3ForCausalLM and not marker.exists()
    own = load_policy(folder, device="cpu", trust_remote_code=True)
    assert type(own.model).__name__ == "OwnModel"
    # what its attention does with a tree isn't known
    assert policy.packs_groups and not own.packs_groups


def test_attention_from_elsewhere_is_not_fetched(own_code):
    with pytest.raises(UsageError, match="can't be loaded") as error:
        load_policy(own_code({"attn_implementation": "somebody/kernel"}), device="cpu")
    assert "\n" not in str(error.value)


def test_packages_that_trusted_code_misses_are_named(own_code):
    folder = own_code(OWN_MODEL)
    Path(folder, "own.py").write_text("import no_such_package\n")
    with pytest.raises(UsageError, match=r"packages that were not found.*no_such_package"):
        load_policy(folder, device="cpu", trust_remote_code=True)


def test_a_chat_template_reaches_nothing_but_the_chat(own_code):
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}"
    folder = own_code(tokenizer={"chat_template": template})
    Path(folder, "chat_template.jinja").unlink()
    with pytest.raises((SecurityError, UsageError)):
        load_policy(folder, device="cpu")


@pytest.mark.parametrize("script", ["gsm8k.py", "builder.py"])
def test_a_dataset_script_is_not_run(tmp_path, marker, monkeypatch, script):
    """`datasets` refuses them from version 4 on (its load.py: "Dataset scripts are no longer
    supported"), and environments/math_qa.py needs version 5."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "openai/gsm8k"  # what load_dataset takes before it asks the hub
    folder.mkdir(parents=True)
    (folder / script).write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    row = json.dumps({"question": "What is 6 * 7?", "answer": "6 * 7 = 42 #### 42"})
    if script != "gsm8k.py":  # the data is usable: what is beside it isn't looked at
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text(f"{row}\n" * 2)
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n"
            "    path: train.jsonl\n  - split: test\n    path: test.jsonl\n---\n"
        )
        assert "6 * 7" in make("math_qa:data=gsm8k").reset(1)[0]["content"]
    else:
        with pytest.raises(UsageError, match="scripts are no longer supported"):
            make("math_qa:data=gsm8k")
    assert not marker.exists()


# --- files that hold weights, moments and settings


class Evil:
    """An object whose pickle makes the marker when it is read."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def assert_evil(file, marker):
    """The attack is real: a careless reader runs it."""
    with file.open("rb") as opened:  # by name, torch reads .safetensors as such
        torch.load(opened, weights_only=False)
    assert marker.exists()
    marker.unlink()


WEIGHTS = {  # files of a model's folder, and the setting that asks for them
    "pytorch_model.bin": {},
    "adapter_model.bin": {},
    "other.bin": {"transformers_weights": "other.bin"},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_pickled_weights_of_a_model_are_not_read(tmp_path, marker, name):
    folder = save_small("qwen3", tmp_path / "model")
    change(folder / "config.json", **WEIGHTS[name])
    if name == "adapter_model.bin":
        adapter = {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "lora_alpha": 1}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
    else:
        (folder / "model.safetensors").unlink()
    torch.save({"weight": Evil(marker)}, folder / name)
    assert_evil(folder / name, marker)
    with pytest.raises(UsageError, match=r"can't be loaded: .*safetensors") as error:
        load_policy(str(folder), device="cpu")
    assert "\n" not in str(error.value) and not marker.exists()


def test_even_honest_pickled_weights_are_refused_in_one_line(tmp_path):
    folder = save_small("qwen3", tmp_path / "model")
    state = load_policy(str(folder), device="cpu").model.state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"no file named model\.safetensors") as error:
        load_policy(str(folder), device="cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", checkpoint.FILES)
def test_a_checkpoint_is_read_without_running_it(tmp_path, policy, marker, name, monkeypatch):
    """Its checksums fit: whoever can write the one file can write the other."""
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
    with pytest.raises((UsageError, UnpicklingError, SafetensorError)):
        load_checkpoint(saved, policy, optimizer)
    assert not marker.exists()


def test_a_reference_is_read_without_running_it(tmp_path, policy, marker):
    torch.save(Evil(marker), tmp_path / reference.FILE)
    assert_evil(tmp_path / reference.FILE, marker)
    with pytest.raises((SafetensorError, UsageError)):
        reference.make_reference(policy, tmp_path, update=1)
    assert not marker.exists()


def test_a_warm_start_of_others_is_read_without_running_it(tmp_path, policy, marker, monkeypatch):
    folder = tmp_path / "recipe"
    folder.mkdir()
    torch.save(Evil(marker), folder / "weights.safetensors")
    assert_evil(folder / "weights.safetensors", marker)
    monkeypatch.setattr(warm_cache, "folder_of", lambda *args: folder)
    told = []
    run = SimpleNamespace(
        policy=policy, progress={"sft_step": 0}, display=SimpleNamespace(say=told.append)
    )
    assert not warm_cache.reuse(None, run, [])
    assert "can't be read" in told[0] and not marker.exists()


def test_settings_are_read_without_running_them(tmp_path, marker, command):
    file = tmp_path / "evil.yaml"
    file.write_text(f"algo: !!python/object/apply:os.system ['touch {marker}']\n")
    code, _, err = command("--config", file)
    assert (code, err) == (2, f"train.py: {file}: not YAML (line 1)\n")
    assert not marker.exists()


# --- what our own source may not say

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = """eval exec compile __import__ os.system os.popen yaml.load yaml.unsafe_load
    yaml.full_load yaml.load_all torch.hub.load torch.jit.load pandas.read_pickle
    subprocess.getoutput subprocess.getstatusoutput""".split()


def unsafe(source):
    """The expressions of a program that may run what others wrote."""
    found = []
    for node in ast.walk(ast.parse(source)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
        found += [m for m in modules if m.split(".")[0] in UNSAFE_MODULES or m in UNSAFE_CALLS]
        if isinstance(node, ast.Call) and is_unsafe(node):
            found.append(ast.unparse(node))
    return found


def is_unsafe(call):
    name = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return (
        name in UNSAFE_CALLS
        or (name == "torch.load" and given.get("weights_only") != "True")
        or (name.endswith(".from_pretrained") and given.get("trust_remote_code", "True") == "True")
        or (name.endswith("load_dataset") and "trust_remote_code" in given)
        or given.get("shell", "False") != "False"
        or given.get("allow_pickle", "False") != "False"
    )


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "from os import system", "eval(x)"),
        *("exec(x)", "os.system('ls')", "yaml.load(x, Loader=y)", "torch.load(f)"),
        *("torch.load(f, weights_only=False)", "subprocess.run('ls', shell=True)"),
        *("AutoTokenizer.from_pretrained(x)", "numpy.load(f, allow_pickle=True)"),
        *("AutoConfig.from_pretrained(x, trust_remote_code=True)", "import joblib.numpy_pickle"),
        "datasets.load_dataset(x, trust_remote_code=True)",
    ],
)
def test_an_unsafe_program_is_known_as_one(source):
    assert unsafe(source)


def test_our_own_source_runs_nothing_of_others():
    files = [ROOT / "train.py"]
    files += [f for room in ("algorithms", "core", "environments") for f in (ROOT / room).glob("*")]
    found = {f.name: unsafe(f.read_text()) for f in files if f.suffix == ".py"}
    assert len(found) > 50
    assert {name: what for name, what in found.items() if what} == {}


def test_the_engine_trusts_what_the_policy_may():
    [call] = [
        node
        for node in ast.walk(ast.parse((ROOT / "core/nanollm.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "vllm.EngineArgs"
    ]
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    assert given["trust_remote_code"] == "policy.trust_remote_code"


# --- commands


@pytest.mark.parametrize(
    "written",
    [
        *("cat ; touch {}", "cat;touch {}", "cat $(touch {})", "cat `touch {}`", "cat && touch {}"),
        *("cat | touch {}", "cat & touch {}", "cat\ntouch {}", "cat > {}", 'cat "$(touch {})"'),
        "cat ${{x:-`touch {}`}}",
    ],
)
def test_a_remote_command_is_read_by_no_shell(marker, written):
    command = written.format(marker)
    subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert marker.exists(), "a shell would obey"
    marker.unlink()
    env = make(f"remote:command={command},timeout=1")
    with pytest.raises((RemoteError, UsageError)):
        env.reset(1)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["$(touch marker)", "`touch marker`", "x && touch marker"])
def test_a_remote_environment_is_named_to_no_shell(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(30)]
    Path(name).write_text("\n".join(map(json.dumps, rows)))
    env = make(f"remote:env=math_qa:data={name}")  # served: the other side has the same name
    assert "What is" in env.reset(1)[0]["content"]
    env.close()
    assert not Path("marker").exists()


@pytest.mark.parametrize("tail", ["; touch marker", "$(touch marker)", "`touch marker`"])
def test_a_remote_environment_that_is_none_is_refused(tmp_path, monkeypatch, tail):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        make(f"remote:env=tic_tac_toe{tail}")
    assert not Path("marker").exists()
