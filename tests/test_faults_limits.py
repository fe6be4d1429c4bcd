"""Files that loop, grow or never end take bounded time, and end with one line."""

import contextlib
import io
import os
import shutil
import signal
import stat
import sys
import time
from pathlib import Path

import pytest
from test_openai_sampler import chat, policy, sample, server  # noqa: F401

import train
from core import chat as chat_command
from core import files, league
from core.interrupt import time_limit
from core.report import compare
from core.run_dir import read_config
from core.types import UsageError

CHAT = [{"role": "user", "content": "hello"}]
NEW = """--num-updates 0 --num-prompts 2 --group-size 2 --eval-num-tasks 0 --max-tokens 4
    --max-model-len 256 --device cpu --model-id tiny-random""".split()
GAME = [*NEW, *"--run-name a --num-updates 1 --env tic_tac_toe:opponent=older:1".split()]


@pytest.fixture(autouse=True)
def in_seconds():
    with time_limit(300):
        yield


def test_an_alarm_that_comes_while_a_time_limit_ends_is_ignored():
    leaving = time_limit(1).gen.gi_frame  # code of core/interrupt.py
    with pytest.raises(TimeoutError, match="in 5 seconds"), time_limit(5):
        alarm = signal.getsignal(signal.SIGALRM)
        alarm(signal.SIGALRM, leaving)
        alarm(signal.SIGALRM, sys._getframe())


def test_a_limit_leaves_the_limit_around_it():
    signal.setitimer(signal.ITIMER_REAL, 1500)
    with time_limit(1):
        pass
    assert 1400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1500


def test_settings_with_aliases_pipes_or_megabytes_are_one_line(tmp_path):
    levels = ["a: &a0 [x]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 99)
    ]
    texts = [
        "\n".join([*levels, "env: *a98"]),
        "env:\n- &e [*e]",
        "env: " + "[" * 50_000,
        "#" * 2**21,
    ]
    texts.append("<<: &m {<<: [*m, *m]}")
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.yaml").write_text(text)
    os.mkfifo(tmp_path / "pipe.yaml")
    started = time.monotonic()
    for file in tmp_path.iterdir():
        with pytest.raises(UsageError, match=f"^{file}: ") as error:
            read_config(file)
        assert len(str(error.value)) < 500 and "\n" not in str(error.value)
    assert time.monotonic() - started < 60  # without end


def test_a_pipe_or_a_foreign_path_in_a_sealed_folder_is_damage(tmp_path):
    with files.sealed(tmp_path / "a", {"n": 1}) as part:
        (part / "x").write_text("x")
    assert files.unseal(tmp_path / "a") == ({"n": 1}, "")
    state = (tmp_path / "a/state.json").read_text()
    (tmp_path / "a/state.json").write_text(state.replace('"x"', '"/dev/zero"'))
    assert files.unseal(tmp_path / "a")[1].startswith("cannot be read")
    (tmp_path / "a/state.json").write_text(state)
    os.mkfifo(tmp_path / "a/y")
    assert files.unseal(tmp_path / "a")[1] == "cannot be read (it has a pipe or device)"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run of a game."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder):
        assert train.run_command(GAME) == 0
    return folder / "runs/a"


def replace_file(path, kind):
    """Puts something else in the place of a file, or where none is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.remove(path)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)


COMMANDS = {
    "resume": lambda run: train.run_command(["--resume", str(run), "--num-updates", "2"]),
    "chat": lambda run: chat_command.run(chat_command.main, [str(run)]),
    "league": lambda run: league.run([str(run), "guess", "--games", "1"]),
    "compare": lambda run: compare.main([str(run)]),
    "model": lambda run: train.run_command([*NEW, "--model-id", str(run / "base")]),
    "config": lambda run: train.run_command([*NEW, "--config", str(run / "config.yaml")]),
}
OF_A_RUN = ["metrics.jsonl", "rollouts.jsonl", "README.md", "curves.png", "report.html",
            "league.json", "scratch.py", "checkpoint/000000-000002/state.json", ".lock",
            "checkpoint/000000-000002/weights.safetensors", "reference/weights.safetensors",
            "base/model.safetensors", "base/tokenizer.json", "opponents/000001/state.json",
            "model/config.json", "model/model.safetensors"]  # fmt: skip


def test_pipes_sockets_devices_and_folders_instead_of_files_are_one_line(
    finished, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    cases = [(name, command) for name in OF_A_RUN for command in [*COMMANDS][:4]]
    cases += [("base/model.safetensors", "model"), ("base/tokenizer.json", "model")]
    cases += [("config.yaml", command) for command in COMMANDS if command != "model"]
    for number, (name, command) in enumerate(cases):
        kind = ["pipe", "socket", "device", "folder"][(number + number // 4) % 4]
        run = shutil.copytree(finished, tmp_path / "run")
        replace_file(run / name, kind)
        code, _, err = COMMANDS[command](run), *capsys.readouterr()
        assert code == 2 and err.count("\n") == 1 and "Error" not in err, (name, kind, command, err)
        assert str(run) in err
        files.remove(run)
    assert not Path("runs").exists()


def test_a_file_instead_of_a_folder_of_a_run_is_one_line(finished, tmp_path):
    for name in ("checkpoint", "base", "model", "opponents", "reference"):
        run = shutil.copytree(finished, tmp_path / name)
        files.remove(run / name)
        (run / name).touch()
        with pytest.raises(UsageError, match=f"{run / name} is a file instead of a folder"):
            files.check_folder(run)
    files.check_folder(finished)
    files.check_folder(finished / "base")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_scratch_or_data_file_that_is_none_is_one_line(command, kind):
    replace_file(Path("scratch.py"), kind)
    replace_file(Path("rows.jsonl"), kind)
    for args in (["--algo", "scratch"], ["--env", "math_qa:data=rows.jsonl"]):
        code, _, err = command(*args)
        assert code == 2 and err.count("\n") == 1, err
    code, _, err = command("--env", "Maze", "--env-path", "rows.jsonl")
    assert code == 2


def test_deep_json_of_a_server_is_one_line(server, policy):  # noqa: F811
    body = b"data: " + b"[" * 100_000 + b"\n\n"
    server.broken["pear"] = ({"Content-Type": "text/event-stream"}, body)
    with pytest.raises(UsageError, match="recursion"):
        sample(server, policy, [chat("pear")])
