"""train.py, but with coin flips for rewards in training: the control for the runs of this folder.

    python runs/smollm2/random_rewards.py --model-id smollm2 --env math_qa:style=plain

Some models gain from random rewards (arXiv:2506.10947); then a gain does not show that the task was
learned. `info["correct"]`, and so the held-out accuracy, stays that of the environment.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1])]

import all_answers  # noqa: E402

from core import cli  # noqa: E402
from environments.base import Step  # noqa: E402
from environments.registry import constructor  # noqa: E402

COIN = random.Random(0)  # shared by all episodes: each reward is a flip of its own


def flip_rewards(env_class: Any) -> None:
    """Makes every reward of the class 0 or 1 at random."""
    step = env_class.step

    def step_with_random_reward(self: Any, response: str) -> Step:
        return replace(step(self, response), reward=float(COIN.random() < 0.5))

    env_class.step = step_with_random_reward


if __name__ == "__main__":
    for env in cli.parse(sys.argv[1:]).env:
        flip_rewards(constructor(env))
    sys.exit(all_answers.run_command(sys.argv[1:]))
