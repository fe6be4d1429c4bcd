"""The control of the sums: in training every reward is the flip of a coin.

Some models gain from random rewards (arXiv:2506.10947); then a gain does not show that the task was
learned. Rewards of held-out tasks, and `info["correct"]`, stay those of math_qa.
"""

import random
from dataclasses import replace

from environments.base import EVAL_SEEDS, Message, Step
from environments.math_qa import MathQA

COIN = random.Random(0)  # shared by all episodes: each reward is a flip of its own


class Coin(MathQA):
    def __init__(self) -> None:
        super().__init__(level=1, style="plain")

    def reset(self, seed: int) -> list[Message]:
        self.held_out = seed in EVAL_SEEDS
        return super().reset(seed)

    def step(self, response: str) -> Step:
        step = super().step(response)
        return step if self.held_out else replace(step, reward=float(COIN.random() < 0.5))
