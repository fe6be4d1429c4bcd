r"""TextArena: text games for one or more players, with their own rules and rewards.

Agents are named "player_0", "player_1", ...; a single-player game has one agent.

Observation: everything said since the agent's last turn, except for the agent's own words.
Action: the value of "action" in a JSON object, else the text between <action> tags, else the whole
response, which the game reads by its own rules.

Reward: 0 until the end, then the game's reward. In most games for two: 1 won, 0 drawn, -1 lost,
and the second invalid move in a row loses. If a response makes the game itself raise an exception,
the episode ends with -1 for that player, and a line says once what was raised.
`info["correct"]`: the reward is at least 1.

TextArena uses the global random generators. Each instance keeps generator states of its own and
restores the global ones, so parallel episodes do not affect each other.

>>> as_text([(-1, "Your turn."), (0, "[4]"), (1, "[0]")], 0, {1: "Player 1"})
'Your turn.\n[Player 1] [0]'
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from environments.adapters import preserve_global_generators, tell_once
from environments.base import Message, MultiAgentEnv, Step, UsageError, check_range
from environments.parsing import read_action, user
from environments.plumbing.installed import import_library

MAX_ACTION_LENGTH = 2000  # characters
MAX_PLAYERS = 20


class TextArena(MultiAgentEnv):
    """`id`: name of the game; `players`: their number, 0 for the fewest that the game allows."""

    def __init__(self, id: str = "TicTacToe-v0", players: int = 0) -> None:
        check_range("players", players, 0, MAX_PLAYERS)
        self.id, self.textarena = id, import_library("textarena")
        self.generator_states = random.getstate(), np.random.get_state()
        problem = ""
        for self.players in [players] if players else range(1, MAX_PLAYERS + 1):
            try:
                self.reset(0)
            except Exception as error:  # unknown game, wrong number of players, missing word list
                problem = " ".join(str(error).split())[:200]
                continue
            single = isinstance(self.game.state, self.textarena.SinglePlayerState)
            if players or single or self.players > 1:  # some multiplayer games start with one
                self.agents = tuple(map(_name, range(self.players)))
                return
        raise UsageError(f"TextArena cannot start {id!r}: {problem}")

    def reset(self, seed: int) -> dict[str, list[Message]]:
        with self._own_generators():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            # A new game each time: some games keep state, such as the deck, across resets.
            self.game: Any = self.textarena.make(self.id)
            self.env = self.game
            self.env.reset(num_players=self.players, seed=seed)
        while isinstance(self.game, self.textarena.Wrapper):  # wrappers repeat the whole chat
            self.game = self.game.env
        self.agent, text = self._next_observation()
        return {self.agent: [user(text)]}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        response = responses[self.agent]
        action = read_action(response, "action", lambda v: v if isinstance(v, str) else None)
        action = (response if action is None else action)[-MAX_ACTION_LENGTH:]
        try:
            with self._own_generators():
                done, _ = self.env.step(action)
                rewards, infos = self.env.close() if done else ({}, {})
                rewards = {player: float(reward) for player, reward in rewards.items()}
        except Exception as error:  # each game's own for an action that it cannot handle
            tell_once(f"textarena:id={self.id}", error, "the player gets -1")
            player = int(self.agent.removeprefix("player_"))
            done, rewards, infos = True, {player: -1.0}, {player: {"invalid_move": True}}
        if done:
            return {
                _name(player): _final_step(rewards.get(player, 0.0), infos.get(player, {}))
                for player in range(self.players)
            }
        previous, (self.agent, text) = self.agent, self._next_observation()
        return {previous: Step(None, 0.0, False), self.agent: Step(user(text), 0.0, False)}

    def _next_observation(self) -> tuple[str, str]:
        """Returns the agent that acts next and what it is shown."""
        with self._own_generators():
            player, messages = self.game.get_observation()
        # a few games swap the text and the type of a message
        said = [(who, text if isinstance(text, str) else str(kind)) for who, text, kind in messages]
        return _name(player), as_text(said, player, self.game.state.role_mapping) or "Your turn."

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Gives this instance its own states of the global generators."""
        with preserve_global_generators():
            random.setstate(self.generator_states[0])
            np.random.set_state(self.generator_states[1])
            try:
                yield
            finally:
                self.generator_states = random.getstate(), np.random.get_state()


def as_text(said: list[tuple[int, str]], player: int, names: dict[int, str]) -> str:
    """Returns the messages (sender, text) of all others as one text; sender -1 is the game."""
    prefixes = {-1: ""} | {p: f"[{name}] " for p, name in names.items() if p >= 0}
    others = [(who, text) for who, text in said if who != player]
    return "\n".join(f"{prefixes.get(who, f'[{who}] ')}{text.strip()}" for who, text in others)


def _name(player: int) -> str:
    return f"player_{player}"


def _final_step(reward: float, info: dict[str, Any]) -> Step:
    invalid = bool(info.get("invalid_move", False))
    return Step(None, reward, True, {"correct": reward >= 1, "invalid": invalid})
