"""Lists, plays and shows environments in the terminal.

python -m environments                       # every environment with its options
python -m environments play tic_tac_toe      # type the responses yourself; each reward is printed
python -m environments play tic_tac_toe --web    # the same in the browser
python -m environments show snake --seed 3   # watch the demonstrator, or else a random player
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

from environments.base import PLAYER, Env, EnvFailure, MultiAgentEnv, UsageError
from environments.plumbing.check import check_env
from environments.plumbing.registry import EnvSpec, describe_error, list_envs, make
from environments.plumbing.text import one_line, print_any_character, printable
from environments.plumbing.web import DEMONSTRATOR, RANDOM, YOU, Episode, serve

CONSOLE = Console()
MAX_TURNS = 50


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
        serve(Episode(make(env), env, seed), port)
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
        build = EnvSpec.read(name).constructor
        options = ", ".join(
            key if p.default is p.empty else f"{key}={p.default}"
            for key, p in inspect.signature(build).parameters.items()
        )
        module = sys.modules.get(build.__module__)  # None if a script registered it
        line = (inspect.getdoc(module or build) or "").partition("\n")[0]
        purpose = re.sub(r"^The afternoon, \d of \d\. ", "", line)  # its place in the README
        table.add_row(*map(Text, (name, options, purpose)))
    return table


def play_episode(env: Env | MultiAgentEnv, seed: int, interactive: bool) -> float:
    """Plays and prints one episode; returns the sum of the rewards of all agents.

    `interactive`: read the responses of every agent from the terminal. Otherwise the demonstrator
    responds, or else the random player. Raises UsageError if the environment has neither.
    """
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  (`input` uses it from then on)
    episode, shown = Episode(env, "", seed), 0
    for _ in range(MAX_TURNS):
        for agent in episode.waiting:
            shown = _print_log(episode, shown)
            if interactive:
                episode.act(agent, input(printable(f"{_name(agent)}{YOU}: ")))
            else:
                episode.demonstrate(agent)
    _print_log(episode, shown)
    episode_return = sum(episode.returns.values())
    CONSOLE.print(f"[bold]sum of rewards: {episode_return:g}[/]")
    return episode_return


def execute(args: list[str]) -> int:
    """What `python -m environments ARGS` does. Returns the exit code; tyro exits with 2 for invalid
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
        text = error if isinstance(error, EnvFailure) else describe_error(error)
        print(f"environments: {one_line(text)}", file=sys.stderr)
        return 1


def _name(agent: str) -> str:
    return "" if agent in ("", PLAYER) else f"{agent}, "


def _print_log(episode: Episode, start: int) -> int:
    """Prints the log from a row on, but for what you typed; returns the next row to print."""
    for row in episode.log[start:]:
        agent = _name(row["agent"])
        if "reward" in row:
            CONSOLE.print(Text(printable(f"{agent}reward {row['reward']:+g}"), "dim"))
            if row["done"]:
                facts = ", ".join(f"{key} {value}" for key, value in row["info"].items())
                CONSOLE.print(Text(printable(f"{agent}the end: {facts}")))
        elif row["speaker"] != YOU:
            style = "bold green" if row["speaker"] in (DEMONSTRATOR, RANDOM) else "bold"
            who = (printable(f"{agent}{row['speaker']}: "), style)
            CONSOLE.print(Text.assemble(who, printable(row["text"])))
    return len(episode.log)


if __name__ == "__main__":
    print_any_character()
    sys.exit(execute(sys.argv[1:]))
