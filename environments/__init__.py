"""Tasks with a text interface: one file per task. `python -m environments` lists them."""

from environments.base import Env, Message, MultiAgentEnv, Step
from environments.plumbing import installed  # noqa: F401  (first: it says what this Python lacks)
from environments.plumbing.registry import list_envs, make, register

__all__ = ["Env", "Message", "MultiAgentEnv", "Step", "list_envs", "make", "register"]
