"""Invalid commands, config files and models: one line that names the cause, exit code 2, no files.

tyro reports wrong flags and values in a box of its own; every other line is from picoRL.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import save_small
from safetensors.torch import load_file, save_file

import train
from core import config

ROOT = Path(train.__file__).parent
LONG = "x" * 300

COMMANDS = [  # a command line, and the flag that its message names
    # values out of range
    ("--num-prompts 0", "--num-prompts"),
    ("--num-updates -5", "--num-updates"),
    ("--lr nan", "--lr"),
    ("--temperature inf", "--temperature"),
    ("--sft-steps 1" + "0" * 400, "--sft-steps"),
    ("--gamma 99", "--gamma"),
    ("--algo ppo --ppo.gae-lambda 95", "--ppo.gae-lambda"),
    ("--grpo.clip-high inf", "--grpo.clip-high"),
    ("--grpo.dual-clip 0.5", "--grpo.dual-clip"),
    ("--seed 99999999999999999999", "--seed"),
    ("--tis-cap 0.5", "--tis-cap"),
    ("--clip-cov 1.5", "--clip-cov"),
    ("--fp32-head --dtype float32", "--fp32-head"),
    ("--clip-cov 0.1 --clip-cov-low 6", "--clip-cov-low"),
    ("--group-size 1", "--group-size"),
    ("--algo reinforce --reinforce.baseline leave_one_out --group-size 1", "--group-size"),
    ("--algo reinforce --filter-groups 1 --group-size 1", "--group-size"),
    ("--num-minibatches 129", "--num-minibatches"),
    ("--overlong-buffer 65", "--overlong-buffer"),
    ("--max-model-len 64", "--max-model-len"),
    ("--stop-on nonsense", "--stop-on"),
    ("--temperature 1e-300", "--temperature must be from 0.01 to 100, not 1e-300"),
    ("--lr 1e308", "--lr must be from 1e-12 to 100, not 1e+308"),
    ("--grpo.clip-low 5", "--grpo.clip-low must be from 0 to 1, not 5.0"),
    ("--max-tokens 1000000000000000000000", "--max-tokens must be from 1 to 1,000,000, not 10000"),
    ("--group-size 1000000000000000000000", "--group-size must be from 1 to 1,000,000, not 10000"),
    ("--num-prompts 1000000 --group-size 2", "--num-prompts must be at most 1,000,000 / --group"),
    ("--eval-num-tasks 2000 --eval-samples 501", "--eval-samples must be at most 1,000,000"),
    ("--env-timeout 1e-8", "--env-timeout must be 0 or from 0.001 to 1,000,000, not 1e-08"),
    ("--env-timeout 3e38", "--env-timeout"),
    # settings that contradict others, or have no effect
    ("--config a.yaml --resume runs/there", "--resume"),
    ("--algo reinforce --ppo.clip 0.3", "--ppo.*"),
    ("--algo ppo --credit episode", "--credit"),
    ("--kl-coef 0.1 --kl-in reward", "--kl-in reward"),
    ("--kl-estimator k3", "--kl-coef"),
    ("--lora-alpha 16", "--lora-rank"),
    ("--quantize nf4", "--lora-rank"),
    ("--grpo.loss-type cispo --grpo.dual-clip 3", "--grpo.dual-clip"),
    ("--tis-cap 0 --tis-mode mask", "--tis-mode"),
    ("--clip-cov-high 9", "--clip-cov"),
    ("--kl-cov-coef 2", "--kl-cov"),
    ("--kl-cov 0.01", "--num-minibatches"),
    ("--algo scratch --clip-cov 0.1", "--clip-cov"),
    ("--optimizer adamw8bit --dtype float64", "--dtype float64"),
    ("--optimizer adamw_bf16_sr --dtype float32", "--dtype bfloat16"),
    ("--optimizer adamw_bf16_sr --lora-rank 4", "adamw8bit"),
    ("--optimizer adamw_bf16_sr --offload-optimizer", "masters"),
    ("--optimizer adamw8bit --shard-optimizer on", "--shard-optimizer on"),
    ("--offload-optimizer --device cpu", "--offload-optimizer"),
    ("--train-difficulty 12", "12"),
    ("--train-difficulty 3 --env tic_tac_toe", "--train-difficulty"),
    ("--curriculum 0.8 --env snake", "--curriculum"),
    ("--algo scratch --credit turn", "--credit turn"),
    ("--algo scratch --top-k 5", "--top-k"),
    ("--algo scratch --sampler openai", "--sampler"),
    ("--algo scratch --grpo.clip-high 0.3", "--grpo.*"),
    ("--algo ppo --scratch.advantages 7", "--scratch.*"),
    ("--algo scratch --kl-coef 0.1 --kl-estimator k1", "--kl-estimator"),
    ("--algo scratch --kl-coef 0.1 --kl-in reward", "--kl-in reward"),
    ("--algo scratch", "--algo scratch"),
    # environments
    ("--env", "--env"),
    ("--env ''", "environment ''"),
    ("--env leter_counting", "letter_counting"),
    ("--env letter_counting:level=3", "'level'"),
    ("--env letter_counting:3", "'3'"),
    ("--env letter_counting:difficulty=hard", "'hard'"),
    ("--env letter_counting:difficulty=99", "99"),
    ("--env snake --eval-env snaek", "snaek"),
    ("--sft-steps 1 --env gymnasium:id=Acrobot-v1", "--sft-steps 0"),
    ("--env math_qa:data=none.jsonl", "none.jsonl"),
    ("--env math_qa:data=wrong/shape.jsonl", "line 1"),
    ("--env math_qa:data=wrong/binary", "wrong/binary"),
    ("--sft-steps 1 --env remote:command=/nowhere", "/nowhere"),
    ("--sft-steps 1 --env remote:command=false", "remote"),
    # files and folders
    ("--config none.yaml", "none.yaml"),
    ("--config runs", "runs"),
    (f"--config {LONG}", LONG),
    ("--resume runs/none", "runs/none"),
    ("--resume runs/there --lora-rank 4", "lora_rank"),
    ("--resume runs/there --grpo.clip-low 0.5", "grpo.clip_low"),
    ("--run-name there", "runs/there"),
    ("--run-name a/b", "--run-name"),
    ("--run-name ..", "--run-name"),
    ("--run-name ' '", "--run-name"),
    ("--run-name 'a\nb'", "--run-name"),
    ("--run-name a\udcff", "--run-name"),  # not UTF-8
    (f"--run-name {LONG}", "--run-name"),
    # devices, models and servers
    ("--device cuda:99", "--device cuda:99"),
    ("--device gpu", "--device"),
    ("--device ''", "--device"),
    ("--model-id nobody/nothing", "--model-id nobody/nothing"),
    (f"--model-id {LONG}", "--model-id"),
    ("--sampler openai --base-url http://127.0.0.1:9/v1", "--num-updates 0"),
    ("--sampler openai --num-updates 0", "--base-url"),
    ("--sampler openai --num-updates 0 --base-url localhost", "--base-url"),
    ("--sampler openai --num-updates 0 --base-url http://a:b", "--base-url"),
    ("--sampler openai --num-updates 0 --base-url http://a --temperature 1 --top-k 5", "--top-k"),
    ("--base-url http://127.0.0.1:9", "--sampler openai"),
    ("--api-concurrency 4", "--sampler openai"),
    ("--api-timeout 60", "--sampler openai"),
    ("--sampler openai --base-url http://a --num-updates 0 --api-timeout 0", "--api-timeout"),
    ("--sampler torch --vllm-eager", "--sampler vllm"),
    # the chat template
    ("--template-options thinking", "key=value"),
    ("--template-options a=1,a=2", "'a' is given twice"),
    ("--template-options enable_thinking=false", "--template-options enable_thinking"),
    ("--sampler openai --base-url http://a --num-updates 0 --template-options a=1", "--template"),
    ("--template-date tomorrow", "--template-date"),
]

MODELS = [  # a folder of the fixture `wrong`, and what the message names
    ("missing", "config.json"),
    ("good/config.json", "folder"),
    ("adapter", "adapter"),
    ("broken_config", "config"),
    ("unknown_type", "nonsense"),
    ("wrong_width", "weights"),
    ("half_the_layers", "11 of its weights"),
    ("without_weights", "model.safetensors"),
    ("cut_short", "SafetensorError"),
    ("without_tokenizer", "tokenizer.json"),
    ("cut_tokenizer", "--model-id"),
    ("without_template", "chat template"),
    ("broken_template", "chat template"),
    ("template_without_header", "ignores add_generation_prompt"),
    ("template_in_capitals", "leaves out or rewrites"),
    ("stop_beyond_embeddings", "stop token 9999 "),
    ("no_layers", "num_hidden_layers in config.json is 0"),
    ("stop_that_is_a_text", "eos_token_id in generation_config.json is '</s>', not an id"),
    ("tokenizer_with_a_wrong_limit", "can't be loaded"),
    ("negative_stop", "eos_token_id in config.json is -1, not an id"),
    ("nan_in_a_row", "model.embed_tokens.weight contains NaN or infinity"),
    ("infinite_weight", "up_proj.weight contains NaN or infinity"),
    ("integers", "up_proj.weight has the dtype I8"),
    ("booleans", "up_proj.weight has the dtype BOOL"),
    ("huge_weights", "its logits are not finite"),
    ("no_positions", "max_position_embeddings in config.json is 0"),
]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """A folder with unusable models and data."""
    root = tmp_path_factory.mktemp("wrong")
    good = Path(save_small("qwen3", root / "good"))
    settings, data = json.loads((good / "config.json").read_text()), "model.safetensors"
    weights = load_file(good / data)
    of_tokenizer = json.loads((good / "tokenizer_config.json").read_text())
    of_layer_0 = {k: v for k, v in weights.items() if "layers.1." not in k}
    of_no_layer = {k: v for k, v in weights.items() if ".layers." not in k}
    template = (good / "chat_template.jinja").read_text()
    without_layers = {**settings, "num_hidden_layers": 0, "layer_types": []}

    up, embedding = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"
    with_nan, with_inf = weights[embedding].clone(), weights[up].clone()
    with_nan[5], with_inf[3, 4] = torch.nan, -torch.inf

    changes = {  # files of the good model and their new content; None: delete the file
        "broken_config": {"config.json": b"{"},
        "unknown_type": {"config.json": {**settings, "model_type": "nonsense"}},
        "wrong_width": {"config.json": {**settings, "hidden_size": 64}},
        "without_weights": {data: None},
        "cut_short": {data: (good / data).read_bytes()[:9000]},
        "half_the_layers": {data: of_layer_0},
        "without_tokenizer": {"tokenizer.json": None, "tokenizer_config.json": None},
        "cut_tokenizer": {"tokenizer.json": (good / "tokenizer.json").read_bytes()[:500]},
        "without_template": {"chat_template.jinja": None},
        "broken_template": {"chat_template.jinja": b"{% for m in %}"},
        "template_without_header": {
            "chat_template.jinja": template.partition("{% if add_generation_prompt %}")[0].encode()
        },
        "template_in_capitals": {
            "chat_template.jinja": template.replace("m.content", "m.content | upper").encode()
        },
        "stop_that_is_a_text": {"generation_config.json": {"eos_token_id": [1, "</s>"]}},
        "tokenizer_with_a_wrong_limit": {
            "tokenizer_config.json": {**of_tokenizer, "model_max_length": []}
        },
        "negative_stop": {"config.json": {**settings, "eos_token_id": -1}},
        "nan_in_a_row": {data: weights | {embedding: with_nan}},
        "infinite_weight": {data: weights | {up: with_inf}},
        "integers": {data: weights | {up: (10 * weights[up]).to(torch.int8)}},
        "booleans": {data: weights | {up: weights[up] > 0}},
        "huge_weights": {data: weights | {up: weights[up] * 1e38}},
        "no_positions": {"config.json": {**settings, "max_position_embeddings": 0}},
        "stop_beyond_embeddings": {"generation_config.json": {"eos_token_id": [9999]}},
        "no_layers": {"config.json": without_layers, data: of_no_layer},
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
    (root / "binary").write_bytes(b"\xff\xfe\0" * 50)
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


@pytest.mark.parametrize(("line", "named"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_an_invalid_command_is_one_line_and_code_2(command, place, line, named):
    check_rejected(command, place, shlex.split(line), named)


@pytest.mark.parametrize(
    "line",
    ["--lrr 1", "--lr fast", "--lr", "--num-updates 1.5", "--algo gpro", "--ppo.clip-high 1",
     "grpo"],
)  # fmt: skip
def test_what_tyro_rejects_has_code_2_and_names_the_argument(command, place, line):
    before = contents(place)
    code, out, err = command(*line.split())
    assert (code, out) == (2, "") and line.split()[0] in err.replace("\n", " ")
    assert contents(place) == before


@pytest.mark.parametrize(("folder", "named"), MODELS)
def test_an_unusable_model_is_one_line_and_code_2(command, place, folder, named):
    flags = ["--model-id", f"./wrong/{folder}", "--device", "cpu"]
    check_rejected(command, place, flags, named)


@pytest.mark.parametrize("content", ["", "lrr: 1", "lr: -1"])
def test_an_invalid_config_of_a_run_is_not_resumed(command, place, content):
    (place / "runs/there/config.yaml").write_text(content)
    named = "--lr" if content == "lr: -1" else "runs/there/config.yaml: "
    check_rejected(command, place, ["--resume", "runs/there"], named)


def test_a_shell_gets_one_line_and_code_2(place):
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "--config", "wrong/binary"], cwd=place,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "wrong/binary" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "flags", [["--sampler", "vllm"], ["--track", "trackio"], ["--optimizer", "adamw8bit"]]
)
def test_a_missing_package_is_named_with_the_command_to_install_it(
    command, place, monkeypatch, flags
):
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    check_rejected(command, place, flags, "pip install")
