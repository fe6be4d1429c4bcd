"""A 2x2 matrix game over several rounds: the prisoner's dilemma, or any other.

`payoffs` is CC_CD_DC_DD, the own choice first, each cell own/other points: 3/3_0/5_5/0_1/1; a stag
hunt is 4/4_0/3_3/0_3/3. The other follows a fixed rule, which is told, or is a second agent
(opponent=self): both are asked at once, and who has to repeat a choice keeps the other waiting.

Observation: the last round and the number of the next; before the first round its rules, like

    Each round you and another cooperate (C) or defect (D). Points you/other: CC 3/3, CD 0/5,
    DC 5/0, DD 1/1. The other cooperates first, then copies you. Think first. End with
    <choice>cooperate</choice> or defect.
    Round 1 of 5.

Reward:

    points / largest    a round: own points, in units of the largest number of the matrix
    -0.1                what can't be read: asked again, two times; the third costs -1, the end

"correct" against a rule: every choice was the best in points expected from there on, by what the
player knows; so the return (penalties aside) is the largest possible with a fixed end and no
chance, and opponent=random was met with the best reply. With opponent=self: the points of both
together are the most that the matrix allows.

>>> env = iterated_game()
>>> env.reset(seed=0)[0]["content"][-13:], env.demonstrate()
('Round 1 of 5.', 'C 3+14=17, D 5+11=16 <choice>cooperate</choice>')
>>> step = env.step(env.demonstrate())
>>> step.reward, step.message["content"]
(0.6, 'You cooperate, other cooperate. Round 2 of 5.')
"""

import random
import re
from dataclasses import dataclass, replace

from core.types import Message, UsageError
from environments.base import Env, MultiAgentEnv, Step
from environments.parsing import Retries, one_of, read_action, user

OPPONENTS = {  # what is told; chance to cooperate at first or after "cooperate", after "defect"
    "tit_for_tat": ("The other cooperates first, then copies you.", (1.0, 0.0)),
    "always_cooperate": ("The other always cooperates.", (1.0, 1.0)),
    "always_defect": ("The other always defects.", (0.0, 0.0)),
    "random": ("The other tosses a coin.", (0.5, 0.5)),
    "self": ("The other is as free as you.", ()),
}
CHOICES = ("cooperate", "defect")
HINT = "End with <choice>cooperate</choice> or defect."
MOST_ROUNDS = 50
NUMBER = r"(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)"


@dataclass(frozen=True)
class Game:
    opponent: str
    matrix: dict[tuple[str, str], tuple[float, float]]  # (own, other) choice -> (own, other) points
    longest: int  # rounds
    go_on: float  # chance of another round after each, up to the longest; 1.0: a fixed number
    total: str  # " of 5", or "" where it isn't known


def iterated_game(
    opponent: str = "tit_for_tat", payoffs: str = "3/3_0/5_5/0_1/1", rounds: int = 5,
    end: str = "fixed", continue_probability: float = 0.8,
) -> Env | MultiAgentEnv:  # fmt: skip
    """`opponent`: tit_for_tat, always_cooperate, always_defect, random, or self (two agents).

    `payoffs`: CC_CD_DC_DD, each own/other. `end`: fixed (after `rounds`, 1 to 50) or random (on
    with `continue_probability` after each round, at most 50; `rounds` is not used).
    """
    if opponent not in OPPONENTS:
        raise UsageError(f"opponent is {', '.join(OPPONENTS)}, not {opponent!r}")
    if end not in ("fixed", "random"):
        raise UsageError(f"end is fixed or random, not {end!r}")
    if not (1 <= rounds <= MOST_ROUNDS and 0 <= continue_probability <= 1):
        raise UsageError(f"rounds is 1 to {MOST_ROUNDS} and continue_probability 0 to 1")
    found = re.fullmatch("_".join([f"{NUMBER}/{NUMBER}"] * 4), payoffs)
    numbers = [float(number) for number in found.groups()] if found else [0.0]
    if max(numbers) <= 0:
        raise UsageError(f"payoffs is 3/3_0/5_5/0_1/1 or alike, one above 0, not {payoffs!r}")
    pairs = [(own, other) for own in CHOICES for other in CHOICES]
    matrix = dict(zip(pairs, zip(numbers[::2], numbers[1::2], strict=True), strict=True))
    game = Game(opponent, matrix, rounds, 1.0, total=f" of {rounds}")
    if end == "random":
        game = replace(game, longest=MOST_ROUNDS, go_on=continue_probability, total="")
    return SelfPlay(game) if opponent == "self" else AgainstRule(game)


class AgainstRule(Env):
    """One player against a fixed rule. `game`: the terms."""

    def __init__(self, game: Game):
        self.game, self.worth = game, worth_of_choices(game)

    def reset(self, seed: int) -> list[Message]:
        self.seed, self.rng = seed, random.Random(seed)
        self.length = _draw_length(self.game, self.rng)
        self.retries = Retries()
        self.own: list[str] = []
        self.now = self.worth[0]["cooperate"]  # what each choice is worth in this round
        self.correct = True
        return [user(_opening(self.game))]

    def step(self, response: str) -> Step:
        own = _read(response)
        if own is None:
            return self.retries.refuse(HINT)
        self.correct &= sum(self.now[own]) >= max(map(sum, self.now.values())) - 1e-9
        chance = OPPONENTS[self.game.opponent][1][self.own[-1:] == ["defect"]]
        other = CHOICES[self.rng.random() >= chance]
        self.own.append(own)
        if len(self.own) < self.length:
            self.now = self.worth[len(self.own)][own]
        return _settle(self.game, self.own, other, self.length, self.correct)

    def demonstrate(self, hasty: bool = False) -> str:
        """What each choice brings now and, played well, later; `hasty`: either choice."""
        if hasty:
            choice = random.Random(f"hasty {self.seed} {len(self.own)}").choice(CHOICES)
            return f"<choice>{choice}</choice>"
        best = max(CHOICES, key=lambda choice: round(sum(self.now[choice]), 9))
        sums = [f"{c[0].upper()} {a:.4g}+{b:.4g}={a + b:.4g}" for c, (a, b) in self.now.items()]
        return f"{', '.join(sums)} <choice>{best}</choice>"


class SelfPlay(MultiAgentEnv):
    """Two agents, asked together: `row` owns the first number of a cell, `column` the second."""

    def __init__(self, game: Game):
        turned = {(a, b): game.matrix[b, a][::-1] for a, b in game.matrix}
        self.games = {"row": game, "column": replace(game, matrix=turned)}

    def reset(self, seed: int) -> dict[str, list[Message]]:
        self.length = _draw_length(self.games["row"], random.Random(seed))
        self.retries = {agent: Retries() for agent in self.games}
        self.played: dict[str, list[str]] = {agent: [] for agent in self.games}
        self.correct = True
        return {agent: [user(_opening(game))] for agent, game in self.games.items()}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        choices = {agent: _read(response) for agent, response in responses.items()}
        refused = {a: self.retries[a].refuse(HINT) for a, choice in choices.items() if not choice}
        if any(step.done for step in refused.values()):  # nobody plays on alone
            pay = {a: refused[a].reward if a in refused else 0.0 for a in self.games}
            return {a: Step(None, pay[a], True, {"correct": False}) for a in self.games}
        for agent, choice in choices.items():
            self.played[agent] += [choice] if choice else []
        row, column = self.played.values()
        if refused or len(row) != len(column):
            return refused
        points = {pair: sum(cell) for pair, cell in self.games["row"].matrix.items()}
        self.correct &= points[row[-1], column[-1]] >= max(points.values()) - 1e-9
        seats = (("row", row, column[-1]), ("column", column, row[-1]))
        return {a: _settle(self.games[a], own, o, self.length, self.correct) for a, own, o in seats}

    def guess(self, agent: str, rng: random.Random) -> str:
        return f"<choice>{rng.choice(CHOICES)}</choice>"


def worth_of_choices(game: Game) -> list[dict[str, dict[str, tuple[float, float]]]]:
    """[round][last own choice][choice]: the points expected now, and later if played well."""
    rounds = []
    best_after = dict.fromkeys(CHOICES, 0.0)
    for _ in range(game.longest):  # from the last possible round back
        worth = {}
        for last, p in zip(CHOICES, OPPONENTS[game.opponent][1], strict=True):
            points = {pair: cell[0] for pair, cell in game.matrix.items()}
            now = {c: p * points[c, "cooperate"] + (1 - p) * points[c, "defect"] for c in CHOICES}
            worth[last] = {c: (now[c], game.go_on * best_after[c]) for c in CHOICES}
        best_after = {last: max(map(sum, worth[last].values())) for last in CHOICES}
        rounds.append(worth)
    return rounds[::-1]


def _draw_length(game: Game, rng: random.Random) -> int:
    ends = (number for number in range(1, game.longest) if rng.random() >= game.go_on)
    return next(ends, game.longest)


def _read(response: str) -> str | None:
    return read_action(response, "choice", one_of(*CHOICES), r"\b(cooperate|defect)\b")


def _settle(game: Game, own: list[str], other: str, length: int, correct: bool) -> Step:
    """What the last round brings to a player of these `own` choices."""
    reward = game.matrix[own[-1], other][0] / max(map(max, game.matrix.values()))
    done = len(own) == length
    info = {"correct": done and correct, "cooperation": own.count("cooperate") / len(own)}
    said = f"You {own[-1]}, other {other}. Round {len(own) + 1}{game.total}."
    return Step(None if done else user(said), reward, done, info)


def _opening(game: Game) -> str:
    cells = [f"{a[0]}{b[0]}".upper() + f" {p:g}/{q:g}" for (a, b), (p, q) in game.matrix.items()]
    go_on = f" Rounds go on with chance {game.go_on:g}." if game.go_on < 1 else ""
    told = f"Points you/other: {', '.join(cells)}. {OPPONENTS[game.opponent][0]}{go_on}"
    rules = f"Each round you and another cooperate (C) or defect (D). {told} Think first. {HINT}"
    return f"{rules}\nRound 1{game.total}."
