"""Tasks: one file each. Importing this package registers all of them under their names."""

from environments import letter_counting, remote
from environments.base import Env, MultiAgentEnv, Step, list_envs, make, register

__all__ = [
    "Env",
    "MultiAgentEnv",
    "Step",
    "letter_counting",
    "list_envs",
    "make",
    "register",
    "remote",
]
