"""TextWorld: commands, rewards, seeds, demonstrations. Compiling a game takes a second or more."""

import pytest
from conftest import needs

from environments.adapters.textworld import LEVELS, TextWorld, read_command

pytestmark = needs("envs", "textworld")


@pytest.mark.parametrize(
    "response, command",
    [("open chest", "open chest"), ("It is shut.\nOpen  the chest\n\n", "open the chest"),
     ('{"command": "go south"} as the door is open', "go south"),
     ("<command>go north</command> no: <command>go south</command>\nbye", "go south"),
     ("", None), ("save", None), ("look. QUIT", None),
     ("\\boxed{go south}", "boxed go south")],  # the interpreter would act on a backslash
)  # fmt: skip
def test_read_command_takes_the_marked_command_or_the_last_line(response, command):
    assert read_command(response) == command


@pytest.mark.slow  # compiling a game takes seconds
def test_demonstrations_win_in_the_number_of_commands_of_the_level():
    env = TextWorld(4, hints=True)
    content = env.reset(1)[0]["content"]
    commands = content.partition("Commands: ")[2].partition("\n")[0].split("; ")
    assert "look" in commands and {env.demonstrate(), env.demonstrate(hasty=True)} <= {*commands}
    rewards = []
    while True:
        step = env.step(env.demonstrate())
        rewards.append(step.reward)
        if step.done:
            break
    assert rewards == [0.0] * (LEVELS[4][2] - 1) + [1.0]
    assert step.info == {"correct": True} and step.message is None
