"""For people: see, play and watch environments in the terminal.

python -m environments                       # all of them, with their keys and defaults
python -m environments play tic_tac_toe      # play it yourself; the reward is shown
python -m environments show snake --seed 3   # watch an episode: its demonstrator's, or by chance
"""

import inspect
import io
import random
import re
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from operator import not_
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from core.types import UsageError
from environments.base import Env, MultiAgentEnv, Step
from environments.registry import constructor, list_envs, make

CONSOLE = Console()
MOST_TURNS = 50
MOVE = re.compile(r"\[(?!Player|GAME)[^][\n]{1,40}\]")


@dataclass(frozen=True)
class Asked:
    """List the environments, play one, or watch one."""

    # list them all, play one yourself, or show an episode
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
        # the box: a title, the problem, a rule, what may help; its lines as the terminal allows
        frame = re.compile("[\u2500-\u257f]|-{5,}")
        _, *lines = (frame.sub("", line).strip() for line in box.getvalue().splitlines())
        problem = " ".join(takewhile(bool, dropwhile(not_, lines)))
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
    total, rng = 0.0, random.Random(seed)
    told: dict[str, list[str]] = {}
    messages = {"": env.reset(seed)} if isinstance(env, Env) else env.reset(seed)
    for _ in range(MOST_TURNS):
        responses = {}
        for agent, new in messages.items():
            told.setdefault(agent, []).extend(message["content"] for message in new)
            for message in new:
                CONSOLE.print(f"[bold]{escape(agent or message['role'])}:[/] ", end="")
                CONSOLE.print(escape(message["content"]))
            if by_hand:
                responses[agent] = CONSOLE.input("[bold green]you:[/] ")
            else:
                responses[agent] = watched(env, agent, told[agent], rng)
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


def watched(env: Env | MultiAgentEnv, agent: str, told: list[str], rng: random.Random) -> str:
    """What the environment demonstrates, or else a random player, who was `told` so much."""
    who, text = "demonstrator", env.demonstrate() if isinstance(env, Env) else None
    if text is None:
        who = "random player"
        text = env.demonstrate(hasty=True) if isinstance(env, Env) else env.guess(agent, rng)
    if text is None:
        text = listed(told, rng)
    if text is None:
        raise UsageError("it has no demonstrator to watch, and no random player: play it instead")
    CONSOLE.print(f"[bold green]{who}:[/] ", end="")
    CONSOLE.print(escape(text))
    return text


def listed(told: list[str], rng: random.Random) -> str | None:
    """A move in brackets, as TextArena's games write them, of the latest text that has any.

    >>> listed(["[Player 1] hello. Say [pass] or [quit]", "Your turn."], random.Random(0))
    '[quit]'
    """
    found = [moves for moves in map(MOVE.findall, reversed(told)) if moves]
    return rng.choice(found[0]) if found else None


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"environments: {error}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, EOFError):
        sys.exit(130)
