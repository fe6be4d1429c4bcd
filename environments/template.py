"""Three environments to start from: one turn, several turns, two players. Copy this file.

    cp environments/template.py my_envs.py
    python -m environments check my_envs.py:HigherLower     # then play, show; or: pytest my_envs.py
    python train.py --env my_envs.py:HigherLower --sft-steps 40 --num-updates 40 --lr 1e-4

Each keeps one task in eight for evaluation, whose seeds are EVAL_SEEDS: by a rule, or by
`is_held_out`, which decides from a text that identifies the task.
"""

import random

from environments import Env, Message, MultiAgentEnv, Step
from environments.base import EVAL_SEEDS, is_held_out
from environments.parsing import Retries, integer, one_of, read_action, user
from environments.plumbing.check import check_env


class Parity(Env):
    """One turn: is a number odd or even? Reward: 1 right, 0 wrong."""

    def __init__(self, digits: int = 3) -> None:  # an option: my_envs.py:Parity:digits=5
        self.digits = digits

    def reset(self, seed: int) -> list[Message]:
        rng, held_out = random.Random(seed), seed in EVAL_SEEDS
        self.hasty_answer = rng.choice(["odd", "even"])
        self.number = rng.randrange(10**self.digits)
        while (self.number // 2 % 8 == 0) != held_out:  # of 10 numbers a hash may hold out none
            self.number = rng.randrange(10**self.digits)
        return [user(f"Is {self.number} odd or even? End with <answer>odd</answer> or even.")]

    def step(self, response: str) -> Step:
        answer = read_action(response, "answer", one_of("odd", "even"))  # None: unreadable
        correct = answer == ("odd" if self.number % 2 else "even")
        return Step(message=None, reward=float(correct), done=True, info={"correct": correct})

    def demonstrate(self, hasty: bool = False) -> str:
        if hasty:
            return f"<answer>{self.hasty_answer}</answer>"
        digit = self.number % 10
        return f"It ends with {digit} <answer>{'odd' if digit % 2 else 'even'}</answer>"


class HigherLower(Env):
    """Several turns: find one of ten numbers. Reward: 1 found, -0.1 for each other guess.

    Halving finds 7 of 10 in 3 guesses. Set --max-turns to `guesses` at least.
    """

    luck = True  # so a run does not check at its start that every demonstration is right

    def __init__(self, guesses: int = 3) -> None:
        self.guesses = guesses

    def reset(self, seed: int) -> list[Message]:
        rng, held_out = random.Random(seed), seed in EVAL_SEEDS
        self.low = rng.randrange(0, 1000, 10)
        while is_held_out(str(self.low)) != held_out:
            self.low = rng.randrange(0, 1000, 10)
        self.high = self.low + 9
        self.secret = rng.randint(self.low, self.high)
        self.left, self.retries = self.guesses, Retries()  # an instance plays many episodes
        self.hasty_guess = rng.randint(self.low, self.high)
        return [user(f"Guess a number from {self.low} to {self.high}: <answer>number</answer>")]

    def step(self, response: str) -> Step:
        guess = read_action(response, "answer", integer(0, 9999))
        if guess is None:
            return self.retries.refuse("Write <answer>number</answer>.")
        self.left -= 1
        if guess == self.secret:
            return Step(None, 1.0, True, {"correct": True})
        if self.left == 0:
            return Step(None, -0.1, True, {"correct": False})
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        hint = user(f"It is from {self.low} to {self.high}.")
        return Step(hint, -0.1, False, {"correct": False})

    def demonstrate(self, hasty: bool = False) -> str:
        guess = self.hasty_guess if hasty else (self.low + self.high) // 2
        return f"<answer>{guess}</answer>"


class Nim(MultiAgentEnv):
    """Two players in turn: who takes the last stone wins. Reward: 1 won, -1 lost or invalid."""

    agents = ("first", "second")  # the seats, for the warm start and for others to play one

    def reset(self, seed: int) -> dict[str, list[Message]]:
        rng, held_out = random.Random(seed), seed in EVAL_SEEDS
        self.stones = rng.randint(6, 50)
        while is_held_out(str(self.stones)) != held_out:
            self.stones = rng.randint(6, 50)
        self.rng = random.Random(f"hasty {seed}")
        return {"first": [self._message("Nim: who takes the last stone wins. ")]}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        [(agent, response)] = responses.items()
        opponent = "second" if agent == "first" else "first"
        taken = read_action(response, "move", integer(1, min(9, self.stones)))
        self.stones -= taken or 0
        if taken and self.stones:
            return {agent: Step(None, 0.0, False), opponent: Step(self._message(), 0.0, False)}
        won = Step(None, 1.0, True, {"correct": True})
        lost = Step(None, -1.0, True, {"correct": False})
        return {agent: won, opponent: lost} if taken else {agent: lost, opponent: won}

    def demonstrate(self, agent: str, hasty: bool = False) -> str:
        if hasty:
            return f"<move>{self.rng.randint(1, min(9, self.stones))}</move>"
        surplus = self.stones % 10  # who leaves a multiple of 10 wins
        return f"{self.stones} = {self.stones - surplus} + {surplus} <move>{surplus or 1}</move>"

    def _message(self, start: str = "") -> Message:
        return user(f"{start}{self.stones} stones. Take 1 to 9: <move>number</move>")


def test_check_env_finds_no_problem() -> None:
    for name in ("Parity", "HigherLower", "Nim"):
        assert not check_env(f"{__file__}:{name}").problems
