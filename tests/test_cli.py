"""Flags override config.yaml, which overrides the defaults; a Config of Python is read alike."""

import dataclasses
import math
import re
import typing
from pathlib import Path

import pytest
import yaml

from algorithms import grpo
from core import config, settings
from core.algorithm import algorithm_names, options_of
from core.config import Config, resolve, validate
from core.faults import UsageError
from core.settings import config_to_dict, read_file
from core.terminal import cli

TRAINED = {"algo": "grpo", "env": ["letter_counting"], "lr": 5e-05, "seed": 0, "eval_every": 10,
           "model_id": "old/model", "device": "auto", "sampler": "auto", "lora_rank": 0,
           "optimizer": "adamw", "grpo": {"clip_low": 0.2}}  # fmt: skip


@pytest.fixture
def resume(tmp_path, monkeypatch):
    """Parses flags that name runs/a, or `a`, which was trained with TRAINED and these changes."""
    monkeypatch.chdir(tmp_path)
    Path("runs/a").mkdir(parents=True)

    def parse(flags, **changes):
        text = "".join(f"{name}: {value}\n" for name, value in (TRAINED | changes).items())
        Path("runs/a/config.yaml").write_text(text)
        return settings.parse(flags.split())

    return parse


def test_flags_override_a_file_which_may_use_what_yaml_has(tmp_path):
    text = "num_updates: 7\ngrpo: {clip_high: 4e-1}\nlr: 1e-5\nsft_lr:\nsystem_prompt:\n"
    text += "run_name: --lr\ntrack: none\noverlap: yes\nenv: reverse\nstop: ['---', 'b']\n"
    (file := tmp_path / "config.yaml").write_text(text)
    cfg = settings.parse(["--config", str(file), "--num-updates", "9"])
    assert (cfg.num_updates, cfg.options.clip_high, cfg.lr, cfg.sft_lr) == (9, 0.4, 1e-5, None)
    assert (cfg.system_prompt, cfg.run_name, cfg.track, cfg.overlap) == ("", "--lr", "none", True)
    assert (cfg.env, cfg.stop) == (("reverse",), ("---", "b"))
    assert settings.parse([f"--config={file}"]).num_updates == 7


def test_a_resumed_run_may_change_settings_and_keeps_the_others(resume):
    cfg = resume("--resume a --num-updates 9 --model-id moved/it --grpo.clip-low 0.5")
    assert (cfg.num_updates, cfg.model_id, cfg.options.clip_low) == (9, "moved/it", 0.5)
    assert (cfg.lr, Path(cfg.resume)) == (5e-05, Path("runs/a"))
    same = {"lr": "5e-05", "env": "letter_counting", "seed": "'0'"}  # other forms of the values
    assert resume("--resume runs/a", **same) == resume("--resume runs/a")


def test_what_follows_from_other_settings_follows_those_that_a_flag_changes(resume):
    """A run of tiny with all defaults, of which --config changes some; what was chosen stays."""
    first = config_to_dict(resolve(Config()))
    known = (first["max_model_len"], first["credit"], first["lr"])
    assert known == (8 * 64 + 4096, "episode", 5e-05)

    def followed(flags, **chosen):
        cfg = resolve(resume(f"--config a {flags}", **first | chosen))
        validate(cfg)
        return cfg

    assert followed("--max-tokens 5000 --max-turns 2").max_model_len == 2 * 5000 + 4096
    assert followed("--algo ppo").credit == "turn"
    model = followed("--model-id x/y --lora-rank 8", max_tokens=100, max_model_len=4896)
    assert (model.lr, model.sft_lr, model.max_tokens) == (2e-5, 1e-4, 100)
    assert model.max_model_len == 4896 and model.max_tokens_per_micro_batch is None
    chosen = followed("--max-tokens 100", lr=1e-3, max_model_len=300, credit="turn")
    assert (chosen.lr, chosen.max_model_len, chosen.credit) == (1e-3, 300, "turn")
    saved = vars(resolve(Config(options=grpo.Options(clip_high=0.5))).options)
    cfg = resume("--resume a --grpo.loss-type dr_grpo", grpo=saved)  # brings what nobody has set
    fresh = Config(options=grpo.Options("dr_grpo", clip_high=0.5))
    assert resolve(cfg).options == resolve(fresh).options


def test_a_run_is_named_by_its_folder_or_its_name(resume, monkeypatch):
    given = {"lr": 0.25, "model_id": "tiny"}
    for name in ("runs/a/config.yaml", "runs/a/", "a"):
        assert resume(f"--config {name}", **given).lr == 0.25
    home = Path.cwd()  # no shell expands a tilde in --resume=~/a or in a config.yaml
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))  # of Windows
    assert Path(resume("--resume=~/runs/a").resume) == home / "runs/a"
    cfg = resolve(resume("--config=~/runs/a --teacher=~/t", model_id="~/m"))
    assert (Path(cfg.model_id), Path(cfg.teacher)) == (home / "m", home / "t")
    Path("a").write_text("lr: 0.5\nenv: reverse\n")  # a file of that name comes first
    assert resume("--config a", **given).lr == 0.5


def values_of(kind):
    """Some values of a setting of this type; texts that a file or a shell could misread."""
    simple = {bool: [False, True], int: [7, -(2**70)], float: [1e-7, -0.5], type(None): [None],
              str: ["null", "1e-5", "a: b #", "é\n[]", "", "~", "x,y=z"]}  # fmt: skip
    parts = typing.get_args(kind)
    if kind in simple:
        return simple[kind]
    if typing.get_origin(kind) is typing.Literal:
        return parts
    if typing.get_origin(kind) is tuple:
        return [(), tuple(values_of(parts[0]))]
    return [value for part in parts for value in values_of(part)]


def some(cls, turn, never=()):
    """An instance with one of the values of each field."""
    kinds = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.name not in never]
    return cls(**{name: (values := values_of(kinds[name]))[turn % len(values)] for name in names})


def test_a_config_file_a_command_line_and_python_give_all_settings_back(tmp_path):
    own = {"algo", "options", "run_name", *config.COMMAND_LINE_ONLY}
    for turn in range(7):
        options = some(options_of("ppo"), turn)
        cfg = dataclasses.replace(some(Config, turn, own), algo="ppo", options=options)
        (file := tmp_path / "config.yaml").write_text(yaml.safe_dump(config_to_dict(cfg)))
        assert read_file(file)[1] == cfg == settings.complete(cfg)


def test_every_number_has_a_range_whose_ends_are_valid():
    for filled in (resolve(Config()), *(options_of(algo)() for algo in algorithm_names())):
        numbers = {name for name, value in vars(filled).items() if type(value) in (int, float)}
        assert numbers <= config.ranges_of(type(filled)).keys()
    for name, x, is_right in (("top_p", 1, 1), ("top_p", 1 + 1e-15, 0), ("tis_cap", 0, 1),
                              ("lr", 0, 0), ("lr", math.nan, 0), ("lr", "1", 0)):  # fmt: skip
        assert config.ranges_of(Config)[name].has(x) == is_right


def test_help_begins_with_the_settings_that_matter(capsys):
    with pytest.raises(SystemExit) as end:
        cli.answer_at_once(["--help"])
    shown, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "")
    boxes = re.split(r"^\W*[a-z ]+ options\W*$", shown, flags=re.MULTILINE)
    assert len(re.findall(r"^\W*--", boxes[1], flags=re.MULTILINE)) == 10
    assert all(config.flag(name) in shown for name in {*vars(Config())} - {"options"})


def test_settings_of_python_are_those_that_flags_would_give(resume):
    """`complete`, with which train.run begins: over a file, as texts, lists, and with options."""
    saved = {"loss_type": "dapo", "clip_low": "0.2", "clip_high": "0.5"}
    resume("--config a", grpo=saved, num_updates=7)
    cfg = settings.complete(Config(resume="a", lr=0.1, options=grpo.Options("dr_grpo")))
    assert cfg == settings.parse("--resume a --lr 0.1 --grpo.loss-type dr_grpo".split())
    assert (cfg.num_updates, cfg.lr, cfg.options.clip_high) == (7, 0.1, 0.5)
    cfg = settings.complete(Config(env=["compose", "reverse"], lr=1, eval_env="compose"))
    assert (cfg.env, cfg.lr, cfg.eval_env) == (("compose", "reverse"), 1, ("compose",))


def test_settings_that_no_longer_exist_are_left_out_with_a_line(resume, capsys):
    assert resume("--config a", patience=3, lr=0.5, stop_on=["any"]).lr == 0.5
    assert capsys.readouterr().err.endswith("picoRL no longer has patience, stop_on: left out\n")
    assert resume("--resume a", lora_rank=4, lora_alpha=8).lora_rank == 4
    assert resume("--config a", lora_rank=4, lora_alpha=16).lora_rank == 4
    with pytest.raises(UsageError, match="lora_alpha is 16"):
        resume("--resume a", lora_rank=4, lora_alpha=16)
