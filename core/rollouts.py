"""Play tasks in many environments at once: tasks in, one Rollout per agent out.

`RolloutCollector.collect` works in this order:

 1. Reset the environment of each task with the task's seed. It returns opening messages.
 2. Render these messages to token ids with the chat template: the first prompt.
 3. Sample one completion for every agent that has a prompt, all in one batch.
 4. Append the sampled ids to the agent's context, and pass the text to the environment's `step`.
 5. Append the ids of the environment's next message: the next prompt. Nothing is tokenized twice.
 6. Repeat from 3 until every episode is done, had `max_turns` turns, or has filled the context.

All episodes are kept, so short ones are not favored. An environment that raises, exceeds its time
limit or returns something invalid costs only its own episode: `Rollout.error` gives the reason.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from core import distributed
from core.chat_template import (
    clean_message,
    closing_ids,
    ids_after_completion,
    prompt_ids,
    without_opened_thought,
    without_thinking,
)
from core.interrupt import time_limit
from core.model import Policy
from core.sampler import Sampler, SamplingParams
from core.seeds import derive_seed
from core.tasks import Task
from core.types import Completion, Message, Rollout, Turn, UsageError
from environments.base import Env, MultiAgentEnv, Step
from environments.registry import make

PLAYER = "player"  # name of the agent in a single-agent environment
MAX_MESSAGE, MAX_INFO = 500_000, 100_000  # characters in a step's message, and in its info as JSON
MAX_OPENINGS = 1000  # prompts that are kept
STREAMS_PER_EPISODE = 1000  # random streams reserved for the agents of one episode


@dataclass
class AgentState:
    """One agent of an episode: its rollout, and its context as messages and as token ids."""

    stream: int  # random stream of its completions
    rollout: Rollout
    chat: list[Message] = field(default_factory=list)  # messages in the context
    context_ids: list[int] = field(default_factory=list)  # of the chat up to the last completion
    prompt_ids: list[int] = field(default_factory=list)  # next prompt; empty: not asked to act
    context_full: bool = False  # a message did not fit, so the agent cannot act any more


@dataclass
class Episode:
    """One task while it is played. `env` is None once the environment has failed."""

    number: int  # of the task, among the tasks of all ranks
    task: Task
    env: MultiAgentEnv | None = None
    agents: dict[str, AgentState] = field(default_factory=dict)


Waiting = list[tuple[Episode, AgentState]]  # agents that have a prompt
Respond = Callable[[Waiting, int], Sequence[Completion | None]]  # (agents, round); None: failed


class RolloutCollector:
    """Plays tasks with a policy, and reuses the environments of finished episodes."""

    def __init__(
        self, policy: Policy, max_turns: int, drop_thinking: bool = False, env_timeout: float = 0.0
    ):
        """`drop_thinking`: later turns do not see the <think>..</think> of earlier ones.
        `env_timeout`: limit of one reset or step, in seconds; 0: no limit."""
        self.policy, self.max_turns = policy, max_turns
        self.drop_thinking, self.env_timeout = drop_thinking, env_timeout
        self.idle_envs: dict[str, list[MultiAgentEnv]] = defaultdict(list)  # by spec
        self.opening_ids: dict[str, list[int]] = {}  # prompts that begin a context, by their chat

    def collect(
        self,
        tasks: list[Task],
        sampler: Sampler,
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[Rollout]:
        """Plays each task with completions of `sampler`; rollouts are in the order of the tasks.

        An agent's draws depend only on `params.seed`, its task's place in `tasks`, and the round.
        """

        def respond(waiting: Waiting, round_: int) -> list[Completion]:
            streams = tuple(agent.stream for _, agent in waiting)
            now = replace(params, seed=derive_seed(params.seed, round_), streams=streams)
            prompts, chats = [a.prompt_ids for _, a in waiting], [a.chat for _, a in waiting]
            return sampler.sample(prompts, now, on_progress, chats)

        return self._play(tasks, respond)

    def demonstrate(self, tasks: list[Task], trivial: bool = False) -> list[Rollout]:
        """Plays each task with the environment's own demonstrations; single-agent ones only.

        `trivial`: with the environment's trivial baseline instead.
        """
        return self._play(
            tasks, lambda waiting, _: [self._demonstration(e, trivial) for e, _ in waiting]
        )

    def set_prompt(self, agent: AgentState) -> None:
        """Renders the agent's new messages, unless the context is full: then sets `context_full`.

        Raises UsageError if the new messages alone exceed the context.
        """
        tokenizer, max_length = self.policy.tokenizer, self.policy.max_length
        if agent.context_ids:
            last = agent.context_ids[-1]
            turn_closed = [last] == closing_ids(tokenizer, agent.chat[-1]["role"])
            if last in self.policy.stop_ids and not turn_closed:
                # the template writes another token there, such as gpt-oss <|end|> for <|return|>
                agent.context_ids = agent.context_ids[:-1]
            new_ids = ids_after_completion(tokenizer, agent.chat, turn_closed)
        else:  # the rollouts of a group share their opening prompt, evaluations all of them
            if len(self.opening_ids) > MAX_OPENINGS:
                self.opening_ids.clear()
            key = json.dumps(agent.chat)
            if key not in self.opening_ids:
                self.opening_ids[key] = prompt_ids(tokenizer, agent.chat)
            new_ids = self.opening_ids[key]
        if len(new_ids) >= max_length:
            raise UsageError(f"one message has {len(new_ids)} tokens; the context of an episode "
                             f"has {max_length} (--max-model-len)")  # fmt: skip
        agent.context_full = len(agent.context_ids) + len(new_ids) >= max_length
        agent.prompt_ids = [] if agent.context_full else agent.context_ids + new_ids

    def add_completion(self, agent: AgentState, completion: Completion) -> None:
        """Appends a completion, sampled from `agent.prompt_ids`, to the agent's context."""
        ids = completion.token_ids
        turn = Turn(
            agent.prompt_ids, ids, completion.logprobs, completion.finish_reason,
            kept_ids=completion.kept_ids,
        )  # fmt: skip
        agent.rollout.turns.append(turn)
        _add_message(agent, {"role": "assistant", "content": completion.text})
        prompt = agent.prompt_ids
        if self.drop_thinking:
            prompt = without_opened_thought(self.policy.tokenizer, prompt)
            ids = without_thinking(self.policy.tokenizer, ids)
        agent.context_ids, agent.prompt_ids = prompt + ids, []

    def _play(self, tasks: list[Task], respond: Respond) -> list[Rollout]:
        """Plays this rank's share of the tasks; returns the rollouts of all ranks."""
        episodes = [self._start(i, task) for i, task in distributed.shard(list(enumerate(tasks)))]
        for round_ in range(self.max_turns):
            waiting = [(e, a) for e in episodes for a in e.agents.values() if a.prompt_ids]
            if not waiting:
                break
            responses: dict[int, dict[str, str]] = defaultdict(dict)  # of each episode and agent
            for (episode, agent), completion in zip(waiting, respond(waiting, round_), strict=True):
                if completion is not None:
                    self.add_completion(agent, completion)
                    responses[episode.number][agent.rollout.agent] = completion.text
            for episode in episodes:
                self._step(episode, responses[episode.number])
        for episode in episodes:
            if episode.env is not None:
                self.idle_envs[episode.task.env].append(episode.env)
        rollouts = [agent.rollout for episode in episodes for agent in episode.agents.values()]
        kept = [rollout for rollout in rollouts if rollout.turns or rollout.error]
        return _group_by_agent(distributed.all_gather(kept))

    def _start(self, number: int, task: Task) -> Episode:
        episode = Episode(number, task)
        with _contain_failure(episode):
            with time_limit(self.env_timeout):
                idle = self.idle_envs[task.env]
                env = idle.pop() if idle else make(task.env)
                episode.env = _SingleAgentEnv(env) if isinstance(env, Env) else env
                openings = episode.env.reset(task.seed)
            for name, messages in openings.items():
                agent = _new_agent(episode, name)
                for message in messages:
                    _add_message(agent, clean_message(message))
                if messages:
                    self.set_prompt(agent)
                episode.agents[name] = agent
            if not any(agent.chat for agent in episode.agents.values()):
                raise ValueError("reset() returned no message")
        return episode

    def _demonstration(self, episode: Episode, trivial: bool) -> Completion | None:
        with _contain_failure(episode):
            text = None
            if isinstance(episode.env, _SingleAgentEnv):
                env = episode.env.env
                with time_limit(self.env_timeout):
                    text = env.trivial() if trivial else env.demonstrate(episode.task.hasty)
            if not isinstance(text, str):
                raise TypeError("the environment has no demonstration")
            ids = self.policy.tokenizer.encode(text, add_special_tokens=False)
            ids.append(self.policy.end_of_turn_id)
            return Completion(ids, [0.0] * len(ids), text, "stop")
        return None

    def _step(self, episode: Episode, responses: dict[str, str]) -> None:
        if not responses or episode.env is None:
            return
        with _contain_failure(episode):
            with time_limit(self.env_timeout):
                steps = episode.env.step(responses)
                _check_steps(steps)
            for name, step in steps.items():  # an agent may join after the start
                agent = episode.agents.setdefault(name, _new_agent(episode, name))
                self._read_step(agent, step)

    def _read_step(self, agent: AgentState, step: Step) -> None:
        """Adds the reward to the agent's last turn, and makes a prompt of the next message."""
        if agent.rollout.turns:
            agent.rollout.turns[-1].reward += float(step.reward)
        agent.rollout.info = step.info or agent.rollout.info
        agent.rollout.episode_truncated = not step.done
        if step.message is None:
            return
        if step.fresh:
            agent.chat, agent.context_ids, agent.context_full = [], [], False
        _add_message(agent, clean_message(step.message))
        if not step.done and not agent.context_full:
            self.set_prompt(agent)


class _SingleAgentEnv(MultiAgentEnv):
    """Presents an Env as a MultiAgentEnv with one agent."""

    def __init__(self, env: Env):
        self.env = env

    def reset(self, seed: int) -> dict[str, list[Message]]:
        return {PLAYER: self.env.reset(seed)}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        return {PLAYER: self.env.step(responses[PLAYER])}


@contextmanager
def _contain_failure(episode: Episode) -> Iterator[None]:
    """An exception in the block ends the episode of all its agents; its environment is dropped."""
    try:
        yield
    except Exception as error:
        episode.env = None
        if not episode.agents:
            episode.agents[PLAYER] = _new_agent(episode, PLAYER)
        for agent in episode.agents.values():
            agent.prompt_ids = []
            agent.rollout.error = f"{type(error).__name__}: {error}"[:500]


def _new_agent(episode: Episode, name: str) -> AgentState:
    task = episode.task
    stream = episode.number * STREAMS_PER_EPISODE + len(episode.agents)
    rollout = Rollout(task.env, name, task.seed, task.group_id, episode_truncated=True)
    return AgentState(stream, rollout)


def _add_message(agent: AgentState, message: Message) -> None:
    agent.rollout.messages.append(message)
    agent.chat.append(message)


def _check_steps(steps: dict[str, Step]) -> None:
    """Raises TypeError or ValueError if an environment returned an invalid step."""
    for agent, step in steps.items():
        if not isinstance(step, Step):
            raise TypeError(f"step() returned {type(step).__name__} for {agent}, not a Step")
        if not math.isfinite(step.reward):
            raise ValueError(f"the reward of {agent} is {step.reward}")
        if step.message is not None and not isinstance(step.message.get("content"), str):
            raise TypeError(f"the message to {agent} has no text")
        if step.message is not None and len(step.message["content"]) > MAX_MESSAGE:
            raise ValueError(f"the message to {agent} has more than {MAX_MESSAGE} characters")
        if not isinstance(step.info, dict):
            raise TypeError(f"the info of {agent} is a {type(step.info).__name__}, not a dict")
        if len(json.dumps(step.info)) > MAX_INFO:  # TypeError if JSON cannot represent it
            raise ValueError(f"the info of {agent} has more than {MAX_INFO} characters")


def _group_by_agent(rollouts: list[Rollout]) -> list[Rollout]:
    """Gives each agent of a task its own group, so that only the same agent is compared."""
    numbers: dict[tuple[int, str], int] = {}
    for rollout in rollouts:
        key = (rollout.group_id, rollout.agent)
        rollout.group_id = numbers.setdefault(key, len(numbers))
    return rollouts
