"""How Gymnasium environments are described to a policy, and players for two of them.

CartPole: pushes towards the side to which the pole leans and falls. Blackjack: basic strategy
without doubling and splitting (Baldwin et al., 1956); mean return about -0.045 per hand.

>>> GAMES["Blackjack-v1"].show((16, 10, 0))
'you 16 dealer 10 ace no'
>>> [blackjack((16, 10, 0)), blackjack((16, 6, 0)), blackjack((18, 9, 1))]
[1, 0, 1]
"""

import inspect
import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from environments.base import UsageError
from environments.parsing import read_action

MAX_RULES = 4000  # characters of a docstring
MAX_SHOWN = 10_000  # characters of an observation; more is an image
RULES_SECTIONS = ("Description", "Action", "Observation", "Reward")
SECTION = re.compile(r"^\s*#{2,3} +", re.MULTILINE)
STICK_AT = {  # usable ace: {dealer's card (1: ace): lowest sum at which to stick}
    False: {1: 17, 2: 13, 3: 13, 4: 12, 5: 12, 6: 12, 7: 17, 8: 17, 9: 17, 10: 17},
    True: {1: 19, 2: 18, 3: 18, 4: 18, 5: 18, 6: 18, 7: 18, 8: 18, 9: 19, 10: 19},
}


def show_numbers(observation: Any) -> str:
    """Returns the numbers of an observation in order, floats with three digits.

    >>> show_numbers({"speed": 0.5, "board": np.array([[1, 0], [0, 2]])})
    'speed 0.5 board 1 0 / 0 2'
    >>> show_numbers(np.array([-0.0, 12.345, 0.07, -0.00412345]))
    '0 12.3 0.07 -0.00412'
    """
    if isinstance(observation, dict):
        return " ".join(f"{key} {show_numbers(value)}" for key, value in observation.items())
    if isinstance(observation, tuple):
        return " ".join(show_numbers(value) for value in observation)
    if isinstance(observation, str):
        return observation
    array = np.asarray(observation)
    if array.ndim > 1:
        return " / ".join(map(show_numbers, array))
    numbers = np.ravel(array).tolist()
    return " ".join(f"{n:z.3g}" if isinstance(n, float) else str(int(n)) for n in numbers)


class Game(NamedTuple):
    """How one environment is described and played."""

    rules: str
    actions: tuple[str, ...] = ()  # the name of each discrete action, in order
    show: Callable[[Any], str] = show_numbers  # observation -> text
    play: Callable[[Any], int] | None = None  # observation -> index into `actions`
    # which end counts as correct: at the time limit, or else with a positive return
    solved: Literal["truncated", "return"] = "return"
    forfeit: float = 1.0  # penalty of giving up; where steps cost, that of the step limit
    # response -> action, None if there is none; without it the last of `actions` that is named
    read: Callable[[str], Any] | None = None
    hint: str = ""  # how a response has to end; empty: with one of `actions`


def find_game(env: Any) -> Game:
    """Returns the entry of GAMES for a Gymnasium environment, or one made of its docstring.

    Raises UsageError for observations that are images, and for actions that no text can express.
    """
    id, space = env.spec.id, env.action_space
    if id in GAMES:
        return GAMES[id]
    if len(show_numbers(env.observation_space.sample())) > MAX_SHOWN:
        raise UsageError(f"{id} observes images: name words=module:GAME, which shows them as text")
    rules = "\n".join(filter(None, [f"{id}.", docstring_rules(type(env.unwrapped).__doc__)]))
    # The steps may have negative rewards: forfeiting must cost more than the longest episode.
    game = Game(rules, forfeit=env.spec.max_episode_steps or 1.0)
    if type(space).__name__ == "Discrete":
        names = tuple(str(space.start + i) for i in range(space.n))
        hint = f"End with a number from {names[0]} to {names[-1]}."
        return game._replace(actions=names, hint=hint)
    with suppress(TypeError):
        if read_json_action(space, to_json(space.sample())) is not None:
            hint = f'End with JSON: {{"action": ..}}, which is of {space}.'
            if type(space).__name__ == "Text":
                hint = f"Answer with a text of at most {space.max_length} characters."
            return game._replace(read=partial(read_json_action, space), hint=hint)
    raise UsageError(f"actions of the space {space} are not read from text: words=module:GAME can")


def docstring_rules(doc: str | None) -> str:
    """Returns what the docstring of an environment says about the task: its introduction and the
    sections on actions, observations and rewards."""
    intro, *sections = SECTION.split(inspect.cleandoc(doc or ""))
    lines = [line for line in intro.splitlines() if not line.startswith(("#", "|", "This env"))]
    for section in sections:
        if section.startswith(RULES_SECTIONS):
            lines += section.splitlines()[1:]
    return "\n".join(line.strip() for line in lines if line.strip())[:MAX_RULES]


def read_json_action(space: Any, response: str) -> Any:
    """Returns the last action of `space` in {"action": ..} or <action>..</action>; None without
    one. If actions are texts, the whole response may be one."""

    def convert(value: Any) -> Any:
        action = to_action(space, value)
        if action is None and isinstance(value, str):  # between tags
            with suppress(ValueError, RecursionError):
                action = to_action(space, json.loads(value))
        return None if action is None else (action,)  # an array has no truth value

    boxed = read_action(response, "action", convert)
    if boxed is None and type(space).__name__ == "Text":
        boxed = convert(response.strip())
    return boxed and boxed[0]


def to_action(space: Any, value: Any) -> Any:
    """Returns a value of JSON or NumPy as an element of `space`; None if it is not one. One number
    stands for an array of one."""
    if space.shape == (1,) and isinstance(value, int | float):
        value = [value]
    try:
        batch: Any = [value]
        if isinstance(value, dict):
            batch = {key: [part] for key, part in value.items()}
        [action] = space.from_jsonable(batch)
        return action if space.contains(action) else None
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError, AttributeError):
        return None


def to_json(action: Any) -> str:
    """The reverse of `read_json_action`."""
    return json.dumps({"action": action}, default=lambda value: value.tolist())


def cartpole(observation: Any) -> int:
    """Returns 0 (left) or 1 (right). Balances the pole with each action repeated up to 3 times."""
    _, _, angle, angular_speed = observation
    # Rounded like the text, so that the rule can be learned from the text.
    return int(3 * round(float(angle), 2) + round(float(angular_speed), 1) > 0)


def blackjack(observation: Any) -> int:
    """Returns 0 (stick) or 1 (hit)."""
    total, dealer, usable_ace = (int(number) for number in observation)
    return int(total < STICK_AT[bool(usable_ace)][dealer])


GAMES = {
    "CartPole-v1": Game(
        "Keep the pole up. Cart: x place, v speed; pole: a angle, w turn speed.",
        ("left", "right"),
        lambda o: f"x {o[0]:z.1f} v {o[1]:z.1f} a {o[2]:z.2f} w {o[3]:z.1f}",
        cartpole,
        solved="truncated",
    ),
    "Blackjack-v1": Game(
        "Blackjack: come nearer to 21 than the dealer, not above.",
        ("stick", "hit"),
        lambda o: f"you {o[0]} dealer {o[1]} ace {'yes' if o[2] else 'no'}",
        blackjack,
    ),
}
