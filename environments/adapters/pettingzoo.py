"""A multi-agent environment of ours as a PettingZoo ParallelEnv with text observations and actions.

    env = as_pettingzoo(make("tic_tac_toe:opponent=self"), agents=["X", "O"])
    observations, infos = env.reset(seed=7)
    observations, rewards, terminated, truncated, infos = env.step({"X": "<move>5</move>", "O": ""})

PettingZoo expects an action from every live agent in every step; our environments ask only the
agents that have a message. `infos[agent]["asked"]` says whether the agent's next action counts. An
agent that is not asked observes "", and its action is ignored. An agent is live until its Step is
done or until no agent is asked any more.

`reset(seed=n)` starts the task of seed n. `reset()` draws a seed from TRAIN_SEEDS with a generator
that the last `reset(seed=n)` seeded.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Any

from core.types import UsageError
from environments.adapters import import_library
from environments.adapters.gymnasium import join, text_space
from environments.base import TRAIN_SEEDS, MultiAgentEnv, Step

NOT_ASKED = Step(None, 0.0, False)


def as_pettingzoo(env: MultiAgentEnv, agents: Sequence[str]) -> Any:
    """Returns `env` as a `pettingzoo.ParallelEnv`; `agents` names all of its players.

    Raises UsageError if PettingZoo is not installed, and at `reset` or `step` if the environment
    has an agent that `agents` does not name.
    """
    import_library("pettingzoo")
    import pettingzoo

    space = text_space()

    class AsPettingZoo(pettingzoo.ParallelEnv):
        metadata = {"name": "picorl", "render_modes": []}  # noqa: RUF012  declared so by PettingZoo

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
            _check_agents(openings, self.possible_agents)
            self.agents = list(self.possible_agents)
            self.asked = set(openings)
            observations = {agent: join(openings.get(agent, [])) for agent in self.agents}
            return observations, {agent: {"asked": agent in self.asked} for agent in self.agents}

        def step(self, actions: dict[str, str]) -> tuple[dict, dict, dict, dict, dict]:
            results = env.step({agent: actions.get(agent, "") for agent in sorted(self.asked)})
            _check_agents(results, self.possible_agents)
            steps = {agent: results.get(agent, NOT_ASKED) for agent in self.agents}
            texts = {a: s.message["content"] if s.message else "" for a, s in steps.items()}
            self.asked = {a for a, step in steps.items() if step.message and not step.done}
            rewards = {agent: float(step.reward) for agent, step in steps.items()}
            terminated = {agent: step.done or not self.asked for agent, step in steps.items()}
            infos = {a: {**step.info, "asked": a in self.asked} for a, step in steps.items()}
            self.agents = [agent for agent in self.agents if not terminated[agent]]
            return texts, rewards, terminated, dict.fromkeys(terminated, False), infos

    return AsPettingZoo()


def _check_agents(names: Iterable[str], agents: list[str]) -> None:
    missing = sorted(set(names) - set(agents))
    if missing:
        raise UsageError(f"the environment has agents that `agents` lacks: {', '.join(missing)}")
