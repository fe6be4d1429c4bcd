"""Tasks: one file each. Importing this package registers all of them under their names."""

from environments import (
    connect4,
    iterated_game,
    letter_counting,
    math_qa,
    reverse,
    reward_hacking,
    snake,
    tic_tac_toe,
    wikipedia_maze,
)
from environments.adapters import gymnasium, openenv, reasoning_gym, remote, textarena, textworld
from environments.base import Env, MultiAgentEnv, Step, list_envs, make, register

__all__ = [
    "Env",
    "MultiAgentEnv",
    "Step",
    "connect4",
    "gymnasium",
    "iterated_game",
    "letter_counting",
    "list_envs",
    "make",
    "math_qa",
    "openenv",
    "reasoning_gym",
    "register",
    "remote",
    "reverse",
    "reward_hacking",
    "snake",
    "textarena",
    "textworld",
    "tic_tac_toe",
    "wikipedia_maze",
]
