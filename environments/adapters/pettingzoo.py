"""PettingZoo environments as text for several agents, and ours as PettingZoo environments.

    --env pettingzoo:id=classic/tictactoe-v3

The agents act in turn, as PettingZoo's AEC interface has it; a simultaneous game hides the actions
of a round until it is complete. Observation: at an agent's first turn the rules, from the
docstring of its class, or of its module; then the numbers of the state and the legal actions.
Actions are numbers, or JSON if they are not discrete: {"action": [0.5, -1]}.

Reward: the environment's. An unreadable or illegal action costs -0.1 twice per agent and episode;
the third one costs -1 and ends the episode. `info["correct"]`: the agent's return is positive.

`as_pettingzoo` does the reverse: a ParallelEnv with text observations and actions.

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
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from environments.adapters import import_library
from environments.adapters.gymnasium import extract_action, join, load_words, text_space
from environments.adapters.gymnasium_players import (
    Game,
    docstring_rules,
    format_hint,
    plain_actions,
)
from environments.adapters.spaces import MAX_SPELLED, as_element, check_observations, to_json
from environments.base import TRAIN_SEEDS, Message, MultiAgentEnv, Step, UsageError
from environments.parsing import Retries, user
from environments.plumbing.registry import import_source

NOT_ASKED = Step(None, 0.0, False)


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
        if action is None or not self._is_legal(action):
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

    def _is_legal(self, action: Any) -> bool:
        return self.mask is None or bool(self.mask[action])

    def _by_numbers(self, space: Any) -> Game:
        for agent in self.env.agents:
            check_observations(self.env.observation_space(agent), self.id)
        raw = self.env.unwrapped
        rules = docstring_rules(type(raw).__doc__ or sys.modules[type(raw).__module__].__doc__)
        rules = "\n".join(filter(None, [f"{self.id}.", rules]))
        return Game(rules, **plain_actions(space))


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
            truncated = {agent: step.truncated for agent, step in steps.items()}
            over = {agent: step.done or not self.asked for agent, step in steps.items()}
            terminated = {agent: over[agent] and not truncated[agent] for agent in over}
            infos = {a: {**step.info, "asked": a in self.asked} for a, step in steps.items()}
            self.agents = [agent for agent in self.agents if not over[agent]]
            return texts, rewards, terminated, truncated, infos

    return AsPettingZoo()


def _check_agents(names: Iterable[str], agents: list[str]) -> None:
    missing = sorted(set(names) - set(agents))
    if missing:
        raise UsageError(f"the environment has agents that `agents` lacks: {', '.join(missing)}")


def _make(id: str, options: dict[str, Any]) -> Any:
    pettingzoo = import_library("pettingzoo")
    source, _, id = id.rpartition(":")
    if source:
        import_source(source)  # registers the environment
    try:
        if id in pettingzoo.parallel_registry and id not in pettingzoo.aec_registry:
            parallel = pettingzoo.make("parallel", id, **options)
            return import_library("pettingzoo.utils").parallel_to_aec(parallel)
        return pettingzoo.make("aec", id, **options)
    except Exception as error:  # of PettingZoo, or of the environment's constructor
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise UsageError(f"PettingZoo cannot make {id!r}: {reason}") from None
