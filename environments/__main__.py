"""For people: see, play and watch environments in the terminal.

python -m environments                       # all of them, with their keys and defaults
python -m environments play tic_tac_toe      # play it yourself; the reward is shown
python -m environments show snake --seed 3   # watch an episode, played by its demonstrator
"""

import inspect
import io
import re
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from core.types import UsageError
from environments.base import Env, MultiAgentEnv, Step, constructor, list_envs, make

CONSOLE = Console()
MOST_TURNS = 50


@dataclass(frozen=True)
class Asked:
    """List the environments, play one, or watch one."""

    what: Annotated[Literal["list", "play", "show"], tyro.conf.Positional] = "list"
    env: Annotated[str, tyro.conf.Positional] = ""  # name[:key=value,...]
    seed: int = 0  # decides the episode


def main(args: list[str]) -> None:
    """Do what the command line asks for; UsageError for what can't be done."""
    asked = read(args)
    if asked.what == "list":
        CONSOLE.print(overview())
        return
    if not asked.env:
        raise UsageError(f"which environment? python -m environments {asked.what} NAME")
    episode(make(asked.env), asked.seed, by_hand=asked.what == "play")


def read(args: list[str]) -> Asked:
    """What tyro reads; what it refuses, in a box of several lines, is a UsageError of one."""
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return tyro.cli(Asked, prog="python -m environments", args=args)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        lines = re.findall("\u2502 (.*)\u2502", box.getvalue().partition("\u2502 \u2500")[0])
        problem = " ".join(" ".join(lines).split())
        raise UsageError(f"{problem.rstrip('.')}; see python -m environments --help") from None


def overview() -> Table:
    """One row an environment: name, keys with their defaults, what it is."""
    table = Table("name", "keys", "what it is", show_lines=False)
    for name in list_envs():
        build = constructor(name)
        keys = ", ".join(
            key if p.default is p.empty else f"{key}={p.default}"
            for key, p in inspect.signature(build).parameters.items()
        )
        module = inspect.getdoc(sys.modules[build.__module__]) or ""
        table.add_row(name, escape(keys), escape(module.partition("\n")[0]))
    return table


def episode(env: Env | MultiAgentEnv, seed: int, by_hand: bool) -> float:
    """Play one episode in the terminal; returns the sum of all rewards."""
    total = 0.0
    messages = {"": env.reset(seed)} if isinstance(env, Env) else env.reset(seed)
    for _ in range(MOST_TURNS):
        responses = {}
        for agent, new in messages.items():
            for message in new:
                CONSOLE.print(f"[bold]{escape(agent or message['role'])}:[/] ", end="")
                CONSOLE.print(escape(message["content"]))
            responses[agent] = respond(env, by_hand)
        steps: dict[str, Step]
        steps = {"": env.step(responses[""])} if isinstance(env, Env) else env.step(responses)
        messages = {}
        for agent, step in steps.items():
            total += step.reward
            CONSOLE.print(f"[dim]{escape(agent)} reward {step.reward:+g}[/]")
            if step.message is not None and not step.done:
                messages[agent] = [step.message]
            if step.done:
                said = [] if step.message is None else [step.message["content"]]
                CONSOLE.print(escape("\n".join([*said, f"the end: {step.info}"])))
        if not messages:
            break
    CONSOLE.print(f"[bold]sum of rewards: {total:g}[/]")
    return total


def respond(env: Env | MultiAgentEnv, by_hand: bool) -> str:
    """What the person types, or what the environment demonstrates."""
    if by_hand:
        return CONSOLE.input("[bold green]you:[/] ")
    text = env.demonstrate() if isinstance(env, Env) else None
    if text is None:
        raise UsageError("it has no demonstrator to watch: play it instead")
    CONSOLE.print("[bold green]demonstrator:[/] ", end="")
    CONSOLE.print(escape(text))
    return text


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"environments: {error}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, EOFError):
        sys.exit(130)
