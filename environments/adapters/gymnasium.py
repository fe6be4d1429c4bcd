"""Any Gymnasium environment with discrete actions, told in words (gymnasium.farama.org).

`system_prompt` makes the rules, `format_observation` a line of what is seen, `extract_action` reads
the response; `gymnasium_players` has words for five environments, others get numbers. Observation:
the rules and a line, then a line a turn (memory=false: each turn the rules and a line, alone), like

    Keep the pole up. Cart: x place, v speed; pole: a angle, w turn speed. End with left or right.
    x 0.0 v 0.0 a 0.03 w 0.0

Reward of a response ("correct": ended as Game.solved says):

    sum of rewards · scale    the environment's, for `repeat` steps of the action
    -0.1                      an action that can't be read, twice; then -forfeit · scale, the end

>>> game = Game("Guess the next card.", ("red", "black"), show=str)
>>> system_prompt(game) + " " + format_observation(game, "seen 12 red 7")
'Guess the next card. End with red or black. seen 12 red 7'
>>> [extract_action(game, text) for text in ("Many red ones gone: black", '{"action": 0}', "ace")]
[1, 0, None]
"""

import random
from typing import Any

from core.types import Message, UsageError
from environments.adapters.gymnasium_players import Game, find_game
from environments.base import Env, Step
from environments.parsing import Retries, one_of, read_action, user


def system_prompt(game: Game) -> str:
    """The rules, and how to name an action."""
    return f"{game.rules} {_form(game)}"


def format_observation(game: Game, observation: Any) -> str:
    """A line of what is seen."""
    return game.show(observation)


def extract_action(game: Game, response: str) -> int | None:
    """The number of the last action named, by its word or number."""
    names = {word: i for i, word in enumerate(game.actions, game.first)}
    names |= {str(i): i for i in names.values()}
    # in plain text a number may mean something else, unless it stands alone
    plain = rf"(?<![\w.+-])({'|'.join(game.actions)}|^\s*\d+\s*$)(?!\w|\.\d)"
    is_name = one_of(*names)
    name = read_action(
        response, "action", lambda v: is_name(str(v) if type(v) is int else v), plain
    )
    return None if name is None else names[name]


class Gymnasium(Env):
    """`id`; `max_steps` (0: its own); `repeat` of an action; reward `scale`; `memory` of turns."""

    def __init__(self, id: str = "CartPole-v1", max_steps: int = 0, repeat: int = 1,
                 scale: float = 1.0, memory: bool = True):  # fmt: skip
        if max_steps < 0 or repeat < 1:
            raise UsageError("max_steps is 0 (as the environment has it) or more, repeat 1 or more")
        self.env, self.repeat, self.scale = _open(id, max_steps or None), repeat, scale
        self.game, self.memory = find_game(self.env), memory

    def reset(self, seed: int) -> list[Message]:
        self.rng = random.Random(seed)
        self.retries = Retries(final=-self.game.forfeit * self.scale)
        self.total, self.steps = 0.0, 0
        observation, _ = self.env.reset(seed=seed % 2**31)
        return [user(self._see(observation, rules=True))]

    def step(self, response: str) -> Step:
        action = extract_action(self.game, response)
        if action is None:
            return self.retries.refuse(_form(self.game), steps=self.steps)
        paid, terminated, truncated = 0.0, False, False
        for _ in range(self.repeat):
            observation, reward, terminated, truncated, _ = self.env.step(action)
            paid += float(reward)
            self.steps += 1
            if terminated or truncated:
                break
        self.total += paid
        ends = {"terminated": terminated, "truncated": truncated and not terminated}
        correct = bool(ends.get(self.game.solved, terminated and self.total > 0))
        done = terminated or truncated
        message = None if done else user(self._see(observation, rules=not self.memory))
        info = {"correct": correct, "steps": self.steps}
        return Step(message, paid * self.scale, done, info, fresh=not self.memory)

    def demonstrate(self, hasty: bool = False) -> str | None:
        """The player's action, None without one; `hasty`: one by chance, the last mostly."""
        if hasty or self.game.play is None:
            return self.game.actions[self.guess] if hasty else None
        return self.game.actions[self.game.play(self.observation)]

    def _see(self, observation: Any, rules: bool) -> str:
        self.observation = observation
        last = len(self.game.actions) - 1
        self.guess = self.rng.choice((last, self.rng.randint(0, last)))
        line = format_observation(self.game, observation)
        return f"{system_prompt(self.game)}\n{line}" if rules else line


def _open(id: str, max_steps: int | None) -> Any:
    try:
        import gymnasium
    except ImportError:
        raise UsageError('gymnasium needs gymnasium: pip install -e ".[envs]"') from None
    try:
        env = gymnasium.make(id, max_episode_steps=max_steps, disable_env_checker=True)
    except (gymnasium.error.Error, ImportError, ValueError) as error:
        raise UsageError(f"Gymnasium can't make {id!r}: {' '.join(str(error).split())}") from None
    if not isinstance(env.action_space, gymnasium.spaces.Discrete):
        raise UsageError(f"{id} has no discrete actions but {env.action_space}")
    return env


def _form(game: Game) -> str:
    return f"End with {' or '.join(game.actions)}."
