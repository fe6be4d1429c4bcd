"""Letter counting, changed so that a part of the algorithm matters.

--env runs/parts/tasks.py:Offset    every reward is higher by a constant
--env runs/parts/tasks.py:Words     several words in an episode, one in each turn
--env runs/parts/tasks.py:Long      the reward is for the length of the response
--env runs/parts/tasks.py:Length    reports how long wrong answers are
"""

from dataclasses import replace

from environments.base import Env, Message, Step
from environments.letter_counting import LetterCounting


class Offset(LetterCounting):
    """Letter counting with `offset` added to every reward."""

    def __init__(self, offset: float = 10.0) -> None:
        super().__init__()
        self.offset = offset

    def step(self, response: str) -> Step:
        step = super().step(response)
        return replace(step, reward=step.reward + self.offset)


class Words(Env):
    """`turns` questions in one episode, each in a fresh context and with a reward of its own."""

    def __init__(self, turns: int = 6) -> None:
        self.turns, self.question = turns, LetterCounting()

    def reset(self, seed: int) -> list[Message]:
        self.seed, self.turn, self.right = seed, 0, 0
        return self.question.reset(seed)

    def step(self, response: str) -> Step:
        step = self.question.step(response)
        self.turn += 1
        self.right += bool(step.info["correct"])
        info = {"correct": self.right == self.turns, "right": self.right / self.turns}
        if self.turn == self.turns:
            return Step(None, step.reward, True, info)
        message = self.question.reset(self.seed + 7919 * self.turn)[0]
        return Step(message, step.reward, False, info, fresh=True)

    def demonstrate(self, hasty: bool = False) -> str:
        return self.question.demonstrate(hasty)


class Long(LetterCounting):
    """Letter counting that rewards the length of a response, in 40 characters, and nothing else."""

    def step(self, response: str) -> Step:
        return replace(super().step(response), reward=min(len(response) / 40, 1.0))


class Length(LetterCounting):
    """Letter counting that reports the characters of wrong answers and of right ones."""

    def step(self, response: str) -> Step:
        step = super().step(response)
        name = "characters_right" if step.info["correct"] else "characters_wrong"
        return replace(step, info=step.info | {name: len(response)})
