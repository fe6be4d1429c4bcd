"""PettingZoo environments as text for several agents.

    --env pettingzoo:id=classic/tictactoe-v3

The agents act in turn, as PettingZoo's AEC interface has it; a simultaneous game hides the actions
of a round until it is complete. Observation: at an agent's first turn the rules, from the
docstring of its class, or of its module; then the numbers of the state and the legal actions.
Actions are numbers, or JSON if they are not discrete: {"action": [0.5, -1]}.

Reward: the environment's. An unreadable or illegal action costs -0.1 twice per agent and episode;
the third one costs -1 and ends the episode. `info["correct"]`: the agent's return is positive.
"""

import random
import sys
from collections import defaultdict
from typing import Any

from environments.adapters.gymnasium import extract_action, load_words
from environments.adapters.gymnasium_players import (
    Game,
    docstring_rules,
    format_hint,
    plain_actions,
)
from environments.adapters.spaces import MAX_SPELLED, as_element, check_observations, to_json
from environments.base import Message, MultiAgentEnv, Step
from environments.parsing import Retries, user
from environments.plumbing.installed import import_library
from environments.plumbing.registry import import_source


class PettingZoo(MultiAgentEnv):
    """One PettingZoo environment.

    `id`: its registered name; module:name or FILE.py:name if importing that registers it.
    `words`: module:GAME, as for gymnasium.
    `options`: keyword arguments of the environment.
    """

    thread_safe = False  # the library has state that all instances share

    def __init__(self, id: str = "classic/tictactoe-v3", words: str = "", **options: Any) -> None:
        self.env, self.id = _make(id, options), id
        self.env.reset(seed=0)
        self.agents = tuple(self.env.possible_agents)
        space = self.env.action_space(self.env.agent_selection)
        self.game = load_words(words, self.env, space) or self._by_numbers(space)

    def reset(self, seed: int) -> dict[str, list[Message]]:
        self.env.reset(seed=seed % 2**31)
        self.retries: dict[str, Retries] = defaultdict(Retries)
        self.returns: dict[str, float] = defaultdict(float)  # of the agents that have had a turn
        steps = self._ask()
        return {agent: [step.message] for agent, step in steps.items() if step.message}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        agent = self.env.agent_selection
        space = self.env.action_space(agent)
        action = as_element(space, extract_action(self.game, responses[agent]))
        if action is None or (self.mask is not None and not self.mask[action]):
            refused = self.retries[agent].refuse(format_hint(self.game))
            others = {} if not refused.done else set(self.returns) - {agent}
            end = Step(None, 0.0, True, {"correct": False})
            return {agent: refused, **dict.fromkeys(others, end)}
        self.env.step(action)
        return self._ask()

    def guess(self, agent: str, rng: random.Random) -> str | None:
        """Returns a random legal action; None if `words` reads actions in a format of its own."""
        if self.mask is not None:
            return str(rng.choice([i for i, legal in enumerate(self.mask) if legal]))
        space = self.env.action_space(agent)
        space.seed(rng.randrange(2**31))
        guess = to_json(space.sample())
        return None if extract_action(self.game, guess) is None else guess

    def _ask(self) -> dict[str, Step]:
        """The steps of the agents that are out, and of the next one to act."""
        steps = {}
        while self.env.agents:
            agent = self.env.agent_selection
            observation, reward, terminated, truncated, info = self.env.last()
            is_new = agent not in self.returns
            self.returns[agent] += float(reward)
            if not terminated and not truncated:
                text = self._describe(observation, info)
                rules = f"{self.game.rules} You are {agent}. {format_hint(self.game)}\n"
                message = user(rules + text if is_new else text)
                steps[agent] = Step(message, float(reward), False)
                break
            steps[agent] = Step(
                None, float(reward), True, {"correct": self.returns[agent] > 0},
                truncated=not terminated,
            )  # fmt: skip
            self.env.step(None)
        return steps

    def _describe(self, observation: Any, info: dict[str, Any]) -> str:
        self.mask = info.get("action_mask")
        if isinstance(observation, dict) and "action_mask" in observation:
            self.mask, observation = observation["action_mask"], observation["observation"]
        text = self.game.show(observation)
        if self.mask is None or (all(self.mask) and len(self.mask) > MAX_SPELLED):
            return text
        names = self.game.actions or tuple(map(str, range(len(self.mask))))
        legal = [name for name, ok in zip(names, self.mask, strict=True) if ok]
        return f"{text}\nLegal: {' '.join(legal)}"

    def _by_numbers(self, space: Any) -> Game:
        for agent in self.env.agents:
            check_observations(self.env.observation_space(agent), self.id)
        raw = self.env.unwrapped
        rules = docstring_rules(type(raw).__doc__ or sys.modules[type(raw).__module__].__doc__)
        rules = "\n".join(filter(None, [f"{self.id}.", rules]))
        return Game(rules, **plain_actions(space))


def _make(id: str, options: dict[str, Any]) -> Any:
    pettingzoo = import_library("pettingzoo")
    source, _, id = id.rpartition(":")
    if source:
        import_source(source)  # registers the environment
    if id in pettingzoo.parallel_registry and id not in pettingzoo.aec_registry:
        parallel = pettingzoo.make("parallel", id, **options)
        return import_library("pettingzoo.utils").parallel_to_aec(parallel)
    return pettingzoo.make("aec", id, **options)
