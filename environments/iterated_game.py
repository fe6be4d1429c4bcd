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
from dataclasses import dataclass
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
    """A fixed opponent: its description in the prompt and its probabilities of cooperating."""

    text: str
    p_after_cooperate: float = 0.0  # also in the first round
    p_after_defect: float = 0.0


OPPONENTS = {
    "tit_for_tat": Rule("The other cooperates first, then copies you.", 1.0, 0.0),
    "always_cooperate": Rule("The other always cooperates.", 1.0, 1.0),
    "always_defect": Rule("The other always defects.", 0.0, 0.0),
    "random": Rule("The other tosses a coin.", 0.5, 0.5),
    "self": Rule("The other is as free as you."),
}


@dataclass(frozen=True)
class Game:
    """The rules of an episode."""

    rule: Rule
    rounds: int


class Value(NamedTuple):
    """The expected points of a choice: in this round, and later with the best choices."""

    now: float
    later: float

    @property
    def total(self) -> float:
        return self.now + self.later


def iterated_game(opponent: Opponent = "tit_for_tat", rounds: int = 5) -> Env | MultiAgentEnv:
    """`opponent`: tit_for_tat, always_cooperate, always_defect, random, or self (two agents).
    `rounds`: 1 to 50."""
    check_range("rounds", rounds, 1, MAX_ROUNDS)
    game = Game(OPPONENTS[opponent], rounds)
    return SelfPlay(game) if opponent == "self" else AgainstRule(game)


class AgainstRule(Env):
    """One agent against a fixed rule."""

    def __init__(self, game: Game):
        self.game, self.values = game, choice_values(game)

    def reset(self, seed: int) -> list[Message]:
        self.seed, self.rng = seed, random.Random(seed)
        self.retries = Retries()
        self.own: list[str] = []
        self.value = self.values[0][COOPERATE]  # of each choice in this round
        self.correct = True
        return [user(_opening(self.game))]

    def step(self, response: str) -> Step:
        own = _read(response)
        if own is None:
            return self.retries.refuse(HINT)
        best = max(value.total for value in self.value.values())
        self.correct &= self.value[own].total >= best - 1e-9
        rule, has_defected = self.game.rule, self.own[-1:] == [DEFECT]
        p_cooperate = rule.p_after_defect if has_defected else rule.p_after_cooperate
        other = CHOICES[self.rng.random() >= p_cooperate]
        self.own.append(own)
        if len(self.own) < self.game.rounds:
            self.value = self.values[len(self.own)][own]
        return _round_result(self.game, self.own, other, self.correct)

    def demonstrate(self, hasty: bool = False) -> str:
        """Adds up the expected points of each choice and takes the best; `hasty`: at random."""
        if hasty:
            choice = random.Random(f"hasty {self.seed} {len(self.own)}").choice(CHOICES)
            return f"<choice>{choice}</choice>"
        best = max(CHOICES, key=lambda choice: round(self.value[choice].total, 9))
        sums = [
            f"{choice[0].upper()} {value.now:.4g}+{value.later:.4g}={value.total:.4g}"
            for choice, value in self.value.items()
        ]
        return f"{', '.join(sums)} <choice>{best}</choice>"

    def trivial(self) -> str:
        """Always cooperates."""
        return f"<choice>{COOPERATE}</choice>"


class SelfPlay(MultiAgentEnv):
    """Two agents that choose at the same time: `row` and `column`."""

    agents = ("row", "column")

    def __init__(self, game: Game):
        self.game = game

    def reset(self, seed: int) -> dict[str, list[Message]]:
        self.seed = seed
        self.retries = {agent: Retries() for agent in self.agents}
        self.choices: dict[str, list[str]] = {agent: [] for agent in self.agents}
        self.correct = True
        return {agent: [user(_opening(self.game))] for agent in self.agents}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        refused = {}
        for agent, response in responses.items():
            choice = _read(response)
            if choice is None:
                refused[agent] = self.retries[agent].refuse(HINT)
            else:
                self.choices[agent].append(choice)
        if any(step.done for step in refused.values()):  # the game ends for both
            rewards = {a: refused[a].reward if a in refused else 0.0 for a in self.agents}
            return {
                a: Step(None, reward, True, {"correct": False}) for a, reward in rewards.items()
            }
        row, column = self.choices["row"], self.choices["column"]
        if refused or len(row) != len(column):
            return refused
        self.correct &= row[-1] == column[-1] == COOPERATE  # 3 + 3 is the highest sum
        views = {"row": (row, column[-1]), "column": (column, row[-1])}
        return {
            agent: _round_result(self.game, own, other, self.correct)
            for agent, (own, other) in views.items()
        }

    def guess(self, agent: str, rng: random.Random) -> str:
        return f"<choice>{rng.choice(CHOICES)}</choice>"

    def demonstrate(self, agent: str, hasty: bool = False) -> str:
        """Adds up the points of both and takes part in the highest sum; `hasty`: at random."""
        if hasty:
            number = len(self.choices[agent])
            return self.guess(agent, random.Random(f"hasty {self.seed} {agent} {number}"))
        sums = [f"{a[0]}{b[0]}".upper() + f" {p}+{q}={p + q}" for (a, b), (p, q) in POINTS.items()]
        return f"{', '.join(sums)} <choice>{COOPERATE}</choice>"


def choice_values(game: Game) -> list[dict[str, dict[str, Value]]]:
    """Returns the expected points as [round][own last choice][choice], by backward induction."""
    rounds = []
    best_after = dict.fromkeys(CHOICES, 0.0)  # best total of the next round, by own choice in this
    for _ in range(game.rounds):
        values = {}
        probabilities = (game.rule.p_after_cooperate, game.rule.p_after_defect)
        for last, p in zip(CHOICES, probabilities, strict=True):
            points = {pair: cell[0] for pair, cell in POINTS.items()}
            now = {c: p * points[c, COOPERATE] + (1 - p) * points[c, DEFECT] for c in CHOICES}
            values[last] = {c: Value(now[c], best_after[c]) for c in CHOICES}
        best_after = {last: max(v.total for v in values[last].values()) for last in CHOICES}
        rounds.append(values)
    return rounds[::-1]


def _read(response: str) -> str | None:
    return read_action(response, "choice", one_of(*CHOICES), r"\b(cooperate|defect)\b")


def _round_result(game: Game, own: list[str], other: str, correct: bool) -> Step:
    """Returns the Step of a player with the choices `own`; `other` made its last choice."""
    reward = POINTS[own[-1], other][0] / MAX_POINTS
    done = len(own) == game.rounds
    info = {"correct": done and correct, "cooperation": own.count(COOPERATE) / len(own)}
    text = f"You {own[-1]}, other {other}. Round {len(own) + 1} of {game.rounds}."
    return Step(None if done else user(text), reward, done, info)


def _opening(game: Game) -> str:
    cells = [f"{a[0]}{b[0]}".upper() + f" {p}/{q}" for (a, b), (p, q) in POINTS.items()]
    terms = f"Points you/other: {', '.join(cells)}. {game.rule.text}"
    rules = f"Each round you and another cooperate (C) or defect (D). {terms} Think first. {HINT}"
    return f"{rules}\nRound 1 of {game.rounds}."
