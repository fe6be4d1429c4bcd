"""Gymnasium environments as text (gymnasium.farama.org).

Observation: the rules and the state as one line; on later turns the new state alone. With
memory=false each turn starts a new context, which holds the rules and the new state:

    Keep the pole up. Cart: x place, v speed; pole: a angle, w turn speed. End with left or right.
    x 0.0 v 0.0 a 0.03 w 0.0

`gymnasium_players` has the words and a player for two environments. For all others the rules are in
the environment's docstring, the state is numbers, and the actions are numbers, or JSON if they are
not discrete: {"action": [0.5, -1]}.

Reward of a response:

    scale * sum of the environment's rewards over `repeat` steps of the action
    -0.1                 no action of the action space could be read, at most twice per episode
    -forfeit * scale     the same for the third time; the episode ends

`info["correct"]`: the episode ended with a positive return; in CartPole, by its time limit. Other
ends by a time limit set `Step.truncated`.

>>> [read_named({"red": 0, "black": 1}, text)
...  for text in ("Many red ones gone: black", '{"action": 0}', "ace")]
[1, 0, None]
"""

import inspect
import random
from functools import partial
from typing import Any

from environments.adapters.gymnasium_players import Game, find_game, to_action, to_json
from environments.base import Env, Message, Step, UsageError, check_range
from environments.parsing import Retries, one_of, read_action, user
from environments.plumbing.installed import import_library
from environments.plumbing.registry import import_attribute, import_source


def read_named(actions: dict[str, int], response: str) -> int | None:
    """Returns the last action that the response names, by word or by number; None without one."""
    # In plain text a number counts only if it is the whole response: it may be an observation.
    plain = rf"(?<![\w.+-])({'|'.join(actions)}|^\s*\d+\s*$)(?!\w|\.\d)"
    by_name = {str(number): number for number in actions.values()} | actions
    to_name = one_of(*by_name)
    convert = lambda value: to_name(str(value) if type(value) is int else value)  # noqa: E731
    name = read_action(response, "action", convert, plain)
    return None if name is None else by_name[name]


class Gymnasium(Env):
    """One Gymnasium environment.

    `id`: its registered name; module:name or FILE.py:name of what registers it, or of its class.
    `max_steps`: step limit; 0: the environment's own. `repeat`: steps of each action.
    `scale`: factor on all rewards. `memory`: whether the policy sees its earlier turns.
    `words`: module:GAME, a `Game` of yours with the texts and the reading of actions.
    `options`: keyword arguments of the environment, such as map_name=8x8.
    """

    luck = True

    def __init__(
        self,
        id: str = "CartPole-v1",
        max_steps: int = 0,
        repeat: int = 1,
        scale: float = 1.0,
        memory: bool = True,
        words: str = "",
        **options: Any,
    ) -> None:
        check_range("max_steps", max_steps, 0)
        check_range("repeat", repeat, 1)
        self.env = _make(id, max_steps or None, options)
        self.repeat, self.scale, self.memory = repeat, scale, memory
        self.game = import_attribute(words) if words else find_game(self.env)
        if not isinstance(self.game, Game) or not (self.game.read or self.game.actions):
            raise UsageError(f"words={words} names no Game with `read` or `actions`")
        names = " or ".join(self.game.actions) or "a valid action"
        self.hint = self.game.hint or f"End with {names}."
        first = int(getattr(self.env.action_space, "start", 0))
        self.actions = {name: i for i, name in enumerate(self.game.actions, first)}

    def reset(self, seed: int) -> list[Message]:
        self.rng = random.Random(seed)
        self.retries = Retries(final=-self.game.forfeit * self.scale)
        self.unscaled_return, self.steps = 0.0, 0
        observation, _ = self.env.reset(seed=seed % 2**31)
        self.env.action_space.seed(seed % 2**31)  # for random guesses
        return [user(self._describe(observation, with_rules=True))]

    def step(self, response: str) -> Step:
        action = self._read(response)
        if action is None:
            return self.retries.refuse(self.hint, steps=self.steps)
        reward = 0.0
        for _ in range(self.repeat):
            observation, step_reward, terminated, truncated, _ = self.env.step(action)
            reward += float(step_reward)
            self.steps += 1
            if terminated or truncated:
                break
        self.unscaled_return += reward
        done = terminated or truncated
        is_cut = truncated and not terminated
        correct = terminated and self.unscaled_return > 0
        if self.game.solved == "truncated":  # the task is to reach the time limit
            is_cut, correct = False, is_cut
        message = None if done else user(self._describe(observation, not self.memory))
        info = {"correct": bool(correct), "steps": self.steps}
        return Step(message, reward * self.scale, done, info, not self.memory, is_cut)

    def demonstrate(self, hasty: bool = False) -> str | None:
        """Returns the player's action, None if there is no player; `hasty`: mostly the last one."""
        if hasty:
            return self.hasty_action
        if self.game.play is None or not self.game.actions:
            return None
        return self.game.actions[self.game.play(self.observation)]

    def trivial(self) -> str | None:
        """Always takes the first action; None if the actions have no names."""
        return self.game.actions[0] if self.game.actions else None

    def _describe(self, observation: Any, with_rules: bool) -> str:
        self.observation = observation
        self.hasty_action = self._guess()  # once per turn: `demonstrate` must not change the draws
        line = self.game.show(observation)
        return f"{self.game.rules} {self.hint}\n{line}" if with_rules else line

    def _guess(self) -> str | None:
        """Returns mostly the last action, so that guesses teach a policy to prefer it.

        Without names of actions: a random action as JSON; None if `words` reads them otherwise.
        """
        if not self.game.actions:
            guess = to_json(self.env.action_space.sample())
            return None if self._read(guess) is None else guess
        last = len(self.game.actions) - 1
        return self.game.actions[self.rng.choice((last, last, last, self.rng.randint(0, last)))]

    def _read(self, response: str) -> Any:
        read = self.game.read or partial(read_named, self.actions)
        return to_action(self.env.action_space, read(response))


def _make(id: str, max_steps: int | None, options: dict[str, Any]) -> Any:
    gymnasium = import_library("gymnasium")
    source, _, id = id.rpartition(":")
    env_class = getattr(import_source(source), id, None) if source else None
    spec: Any = id  # which that import may have registered
    if inspect.isclass(env_class):
        spec = gymnasium.envs.registration.EnvSpec(id=id, entry_point=env_class)
    return gymnasium.make(spec, max_episode_steps=max_steps, disable_env_checker=True, **options)
