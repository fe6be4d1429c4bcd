"""A file runs no code and sends no key without --trust on the command line of this start."""

import contextlib
import io
import itertools
import os
from pathlib import Path

import pytest
import yaml

from core import chat, cli, config, league
from core.types import UsageError
from environments import registry

CODE = "from pathlib import Path\nPath({marker!r}).touch()\n"
# {file}: a file of Python code that creates the marker; {marker}: that file
SPECS = (
    "{file}:Maze", "evil_module:Maze", "evil_module:Maze:size=4",
    "gymnasium:id=evil_module:Maze-v0",
    'gymnasium:id="evil_module\\u003aMaze-v0"', "gymnasium:id=CartPole-v1,words=evil_module:GAME",
    "gymnasium:id=A-v0,env_id=evil_module:Maze", "gymnasium:id=A-v0,url=x,options=evil_module:a",
    "pettingzoo:words={file}:GAME", "remote:command=touch {marker}", "remote:env={file}:Maze",
    'remote:command="touch {marker}"', "remote: command = touch {marker}",
    "rewarded:data=rows.jsonl,reward={file}:one", "evil_module:Maze:opponent=guess",
    "{file}:Maze:opponent=openai:m@http://127.0.0.1:9/v1", "gymnasium:id=evil_module:Maze,=",
)  # fmt: skip
SENT = (
    {"sampler": "openai", "base_url": "http://127.0.0.1:9/v1", "num_updates": 0},
    {"env": ["tic_tac_toe:opponent=openai:m@http://127.0.0.1:9/v1"]},
    {"env": ['tic_tac_toe:opponent="openai:m\\u0040http://127.0.0.1:9/v1"']},
)


def attack(folder, settings, how):
    """Reads `settings` as a config.yaml as `how` says; returns exit code and the line it prints."""
    here = folder / "here"
    here.mkdir(exist_ok=True)
    for file in ("evil.py", "evil_module.py"):
        (folder / file).write_text(CODE.format(marker=str(folder / "marker")))
    words = {"{file}": str(folder / "evil.py"), "{marker}": str(folder / "marker"),
             "{folder}": str(folder)}  # fmt: skip
    text = yaml.safe_dump(settings)
    for word, value in words.items():
        text = text.replace(word, value)
    (folder / "config.yaml").write_text(text)
    file = str(folder / "config.yaml") if how == "--config" else str(folder)

    def validated(cfg):
        config.validate(config.resolve(cfg))
        return 0

    errors = io.StringIO()
    with contextlib.chdir(here), contextlib.redirect_stderr(errors):
        if how == "chat":
            return chat.run(lambda *_: 0, [file]), errors.getvalue()
        return cli.run(validated, [how, file]), errors.getvalue()


def test_no_file_runs_code_or_sends_the_key_without_trust(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-7")
    cases = [({"env": ["snake", spec]}, "would run") for spec in SPECS]
    cases += [({"eval_env": [spec]}, "would run") for spec in SPECS[::3]]
    cases += [(settings, "would send") for settings in SENT]
    ways = itertools.cycle(["--config", "--resume", "chat"])
    for settings, said in cases:
        how = next(ways) if said == "would run" else "--config"
        settings = {"env_path": "{folder}", **settings}  # of an older version
        code, err = attack(tmp_path, settings, how)
        assert code == 2 and err.count("\n") == 1 and said in err and "--trust" in err, settings
        assert "secret-7" not in err and not (tmp_path / "marker").exists()


def test_the_attacks_notice_code_that_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "check_trust", lambda *_: None)
    attack(tmp_path, {"env": ["{file}:Maze:opponent=guess"], "env_path": "{folder}"}, "--config")
    assert (tmp_path / "marker").exists()


def parse(tmp_path, flags, **settings):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(settings))
    return cli.parse(["--config", str(file), *flags])


def test_what_the_command_line_names_needs_no_trust(tmp_path):
    saved = {"env": ["evil.py:Maze"], "base_url": "http://there/v1"}
    assert parse(tmp_path, ["--env", "my.py:Game"], **saved).env == ("my.py:Game",)
    assert parse(tmp_path, ["--env", "snake"], **saved).env == ("snake",)
    assert parse(tmp_path, ["--trust"], **saved).env == ("evil.py:Maze",)
    with pytest.raises(UsageError, match=r"would run evil\.py:Maze: if you trust it, add --trust"):
        parse(tmp_path, ["--eval-env", "snake"], **saved)
    assert cli.parse(["--trust"]).trust  # for the code of the model


def test_the_key_is_sent_to_an_address_of_the_command_line_only(tmp_path, monkeypatch):
    server = {"base_url": "http://there/v1", "num_updates": 0}
    evaluate = ["--sampler", "openai"]
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert parse(tmp_path, evaluate, **server).base_url == "http://there/v1"
    monkeypatch.setenv("OPENAI_API_KEY", "secret-7")
    with pytest.raises(UsageError, match="would send OPENAI_API_KEY to http://there/v1"):
        parse(tmp_path, evaluate, **server)
    monkeypatch.setenv(
        "OPENAI_CUSTOM_HEADERS", "api-key: secret-8"
    )  # openai sends it to any server
    with pytest.raises(UsageError, match="would send OPENAI_API_KEY OPENAI_CUSTOM_HEADERS to http"):
        parse(tmp_path, evaluate, **server)
    here = [*evaluate, "--base-url", "http://here/v1"]
    assert parse(tmp_path, here, **server).base_url == "http://here/v1"


@pytest.mark.parametrize("spec", [
    "snake:size=5", "gymnasium:id=CartPole-v1,repeat=2", "openenv:url=http://127.0.0.1:8000",
    "remote:env=letter_counting", "tic_tac_toe:opponent=runs/x", "textworld:level=2",
])  # fmt: skip
def test_registered_environments_need_no_trust(tmp_path, spec, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-7")
    assert parse(tmp_path, [], env=[spec]).env == (spec,)


def test_a_run_of_this_user_in_runs_needs_no_trust(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, settings = Path("runs/a/config.yaml"), {"env": ["my.py:Game"]}
    for place in (file, Path("other/a/config.yaml")):
        place.parent.mkdir(parents=True)
        place.write_text(yaml.safe_dump(settings))
    assert cli.parse(["--resume", "runs/a"]).env == ("my.py:Game",)
    assert config.trust_flags(settings, file) == []
    assert config.trust_flags(settings, Path("other/a/config.yaml")) == ["--trust"]
    with pytest.raises(UsageError, match="--trust"):
        cli.parse(["--resume", "other/a"])
    if hasattr(os, "getuid") and os.getuid() == 0:
        os.chown(file, 1234, -1)
        with pytest.raises(UsageError, match="--trust"):
            cli.parse(["--resume", "runs/a"])


def play_first_task(flags, cfg):
    registry.make(chat.held_out_task(cfg, 0).env).reset(0)
    return 0


@pytest.mark.parametrize("main", [
    lambda run: chat.run(play_first_task, [run, "--env", "my.py:Maze"]),
    lambda run: league.run([run, "guess", "--env", "my.py:Maze"]),
])  # fmt: skip
def test_code_that_a_flag_names_is_not_found_in_the_folder_that_a_file_names(
    tmp_path, monkeypatch, main
):
    evil, marker = tmp_path / "evil", tmp_path / "marker"
    (evil / "model").mkdir(parents=True)
    (evil / "my.py").write_text(CODE.format(marker=str(marker)))
    settings = {"env": ["tic_tac_toe:opponent=./model"], "env_path": str(evil)}
    (evil / "config.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text("from environments.snake import Snake as Maze\n")
    main(str(evil))
    assert not marker.exists()


def test_a_run_does_not_bring_its_own_scratch_py(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("scratch.py").touch()
    with pytest.raises(UsageError, match=r"would run scratch\.py beside it"):
        parse(tmp_path, [], algo="scratch")
    assert parse(tmp_path, ["--trust"], algo="scratch").algo == "scratch"
    assert parse(tmp_path, ["--algo", "scratch"], algo="scratch").algo == "scratch"
    monkeypatch.chdir(tmp_path.parent)
    assert parse(tmp_path, [], algo="scratch").algo == "scratch"


def test_a_league_asks_for_trust(tmp_path):
    run = tmp_path / "a"
    (run / "model").mkdir(parents=True)
    (run / "config.yaml").write_text("env: [evil.py:Maze]\n")
    with pytest.raises(UsageError, match=r"would run evil\.py:Maze"):
        league.main(league.Flags((str(run),)))
    assert not Path(run / "league.json").exists()
