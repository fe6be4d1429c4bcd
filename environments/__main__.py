"""Lists, plays and shows environments in the terminal.

python -m environments                       # every environment with its options
python -m environments play tic_tac_toe      # type the responses yourself; each reward is printed
python -m environments show reverse --seed 3 # watch its demonstrations, or else guesses
python -m environments check my.py:Maze      # find mistakes; exit code 1 if there are any
"""

import inspect
import re
import sys
from contextlib import suppress
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from environments.base import PLAYER, Env, Message, MultiAgentEnv, UsageError
from environments.parsing import prefill_of
from environments.plumbing.check import check_env
from environments.plumbing.registry import EnvSpec, describe_error, list_envs, make
from environments.plumbing.text import one_line, print_any_character, printable
from environments.plumbing.tools import lines_about, with_tools

CONSOLE = Console()
MAX_TURNS = 50


def main(
    command: Annotated[Literal["list", "play", "show", "check"], tyro.conf.Positional] = "list",
    env: Annotated[str, tyro.conf.Positional] = "",
    seed: int = 0,
) -> int:
    """Lists the environments, plays one in the terminal, or checks one.

    Args:
        command: list all environments, play one yourself, show an episode, or find mistakes
        env: name[:key=value,...]
        seed: determines the task
    """
    if command == "list":
        CONSOLE.print(overview())
    elif command == "check" and env:
        report = check_env(env)
        print(printable("\n".join(report.lines())))
        return int(bool(report.problems))
    elif env:
        play_episode(make(env), seed, interactive=command == "play")
    else:
        raise UsageError(f"name an environment: python -m environments {command} NAME")
    return 0


def overview() -> Table:
    """Returns a table with the name, the options and the purpose of every environment."""
    table = Table("name", "options", "what it is")
    for name in list_envs():
        spec = EnvSpec.read(name)
        options = ", ".join(f"{key}={value}" for key, value in spec.values.items())
        module = sys.modules.get(spec.constructor.__module__)  # None if a script registered it
        line = (inspect.getdoc(module or spec.constructor) or "").partition("\n")[0]
        purpose = re.sub(r"^The afternoon, \d of \d\. ", "", line)  # its place in the README
        table.add_row(*map(Text, (name, options, purpose)))
    return table


def play_episode(env: Env | MultiAgentEnv, seed: int, interactive: bool) -> None:
    """Plays and prints one episode.

    `interactive`: read the responses of every agent from the terminal. Otherwise responses are the
    environment's demonstrations, or else its guesses. Raises UsageError if it has neither.
    """
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  (`input` uses it from then on)
    game, sum_of_rewards = with_tools(env), 0.0
    openings = game.reset(seed)
    for line in lines_about(game):
        _say("tools: ", line)
    for agent, messages in openings.items():
        _show(agent, messages)
    prefills = {agent: prefill_of(messages) for agent, messages in openings.items() if messages}
    for _ in range(MAX_TURNS):
        responses = {}
        for agent, prefill in prefills.items():
            responses[agent] = prefill + _respond(game, agent, interactive)
        steps = game.step(responses)
        for agent, step in steps.items():
            sum_of_rewards += float(step.reward)
            if agent in responses or step.reward or step.done:
                _say(f"{_name(agent)}reward {float(step.reward):+g}", style="dim")
            if step.done:
                facts = ", ".join(f"{key} {value}" for key, value in step.info.items())
                _say(f"{_name(agent)}the end: {facts}", style="")
            _show(agent, step.messages)
        acting = {agent: step for agent, step in steps.items() if step.message and not step.done}
        prefills = {agent: prefill_of(step.messages) for agent, step in acting.items()}
        if not prefills:
            break
    CONSOLE.print(f"[bold]sum of rewards: {sum_of_rewards:g}[/]")


def execute(args: list[str]) -> int:
    """Runs `python -m environments ARGS`. Returns the exit code; tyro exits with 2 for invalid
    arguments."""
    try:
        return tyro.cli(main, prog="python -m environments", args=args)
    except UsageError as error:
        print(f"environments: {one_line(error)}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError):
        print()  # after the prompt
        return 130
    except Exception as error:  # of the environment
        print(f"environments: {one_line(describe_error(error))}", file=sys.stderr)
        return 1


def _respond(game: MultiAgentEnv, agent: str, interactive: bool) -> str:
    if interactive:
        return input(printable(f"{_name(agent)}you: "))
    for hasty, player in ((False, "demonstrator"), (True, "guess")):
        text = game.demonstrate(agent, hasty)
        if text is not None:
            _say(f"{_name(agent)}{player}: ", text, "bold green")
            return text
    raise UsageError("this environment has no demonstrations: use play")


def _show(agent: str, messages: list[Message]) -> None:
    for message in messages:
        speaker = "environment" if message["role"] == "user" else message["role"]
        _say(f"{_name(agent)}{speaker}: ", message["content"] or "")


def _say(head: str, text: str = "", style: str = "bold") -> None:
    CONSOLE.print(Text.assemble((printable(head), style), printable(text)))


def _name(agent: str) -> str:
    return "" if agent == PLAYER else f"{agent}, "


if __name__ == "__main__":
    print_any_character()
    sys.exit(execute(sys.argv[1:]))
