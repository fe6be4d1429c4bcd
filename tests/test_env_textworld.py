"""TextWorld: how a command is read, what is paid, seeds, and the way to win."""

import subprocess
import sys
import time

import pytest

pytest.importorskip("textworld")

import environments.adapters.textworld  # registers
from core.types import UsageError
from environments.adapters.textworld import FORM, LEVELS, TextWorld, read_command
from environments.registry import make


@pytest.mark.parametrize(
    "response, command",
    [
        ("open chest", "open chest"),
        ("It is shut.\nOpen  the chest\n\n", "open the chest"),
        ('{"command": "go south"} as the door is open', "go south"),
        ("<command>go north</command> no: <command>go south</command>\nbye", "go south"),
        ('{"command": 3}\nlook', "look"),
        ("täke κey x", "t ke ey x"),
        ("look\udcff", "look"),
        ("x" * 500, "x" * 100),
        ("", None),
        (" \n\t\n", None),
        ('{"command": ""}', None),
        ("\0\0", None),
        ("save", None),
        ("look. QUIT", None),
        ("\\boxed{go south}", "boxed go south"),  # a backslash would reach the interpreter itself
        ("\\", None),
        ("take 'chest' - key, please", "take 'chest' - key, please"),
    ],
)
def test_the_command_is_marked_or_the_last_line(response, command):
    assert read_command(response) == command


@pytest.mark.parametrize("level", [1, 4])
def test_following_the_demonstrations_wins_in_as_many_commands_as_the_level_says(level):
    env = TextWorld(level)
    for seed in range(2):
        env.reset(seed)
        rewards = []
        while True:
            command = env.demonstrate()
            assert env.demonstrate() == command
            step = env.step(command)
            rewards.append(step.reward)
            if step.done:
                break
        assert rewards == [0.0] * (LEVELS[level][2] - 1) + [1.0]
        assert step.info == {"correct": True} and step.message is None


def test_same_seed_is_the_same_game_whatever_was_played_before():
    env = TextWorld(1)
    first = env.reset(0), env.demonstrate(), env.demonstrate(hasty=True)
    text = first[0][0]["content"]
    assert text.endswith(FORM) and "-= " in text and "$$$" not in text
    env.step("look")
    assert env.reset(1) != first[0]
    assert (env.reset(0), env.demonstrate(), env.demonstrate(hasty=True)) == first


def test_same_seed_is_the_same_game_in_another_process():
    code = """if True:
        from environments.adapters.textworld import TextWorld
        env = TextWorld(4)
        print([env.reset(1), env.demonstrate(), env.demonstrate(hasty=True)])
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    env = TextWorld(4)
    messages = env.reset(1)
    assert run.stdout.strip() == str([messages, env.demonstrate(), env.demonstrate(hasty=True)])


def test_what_the_game_says_is_one_short_line():
    env = TextWorld(4)
    env.reset(1)
    assert env.step("inventory").message["content"].startswith("You are carrying")
    step = env.step("dance with the moon")
    assert not step.done and step.reward == 0 and "\n" not in step.message["content"]
    assert ">" not in step.message["content"]


def test_hints_show_the_commands_and_a_hasty_player_takes_one():
    env = make("textworld:level=4,hints=true")
    content = env.reset(0)[0]["content"]
    commands = content.partition("Commands: ")[2].partition("\n")[0].split("; ")
    assert "look" in commands and env.demonstrate() in commands
    for _ in range(3):
        assert env.demonstrate(hasty=True) in commands
        commands = env.step("look").message["content"].partition("Commands: ")[2].split("; ")


def test_two_responses_without_a_command_are_forgiven():
    env = TextWorld(1)
    env.reset(0)
    steps = [env.step(text) for text in ("", "quit", "\n")]
    assert [step.reward for step in steps] == [-0.1, -0.1, -1]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[0].message["content"] == FORM and steps[2].info["correct"] is False
    env.reset(0)
    assert env.step("").reward == -0.1  # retries start anew


@pytest.mark.parametrize("level", [0, 6])
def test_a_bad_level_is_one_clear_line(level):
    with pytest.raises(UsageError, match=f"level is 1 to 5, not {level}"):
        make(f"textworld:level={level}")


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(UsageError, match="needs textworld: pip install"):
        make("textworld")


def test_hostile_responses_raise_nothing_and_are_fast():
    env = TextWorld(1)
    for text in ["go " * 33_000, "{" * 100_000, "\ud800", "\0" * 1000, "again",
                 '{"command": [1]}', "<command>" * 10_000, '"', "%s%n", "1" * 100_000, "script",
                 "actions", "showme", "take, . ; \\", "\\boxed{", "\\help"]:  # fmt: skip
        env.reset(0)
        started = time.perf_counter()
        step = env.step(text)
        assert time.perf_counter() - started < 0.3
        assert step.reward <= 0 and not step.info["correct"]


def test_a_game_is_compiled_once_and_only_the_last_ones_are_kept(monkeypatch):
    # the last test: it empties the folder
    monkeypatch.setattr(environments.adapters.textworld, "MOST_GAMES", 1)
    env = TextWorld(1)
    env.reset(100)
    started = time.perf_counter()
    env.reset(100)
    assert time.perf_counter() - started < 0.5
    env.reset(101)
    folder = environments.adapters.textworld._folder().name
    assert {file.stem for file in environments.adapters.textworld.Path(folder).iterdir()} == {
        "1-101"
    }
    assert env.step(env.demonstrate()).info["correct"]
