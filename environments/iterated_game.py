"""The prisoner's dilemma over several rounds, against tit for tat or in self-play.

The two choose at the same time. With opponent=self the other player is a second agent; an agent
that has to repeat an unreadable choice delays the other.

Observation: the choices of the last round and the number of the next one. The first message states
the rules:

    Each round you and another cooperate (C) or defect (D). Points you/other: CC 3/3, CD 0/5,
    DC 5/0, DD 1/1. The other cooperates first, then copies you. Think first. End with
    <choice>cooperate</choice> or defect.
    Round 1 of 5.

Reward:

    points / 5    in each round; 5 are the most
    -0.1          an unreadable choice, twice per episode; the third costs -1 and ends it

`info["correct"]` is True at the end if every choice was a best one, counting the points from that
round on; with opponent=self, if both agents cooperated in every round.

>>> env = iterated_game()
>>> env.reset(seed=0)[0]["content"][-13:], env.demonstrate()
('Round 1 of 5.', 'C 3+14=17, D 5+11=16 <choice>cooperate</choice>')
>>> step = env.step(env.demonstrate())
>>> step.reward, step.message["content"]
(0.6, 'You cooperate, other cooperate. Round 2 of 5.')
"""

import random
from functools import cache
from typing import Literal

from environments.base import Env, Message, MultiAgentEnv, Step, check_range
from environments.parsing import Retries, one_of, read_action, user

COOPERATE, DEFECT = CHOICES = ("cooperate", "defect")
HINT = "End with <choice>cooperate</choice> or defect."
MAX_ROUNDS = 50
POINTS = {  # (a player's choice, the other's choice): (the player's points, the other's points)
    (COOPERATE, COOPERATE): (3, 3), (COOPERATE, DEFECT): (0, 5),
    (DEFECT, COOPERATE): (5, 0), (DEFECT, DEFECT): (1, 1),
}  # fmt: skip
MAX_POINTS = 5


def iterated_game(
    opponent: Literal["tit_for_tat", "self"] = "tit_for_tat", rounds: int = 5
) -> Env | MultiAgentEnv:
    """`opponent`: tit_for_tat, or self (two agents). `rounds`: 1 to 50."""
    check_range("rounds", rounds, 1, MAX_ROUNDS)
    return SelfPlay(rounds) if opponent == "self" else AgainstTitForTat(rounds)


class AgainstTitForTat(Env):
    """One agent; the other makes the choice that the agent made in the round before."""

    def __init__(self, rounds: int):
        self.rounds = rounds

    def reset(self, seed: int) -> list[Message]:
        self.seed, self.retries = seed, Retries()
        self.choices: list[str] = []
        self.correct = True
        return [_opening("The other cooperates first, then copies you.", self.rounds)]

    def step(self, response: str) -> Step:
        choice = _read(response)
        if choice is None:
            return self.retries.refuse(HINT)
        values = self._values()
        self.correct &= sum(values[choice]) == max(map(sum, values.values()))
        others_choice = self._last()
        self.choices.append(choice)
        return _round_result(self.rounds, self.choices, others_choice, self.correct)

    def demonstrate(self, hasty: bool = False) -> str:
        """Adds up the points of each choice and takes the best; `hasty`: at random."""
        if hasty:
            return _guess(f"hasty {self.seed} {len(self.choices)}")
        values = self._values()
        best = max(CHOICES, key=lambda choice: sum(values[choice]))
        sums = []
        for choice, (points, later) in values.items():
            sums.append(f"{choice[0].upper()} {points}+{later}={points + later}")
        return f"{', '.join(sums)} <choice>{best}</choice>"

    def trivial(self) -> str:
        """Always cooperates."""
        return f"<choice>{COOPERATE}</choice>"

    def _values(self) -> dict[str, tuple[int, int]]:
        return choice_values(self._last(), self.rounds - len(self.choices))

    def _last(self) -> str:
        """The agent's last choice, which is the other's next one."""
        return self.choices[-1] if self.choices else COOPERATE


class SelfPlay(MultiAgentEnv):
    """Two agents that choose at the same time: `row` and `column`."""

    agents = ("row", "column")

    def __init__(self, rounds: int):
        self.rounds = rounds

    def reset(self, seed: int) -> dict[str, list[Message]]:
        self.seed, self.correct = seed, True
        self.retries = {agent: Retries() for agent in self.agents}
        self.choices: dict[str, list[str]] = {agent: [] for agent in self.agents}
        return {a: [_opening("The other is as free as you.", self.rounds)] for a in self.agents}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        refused = {}
        for agent, response in responses.items():
            if choice := _read(response):
                self.choices[agent].append(choice)
            else:
                refused[agent] = self.retries[agent].refuse(HINT)
        if any(step.done for step in refused.values()):  # the game ends for both
            rewards = {agent: step.reward for agent, step in refused.items()}
            info = {"correct": False}
            return {a: Step(None, rewards.get(a, 0.0), True, info) for a in self.agents}
        row, column = self.choices.values()
        if refused or len(row) != len(column):
            return refused
        self.correct &= row[-1] == column[-1] == COOPERATE  # 3 + 3 is the highest sum
        return {
            "row": _round_result(self.rounds, row, column[-1], self.correct),
            "column": _round_result(self.rounds, column, row[-1], self.correct),
        }

    def demonstrate(self, agent: str, hasty: bool = False) -> str:
        """Adds up the points of both and takes part in the highest sum; `hasty`: at random."""
        if hasty:
            return _guess(f"hasty {self.seed} {agent} {len(self.choices[agent])}")
        sums = [f"{_letters(choices)} {p}+{q}={p + q}" for choices, (p, q) in POINTS.items()]
        return f"{', '.join(sums)} <choice>{COOPERATE}</choice>"


@cache
def choice_values(last: str, rounds: int) -> dict[str, tuple[int, int]]:
    """Returns, for each choice, the points of this round and those of the best later choices, with
    `rounds` left, against tit for tat, which copies the choice `last`.

    >>> choice_values("cooperate", 1)
    {'cooperate': (3, 0), 'defect': (5, 0)}
    """
    values = {}
    for choice in CHOICES:
        later = max(map(sum, choice_values(choice, rounds - 1).values())) if rounds > 1 else 0
        values[choice] = (POINTS[choice, last][0], later)
    return values


def _read(response: str) -> str | None:
    return read_action(response, "choice", one_of(*CHOICES), r"\b(cooperate|defect)\b")


def _guess(seed: str) -> str:
    return f"<choice>{random.Random(seed).choice(CHOICES)}</choice>"


def _round_result(rounds: int, choices: list[str], others_choice: str, correct: bool) -> Step:
    """Returns a player's Step after a round: the player's choices so far, and the other's last."""
    num_rounds, choice = len(choices), choices[-1]
    done = num_rounds == rounds
    info = {"correct": done and correct, "cooperation": choices.count(COOPERATE) / num_rounds}
    text = f"You {choice}, other {others_choice}. Round {num_rounds + 1} of {rounds}."
    reward = POINTS[choice, others_choice][0] / MAX_POINTS
    return Step(None if done else user(text), reward, done, info)


def _opening(rule: str, rounds: int) -> Message:
    cells = ", ".join(f"{_letters(choices)} {p}/{q}" for choices, (p, q) in POINTS.items())
    rules = f"Each round you and another cooperate (C) or defect (D). Points you/other: {cells}."
    return user(f"{rules} {rule} Think first. {HINT}\nRound 1 of {rounds}.")


def _letters(choices: tuple[str, str]) -> str:
    return "".join(choice[0].upper() for choice in choices)
