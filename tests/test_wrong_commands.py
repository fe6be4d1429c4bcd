"""Invalid commands, config files and models: one line that names the cause, exit code 2, no files.

tyro reports wrong flags and values in a box of its own; every other line is from picoRL.
"""

import math
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from algorithms.ppo import Options as PpoOptions
from core import config
from core.config import Config
from core.extras import chat
from core.faults import UsageError
from core.loop.open import prepare
from environments.plumbing.installed import NEEDED

ROOT = Path(__file__).parent.parent
SERVER = {"sampler": "server", "base_url": "http://127.0.0.1:9", "lora_rank": 4}
SETTINGS = [  # invalid settings, and what the message names
    ({"lr": math.nan}, "--lr"),  # the range of a number
    ({"dtype": "float3"}, "--dtype float3: choose auto, float64"),
    ({"algo": "ppo", "options": PpoOptions(gae_lambda=95)}, "--ppo.gae-lambda"),
    ({"options": PpoOptions()}, "Config.options: give algorithms.grpo.Options"),
    ({"num_minibatches": 129}, "--num-minibatches"),  # of 128 rollouts
    ({"max_tokens": 9000, "max_model_len": 9000}, "--max-model-len"),
    ({"env": ()}, "--env is empty"),
    ({"train_difficulty": 3, "env": ("tic_tac_toe",)}, "--train-difficulty"),
    ({"template_options": "thinking"}, "key=value"),
    ({"kl_estimator": "k3"}, "--kl-coef"),  # has no effect without another
    ({"base_url": "http://127.0.0.1:9"}, "--sampler openai"),
    ({"quantize": "nf4", "lora_rank": 4, **SERVER}, "--quantize nf4"),  # contradicts another
    ({"algo": "ppo", "credit": "episode"}, "--credit"),  # not with this algorithm
    ({"algo": "scratch", "top_k": 5}, "--top-k"),
    ({"algo": "scratch", "kl_coef": 0.1, "kl_estimator": "k3"}, "has a KL of its own"),
    ({"algo": "gspo", "group_size": 1}, "--algo gspo compares the rollouts of a group"),
    ({"sampler": "openai", "base_url": "http://127.0.0.1:9/v1"}, "--num-updates 0"),
    ({"sampler": "openai", "num_updates": 0, "base_url": "localhost"}, "--base-url"),
    (SERVER | {"base_url": ""}, "--base-url must look like"),
    (SERVER | {"lora_rank": 0}, "works only with --lora-rank"),
    (SERVER | {"top_p": 0.9}, "--top-p 0.9 does not go with --sampler server"),
    (SERVER | {"overlap": True, "staleness": 2}, "remove --staleness 2"),
    (SERVER | {"overlap": True, "curriculum": 0.7}, "--overlap does not go with --curriculum"),
    ({"overlap": True, "sampler": "torch"}, "--overlap works only with --sampler server"),
]

COMMANDS = [  # a command line of train.py, or of core.chat, and what its message names
    ("chat none", "there is no such run; runs/ has there"),
    ("chat there", "no checkpoint yet"),
    ("chat tiny --before", "--before needs a run"),
    ("chat --before", "name a run"),
    ("--algo scratch", "--algo scratch"),  # there is no scratch.py
    ("--algo gpro", "choose cispo, "),
    ("--env tic_tac_toe --env reverse", "give --env once"),
    ("--learning-rate 1e-5", "write --lr"),
    ("--weight-decay 0.1", "is no flag; there is no weight decay"),
    ("--env leter_counting", "letter_counting"),
    (
        "--overlap --sampler server --lora-rank 4 --base-url http://127.0.0.1:9 --device cpu "
        "--env tic_tac_toe:opponent=older:1",
        "--overlap does not go with opponent=older:1",
    ),
    ("--env tic_tac_toe:opponent=runs/none", "opponent=runs/none: there is no such folder of"),
    ("--env reverse:opponent=older:1", "needs an environment that names its `agents`"),
    ("--env math_qa:data=shape.jsonl", "row 1"),
    ("--run-name there", "runs/there"),
    ("--run-name ..", "--run-name"),
    ("--device cuda:99", "--device cuda:99"),
    ("--model-id nobody/nothing", "connect to"),
    ("--model-id runs/there", "a run's is runs/NAME/model"),
    ("--template-options enable_thinking=false", "--template-options enable_thinking"),
    ("--config none.yaml", "none.yaml"),
    ("--resume runs/there/model", "no run has this name; runs/ has there"),
    ("--resume there --config there", "give --config or --resume, not both"),
    ("--resume there --run-name b", "--run-name b: a resumed run keeps its folder"),
    ("--config tabs.yaml", "line 2"),
    ("--config words.yaml", "words.yaml: must contain lines"),
    ("--config trust.yaml", "trust.yaml: 'trust_remote_code' is not a setting for a file"),
    ("--config code.yaml", "code.yaml"),
]
FILES = {
    "shape.jsonl": '{"q": "1 + 1", "a": 2}\n' * 20, "tabs.yaml": "env:\n\t- reverse",
    "words.yaml": "just words", "name.yaml": "learning_rate: 1",
    "trust.yaml": "trust_remote_code: true",
    "code.yaml": "algo: !!python/object/apply:os.system ['touch marker']",
}  # fmt: skip

BOXES = [  # a command line of which tyro says in a box what is wrong, and what the box names
    ("--num_prompt=3", "--num-prompts"), ("--lr fast", "--lr"), ("--ppo.clip 0.3", "--ppo.clip"),
    ("letter_counting", "letter_counting"), ("--sampler none", "'vllm'"),
    ("--config name.yaml", "--learning-rate=1"),  # and a line names the file
]  # fmt: skip


@pytest.fixture
def place(tmp_path):
    """The working directory of the commands, with a run called `there` and wrong data."""
    (tmp_path / "runs/there/model").mkdir(parents=True)
    (tmp_path / "runs/there/config.yaml").write_text("algo: grpo\n")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def rejected(command, capsys, place):
    """Checks that a command line is rejected."""

    def files():
        return {path: path.read_bytes() if path.is_file() else None for path in place.rglob("*")}

    def check(line, named, box=False):
        before, (program, *args) = files(), shlex.split(line)
        if program == "chat":
            code, out, err = chat.execute(args), *capsys.readouterr()
        else:
            code, out, err = command(program, *args)
        assert (code, out) == (2, "") and named in err and files() == before
        if not box:
            assert err.startswith(("train.py: ", "core.chat: ")) and err.endswith("\n")
            assert err[:-1].isprintable() and len(err) < 900  # no line breaks

    return check


@pytest.mark.parametrize(("settings", "named"), SETTINGS, ids=str)
def test_invalid_settings_are_named_in_one_line(settings, named):
    with pytest.raises(UsageError, match=re.escape(named)) as error:
        prepare(Config(**settings))
    assert str(error.value).isprintable()


@pytest.mark.parametrize(("line", "named"), [*COMMANDS, *BOXES])
def test_an_invalid_command_names_what_is_wrong_and_has_code_2(rejected, line, named):
    rejected(line, named, box=(line, named) in BOXES)


def test_an_unusable_model_is_one_line_and_code_2(rejected, place, qwen3_folder):
    file = Path(shutil.copytree(qwen3_folder, place / "model"), "model.safetensors")
    weights, up = load_file(file), "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {up: weights[up] * 1e38}, file, metadata={"format": "pt"})
    rejected("--model-id ./model --device cpu", "its logits are not finite")
    file.write_bytes(file.read_bytes()[:9000])
    rejected("--model-id ./model --device cpu", "SafetensorError")


def test_a_folder_with_the_name_of_a_package_is_not_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "left_behind").mkdir()  # as wandb/ is, by a tracked run
    assert config.is_installed("torch") and not config.is_installed("left_behind")


def test_a_missing_package_is_named_with_the_command_to_install_it(rejected, monkeypatch):
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    rejected("--sampler vllm", "pip install")


@pytest.mark.parametrize("program", ["train.py", "-m environments"])
def test_a_python_without_the_packages_gets_one_sentence(program):
    """-S: without site-packages."""
    found = subprocess.run([sys.executable, "-S", *program.split()], cwd=ROOT, text=True,
                           capture_output=True)  # fmt: skip
    assert found.returncode == 1 and found.stderr.count("\n") == 1
    assert re.search(r"^torch, .* tyro, .*not installed in this Python, ", found.stderr)
    assert found.stderr.count(sys.executable) == 2


def test_every_dependency_is_looked_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split("[<>=]", package)[0] for package in project["dependencies"]}
    assert {"pyyaml" if name == "yaml" else name for name in NEEDED} == names
