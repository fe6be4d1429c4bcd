"""Lists, plays and shows environments in the terminal.

python -m environments                       # every environment with its options
python -m environments play tic_tac_toe      # type the responses yourself; each reward is printed
python -m environments play tic_tac_toe --web    # the same in the browser
python -m environments show snake --seed 3   # watch the demonstrator, or else a random player
python -m environments check my.py:Maze      # find mistakes; exit code 1 if there are any
"""

import inspect
import random
import re
import sys
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from environments import check
from environments.base import PLAYER, Env, EnvFailure, MultiAgentEnv, SingleAgentEnv, UsageError
from environments.registry import constructor, describe_error, list_envs, make
from environments.text import one_line, print_any_character, printable
from environments.tools import describe, with_tools
from environments.web import Episode, serve

CONSOLE = Console()
MAX_TURNS = 50
BRACKETED_MOVE = re.compile(r"\[(?!Player|GAME)[^][\n]{1,40}\]")


def main(
    command: Annotated[Literal["list", "play", "show", "check"], tyro.conf.Positional] = "list",
    env: Annotated[str, tyro.conf.Positional] = "",
    seed: int = 0,
    web: bool = False,
    port: int = 0,
) -> int:
    """Lists the environments, plays one in the terminal or the browser, or checks one.

    Args:
        command: list all environments, play one yourself, show an episode, or find mistakes
        env: name[:key=value,...]
        seed: determines the task
        web: play in the browser instead
        port: of the page of --web; 0: a free one
    """
    if (web and command != "play") or (port and not web):
        raise UsageError("--web needs the command play, and --port needs --web")
    if command == "list":
        CONSOLE.print(overview())
    elif web and env:
        serve(Episode(make(env), env, seed, {}), port)
    elif command == "check" and env:
        return check.main(env)
    elif env:
        run_episode(make(env), seed, interactive=command == "play")
    else:
        raise UsageError(f"name an environment: python -m environments {command} NAME")
    return 0


def overview() -> Table:
    """Returns a table with the name, the options and the purpose of every environment."""
    table = Table("name", "options", "what it is")
    for name in list_envs():
        build = constructor(name)
        options = ", ".join(
            key if p.default is p.empty else f"{key}={p.default}"
            for key, p in inspect.signature(build).parameters.items()
        )
        module = sys.modules.get(build.__module__)  # None if a script registered it
        doc = inspect.getdoc(module or build) or ""
        cells = (name, options, doc.partition("\n")[0])
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def run_episode(env: Env | MultiAgentEnv, seed: int, interactive: bool) -> float:
    """Runs and prints one episode; returns the sum of the rewards of all agents.

    `interactive`: read the responses of every agent from the terminal.
    """
    episode_return, rng = 0.0, random.Random(seed)
    received: dict[str, list[str]] = {}  # agent -> contents of all its messages
    env = with_tools(env)
    pending = env.reset(seed)
    for line in describe(env):
        _print_as("tool", line)
    for _ in range(MAX_TURNS):
        responses = {}
        for agent, messages in pending.items():
            for message in messages:
                who = message["role"] if agent == PLAYER else agent
                _print_as(who, message["content"])
            received.setdefault(agent, []).extend(message["content"] for message in messages)
            if interactive:
                responses[agent] = CONSOLE.input("[bold green]you:[/] ")
            else:
                player, responses[agent] = automatic_response(env, agent, received[agent], rng)
                _print_as(player, responses[agent], "bold green")
        steps = env.step(responses)
        for agent, step in steps.items():
            episode_return += step.reward
            who = "" if agent == PLAYER else f"{agent} "
            CONSOLE.print(Text(printable(f"{who}reward {step.reward:+g}"), "dim"))
            if step.done:
                last = [] if step.message is None else [step.message["content"]]
                CONSOLE.print(Text(printable("\n".join([*last, f"the end: {step.info}"]))))
        pending = {a: s.messages for a, s in steps.items() if s.message and not s.done}
        if not pending:
            break
    CONSOLE.print(f"[bold]sum of rewards: {episode_return:g}[/]")
    return episode_return


def automatic_response(
    env: MultiAgentEnv, agent: str, received: list[str], rng: random.Random
) -> tuple[str, str]:
    """Returns who responds ("demonstrator" or "random player") and the response.

    Raises UsageError if the environment has neither and its messages name no moves in brackets.
    """
    if isinstance(env, SingleAgentEnv) and (demonstration := env.demonstrate(agent)) is not None:
        return "demonstrator", demonstration
    guess = env.guess(agent, rng)
    if guess is None:
        guess = bracketed_move(received, rng)
    if guess is None:
        raise UsageError("this environment has no demonstrator and no random player: use play")
    return "random player", guess


def bracketed_move(received: list[str], rng: random.Random) -> str | None:
    """Returns a random move in brackets, TextArena's format, from the latest message with one.

    >>> bracketed_move(["[Player 1] hello. Say [pass] or [quit]", "Your turn."], random.Random(0))
    '[quit]'
    """
    for text in reversed(received):
        if moves := BRACKETED_MOVE.findall(text):
            return rng.choice(moves)
    return None


def run_command(args: list[str]) -> int:
    """Runs the command line and returns the exit code; tyro exits with 2 for invalid arguments."""
    try:
        return tyro.cli(main, prog="python -m environments", args=args)
    except UsageError as error:
        print(f"environments: {one_line(error)}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError):
        return 130
    except Exception as error:  # of the environment
        text = error if isinstance(error, EnvFailure) else describe_error(error)
        print(f"environments: {one_line(text)}", file=sys.stderr)
        return 1


def _print_as(speaker: str, text: str, style: str = "bold") -> None:
    CONSOLE.print(Text.assemble((printable(f"{speaker}: "), style), printable(text)))


if __name__ == "__main__":
    print_any_character()
    sys.exit(run_command(sys.argv[1:]))
