"""TextWorld: commands, rewards, seeds, demonstrations. Compiling a game takes a second or more."""

import subprocess
import sys
import time

import pytest

pytest.importorskip("textworld")

from environments.adapters.textworld import FORMAT, LEVELS, TextWorld, read_command
from environments.registry import make


@pytest.mark.parametrize(
    "response, command",
    [("open chest", "open chest"), ("It is shut.\nOpen  the chest\n\n", "open the chest"),
     ('{"command": "go south"} as the door is open', "go south"),
     ("<command>go north</command> no: <command>go south</command>\nbye", "go south"),
     ('{"command": 3}\nlook', "look"), ("look\udcff", "look"), ("x" * 500, "x" * 100),
     ("", None), ('{"command": ""}', None), ("save", None), ("look. QUIT", None),
     ("\\boxed{go south}", "boxed go south")],  # the interpreter would act on a backslash
)  # fmt: skip
def test_read_command_takes_the_marked_command_or_the_last_line(response, command):
    assert read_command(response) == command


@pytest.fixture
def env():
    env = TextWorld(4)
    env.reset(1)  # compiled once for all tests
    return env


def test_demonstrations_win_in_the_number_of_commands_of_the_level(env):
    rewards = []
    while True:
        command = env.demonstrate()
        assert env.demonstrate() == command
        step = env.step(command)
        rewards.append(step.reward)
        if step.done:
            break
    assert rewards == [0.0] * (LEVELS[4][2] - 1) + [1.0]
    assert step.info == {"correct": True} and step.message is None


@pytest.mark.slow
def test_same_seed_gives_the_same_game_in_another_process(env):
    code = """if True:
        from environments.adapters.textworld import TextWorld
        env = TextWorld(4)
        print([env.reset(1), env.demonstrate(), env.demonstrate(hasty=True)])
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    opening = env.reset(1)
    assert run.stdout.strip() == str([opening, env.demonstrate(), env.demonstrate(hasty=True)])
    text = opening[0]["content"]
    assert text.endswith(FORMAT) and "-= " in text and "$$$" not in text


def test_hints_list_the_commands_from_which_hasty_demonstrations_choose():
    env = make("textworld:level=4,hints=true")
    content = env.reset(1)[0]["content"]
    commands = content.partition("Commands: ")[2].partition("\n")[0].split("; ")
    assert "look" in commands and env.demonstrate() in commands
    for _ in range(3):
        assert env.demonstrate(hasty=True) in commands
        commands = env.step("look").message["content"].partition("Commands: ")[2].split("; ")


def test_third_response_without_a_command_ends_the_episode(env):
    steps = [env.step(text) for text in ("", "quit", "\n")]
    assert [step.reward for step in steps] == [-0.1, -0.1, -1]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[0].message["content"] == FORMAT and steps[2].info["correct"] is False
    env.reset(1)
    assert env.step("").reward == -0.1


def test_hostile_response_raises_nothing_and_is_read_fast(env):
    for text in ["go " * 33_000, "{" * 100_000, "\ud800", "\0" * 1000, "again",
                 '{"command": [1]}', "<command>" * 10_000, '"', "%s%n", "1" * 100_000, "script",
                 "actions", "showme", "take, . ; \\", "\\boxed{", "\\help"]:  # fmt: skip
        env.reset(1)
        started = time.process_time()
        step = env.step(text)
        assert time.process_time() - started < 5  # seconds; what backtracks takes minutes
        assert step.reward <= 0 and not step.info["correct"]
