"""The prisoner's dilemma over several rounds.

The other player follows a fixed rule, which the prompt states, or is a second agent
(opponent=self). Two agents choose at the same time; an agent that has to repeat an unreadable
choice delays the other.

Observation: the choices of the last round and the number of the next one. The first message states
the rules:

    Each round you and another cooperate (C) or defect (D). Points you/other: CC 3/3, CD 0/5,
    DC 5/0, DD 1/1. The other cooperates first, then copies you. Think first. End with
    <choice>cooperate</choice> or defect.
    Round 1 of 5.

Reward:

    points / max point    in each round: own points, of which 5 is the most, divided by 5
    -0.1                  an unreadable choice, twice per episode; the third costs -1 and ends it

Against a rule, `info["correct"]` is True at the end if every choice had the maximum expected points
from that round on. Without randomness the return is then the maximum (penalties aside). With
opponent=self it is True if the agents together made the most points in every round.

>>> env = iterated_game()
>>> env.reset(seed=0)[0]["content"][-13:], env.demonstrate()
('Round 1 of 5.', 'C 3+14=17, D 5+11=16 <choice>cooperate</choice>')
>>> step = env.step(env.demonstrate())
>>> step.reward, step.message["content"]
(0.6, 'You cooperate, other cooperate. Round 2 of 5.')
"""

import random
from typing import Literal, NamedTuple

from environments.base import Env, Message, MultiAgentEnv, Step, check_range
from environments.parsing import Retries, one_of, read_action, user

COOPERATE, DEFECT = CHOICES = ("cooperate", "defect")
HINT = "End with <choice>cooperate</choice> or defect."
MAX_ROUNDS = 50
Opponent = Literal["tit_for_tat", "always_cooperate", "always_defect", "random", "self"]
POINTS = {  # (own, other) choice: (own, other) points
    (COOPERATE, COOPERATE): (3, 3), (COOPERATE, DEFECT): (0, 5),
    (DEFECT, COOPERATE): (5, 0), (DEFECT, DEFECT): (1, 1),
}  # fmt: skip
MAX_POINTS = 5


class Rule(NamedTuple):
    """How the other plays: in the words of the prompt, and its probabilities of cooperating."""

    text: str
    after_cooperate: float = 0.0  # also in the first round
    after_defect: float = 0.0


OPPONENTS = {
    "tit_for_tat": Rule("The other cooperates first, then copies you.", 1.0, 0.0),
    "always_cooperate": Rule("The other always cooperates.", 1.0, 1.0),
    "always_defect": Rule("The other always defects.", 0.0, 0.0),
    "random": Rule("The other tosses a coin.", 0.5, 0.5),
    "self": Rule("The other is as free as you."),
}
# of each choice, the expected points in this round, and later with the best choices
Values = dict[str, tuple[float, float]]


def iterated_game(opponent: Opponent = "tit_for_tat", rounds: int = 5) -> Env | MultiAgentEnv:
    """`opponent`: tit_for_tat, always_cooperate, always_defect, random, or self (two agents).
    `rounds`: 1 to 50."""
    check_range("rounds", rounds, 1, MAX_ROUNDS)
    return SelfPlay(rounds) if opponent == "self" else AgainstRule(OPPONENTS[opponent], rounds)


class AgainstRule(Env):
    """One agent against a fixed rule."""

    def __init__(self, rule: Rule, rounds: int):
        self.rule, self.rounds, self.values = rule, rounds, choice_values(rule, rounds)

    def reset(self, seed: int) -> list[Message]:
        self.seed, self.rng, self.retries = seed, random.Random(seed), Retries()
        self.own: list[str] = []
        self.correct = True
        return [user(_opening(self.rule, self.rounds))]

    def step(self, response: str) -> Step:
        own = _read(response)
        if own is None:
            return self.retries.refuse(HINT)
        values = self._values()
        self.correct &= sum(values[own]) >= max(map(sum, values.values())) - 1e-9
        has_defected = self.own[-1:] == [DEFECT]
        p = self.rule.after_defect if has_defected else self.rule.after_cooperate
        other = CHOICES[self.rng.random() >= p]
        self.own.append(own)
        return _round_result(self.rounds, self.own, other, self.correct)

    def demonstrate(self, hasty: bool = False) -> str:
        """Adds up the expected points of each choice and takes the best; `hasty`: at random."""
        if hasty:
            return _guess(random.Random(f"hasty {self.seed} {len(self.own)}"))
        values = self._values()
        best = max(CHOICES, key=lambda choice: round(sum(values[choice]), 9))
        sums = [f"{choice[0].upper()} {now:.4g}+{later:.4g}={now + later:.4g}"
                for choice, (now, later) in values.items()]  # fmt: skip
        return f"{', '.join(sums)} <choice>{best}</choice>"

    def trivial(self) -> str:
        """Always cooperates."""
        return f"<choice>{COOPERATE}</choice>"

    def _values(self) -> Values:
        return self.values[len(self.own)][self.own[-1] if self.own else COOPERATE]


class SelfPlay(MultiAgentEnv):
    """Two agents that choose at the same time: `row` and `column`."""

    agents = ("row", "column")

    def __init__(self, rounds: int):
        self.rounds = rounds

    def reset(self, seed: int) -> dict[str, list[Message]]:
        self.seed, self.correct = seed, True
        self.retries = {agent: Retries() for agent in self.agents}
        self.choices: dict[str, list[str]] = {agent: [] for agent in self.agents}
        return {agent: [user(_opening(OPPONENTS["self"], self.rounds))] for agent in self.agents}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        refused = {}
        for agent, response in responses.items():
            if choice := _read(response):
                self.choices[agent].append(choice)
            else:
                refused[agent] = self.retries[agent].refuse(HINT)
        if any(step.done for step in refused.values()):  # the game ends for both
            rewards = {a: refused[a].reward if a in refused else 0.0 for a in self.agents}
            return {a: Step(None, rewards[a], True, {"correct": False}) for a in self.agents}
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
            return _guess(random.Random(f"hasty {self.seed} {agent} {len(self.choices[agent])}"))
        sums = [f"{_letters(pair)} {p}+{q}={p + q}" for pair, (p, q) in POINTS.items()]
        return f"{', '.join(sums)} <choice>{COOPERATE}</choice>"


def choice_values(rule: Rule, rounds: int) -> list[dict[str, Values]]:
    """Returns the expected points as [round][own last choice], by backward induction."""
    found: list[dict[str, Values]] = []
    best_after = dict.fromkeys(CHOICES, 0.0)  # best sum of the next round, by own choice in this
    for _ in range(rounds):
        values = {}
        for last, p in ((COOPERATE, rule.after_cooperate), (DEFECT, rule.after_defect)):
            values[last] = {
                c: (p * POINTS[c, COOPERATE][0] + (1 - p) * POINTS[c, DEFECT][0], best_after[c])
                for c in CHOICES
            }
        best_after = {last: max(map(sum, values[last].values())) for last in CHOICES}
        found.insert(0, values)
    return found


def _read(response: str) -> str | None:
    return read_action(response, "choice", one_of(*CHOICES), r"\b(cooperate|defect)\b")


def _guess(rng: random.Random) -> str:
    return f"<choice>{rng.choice(CHOICES)}</choice>"


def _round_result(rounds: int, own: list[str], other: str, correct: bool) -> Step:
    """Returns the Step of a player with the choices `own`; `other` made its last choice."""
    done = len(own) == rounds
    info = {"correct": done and correct, "cooperation": own.count(COOPERATE) / len(own)}
    text = f"You {own[-1]}, other {other}. Round {len(own) + 1} of {rounds}."
    return Step(None if done else user(text), POINTS[own[-1], other][0] / MAX_POINTS, done, info)


def _opening(rule: Rule, rounds: int) -> str:
    cells = [f"{_letters(pair)} {p}/{q}" for pair, (p, q) in POINTS.items()]
    terms = f"Points you/other: {', '.join(cells)}. {rule.text}"
    rules = f"Each round you and another cooperate (C) or defect (D). {terms} Think first. {HINT}"
    return f"{rules}\nRound 1 of {rounds}."


def _letters(pair: tuple[str, str]) -> str:
    return f"{pair[0][0]}{pair[1][0]}".upper()
