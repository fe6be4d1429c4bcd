"""Flags win over config.yaml, which wins over the defaults; nothing unknown passes."""

import subprocess
import sys
from pathlib import Path

import pytest

from core import cli
from core.config import check, resolve
from core.types import UsageError
from train import ALGORITHMS, Config


def test_settings_survive_yaml(tmp_path):
    import yaml

    flags = "--algo ppo --ppo.clip 0.3 --env a:k=1 b --lr 3e-5 --track wandb --lora-alpha 8"
    config = resolve(cli.parse(Config, flags.split()))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(cli.to_dict(config, ALGORITHMS)))
    assert cli.from_yaml(Config, file) == config


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("lr: 0.5\nnum_updates: 7\ngrpo:\n  clip_high: 0.4\n")
    config = cli.parse(Config, ["--config", str(file), "--num-updates", "9"])
    assert (config.lr, config.num_updates, config.grpo.clip_high) == (0.5, 9, 0.4)
    assert cli.parse(Config, [f"--config={file}"]).num_updates == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: 1", "unknown setting learning_rate"),
        ("grpo:\n  clip: 1", "unknown setting grpo.clip"),
        ("lr:\n  high: 1", "lr has no settings of its own"),
        ("just words", "not a config"),
        ("a: [", "not YAML"),
        ("", "not a config"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        cli.parse(Config, ["--config", str(file)])


def test_a_value_of_the_wrong_type_in_a_file_is_refused_as_a_flag_is(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("num_updates: many")
    for args, where in ((["--config", str(file)], f"{file}: "), (["--num-updates", "many"], "")):
        with pytest.raises(UsageError) as error:
            cli.parse(Config, args)
        told = "--num-updates is a whole number, not 'many'; see python train.py --help"
        assert str(error.value) == f"{where}{told}"


def test_a_file_keeps_texts_that_look_like_flags_and_the_on_and_off_of_yaml(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("run_name: --lr\ngradient_checkpointing: off\nlr:\ncache: no\nenv: snake\n")
    config = cli.parse(Config, ["--config", str(file)])
    assert (config.run_name, config.gradient_checkpointing, config.lr) == ("--lr", "off", None)
    assert (config.cache, config.env) == (False, ("snake",))


def test_of_a_flag_given_twice_the_last_counts(tmp_path):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        (tmp_path / name).write_text(f"lr: {lr}\n")
    args = ["--config", str(tmp_path / "a"), f"--config={tmp_path / 'b'}"]
    assert cli.parse(Config, args).lr == 0.2
    assert cli.parse(Config, ["--lr", "1", "--lr", "3"]).lr == 3


def test_every_flag_of_the_help_has_words_for_what_it_takes():
    from core.config import NOT_NEGATIVE, POSITIVE

    flags = cli._flags(Config)
    assert {f"--{n.replace('_', '-')}" for n in POSITIVE + NOT_NEGATIVE} <= set(flags)
    assert all(cli._takes(kind) for kind in flags.values() if kind != tuple[str, ...])


def test_what_tyro_says_without_a_flag_is_passed_on_in_one_line():
    rows = ["two", "lines", "For full helptext, run train.py --help"]
    box = "\n".join(["\u256d\u2500 Title \u2500\u256e", *(f"\u2502 {row} \u2502" for row in rows)])
    assert cli._refused({}, [], box) == "Title two lines"


@pytest.mark.parametrize(
    ("flags", "lr", "sft_steps", "max_tokens"),
    [
        ("", 1e-4, 800, 64),
        ("--model-id x/y", 1e-6, 0, 1024),
        ("--model-id x/y --lora-rank 8", 2e-5, 0, 1024),
        ("--lr 0.1 --sft-steps 3 --max-tokens 5", 0.1, 3, 5),
    ],
)
def test_what_is_not_given_follows_from_the_model(flags, lr, sft_steps, max_tokens):
    config = resolve(cli.parse(Config, flags.split()))
    check(config, ALGORITHMS)
    assert (config.lr, config.sft_steps, config.max_tokens) == (lr, sft_steps, max_tokens)


def test_the_command_of_the_design_is_valid():
    flags = """--algo grpo --model-id Qwen/Qwen3-4B-Instruct-2507 --lora-rank 32 --sft-steps 50
        --train-difficulty 6"""
    config = resolve(cli.parse(Config, flags.split()))
    check(config, ALGORITHMS)
    assert (config.lora_rank, config.sft_steps, config.train_difficulty) == (32, 50, 6)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [(["--help"], 0, "--grpo.clip-high"), (["--lr", "fast"], 2, "--lr"), (["--flag"], 2, "--flag")],
)
def test_help_and_mistakes_are_answered_before_torch_is_imported(args, code, said):
    command = [sys.executable, "-X", "importtime", "train.py", *args]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert done.returncode == code and said in done.stdout + done.stderr
    assert "tyro" in imported and not {"torch", "transformers", "numpy"} & imported
