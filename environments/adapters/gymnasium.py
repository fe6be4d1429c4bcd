"""Gymnasium environments with discrete actions, as text (gymnasium.farama.org).

Observation: the rules and the state as one line; on later turns the new state alone. With
memory=false each turn starts a new context, which holds the rules and the new state:

    Keep the pole up. Cart: x place, v speed; pole: a angle, w turn speed. End with left or right.
    x 0.0 v 0.0 a 0.03 w 0.0

`gymnasium_players` has the rules, the names of the actions and a player for five environments.
For all others the state and the actions are numbers.

Reward of a response:

    scale * sum of the environment's rewards over `repeat` steps of the action
    -0.1                 no action could be read, at most twice per episode
    -forfeit * scale     no action could be read for the third time; the episode ends

`info["correct"]`: the episode ended as `Game.solved` requires.

`as_gymnasium` does the reverse: it turns one of our environments into a `gymnasium.Env`.

>>> game = Game("Guess the next card.", ("red", "black"), show=str)
>>> system_prompt(game) + " " + format_observation(game, "seen 12 red 7")
'Guess the next card. End with red or black. seen 12 red 7'
>>> [extract_action(game, text) for text in ("Many red ones gone: black", '{"action": 0}', "ace")]
[1, 0, None]
"""

import random
from typing import Any

from core.types import Message, UsageError
from environments.adapters import import_library
from environments.adapters.gymnasium_players import Game, find_game
from environments.base import TRAIN_SEEDS, Env, Step
from environments.parsing import Retries, one_of, read_action, user

MAX_TEXT_LENGTH = 100_000  # characters
CHARACTERS = "".join(map(chr, range(0x3000)))  # alphabets, punctuation, symbols


def system_prompt(game: Game) -> str:
    """Returns the rules and the required format of a response."""
    return f"{game.rules} {_format_hint(game)}"


def format_observation(game: Game, observation: Any) -> str:
    """Returns the observation as one line of text."""
    return game.show(observation)


def extract_action(game: Game, response: str) -> int | None:
    """Returns the last action that the response names, by word or by number; None without one."""
    actions = {word: i for i, word in enumerate(game.actions, game.first)}
    actions |= {str(i): i for i in actions.values()}
    # In plain text a number counts only if it is the whole response: it may be an observation.
    plain = rf"(?<![\w.+-])({'|'.join(game.actions)}|^\s*\d+\s*$)(?!\w|\.\d)"
    to_name = one_of(*actions)
    name = read_action(
        response, "action", lambda v: to_name(str(v) if type(v) is int else v), plain
    )
    return None if name is None else actions[name]


class Gymnasium(Env):
    """One Gymnasium environment.

    `id`: its registered name.
    `max_steps`: step limit; 0: the environment's own.
    `repeat`: number of steps for which each action is repeated.
    `scale`: factor on all rewards.
    `memory`: whether the policy sees its earlier turns.
    """

    def __init__(self, id: str = "CartPole-v1", max_steps: int = 0, repeat: int = 1,
                 scale: float = 1.0, memory: bool = True) -> None:  # fmt: skip
        if max_steps < 0 or repeat < 1:
            raise UsageError(
                "max_steps must be at least 0 (0: the environment's own limit), "
                "repeat must be at least 1"
            )
        self.env, self.repeat, self.scale = _make(id, max_steps or None), repeat, scale
        self.game, self.memory = find_game(self.env), memory

    def reset(self, seed: int) -> list[Message]:
        self.rng = random.Random(seed)
        self.retries = Retries(final=-self.game.forfeit * self.scale)
        self.unscaled_return, self.steps = 0.0, 0
        observation, _ = self.env.reset(seed=seed % 2**31)
        return [user(self._describe(observation, with_rules=True))]

    def step(self, response: str) -> Step:
        action = extract_action(self.game, response)
        if action is None:
            return self.retries.refuse(_format_hint(self.game), steps=self.steps)
        reward, terminated, truncated = 0.0, False, False
        for _ in range(self.repeat):
            observation, step_reward, terminated, truncated, _ = self.env.step(action)
            reward += float(step_reward)
            self.steps += 1
            if terminated or truncated:
                break
        self.unscaled_return += reward
        done = terminated or truncated
        solved = {
            "terminated": terminated,
            "truncated": truncated and not terminated,
            "return": terminated and self.unscaled_return > 0,
        }
        info = {"correct": bool(solved[self.game.solved]), "steps": self.steps}
        message = None if done else user(self._describe(observation, not self.memory))
        return Step(message, reward * self.scale, done, info, fresh=not self.memory)

    def demonstrate(self, hasty: bool = False) -> str | None:
        """Returns the player's action, None if there is no player; `hasty`: mostly the last one."""
        if hasty:
            return self.game.actions[self.hasty_action]
        if self.game.play is None:
            return None
        return self.game.actions[self.game.play(self.observation)]

    def trivial(self) -> str:
        """Always takes the first action."""
        return self.game.actions[0]

    def _describe(self, observation: Any, with_rules: bool) -> str:
        self.observation = observation
        last = len(self.game.actions) - 1
        # Mostly the last action, which a policy then prefers that saw more guesses than good play.
        # Drawn here, once per turn, so that `demonstrate` has no effect on the random draws.
        self.hasty_action = self.rng.choice((last, last, last, self.rng.randint(0, last)))
        line = format_observation(self.game, observation)
        return f"{system_prompt(self.game)}\n{line}" if with_rules else line


def as_gymnasium(env: Env) -> Any:
    """Returns `env` as a `gymnasium.Env` whose observations and actions are texts.

        env = as_gymnasium(make("letter_counting:difficulty=2"))
        observation, info = env.reset(seed=7)
        observation, reward, terminated, truncated, info = env.step("<answer>1</answer>")

    The first observation joins the opening messages with empty lines; the last one is empty.
    `reset(seed=n)` starts the task of seed n; `reset()` draws a seed from TRAIN_SEEDS with
    `np_random`. `truncated` is always False. Raises UsageError if Gymnasium is not installed.
    """
    import_library("gymnasium")
    import gymnasium

    class AsGymnasium(gymnasium.Env[str, str]):
        metadata = {"render_modes": []}  # noqa: RUF012  declared so by Gymnasium
        observation_space = text_space()
        action_space = text_space()

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            if seed is None:
                seed = int(self.np_random.integers(TRAIN_SEEDS.start, TRAIN_SEEDS.stop))
            return join(env.reset(seed)), {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            step = env.step(action)
            observation = step.message["content"] if step.message else ""
            return observation, float(step.reward), step.done, False, dict(step.info)

    return AsGymnasium()


def text_space() -> Any:
    """Returns a `gymnasium.spaces.Text` of 0 to 100,000 characters, each below U+3000."""
    spaces = import_library("gymnasium").spaces
    return spaces.Text(MAX_TEXT_LENGTH, min_length=0, charset=CHARACTERS)


def join(messages: list[Message]) -> str:
    r"""Returns the contents of the messages, separated by empty lines.

    >>> join([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}])
    'Be brief.\n\n2 + 2?'
    """
    return "\n\n".join(message["content"] for message in messages)


def _make(id: str, max_steps: int | None) -> Any:
    gymnasium = import_library("gymnasium")
    try:
        env = gymnasium.make(id, max_episode_steps=max_steps, disable_env_checker=True)
    except (gymnasium.error.Error, ImportError, ValueError) as error:
        raise UsageError(f"Gymnasium cannot make {id!r}: {' '.join(str(error).split())}") from None
    if not isinstance(env.action_space, gymnasium.spaces.Discrete):
        raise UsageError(f"{id} has the action space {env.action_space}; it must be Discrete")
    return env


def _format_hint(game: Game) -> str:
    return f"End with {' or '.join(game.actions)}."
