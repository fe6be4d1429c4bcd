"""Commands and files as people get them wrong: each is one line that says so, and exit code 2.

Nothing is left behind, nothing overwritten, and stdout says nothing. The first table is of command
lines, the second of config.yaml files, the third of models' folders, the last of other commands.
"""

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import save_small
from safetensors.torch import load_file, save_file

import train
from core import run_log

ROOT = Path(train.__file__).parent
LONG = "x" * 300

COMMANDS = [
    # flags that aren't there
    ("--lrr 1", "there is no flag '--lrr'; perhaps you meant --lr; see python train.py --help"),
    ("--learning-rate 1e-5", "perhaps you meant --lr;"),
    ("--learning_rate=1e-5", "perhaps you meant --lr;"),
    ("--batch-size 8", "perhaps you meant --num-prompts"),
    ("--num-generations 8", "perhaps you meant --group-size"),
    ("--epochs 2", "perhaps you meant --num-epochs"),
    ("--model Qwen/Qwen3-4B", "perhaps you meant --model-id"),
    ("--clip-high 0.3", "perhaps you meant --grpo.clip-high"),
    ("--grpo.clip-hihg 0.3", "perhaps you meant --grpo.clip-high"),
    ("--ppo.clip-high 0.3", "there is no flag '--ppo.clip-high'"),
    ("--LR 1", "perhaps you meant --lr;"),
    ("-lr 1", "there is no flag '-lr'; perhaps you meant --lr;"),
    ("\u2014lr 1", "perhaps you meant --lr;"),  # a dash as a text processor writes it
    ("--no-lr", "there is no flag '--no-lr'"),
    ("--no-cahce", "perhaps you meant --no-cache"),
    ("--help=me", "there is no flag '--help'"),
    ("-x", "there is no flag '-x'; see"),
    ("--zzz", "there is no flag '--zzz'; see"),
    # words that belong to no flag
    ("grpo", "'grpo' belongs to no flag; see"),
    ("lr 1e-5", "'lr' belongs to no flag; perhaps you meant --lr;"),
    ("algo=ppo", "'algo=ppo' belongs to no flag; perhaps you meant --algo"),
    ("''", "'' belongs to no flag"),
    ("--group-size 4 8", "--group-size takes one value, so '8' is too much"),
    ("--cache true", "--cache takes no value, so 'true' is too much"),
    ("--no-cache=1", "--no-cache takes no value, so '1' is too much"),
    ("--reinforce.normalize yes", "--reinforce.normalize takes no value"),
    # values that are missing, or of another kind
    ("--lr", "--lr has no value; it takes a number"),
    ("--lr --algo ppo", "--lr has no value; it takes a number"),
    ("--algo", "--algo has no value; it takes reinforce, grpo, ppo or scratch"),
    ("--run-name", "--run-name has no value; it takes a text"),
    ("--config", "--config has no value"),
    ("--lr fast", "--lr is a number, not 'fast'; see python train.py --help"),
    ("--lr=", "--lr is a number, not ''"),
    ("--lr 1,5", "--lr is a number, not '1,5'"),
    ("--lr 1 --lr fast", "--lr is a number, not 'fast'"),  # of two, the last counts
    ("--num_updates many", "--num-updates is a whole number, not 'many'"),
    ("--num-updates 1.5", "--num-updates is a whole number, not '1.5'"),
    ("--num-updates 1e3", "--num-updates is a whole number, not '1e3'"),
    ("--seed 0x10", "--seed is a whole number, not '0x10'"),
    (f"--lr {LONG}", f"--lr is a number, not '{'x' * 80}..'"),
    ("--lr $'1\n2'", "--lr is a number, not '$1\\n2'"),
    # choices that aren't there
    (
        "--algo gpro",
        "--algo is reinforce, grpo, ppo or scratch, not 'gpro'; perhaps you meant grpo",
    ),
    ("--algo dpo", "perhaps you meant ppo"),
    ("--algo=--lr", "--algo is reinforce, grpo, ppo or scratch, not '--lr'"),
    ("--sampler VLLM", "perhaps you meant vllm"),
    ("--dtype bf16", "perhaps you meant bfloat16"),
    ("--kl-in both", "--kl-in is loss or reward, not 'both'"),
    ("--track mlflow", "--track is none, wandb, tensorboard or trackio"),
    (
        "--grpo.ratio_level-level episode",
        "--grpo.ratio_level-level is token or sequence, not 'episode'",
    ),
    # numbers out of range
    ("--num-prompts 0", "--num-prompts must be more than 0, not 0"),
    ("--num-updates -5", "--num-updates must be 0 or more, not -5"),
    ("--lr -1e-5", "--lr must be more than 0, not -1e-05"),
    ("--lr nan", "--lr must be more than 0, not nan"),
    ("--temperature inf", "--temperature must be more than 0, not inf"),
    ("--max-grad-norm nan", "--max-grad-norm must be 0 or more, not nan"),
    ("--tis-cap inf", "--tis-cap must be 0 or more, not inf"),
    ("--kl-coef -0.1", "--kl-coef must be 0 or more"),
    ("--sft-hasty nan", "--sft-hasty is a share from 0 to 1, not nan"),
    ("--gamma 99", "--gamma is a share from 0 to 1"),
    ("--top-p 90", "--top-p is a share from 0 to 1, not 90"),
    ("--curriculum -0.5", "--curriculum is a share from 0 to 1"),
    ("--algo ppo --ppo.gae-lambda 95", "--ppo.gae-lambda is a share from 0 to 1"),
    ("--grpo.clip-high inf", "--grpo.clip-high must be 0 or more, not inf"),
    ("--seed -1", "--seed must be 0 or more"),
    ("--seed 99999999999999999999", "--seed is at most 4294967295"),
    ("--num-minibatches 129", "an update has 128 rollouts"),
    ("--max-model-len 64", "--max-model-len 64 leaves no room for a prompt beside --max-tokens 64"),
    # what contradicts, or has no effect
    ("--config a.yaml --resume runs/there", "not both"),
    ("--algo reinforce --ppo.clip 0.3", "--ppo.* options have no effect with --algo reinforce"),
    ("--lora-alpha 16", "--lora-alpha has no effect without --lora-rank"),
    ("--kl-estimator k3", "--kl-estimator has no effect without --kl-coef"),
    ("--eval-env snake --eval-num-tasks 0", "--eval-env has no effect without --eval-num-tasks"),
    ("--train-difficulty 3 --env tic_tac_toe", "--train-difficulty has no effect: no environment"),
    ("--curriculum 0.8 --env snake", "--curriculum has no effect: no environment"),
    ("--algo scratch --num-epochs 2", "--num-epochs has no effect with --algo scratch"),
    ("--algo scratch", "--algo scratch needs exercise 1 (token_logprobs)"),
    # environments
    ("--env", "--env names no environment"),
    ("--env ''", "unknown environment ''; available: connect4"),
    ("--env :", "unknown environment ''"),
    ("--env leter_counting", "did you mean letter_counting? available: connect4"),
    ("--env Snake", "did you mean snake"),
    ("--env letter_counting,math_qa", "unknown environment 'letter_counting,math_qa'"),
    ("--env letter_counting difficulty=3", "unknown environment 'difficulty=3'"),
    ("--env letter_counting:level=3", "unknown key 'level'; available keys: difficulty"),
    (
        "--env letter_counting::difficulty=3",
        "unknown key ':difficulty'; available keys: difficulty",
    ),
    ("--env letter_counting:3", "write options as key=value, not '3'"),
    ("--env letter_counting:difficulty=3,", "remove the extra comma"),
    ("--env letter_counting:,difficulty=3", "remove the extra comma"),
    ("--env letter_counting:difficulty=1,difficulty=2", "the key 'difficulty' is given twice"),
    ("--env letter_counting:difficulty=hard", "difficulty must be an integer, not 'hard'"),
    ("--env letter_counting:difficulty=", "difficulty must be an integer, not ''"),
    ("--env letter_counting:difficulty=99", "difficulty must be 1 to 10, not 99"),
    ("--env reward_hacking:proxy_weight=nan", "proxy_weight must be a number, not 'nan'"),
    ("--env wikipedia_maze:live=yes", "live must be true or false, not 'yes'"),
    ("--env snake --eval-env snaek", "did you mean snake"),
    ("--env tic_tac_toe:opponent=self", "has no demonstrations: take --sft-steps 0"),
    ("--env math_qa:data=none.jsonl", "No such file"),
    ("--env math_qa:data=runs", "Is a directory"),
    ("--env math_qa:data=wrong/empty.jsonl", "has 0 usable lines; it needs 16"),
    ("--env math_qa:data=wrong/shape.jsonl", 'line 1: not {"question": .., "answer": ..}'),
    ("--env math_qa:data=wrong/rows.jsonl", 'line 1: not {"question": .., "answer": ..}'),
    ("--env math_qa:data=wrong/binary", "--env math_qa:data=wrong/binary"),
    ("--env remote", "name either env=.. (one of ours) or command=.."),
    ("--env remote:env=snaek", "unknown environment 'snaek'"),
    ("--env remote:command=/nowhere", "can't start '/nowhere'"),
    ("--env remote:command=false", "fails: RemoteError: remote environment: "),
    ('--env "remote:command=\'x"', "No closing quotation"),
    ("--env remote:env=snake,timeout=inf", "timeout must be a number, not 'inf'"),
    # files and folders
    ("--config none.yaml", "--config none.yaml: no such file"),
    ("--config runs", "--config runs: no such file"),
    ("--config runs/there", "a folder; take runs/there/config.yaml"),
    ("--config /proc/self/mem", "/proc/self/mem: can't be read"),  # by nobody
    (f"--config {LONG}", "no such file"),
    ("--resume runs/none", "not a run folder (it has no config.yaml)"),
    ("--resume runs", "not a run folder"),
    ("--resume runs/there/config.yaml", "not a run folder"),
    (f"--resume {LONG}", "not a run folder"),
    ("--resume runs/there --lora-rank 4", "lora_rank is 0 in this run, not 4"),
    ("--run-name there", "runs/there exists; take another"),
    ("--run-name a/b", "not a plain folder name"),
    ("--run-name ..", "not a plain folder name"),
    ("--run-name /tmp", "not a plain folder name"),
    ("--run-name ' '", "begins or ends with a space"),
    ("--run-name 'a\nb'", "has characters that can't be shown: 'a\\nb'"),
    ("--run-name a\udcff", "has characters that can't be shown: 'a\\udcff'"),  # not UTF-8
    (f"--run-name {LONG}", "--run-name is at most 100 bytes"),
    # devices, models and servers
    ("--device cuda:99", "--device cuda:99: th"),  # "there is none" or "this machine has 1"
    ("--device gpu", "--device must be auto, cpu, cuda, cuda:N or mps, not 'gpu'"),
    ("--device cuda:x", "--device must be auto, cpu"),
    ("--device ''", "--device is empty"),
    ("--model-id ''", "--model-id is empty"),
    ("--model-id nobody/nothing", "--model-id nobody/nothing: can't be loaded"),
    ("--model-id a/b/c", "--model-id a/b/c: can't be loaded"),
    (f"--model-id {LONG}", "can't be loaded"),
    ("--sampler openai --base-url http://127.0.0.1:9/v1", "--sampler openai evaluates only"),
    ("--sampler openai --num-updates 0", "--sampler openai evaluates only"),
    ("--sampler openai --num-updates 0 --base-url localhost", "--base-url is like http://"),
    ("--sampler openai --num-updates 0 --base-url http://a:b", "--base-url is like http://"),
    ("--base-url http://127.0.0.1:9", "--base-url has no effect without --sampler openai"),
]

CONFIGS = [
    ("learning_rate: 1", "unknown setting learning_rate; perhaps you meant lr"),
    ("grpo:\n  clip_hihg: 1", "unknown setting grpo.clip_hihg"),
    ("clip_high: 1", "unknown setting clip_high; perhaps you meant grpo.clip_high"),
    ("1: 2", "unknown setting 1"),
    ("lr: fast", "--lr is a number, not 'fast'"),
    ("lr: [1, 2]", "lr is a number, not a list"),
    ("lr: true", "lr is a number, not 'True'"),
    ("lr: {high: 1}", "lr has no settings of its own"),
    ("num_updates:", "num_updates is a whole number, not empty"),
    ("num_updates: 2.5", "--num-updates is a whole number, not '2.5'"),
    ("seed: 2026-01-01", "--seed is a whole number, not '2026-01-01'"),
    ("run_name:", "run_name is a text, not empty"),
    ("cache: 1", "cache is true or false, not '1'"),
    ("algo: gpro", "--algo is reinforce, grpo, ppo or scratch, not 'gpro'; perhaps"),
    ("track: off", "track is none, wandb, tensorboard or trackio, not 'False'"),
    ("grpo: 0.2", "grpo has settings of its own, in lines below it"),
    ("env: 3", "env is a list of texts, '3' is not one"),
    ("env: [--lr, 3]", "env is a list of texts, '--lr' is not one"),
    ("env: []", "--env names no environment"),
    ("resume: runs/there", "resume is given on the command line, not in a file"),
    ("lr: -1", "--lr must be more than 0, not -1"),
    ("lr: .nan", "--lr must be more than 0, not nan"),
    ('run_name: "a\\0b"', "has characters that can't be shown"),
    ("", "not a config; it should have lines like `algo: grpo`"),
    ("just words", "not a config"),
    ("- lr", "not a config"),
    ("algo: grpo\nlr: [", "not YAML (line 2)"),
    ("lr: !!python/object/apply:os.getcwd []", "not YAML"),
    ("lr: 2026-99-99", "not YAML"),
    ("[" * 2000, "not YAML"),
    (b"lr: \xe9", "not YAML in UTF-8"),
    ("lr: 1".encode("utf-16"), "not YAML in UTF-8"),
    (bytes(range(256)), "not YAML in UTF-8"),
]

MODELS = [  # a folder of `models`, and what is said of it
    ("missing", "no model in this folder (no config.json)"),
    ("empty", "no model in this folder (no config.json)"),
    ("without_config", "no model in this folder (no config.json)"),
    ("good/config.json", "this is a file; give the folder"),
    ("adapter", "contains a LoRA adapter; give its base model"),
    ("broken_config", "can't be loaded: It looks like the config file"),
    ("number_as_config", "can't be loaded"),
    ("unknown_type", "can't be loaded: The checkpoint you are trying to load has model type"),
    ("wrong_width", "of its weights are missing or differ in shape"),
    ("text_as_width", "can't be loaded"),
    ("without_weights", "can't be loaded: Error no file named model.safetensors"),
    ("cut_short", "can't be loaded: SafetensorError"),
    ("zero_bytes", "can't be loaded: SafetensorError"),
    ("half_the_layers", "11 of its weights are missing or differ in shape"),
    ("without_tokenizer", "the tokenizer is missing (tokenizer.json)"),
    ("cut_tokenizer", "can't be loaded"),
    ("without_template", "the tokenizer has no chat template; use an instruct model"),
    ("broken_template", "the chat template refuses"),
    ("nothing_to_adapt", "--lora-rank 4: No `target_modules`"),
]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """Models and data that can't be used, in one folder for all rows."""
    root = tmp_path_factory.mktemp("wrong")
    good = Path(save_small("qwen3", root / "good"))
    config, data = json.loads((good / "config.json").read_text()), "model.safetensors"
    weights = load_file(good / data)
    of_layer_0 = {k: v for k, v in weights.items() if "layers.1." not in k}
    of_no_layer = {k: v for k, v in weights.items() if ".layers." not in k}
    without_layers = {**config, "num_hidden_layers": 0, "layer_types": []}

    changes = {  # of a good model: files and their new content, None for none
        "without_config": {"config.json": None},
        "broken_config": {"config.json": b"{"},
        "number_as_config": {"config.json": b"5"},
        "unknown_type": {"config.json": {**config, "model_type": "nonsense"}},
        "wrong_width": {"config.json": {**config, "hidden_size": 64}},
        "text_as_width": {"config.json": {**config, "hidden_size": "wide"}},
        "without_weights": {data: None},
        "cut_short": {data: (good / data).read_bytes()[:9000]},
        "zero_bytes": {data: b""},
        "half_the_layers": {data: of_layer_0},
        "without_tokenizer": {"tokenizer.json": None, "tokenizer_config.json": None},
        "cut_tokenizer": {"tokenizer.json": (good / "tokenizer.json").read_bytes()[:500]},
        "without_template": {"chat_template.jinja": None},
        "broken_template": {"chat_template.jinja": b"{% for m in %}"},
        "nothing_to_adapt": {"config.json": without_layers, data: of_no_layer},
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
    (root / "empty").mkdir()
    (root / "adapter").mkdir()
    (root / "adapter/adapter_config.json").write_text("{}")
    (root / "binary").write_bytes(b"\xff\xfe\0" * 50)
    (root / "empty.jsonl").write_text("")
    (root / "shape.jsonl").write_text('{"q": "1 + 1", "a": 2}\n' * 20)
    (root / "rows.jsonl").write_text('["1 + 1", 2]\n' * 20)
    return root


@pytest.fixture
def place(tmp_path, wrong):
    """Where the commands run: a run called `there`, and the wrong files."""
    (tmp_path / "wrong").symlink_to(wrong)
    (tmp_path / "runs/there").mkdir(parents=True)
    (tmp_path / "runs/there/config.yaml").write_text("algo: grpo\n")
    return tmp_path


def contents(place):
    """Every file and what is in it, the wrong ones by their size and time."""
    kept = {p: p.read_bytes() if p.is_file() else None for p in place.rglob("*")}
    beside = (place / "wrong").resolve().rglob("*")
    return kept, {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in beside}


def check_refused(command, place, args, message):
    before = contents(place)
    code, out, err = command(*args)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("train.py: ") and err.endswith("\n")
    assert err[:-1].isprintable()  # so it has no line breaks, nor colours
    assert contents(place) == before


@pytest.mark.parametrize(("line", "message"), COMMANDS, ids=[c for c, _ in COMMANDS])
def test_a_wrong_command_is_one_line_and_code_2(command, place, line, message):
    check_refused(command, place, shlex.split(line), message)


@pytest.mark.parametrize(("content", "message"), CONFIGS)
def test_a_wrong_config_is_one_line_that_names_it_if_its_type_is_wrong(
    command, place, content, message
):
    (place / "c.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    named = "" if message.startswith(("--env names", "--lr must", "has char")) else "c.yaml: "
    check_refused(command, place, ["--config", "c.yaml"], f"{named}{message}")


@pytest.mark.parametrize(("folder", "message"), MODELS)
def test_a_wrong_model_is_one_line_and_code_2(command, place, folder, message):
    flags = ["--model-id", f"./wrong/{folder}", "--device", "cpu"]
    flags += ["--lora-rank", "4"] if folder == "nothing_to_adapt" else []
    check_refused(command, place, flags, message)


@pytest.mark.parametrize("content", ["", "[", "lrr: 1", "lr: fast"])
def test_a_run_whose_config_was_broken_is_not_resumed(command, place, content):
    (place / "runs/there/config.yaml").write_text(content)
    check_refused(command, place, ["--resume", "runs/there"], "runs/there/config.yaml: ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lrr", "1"], "perhaps you meant --lr"),
        (["--config", "wrong/binary"], "not YAML"),
        pytest.param(
            ["--model-id", "wrong/wrong_width"], "of another shape", marks=pytest.mark.slow
        ),
    ],
)
def test_what_a_shell_gets_is_one_line_and_code_2(place, args, message):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "40"}
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *args], cwd=place, env=environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert [p.name for p in (place / "runs").iterdir()] == ["there"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("play", "which environment? python -m environments play NAME"),
        ("play chess", "unknown environment 'chess'; available: connect4"),
        ("plaiy chess", "invalid choice 'plaiy' for argument 'what'. Expected one of ('list', "),
        ("show snake --seed x", "Error parsing --seed: invalid literal for int()"),
        ("show snake --sed 3", "Unrecognized options: --sed, 3; see python -m environments --help"),
        ("show snake now", "Unrecognized options: now; see"),
        ("show snaek", "did you mean snake"),
        ("show snake:size=x", "size must be an integer, not 'x'"),
        ("show snake:size=99", "size must be 4 to 20, not 99"),
    ],
)
def test_a_wrong_environment_to_play_is_one_line(monkeypatch, capsys, args, message):
    monkeypatch.setattr(sys, "argv", ["environments", *args.split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("environments", run_name="__main__")
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "which runs? python -m core.run_log runs/a runs/b"),
        (["--help"], "which runs?"),
        (["runs/none"], "runs/none: not a run folder"),
        (["runs"], "runs: not a run folder"),
        (["runs/there"], "not a run folder (it has no metrics.jsonl)"),
        (["runs/bad"], "not a run's settings"),
    ],
)
def test_wrong_runs_to_compare_are_one_line(monkeypatch, capsys, place, args, message):
    monkeypatch.chdir(place)
    Path("runs/bad").mkdir()
    Path("runs/bad/config.yaml").write_text("- algo")
    Path("runs/bad/metrics.jsonl").write_text("{}\n")
    before = contents(place)
    assert run_log.main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1
    assert contents(place) == before


def test_the_tables_are_as_long_as_people_are_inventive():
    lines = [*(line for line, _ in COMMANDS), *(c for c, _ in CONFIGS), *(f for f, _ in MODELS)]
    assert len(set(lines)) == len(lines) >= 75
