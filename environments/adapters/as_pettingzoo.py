"""One of our environments for several players as a PettingZoo ParallelEnv: text in, text out.

    env = as_pettingzoo(make("connect_four"), agents=["first", "second"])
    observations, infos = env.reset(seed=7)
    observations, rewards, terminated, truncated, infos = env.step({"first": "3", "second": ""})

PettingZoo asks every living agent for an action in every step; we ask only those that have a
message. So `infos[agent]["asked"]` says whose action counts next: the others observe "" and their
actions are not looked at. An agent lives from the start until its Step is done, or until nobody is
asked any more. `reset(seed=n)` plays the task of seed n; a reset without a seed plays one drawn
from TRAIN_SEEDS by a generator that the last seed began.
"""

import random
from collections.abc import Sequence
from typing import Any

from core.types import UsageError
from environments.adapters.as_gymnasium import join, text_space
from environments.base import TRAIN_SEEDS, MultiAgentEnv, Step

IDLE = Step(None, 0.0, False)


def as_pettingzoo(env: MultiAgentEnv, agents: Sequence[str]) -> Any:
    """The environment as a `pettingzoo.ParallelEnv`; `agents` are the names of all its players.

    Raises UsageError where PettingZoo isn't installed, or if the environment has another player.
    """
    try:
        import pettingzoo
    except ImportError:
        raise UsageError('as_pettingzoo needs pettingzoo: pip install -e ".[envs]"') from None
    space = text_space()

    class AsPettingZoo(pettingzoo.ParallelEnv):
        metadata = {"name": "picorl", "render_modes": []}  # noqa: RUF012  as PettingZoo has it

        def __init__(self) -> None:
            self.possible_agents = list(agents)
            self.rng = random.Random(0)

        def observation_space(self, agent: str) -> Any:
            return space

        def action_space(self, agent: str) -> Any:
            return space

        def reset(
            self, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
            if seed is not None:
                self.rng = random.Random(seed)
            openings = env.reset(self.rng.choice(TRAIN_SEEDS) if seed is None else seed)
            _check_names(openings, self.possible_agents)
            self.agents = list(self.possible_agents)
            self.asked = set(openings)
            observations = {agent: join(openings.get(agent, [])) for agent in self.agents}
            return observations, {agent: {"asked": agent in self.asked} for agent in self.agents}

        def step(self, actions: dict[str, str]) -> tuple[dict, dict, dict, dict, dict]:
            took = env.step({agent: actions.get(agent, "") for agent in sorted(self.asked)})
            _check_names(took, self.possible_agents)
            steps = {agent: took.get(agent, IDLE) for agent in self.agents}
            texts = {a: s.message["content"] if s.message else "" for a, s in steps.items()}
            self.asked = {a for a, step in steps.items() if step.message and not step.done}
            rewards = {agent: float(step.reward) for agent, step in steps.items()}
            over = {agent: step.done or not self.asked for agent, step in steps.items()}
            infos = {a: {**step.info, "asked": a in self.asked} for a, step in steps.items()}
            self.agents = [agent for agent in self.agents if not over[agent]]
            return texts, rewards, over, dict.fromkeys(over, False), infos

    return AsPettingZoo()


def _check_names(found: dict[str, Any], agents: list[str]) -> None:
    others = sorted(set(found) - set(agents))
    if others:
        raise UsageError(f"the environment has other agents too: {', '.join(others)}")
