"""Any game of TextArena, for one player or several: its own texts, rules and rewards.

Agents are "player_0", "player_1", ..; a game for one player has one. An agent is shown what is new
since its last turn, its own words left out. The action may be named by {"action": "[4]"} or between
<action> tags; otherwise the game reads the whole response, by its own rules.

Reward: 0 until the end, then what the game pays (1 won, 0 drawn, -1 lost in games for two, where
an invalid move is forgiven once and then loses). "correct": a reward of at least 1. A response that
makes the game itself fail ends it: -1 for that player, 0 for the others.

TextArena draws from the global generators, so each episode keeps states of them of its own.

>>> describe([(-1, "Your turn."), (0, "[4]"), (1, "[0]")], 0, {1: "Player 1"})
'Your turn.\\n[Player 1] [0]'
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from core.types import Message, UsageError
from environments.base import MultiAgentEnv, Step
from environments.parsing import read_action, user

LONGEST_ACTION = 2000  # characters
MOST_PLAYERS = 20


class TextArena(MultiAgentEnv):
    """`id` of the game; number of `players` (0: the fewest that it takes)."""

    def __init__(self, id: str = "TicTacToe-v0", players: int = 0):
        try:
            import textarena
        except ImportError:
            raise UsageError('textarena needs textarena: pip install -e ".[envs]"') from None
        if not 0 <= players <= MOST_PLAYERS:
            raise UsageError(f"players is 0 to {MOST_PLAYERS}, not {players}")
        self.id, self.textarena = id, textarena
        self.draws = random.getstate(), np.random.get_state()
        for self.players in [players] if players else range(1, MOST_PLAYERS + 1):
            try:
                self.reset(0)
            except Exception as error:  # unknown, a wrong number, a missing word list or service
                problem = " ".join(str(error).split())[:200]
                if self.game is None:  # not even made
                    break
                continue
            alone = isinstance(self.game.state, textarena.SinglePlayerState)
            if players or alone or self.players > 1:  # a game for many may begin with one alone
                return
        raise UsageError(f"TextArena can't begin {id!r}: {problem}")

    def reset(self, seed: int) -> dict[str, list[Message]]:
        with self._own_draws():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            self.game: Any = None  # made anew, as some games keep the cards as they lay
            self.game = self.env = self.textarena.make(self.id)
            self.env.reset(num_players=self.players, seed=seed)
        while isinstance(self.game, self.textarena.Wrapper):  # some repeat the chat every turn
            self.game = self.game.env
        self.mover, text = self._next()
        return {self.mover: [user(text)]}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        response = responses[self.mover]
        action = read_action(response, "action", lambda v: v if isinstance(v, str) else None)
        action = (response if action is None else action)[-LONGEST_ACTION:]
        try:
            with self._own_draws():
                done, _ = self.env.step(action)
                rewards, facts = self.env.close() if done else ({}, {})
                rewards = {player: float(reward) for player, reward in rewards.items()}
        except Exception:  # games differ in what they can't bear
            done, rewards, facts = True, {int(self.mover.removeprefix("player_")): -1.0}, {}
        if done:
            everyone = range(self.players)
            return {_name(p): _last(rewards.get(p, 0.0), facts.get(p, {})) for p in everyone}
        before, (self.mover, text) = self.mover, self._next()
        return {before: Step(None, 0.0, False), self.mover: Step(user(text), 0.0, False)}

    def _next(self) -> tuple[str, str]:
        with self._own_draws():
            player, news = self.game.get_observation()
        # a few games give text and kind in the wrong order
        said = [(who, text if isinstance(text, str) else str(kind)) for who, text, kind in news]
        return _name(player), describe(said, player, self.game.state.role_mapping) or "Your turn."

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        others = random.getstate(), np.random.get_state()
        random.setstate(self.draws[0])
        np.random.set_state(self.draws[1])
        try:
            yield
        finally:
            self.draws = random.getstate(), np.random.get_state()
            random.setstate(others[0])
            np.random.set_state(others[1])


def describe(said: list[tuple[int, str]], player: int, names: dict[int, str]) -> str:
    """What was said, (sender, text), as one text for `player`; -1 is the game itself."""
    shown = {-1: ""} | {p: f"[{name}] " for p, name in names.items() if p >= 0}
    others = [(who, text) for who, text in said if who != player]  # it knows its own words
    return "\n".join(f"{shown.get(who, f'[{who}] ')}{text.strip()}" for who, text in others)


def _name(player: int) -> str:
    return f"player_{player}"


def _last(reward: float, facts: dict[str, Any]) -> Step:
    invalid = bool(facts.get("invalid_move", False))
    return Step(None, reward, True, {"correct": reward >= 1, "invalid": invalid})
