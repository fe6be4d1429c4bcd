"""For people: see, play and watch environments in the terminal.

python -m environments                       # all of them, with their keys and defaults
python -m environments play tic_tac_toe      # play it yourself; the reward is shown
python -m environments show snake --seed 3   # watch an episode, played by its demonstrator
"""

import inspect
import sys
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from core.types import UsageError
from environments.base import Env, MultiAgentEnv, Step, constructor, list_envs, make

CONSOLE = Console()
MOST_TURNS = 50


def main(
    what: Annotated[Literal["list", "play", "show"], tyro.conf.Positional] = "list",
    env: Annotated[str, tyro.conf.Positional] = "",
    seed: int = 0,
) -> None:
    """List the environments, play one, or watch one.

    Args:
        what: list them all, play one yourself, or show an episode.
        env: name[:key=value,...]
        seed: decides the episode
    """
    if what == "list":
        CONSOLE.print(overview())
        return
    if not env:
        raise UsageError(f"which environment? python -m environments {what} NAME")
    episode(make(env), seed, by_hand=what == "play")


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
        tyro.cli(main)
    except UsageError as error:
        print(f"environments: {error}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, EOFError):
        sys.exit(130)
