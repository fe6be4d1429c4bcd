"""Five Gymnasium environments: the words they are told in, and a hand-written player for each.

CartPole pushes to the side that the pole leans and falls to; MountainCar pushes the way it moves;
Blackjack plays the basic strategy without doubling and splitting (Baldwin et al., 1956), which
returns about -0.045 a hand; FrozenLake and Taxi publish their transitions, so value iteration
(Bellman, 1957) finds the best action of each state.

>>> GAMES["Blackjack-v1"].show((16, 10, 0))
'you 16 dealer 10 ace no'
>>> [blackjack((16, 10, 0)), blackjack((16, 6, 0)), blackjack((18, 9, 1))]
[1, 0, 1]
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

DISCOUNT = 0.99  # so that the shorter of two ways is better
TOLERANCE = 1e-9
LEAST_TO_STICK = {  # by the dealer's card, an ace is 1; without and with a usable ace
    False: {1: 17, 2: 13, 3: 13, 4: 12, 5: 12, 6: 12, 7: 17, 8: 17, 9: 17, 10: 17},
    True: {1: 19, 2: 18, 3: 18, 4: 18, 5: 18, 6: 18, 7: 18, 8: 18, 9: 19, 10: 19},
}


class Game(NamedTuple):
    rules: str
    actions: tuple[str, ...]  # the word of each action, in order
    show: Callable[[Any], str]  # an observation as a line of text
    play: Callable[[Any], int] | None = None  # the action for an observation
    solved: str = "return"  # any end with a positive one; or the end "terminated", "truncated"
    forfeit: float = 1.0  # cost of giving up: where steps cost, that of the step limit
    first: int = 0  # the number of the first action


def find_game(env: Any) -> Game:
    """The words and player for an environment; numbers and no player where GAMES has none."""
    first = int(env.action_space.start)
    numbers = tuple(str(first + i) for i in range(int(env.action_space.n)))
    # the sign of its rewards isn't known: giving up must not be the cheaper way out
    forfeit = env.spec.max_episode_steps or 1.0
    other = Game(f"{env.spec.id}.", numbers, show_numbers, forfeit=forfeit, first=first)
    return GAMES.get(env.spec.id, other)


def show_numbers(observation: Any) -> str:
    """What is seen as numbers to two decimals, in order."""
    if isinstance(observation, dict):
        return " ".join(f"{key} {show_numbers(value)}" for key, value in observation.items())
    if isinstance(observation, tuple):
        return " ".join(show_numbers(value) for value in observation)
    if isinstance(observation, str):
        return observation
    numbers = np.ravel(observation).tolist()
    return " ".join(f"{n:z.2f}" if isinstance(n, float) else str(int(n)) for n in numbers)


def cartpole(observation: Any) -> int:
    """0: left, 1: right. Balances where an action is repeated up to 3 times."""
    _, _, angle, turn_speed = observation
    # rounded as they are shown, so that who reads the text can learn the rule
    return int(3 * round(float(angle), 2) + round(float(turn_speed), 1) > 0)


def mountain_car(observation: Any) -> int:
    """0: left, 2: right."""
    _, speed = observation
    return 2 if speed >= 0 else 0


def blackjack(observation: Any) -> int:
    """0: stick, 1: hit."""
    total, dealer, usable_ace = (int(number) for number in observation)
    return int(total < LEAST_TO_STICK[bool(usable_ace)][dealer])


def table_player(id: str, state: Any) -> int:
    """The best action of a state, where the environment publishes its transitions."""
    return best_actions(id)[int(state)]


@cache
def best_actions(id: str) -> list[int]:
    """The action of highest value in each state, from the environment's transition table `P`."""
    import gymnasium

    table: dict[int, dict[int, list]] = gymnasium.make(id).unwrapped.P  # type: ignore[attr-defined]
    values = [0.0] * len(table)

    def worth(state: int, action: int) -> float:
        return sum(
            chance * (reward + (0.0 if ended else DISCOUNT * values[following]))
            for chance, following, reward, ended in table[state][action]
        )

    change = 1.0
    while change > TOLERANCE:
        change = 0.0
        for state, actions in table.items():
            best = max(worth(state, action) for action in actions)
            change = max(change, abs(best - values[state]))
            values[state] = best
    return [max(table[state], key=partial(worth, state)) for state in range(len(values))]


def _show_taxi(state: int) -> str:
    row, column, place, goal = state // 100, state // 20 % 5, state // 4 % 5, state % 4
    return f"taxi {row},{column} passenger {['R', 'G', 'Y', 'B', 'in'][place]} to {'RGYB'[goal]}"


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
    "FrozenLake-v1": Game(
        "Go from S to G, not into H; the ice may turn you aside. Rows 0-3: SFFF FHFH FFFH HFFG.",
        ("left", "down", "right", "up"),
        lambda state: f"row {state // 4} column {state % 4}",
        partial(table_player, "FrozenLake-v1"),
    ),
    "Taxi-v4": Game(
        "Fetch the passenger, drop at the goal. R 0,0 G 0,4 Y 4,0 B 4,3 (row,column). Walls: "
        "columns 1|2 in rows 0 1; 0|1 and 2|3 in rows 3 4.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        _show_taxi,
        partial(table_player, "Taxi-v4"),
        solved="terminated",
        forfeit=200,
    ),
    "MountainCar-v0": Game(
        "Swing up to x 0.5; the engine is weak. x place, v speed in hundredths.",
        ("left", "none", "right"),
        lambda o: f"x {o[0]:z.2f} v {100 * o[1]:z.1f}",
        mountain_car,
        solved="terminated",
        forfeit=200,
    ),
}
