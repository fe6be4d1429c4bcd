"""Flags override config.yaml, which overrides the defaults; unknown settings are rejected."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_files import small_files

from core import cli, config
from core.config import Config, resolve, validate
from core.run_dir import config_to_dict, quoted, read_config
from core.types import Fault, UsageError

ROOT = Path(__file__).parent.parent


def written(folder, text):
    file = folder / "config.yaml"
    file.write_text(text)
    return file


def test_settings_survive_yaml(tmp_path):
    flags = "--algo ppo --ppo.clip 0.3 --env a:k=1 b --lr 3e-5 --track wandb --lora-alpha 8"
    cfg = resolve(cli.parse(flags.split()))
    assert read_config(written(tmp_path, yaml.safe_dump(config_to_dict(cfg)))) == cfg


def test_flags_override_the_file(tmp_path):
    file = written(tmp_path, "lr: 0.5\nnum_updates: 7\ngrpo:\n  clip_high: 0.4\n")
    cfg = cli.parse(["--config", str(file), "--num-updates", "9"])
    assert (cfg.lr, cfg.num_updates, cfg.grpo.clip_high) == (0.5, 9, 0.4)
    assert cli.parse([f"--config={file}"]).num_updates == 7


def test_a_file_may_use_yaml_words_and_exponents(tmp_path):
    text = (
        "run_name: --lr\ngradient_checkpointing: off\nlr: 1e-5\nsft_lr:\ntrack: none\nenv: snake\n"
    )
    cfg = read_config(written(tmp_path, text))
    assert (cfg.run_name, cfg.gradient_checkpointing, cfg.lr) == ("--lr", "off", 1e-5)
    assert (cfg.sft_lr, cfg.track, cfg.env) == (None, "none", ("snake",))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("learning_rate: 1", "learning_rate"),
        ("grpo:\n  clip: 1", "grpo.clip"),
        ("grpo: 0.2", "grpo"),
        ("lr: {high: 1}", "lr"),
        ("lr: [1, 2]", "lr"),
        ("lr: fast", "lr"),
        ("num_updates: 2.5", "num_updates"),
        ("num_updates:", "num_updates"),
        ("cache: 1", "cache"),
        ("algo: gpro", "algo"),
        ("resume: runs/a", "resume"),
        ("trust: true", "trust"),
        ("just words", ""),
        ("", ""),
        ("a: [", "YAML"),
        ("[" * 600, "YAML"),
        ("lr: \xe9".encode("latin-1"), "YAML"),
        ("lr: 1".encode("utf-16"), "YAML"),
    ],
)
def test_an_invalid_file_is_one_line_with_its_name(tmp_path, capsys, text, named):
    file = tmp_path / "c.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cli.run(lambda cfg: 0, ["--config", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("train.py: ") and f"{file}" in err and named in err


def test_a_setting_that_is_gone_is_named_and_refused_only_if_it_had_another_value(tmp_path, capsys):
    assert read_config(written(tmp_path, "lr: 0.5\nenv_workers: 64\n")).lr == 0.5
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "env_workers" in err
    with pytest.raises(UsageError, match="env_workers"):
        read_config(written(tmp_path, "env_workers: 1\n"))


TRAINED = {"algo": "grpo", "env": ["letter_counting"], "lr": 5e-05, "seed": 0, "eval_every": 10,
           "model_id": "old/model", "device": "auto", "sampler": "auto"}  # fmt: skip


@pytest.fixture
def resume(tmp_path, monkeypatch):
    """Parses the flags of a resume of runs/a, which was trained with TRAINED, from a config.yaml
    with these changes; None leaves a line out."""
    monkeypatch.chdir(tmp_path)

    def parse(flags, **changes):
        checkpoint = Path("runs/a/checkpoint/000000-000002")
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "state.json").write_text(json.dumps({"settings": TRAINED}))
        lines = {k: v for k, v in (TRAINED | changes).items() if v is not None}
        text = "".join(f"{name}: {value}\n" for name, value in lines.items())
        Path("runs/a/config.yaml").write_text(text)
        return cli.parse(flags.split())

    return parse


@pytest.mark.parametrize(("flags", "name", "value"), [
    ("--num-updates 9", "num_updates", 9), ("--env-timeout 5", "env_timeout", 5),
    ("--base-url http://a", "base_url", "http://a"), ("--eval-every 3", "eval_every", 3),
    ("--eval-num-tasks 8", "eval_num_tasks", 8), ("--device cpu", "device", "cpu"),
    ("--sampler torch", "sampler", "torch"), ("--model-id moved/it", "model_id", "moved/it"),
    ("--lr 0.4 --allow-changes", "lr", 0.4),
])  # fmt: skip
def test_a_resumed_run_may_change(resume, flags, name, value):
    cfg = resume(f"--resume runs/a {flags}")
    assert getattr(cfg, name) == value and (cfg.lr == 5e-05 or name == "lr")


@pytest.mark.parametrize(
    "flag", ["--lr 0.4", "--grpo.clip-low 0.5", "--lora-rank 4", "--sampler openai"]
)
def test_a_resumed_run_keeps_its_other_settings(resume, flag):
    named = flag.split()[0].removeprefix("--").replace("-", "_")
    with pytest.raises(UsageError, match=f"{named} is .* --allow-changes"):
        resume(f"--resume runs/a {flag}", grpo="{clip_low: 0.2}", lora_rank=0)


def test_an_edited_config_is_named_and_another_form_of_a_value_is_no_change(resume):
    same = {"lr": "5e-05", "env": "letter_counting", "seed": "'0'"}
    assert resume("--resume runs/a", **same) == resume("--resume runs/a")
    assert resume("--resume runs/a", lr=None).lr == 5e-05  # of the checkpoint
    with pytest.raises(UsageError, match=r"config\.yaml has lr 0\.1, .* 5e-05"):
        resume("--resume runs/a", lr=0.1)
    assert resume("--resume runs/a --allow-changes", lr=0.1).lr == 0.1


def test_a_run_is_resumed_by_its_name_and_not_by_a_folder_inside_it(resume):
    assert Path(resume("--resume a").resume) == Path("runs/a")
    with pytest.raises(UsageError, match=r"write --resume runs.a$"):
        resume("--resume runs/a/checkpoint/000000-000002")
    with pytest.raises(UsageError, match="not both"):
        resume("--resume runs/a --config runs/a/config.yaml")


def test_printed_commands_are_quoted_for_the_shell_of_the_system(monkeypatch):
    words = ["python", "train.py", "--resume", "my run"]
    monkeypatch.setattr(os, "name", "posix")
    assert quoted(words) == "python train.py --resume 'my run'"
    monkeypatch.setattr(os, "name", "nt")
    assert quoted(words) == 'python train.py --resume "my run"'


def test_run_returns_the_exit_code_and_prints_one_line(capsys):
    def fails(error):
        raise error

    assert cli.run(lambda cfg: cfg.num_updates, ["--num-updates", "3"]) == 3
    assert cli.run(lambda cfg: fails(UsageError("two\nlines, \x1b[31mred")), []) == 2
    assert cli.run(lambda cfg: fails(Fault("no memory")), []) == 1
    assert cli.run(lambda cfg: fails(KeyboardInterrupt()), []) == 130
    assert capsys.readouterr().err.splitlines() == [
        "train.py: two lines, [31mred", "train.py: no memory"
    ]  # fmt: skip


def test_a_disk_that_fails_outside_a_run_is_one_line(tmp_path, capsys):
    def write(cfg):
        return (tmp_path / "x").write_text("0123456789")

    with small_files(9):
        assert cli.run(write, []) == 1
    assert capsys.readouterr().err == (
        "train.py: a file: File too large; fix this, then run the same command\n"
    )
    with pytest.raises(FileNotFoundError):  # a mistake in the code
        cli.run(lambda cfg: len((tmp_path / "y").read_text()), [])


@pytest.mark.parametrize(
    ("flags", "lr", "sft_lr", "max_tokens"),
    [
        ("", 5e-5, 2e-3, 64),
        ("--model-id tiny-random", 5e-5, 2e-3, 64),
        ("--model-id x/y", 1e-6, 1e-5, 1024),
        ("--model-id x/y --lora-rank 8", 2e-5, 1e-4, 1024),
        ("--lr 0.1 --sft-lr 3e-3 --max-tokens 5", 0.1, 3e-3, 5),
    ],
)
def test_defaults_depend_on_the_model(flags, lr, sft_lr, max_tokens):
    cfg = resolve(cli.parse(flags.split()))
    validate(cfg)
    assert (cfg.lr, cfg.sft_lr, cfg.max_tokens) == (lr, sft_lr, max_tokens)
    assert cfg.sft_steps == 0


def test_every_number_has_a_range_whose_ends_are_valid():
    numbers = {name for name, value in vars(resolve(Config())).items()
               if type(value) in (int, float)}  # fmt: skip
    for name in config.ALGORITHMS:
        options = vars(getattr(Config(), name)).items()
        numbers |= {f"{name}.{k}" for k, v in options if type(v) in (int, float)}
    others = {"max_tokens_per_micro_batch", "grpo.clip_low", "grpo.clip_high", "ppo.value_lambda"}
    assert config.RANGE_OF.keys() == numbers | others  # None by default
    for name, allowed in config.RANGE_OF.items():
        assert not any(config.range_problem(name, x) for x in (allowed.low, allowed.high))
        for beyond in (allowed.low - 1e-13, allowed.high * (1 + 1e-15), math.nan):
            assert config.flag(name) in config.range_problem(name, beyond)
    assert not config.range_problem("tis_cap", 0) and config.range_problem("lr", 0)


def test_help_begins_with_the_settings_that_matter_and_shows_all_others_in_groups(capsys):
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    text = capsys.readouterr().out
    parts = re.split(r"^\W*([a-z ]+) options\W*$", text, flags=re.MULTILINE)
    boxes = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert next(iter(boxes)) == "main"
    assert len(re.findall(r"^\W*--", boxes["main"], flags=re.MULTILINE)) == 10
    for flag, box in (("--lr", "main"), ("--top-p", "sampling"), ("--grpo.clip-high", "grpo")):
        assert re.search(rf"^\W*{flag} ", boxes[box], flags=re.MULTILINE)
    for name in {*vars(Config()), *config.RANGE_OF} - {*config.ALGORITHMS, "template_date"}:
        assert config.flag(name) in text
    assert "--template-date" not in text


@pytest.mark.parametrize(
    ("args", "code", "named"),
    [(["--help"], 0, "--grpo.clip-high"), (["--lr", "fast"], 2, "--lr"), (["--flag"], 2, "--flag")],
)
def test_help_and_mistakes_are_answered_before_torch_is_imported(args, code, named):
    command = [sys.executable, "-X", "importtime", "train.py", *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert done.returncode == code and named in done.stdout + done.stderr
    assert "tyro" in imported and not {"torch", "transformers", "numpy"} & imported
