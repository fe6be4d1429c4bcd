"""Invalid commands, config files and models: one line that names the cause, exit code 2, no files.

tyro reports wrong flags and values in a box of its own; every other line is from picoRL.
"""

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import save_small
from safetensors.torch import load_file, save_file

import train
from algorithms.options import GrpoOptions, PpoOptions
from core import config
from core.config import Config
from core.types import UsageError

LONG = "x" * 300

SETTINGS = [  # invalid settings, and the flag that the message names
    ({"num_prompts": 0}, "--num-prompts"),
    ({"lr": math.nan}, "--lr"),
    ({"algo": "ppo", "ppo": PpoOptions(gae_lambda=95)}, "--ppo.gae-lambda"),
    ({"tis_cap": 0.5}, "--tis-cap"),
    ({"num_prompts": 500_001, "group_size": 2}, "--num-prompts"),
    ({"eval_num_tasks": 2000, "eval_samples": 501}, "--eval-samples"),
    ({"num_minibatches": 129}, "--num-minibatches"),  # of 128 rollouts
    ({"overlong_buffer": 65}, "--overlong-buffer"),  # of 64 tokens
    ({"max_model_len": 64}, "--max-model-len"),
    ({"clip_cov": 0.1, "clip_cov_low": 6}, "--clip-cov-low"),
    ({"group_size": 1}, "--group-size"),
    ({"group_size": 1, "algo": "reinforce", "filter_groups": 1}, "--group-size"),
    ({"stop_on": ("nonsense",)}, "--stop-on"),
    ({"allow_changes": True}, "--resume"),
    # settings that contradict others, or have no effect
    ({"algo": "reinforce", "ppo": PpoOptions(clip=0.3)}, "--ppo"),
    ({"algo": "ppo", "credit": "episode"}, "--credit"),
    ({"algo": "scratch", "credit": "turn"}, "--credit"),
    ({"algo": "scratch", "top_k": 5}, "--top-k"),
    ({"algo": "scratch", "sampler": "openai"}, "--sampler"),
    ({"algo": "scratch", "kl_coef": 0.1, "kl_in": "reward"}, "--kl-in reward"),
    ({"kl_coef": 0.1, "kl_in": "reward"}, "--kl-in reward"),
    ({"kl_estimator": "k3"}, "--kl-coef"),
    ({"quantize": "nf4"}, "--lora-rank"),
    ({"grpo": GrpoOptions("cispo", dual_clip=3)}, "--grpo.dual-clip"),
    ({"kl_cov": 0.01}, "--num-minibatches"),
    ({"fp32_head": True, "dtype": "float32"}, "--fp32-head"),
    ({"optimizer": "adamw8bit", "dtype": "float64"}, "--dtype float64"),
    ({"optimizer": "adamw_bf16_sr", "lora_rank": 4}, "adamw8bit"),
    ({"optimizer": "adamw_bf16_sr", "offload_optimizer": True}, "masters"),
    ({"optimizer": "adamw8bit", "shard_optimizer": "on"}, "--shard-optimizer on"),
    ({"train_difficulty": 12}, "12"),
    ({"train_difficulty": 3, "env": ("tic_tac_toe",)}, "--train-difficulty"),
    ({"sampler": "torch", "vllm_eager": True}, "--sampler vllm"),
    ({"template_options": "thinking"}, "key=value"),
    # servers
    ({"sampler": "openai", "base_url": "http://127.0.0.1:9/v1"}, "--num-updates 0"),
    ({"sampler": "openai", "num_updates": 0}, "--base-url"),
    ({"sampler": "openai", "num_updates": 0, "base_url": "localhost"}, "--base-url"),
    ({"sampler": "openai", "num_updates": 0, "base_url": "http://a:b"}, "--base-url"),
    ({"sampler": "openai", "num_updates": 0, "base_url": "http://a", "top_k": 5}, "--top-k"),
    ({"base_url": "http://127.0.0.1:9"}, "--sampler openai"),
]

COMMANDS = [  # a command line, and what its message names
    ("--config a.yaml --resume runs/there", "--resume"),
    ("--algo scratch", "--algo scratch"),  # there is no scratch.py
    ("--env ''", "environment ''"),
    ("--env leter_counting", "letter_counting"),
    ("--env letter_counting:level=3", "'level'"),
    ("--env letter_counting:difficulty=hard", "'hard'"),
    ("--env snake --eval-env snaek", "snaek"),
    ("--sft-steps 1 --env gymnasium:id=Acrobot-v1", "--sft-steps 0"),
    ("--env math_qa:data=wrong/shape.jsonl", "line 1"),
    ("--sft-steps 1 --env remote:command=/nowhere", "/nowhere"),
    ("--config none.yaml", "none.yaml"),
    ("--resume runs/none", "runs/none"),
    ("--run-name there", "runs/there"),
    ("--run-name ..", "--run-name"),
    ("--run-name 'a\nb'", "--run-name"),
    (f"--run-name {LONG}", "--run-name"),
    ("--device cuda:99", "--device cuda:99"),
    ("--offload-optimizer --device cpu", "--offload-optimizer"),
    ("--model-id nobody/nothing", "--model-id nobody/nothing"),
    ("--template-options enable_thinking=false", "--template-options enable_thinking"),
]

MODELS = [  # a folder of the fixture `wrong`, and what the message names
    ("missing", "config.json"),
    ("good/config.json", "folder"),
    ("adapter", "adapter"),
    ("unknown_type", "nonsense"),
    ("wrong_width", "weights"),
    ("half_the_layers", "11 of its weights"),
    ("without_weights", "model.safetensors"),
    ("cut_short", "SafetensorError"),
    ("without_tokenizer", "tokenizer.json"),
    ("without_template", "chat template"),
    ("template_without_header", "ignores add_generation_prompt"),
    ("template_in_capitals", "leaves out or rewrites"),
    ("stop_beyond_embeddings", "stop token 9999 "),
    ("huge_weights", "its logits are not finite"),
]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """A folder with unusable models and data."""
    root = tmp_path_factory.mktemp("wrong")
    good = Path(save_small("qwen3", root / "good"))
    settings, data = json.loads((good / "config.json").read_text()), "model.safetensors"
    weights = load_file(good / data)
    of_layer_0 = {k: v for k, v in weights.items() if "layers.1." not in k}
    template = (good / "chat_template.jinja").read_text()

    up = "model.layers.0.mlp.up_proj.weight"

    changes = {  # files of the good model and their new content; None: delete the file
        "unknown_type": {"config.json": {**settings, "model_type": "nonsense"}},
        "wrong_width": {"config.json": {**settings, "hidden_size": 64}},
        "without_weights": {data: None},
        "cut_short": {data: (good / data).read_bytes()[:9000]},
        "half_the_layers": {data: of_layer_0},
        "without_tokenizer": {"tokenizer.json": None, "tokenizer_config.json": None},
        "without_template": {"chat_template.jinja": None},
        "template_without_header": {
            "chat_template.jinja": template.partition("{% if add_generation_prompt %}")[0].encode()
        },
        "template_in_capitals": {
            "chat_template.jinja": template.replace("m.content", "m.content | upper").encode()
        },
        "huge_weights": {data: weights | {up: weights[up] * 1e38}},
        "stop_beyond_embeddings": {"generation_config.json": {"eos_token_id": [9999]}},
    }
    for name, files in changes.items():
        shutil.copytree(good, root / name)
        for file, content in files.items():
            path = root / name / file
            if content is None:
                path.unlink()
            elif isinstance(content, bytes):
                path.write_bytes(content)
            elif file == data:
                save_file(content, path, metadata={"format": "pt"})
            else:
                path.write_text(json.dumps(content))
    (root / "adapter").mkdir()
    (root / "adapter/adapter_config.json").write_text("{}")
    (root / "shape.jsonl").write_text('{"q": "1 + 1", "a": 2}\n' * 20)
    return root


@pytest.fixture
def place(tmp_path, wrong):
    """The working directory of the commands, with a run called `there` and the wrong files."""
    (tmp_path / "wrong").symlink_to(wrong)
    (tmp_path / "runs/there").mkdir(parents=True)
    (tmp_path / "runs/there/config.yaml").write_text("algo: grpo\n")
    return tmp_path


def contents(place):
    """Every file with its content; of the wrong files the size and the time."""
    files = {p: p.read_bytes() if p.is_file() else None for p in place.rglob("*")}
    linked = (place / "wrong").resolve().rglob("*")
    return files, {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in linked}


def check_rejected(command, place, args, named):
    before = contents(place)
    code, out, err = command(*args)
    assert (code, out) == (2, "")
    assert err.startswith("train.py: ") and named in err
    assert err.endswith("\n") and err[:-1].isprintable()  # no line breaks, no colours
    assert contents(place) == before


@pytest.mark.parametrize(("settings", "named"), SETTINGS, ids=str)
def test_invalid_settings_are_named_in_one_line(settings, named):
    with pytest.raises(UsageError, match=re.escape(named)) as error:
        train.prepare(Config(**settings))
    assert str(error.value).isprintable()


def test_a_run_that_only_evaluates_needs_no_groups():
    assert train.prepare(Config(group_size=1, num_updates=0)).group_size == 1


@pytest.mark.parametrize(("line", "named"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_an_invalid_command_is_one_line_and_code_2(command, place, line, named):
    check_rejected(command, place, shlex.split(line), named)


@pytest.mark.parametrize("line", ["--lrr 1", "--lr fast", "--num-updates 1.5", "--algo gpro"])
def test_what_tyro_rejects_has_code_2_and_names_the_argument(command, place, line):
    code, out, err = command(*line.split())
    assert (code, out) == (2, "") and line.split()[0] in err.replace("\n", " ")


@pytest.mark.parametrize(("folder", "named"), MODELS)
def test_an_unusable_model_is_one_line_and_code_2(command, place, folder, named):
    flags = ["--model-id", f"./wrong/{folder}", "--device", "cpu"]
    check_rejected(command, place, flags, named)


def test_a_missing_package_is_named_with_the_command_to_install_it(command, place, monkeypatch):
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    check_rejected(command, place, ["--sampler", "vllm"], "pip install")
