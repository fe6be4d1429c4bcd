"""Rates policies by games against each other, with an Elo rating for each.

    python -m core.league runs/mine         # its older copies and its model, guess and demonstrate
    python -m core.league runs/a runs/b guess --env tic_tac_toe:opponent=self --games 64

Every pair plays held-out seeds in both seats, and all sample at temperature 1. The higher return
wins; returns less than DRAW apart are a draw, which counts half. The ratings R maximize the
likelihood of the Bradley-Terry model (1952): i has the expected score 1 / (1 + 10^((R_j - R_i) /
400)) against j. Their mean is 0; the 95% intervals are from the Fisher information. PRIOR drawn
games are added to each pair, so that who has won, or lost, all games has a finite rating, too.

The table is written to league.json of the first run, whose report.html shows it from then on.
"""

import itertools
import json
import math
import sys
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from core.run import cli

if __name__ == "__main__":
    cli.need_temporary_folder("core.league")

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from core.config import Config, check_trust, resolve
from core.context import Agent
from core.episodes import Ask, Episode, RolloutCollector
from core.extras.opponents import Opponents, copies_in, load_opponent
from core.report.page import write_report
from core.run.files import published
from core.run.folder import config_to_dict, read_config
from core.run.models import load_exported
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task
from core.types import UsageError
from environments.base import EVAL_SEEDS, MultiAgentEnv
from environments.registry import absolute, make, short, split_opponent
from environments.text import printable

DRAW = 0.25  # so that two rewards of -0.1 for unreadable answers decide no game
PRIOR = 1.0  # drawn games of each pair that are added to those that were played
SCALE = 400 / math.log(10)  # Elo points per nat
BUILTIN = ("guess", "demonstrate")
FILE = "league.json"


@dataclass(frozen=True)
class Flags:
    """Rate policies by games against each other."""

    # Folders of runs or models, guess, demonstrate. A run alone brings its older copies and both.
    players: Annotated[tuple[str, ...], tyro.conf.Positional]
    env: str = ""  # Game of two agents; empty: that of the first run.
    games: int = 32  # Games of each pair in each seat.
    seed: int = 0  # Random seed of the players' draws.
    trust: bool = False  # Run the code that the first run names.


@dataclass(frozen=True)
class Rating:
    """One row of the table: Elo points `elo` with their 95% interval, and numbers of games."""

    name: str
    elo: float
    low: float
    high: float
    won: int
    drawn: int
    lost: int


class Player(NamedTuple):
    """A player: `copy` is the update of an older copy, -1 for every other player."""

    name: str
    opponent: str
    copy: int
    opponents: Opponents


def main(flags: Flags) -> int:
    """Plays the games, prints and writes the table. Returns the exit code."""
    runs = [name for name in flags.players if name not in BUILTIN]
    if flags.games < 1 or flags.seed < 0 or not runs or len(flags.players) > len({*flags.players}):
        raise UsageError("name a run and other players, each once; --games must be 1 or more, "
                         "--seed 0 or more")  # fmt: skip
    run = Path(runs[0])
    if not (run / "model").is_dir() or not (run / "config.yaml").exists():
        raise UsageError(f"{run}: not the folder of a finished run")
    saved = read_config(run / "config.yaml")
    if not flags.trust:
        check_trust(vars(saved), run / "config.yaml")
    cfg = resolve(saved)
    game = split_opponent(absolute(flags.env) or cfg.env[0])[0]
    name = short(game)
    env = make(game)
    if not isinstance(env, MultiAgentEnv) or len(env.agents) != 2:
        raise UsageError(f"--env {game}: a league needs a game that names its two `agents`")
    players = players_of(flags.players, run, cfg)
    won, drawn = play(players, game, env.agents, flags, cfg)
    ratings = rate([player.name for player in players], won, drawn)
    table = {"env": name, "games": flags.games, "prior": PRIOR}
    rows = [asdict(rating) for rating in ratings]
    with published(run / FILE) as part:
        text = json.dumps(table | {"players": rows}, indent=1) + "\n"
        part.write_text(text, encoding="utf-8", newline="\n")
    write_report(run, config_to_dict(cfg))
    shown = Table(
        "player", "Elo [95%]", "won", "drawn", "lost", title=Text(printable(f"{name}, mean 0"))
    )
    for r in ratings:
        counts = map(str, (r.won, r.drawn, r.lost))
        shown.add_row(Text(printable(r.name)), f"{r.elo:.0f} [{r.low:.0f}, {r.high:.0f}]", *counts)
    Console().print(shown)
    return 0


def players_of(names: tuple[str, ...], run: Path, cfg: Config) -> list[Player]:
    """The players; a run alone brings its older copies, `guess` and `demonstrate`."""
    policy = load_exported(cfg, run, "opponent")
    own = Opponents(replace(cfg, env=(), eval_env=()), policy, run, {"update": 0})
    players = []
    if len(names) == 1:
        players = [Player(f"update {n}", "older:1", n, own) for n in copies_in(run)]
        names = (*names, *BUILTIN)
    for name in names:
        if name not in BUILTIN:
            loaded = policy if Path(name) == run else load_opponent(Path(name), cfg, policy)
            own.samplers[name] = TorchSampler(loaded)
        players.append(Player(name, name, -1, own))
    return players


def play(
    players: list[Player], game: str, agents: tuple[str, ...], flags: Flags, cfg: Config
) -> tuple[np.ndarray, np.ndarray]:
    """Plays all games at once; returns how many player i won against j, and how many were drawn.

    Both are [n, n]. Games whose environment fails are not counted.
    """
    pairs = itertools.permutations(range(len(players)), 2)  # with each player first in one
    lineups = [pair for pair in pairs for _ in range(flags.games)]
    tasks = [Task(game, EVAL_SEEDS[i % flags.games], i) for i in range(len(lineups))]
    params = SamplingParams(cfg.max_tokens, seed=flags.seed)
    episodes: dict[int, Episode] = {}

    def answerer(episode: Episode, agent: Agent) -> Ask:
        episodes[episode.number] = episode
        player = players[lineups[episode.number][agents.index(agent.rollout.agent)]]
        return player.opponents.ask(player.opponent, episode, agent, params, player.copy)

    won, drawn = np.zeros((2, len(players), len(players)))
    with closing(RolloutCollector(
        players[0].opponents.policy, cfg.max_turns, cfg.thinking == "drop", cfg.env_timeout,
        env_instances=cfg.env_instances,
    )) as collector:  # fmt: skip
        collector.play(tasks, answerer)
    for number, (first, second) in enumerate(lineups):
        seated = episodes[number].agents if number in episodes else {}
        rollouts = {name: agent.rollout for name, agent in seated.items()}
        if not rollouts or any(rollout.error for rollout in rollouts.values()):
            continue
        returns = [rollouts[a].episode_return if a in rollouts else 0.0 for a in agents]
        if abs(returns[0] - returns[1]) < DRAW:
            drawn[first, second] += 1
            drawn[second, first] += 1
        else:
            winner, loser = (first, second) if returns[0] > returns[1] else (second, first)
            won[winner, loser] += 1
    return won, drawn


def rate(names: list[str], won: np.ndarray, drawn: np.ndarray) -> list[Rating]:
    """The ratings, the highest first, from `won[i, j]` games of i against j and symmetric `drawn`.

    Newton's method on the log-likelihood, which is concave; `PRIOR` drawn games per pair make its
    maximum finite and unique.
    """
    others = 1 - np.eye(len(names))
    points = won + (drawn + PRIOR * others) / 2
    games = points + points.T
    nats = np.zeros(len(names))
    for _ in range(100):
        expected = 1 / (1 + np.exp(nats[None, :] - nats[:, None]))
        gradient = (points - games * expected).sum(1)
        curvature = games * expected * (1 - expected)
        information = np.diag(curvature.sum(1)) - curvature
        step = np.linalg.pinv(information) @ gradient  # the mean stays 0
        nats += step / max(1.0, np.abs(step).max())
        if np.abs(step).max() < 1e-9:
            break
    errors = 1.96 * np.sqrt(np.diag(np.linalg.pinv(information)))
    ratings = [
        Rating(name, SCALE * r, SCALE * (r - e), SCALE * (r + e),
               int(won[i].sum()), int(drawn[i].sum()), int(won[:, i].sum()))
        for i, (name, r, e) in enumerate(zip(names, nats.tolist(), errors.tolist(), strict=True))
    ]  # fmt: skip
    return sorted(ratings, key=lambda rating: -rating.elo)


def run(args: list[str]) -> int:
    """What `python -m core.league ARGS` does. Returns the exit code."""
    return cli.run(main, args, lambda a: tyro.cli(Flags, prog="python -m core.league", args=a),
                   "core.league")  # fmt: skip


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
