"""Tasks with a text interface: one file per task. `python -m environments` lists them."""

from core.types import Message
from environments.base import Env, MultiAgentEnv, Step
from environments.registry import list_envs, make, register

__all__ = ["Env", "Message", "MultiAgentEnv", "Step", "list_envs", "make", "register"]
