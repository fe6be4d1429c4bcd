"""Play tasks in many environments at once: tasks in, one Rollout per agent out.

`RolloutCollector.collect` works in this order:

 1. Reset the environment of each task with the task's seed. It returns opening messages.
 2. Render these messages to token ids with the chat template: the first prompt.
 3. Sample one completion for every agent that has a prompt, all in one batch.
 4. Append the sampled ids to the agent's context, and pass the text to the environment's `step`.
 5. Append the ids of the environment's next message: the next prompt. Nothing is tokenized twice.
 6. Repeat from 3 until every episode is done, has filled the context, or asks an agent to act that
    had `max_turns` turns.

Steps 3 to 5 are a round: an episode waits for the slowest environment. Once an environment is known
to answer late, its episodes do not wait for each other (`ContinuousPlay`): each joins the running
batch when its environment has answered. Its draws are those of rounds, log-probs up to rounding.

All episodes are kept, so short ones are not favored. An environment that raises, exceeds its time
limit, changes the working directory or returns something invalid costs only its own episode:
`Rollout.error` gives the reason. Slow environments are called at the same time (core/env_calls.py).
"""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from core import distributed
from core.chat_template import (
    Schema,
    clean_message,
    closing_ids,
    ids_after_completion,
    prompt_ids,
    without_opened_thought,
    without_thinking,
)
from core.env_calls import Call, EnvCalls, Outcome, TimeLimit, generators
from core.extras import tools
from core.policy import Policy
from core.sampler import Exchange, Request, Sampler, SamplingParams
from core.seeds import derive_seed
from core.tasks import Task
from core.types import Completion, Message, Rollout, Turn, UsageError
from environments.base import Env, EnvFailure, MultiAgentEnv, Step, checked_step
from environments.registry import constructor, make, short, split_opponent
from environments.tools import ToolEnv, messages_of

if TYPE_CHECKING:
    from core.extras.opponents import Opponents

PLAYER = "player"  # name of the agent in a single-agent environment
MAX_OPENINGS = 1000  # prompts that are kept
POLL = 0.05  # seconds that a sampler without prompts waits for one, at most, before it asks again
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
    has_step: bool = False  # the environment returned a Step for it
    schemas: list[Schema] = field(default_factory=list)  # of the tools that it may call


@dataclass
class Episode:
    """One task while it is played."""

    number: int  # of the task, among the tasks of all ranks
    task: Task
    env: MultiAgentEnv | None = None  # None: not built yet
    failed: bool = False  # its environment is not used again
    given_up: bool = False  # its environment may still be at work, so it's not even closed
    rounds: int = 0  # how often its agents were asked to act
    agents: dict[str, AgentState] = field(default_factory=dict)
    seat: str = ""  # the only agent whose rollout is kept; empty: that of all agents
    opponents: dict[str, str] = field(default_factory=dict)  # who plays the other agents


Waiting = list[tuple[Episode, AgentState]]  # agents that have a prompt
Respond = Callable[[Waiting], Sequence[Completion | None]]  # None: failed
Ask = Callable[[Episode, AgentState], Request]
Stream = Callable[[Exchange], None]  # as Sampler.stream


class RolloutCollector:
    """Plays tasks with a policy, and reuses the environments of finished episodes."""

    def __init__(
        self,
        policy: Policy,
        max_turns: int,
        drop_thinking: bool = False,
        env_timeout: float = 0.0,
        env_workers: int = 64,
        env_instances: int = 32,
        system_prompt: str = "",
    ):
        """`drop_thinking`: later turns do not see the <think>..</think> of earlier ones.
        `env_timeout`: limit of one reset or step, in seconds; 0: no limit.
        `env_workers`: calls of slow environments at the same time.
        `env_instances`: heavy environments (`Env.heavy`) that exist at the same time.
        `system_prompt`: comes before the first message of every context. Raises UsageError if the
        chat template has no system messages."""
        if system_prompt and not tools.accepts_system(policy.tokenizer):
            raise UsageError("--system-prompt: the chat template has no system messages; remove it")
        self.system_prompt = system_prompt
        self.policy, self.max_turns, self.drop_thinking = policy, max_turns, drop_thinking
        self.calls, self.env_instances = EnvCalls(env_workers, env_timeout), env_instances
        self.opponents: Opponents | None = None  # None: the policy plays all agents
        self.batched: set[str] = set()  # specs of environments that are stepped in one call
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

        The opponent that a task names plays all agents but one; only that one has a rollout, unless
        the opponent ends the episode before it acts. An agent's draws depend only on `params.seed`,
        its task's place in `tasks`, and how often the agents of its episode were asked to act.
        """

        def seed(episode: Episode) -> int:
            return derive_seed(params.seed, episode.rounds)

        def respond(waiting: Waiting) -> list[Completion | None]:
            streams = tuple(agent.stream for _, agent in waiting)
            # in rounds, all episodes have had the same number of them
            now = replace(params, seed=seed(waiting[0][0]), streams=streams)
            prompts = [a.prompt_ids for _, a in waiting]
            chats = [self._for_template(a)[0] for _, a in waiting]
            completions = sampler.sample(prompts, now, on_progress, chats)
            for (episode, _), completion in zip(waiting, completions, strict=True):
                with contain_failure(episode):
                    if completion.error:
                        raise EnvFailure(completion.error)
            return [None if completion.error else completion for completion in completions]

        def ask(episode: Episode, agent: AgentState) -> Request:
            key, chat = (episode.number, agent.rollout.agent), self._for_template(agent)[0]
            return Request(key, agent.prompt_ids, seed(episode), agent.stream, chat)

        continuous = ask, partial(sampler.stream, params=params, on_progress=on_progress)
        if self.opponents is None:
            return self.play(tasks, respond, continuous)
        self.opponents.update_copies(tasks)
        joined = self.opponents.join(self, respond, params, on_progress)
        return self.play(tasks, joined, continuous)

    def demonstrate(self, tasks: list[Task], trivial: bool = False) -> list[Rollout]:
        """Plays each task with the environment's own demonstrations.

        With several agents one demonstrates, and the others guess; only its rollout is returned.
        `trivial`: with the trivial baseline of an environment for one agent instead.
        """

        def respond(waiting: Waiting) -> list[Completion | None]:
            for episode, agent in waiting:
                take_seat(episode, agent.rollout.agent)
            return self._act("demonstrate", waiting, [
                partial(_demonstration, e, a.rollout.agent, trivial) for e, a in waiting
            ])  # fmt: skip

        return self.play(tasks, respond)

    def act(self, method: str, waiting: Waiting, seeds: list[int]) -> list[Completion | None]:
        """What the environment's `guess`, with random numbers of `seeds`, or `demonstrate` answers.

        None where it has no answer, which fails the episode.
        """
        return self._act(method, waiting, [
            partial(_answer, method, e.env, a.rollout.agent, seed)
            for (e, a), seed in zip(waiting, seeds, strict=True)
        ])  # fmt: skip

    def close(self) -> None:
        """Closes all environments."""
        self.close_envs([(spec, env) for spec, envs in self.idle_envs.items() for env in envs])
        self.idle_envs.clear()
        self.calls.close()

    def set_prompt(self, agent: AgentState) -> None:
        """Renders the agent's new messages, unless the context is full: then sets `context_full`.

        Raises UsageError if the new messages alone exceed the context.
        """
        tokenizer, max_length = self.policy.tokenizer, self.policy.max_length
        chat, schemas = self._for_template(agent)
        if agent.context_ids:
            last = agent.context_ids[-1]
            turn_closed = [last] == closing_ids(tokenizer, chat[-1]["role"])
            if last in self.policy.stop_ids and not turn_closed:
                # the template writes another token there, such as gpt-oss <|end|> for <|return|>
                agent.context_ids = agent.context_ids[:-1]
            new_ids = ids_after_completion(
                tokenizer, tools.without_calls(chat), turn_closed,
                max(1, tools.num_results(chat)), schemas,
            )  # fmt: skip
        else:  # the rollouts of a group share their opening prompt, evaluations all of them
            if len(self.opening_ids) > MAX_OPENINGS:
                self.opening_ids.clear()
            key = json.dumps([chat, schemas])
            if key not in self.opening_ids:
                self.opening_ids[key] = prompt_ids(tokenizer, chat, schemas)
            new_ids = self.opening_ids[key]
        is_result = agent.chat[-1]["role"] == "tool"  # its length may be the policy's doing
        if len(new_ids) >= max_length and not is_result:
            raise UsageError(f"one message has {len(new_ids)} tokens; the context of an episode "
                             f"has {max_length} (--max-model-len)")  # fmt: skip
        agent.context_full = len(agent.context_ids) + len(new_ids) >= max_length
        agent.prompt_ids = [] if agent.context_full else agent.context_ids + new_ids

    def begin(self, agent: AgentState, messages: list[Message]) -> None:
        """Adds the messages that begin a context, with the system prompt before them."""
        messages = [clean_message(message) for message in messages]
        if self.system_prompt and messages:
            messages = tools.with_system(self.policy.tokenizer, messages, self.system_prompt)
        for message in messages:
            _add_message(agent, message)

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

    def _for_template(self, agent: AgentState) -> tuple[list[Message], Sequence[Schema]]:
        return tools.for_template(self.policy.tokenizer, agent.chat, agent.schemas)

    def play(
        self, tasks: list[Task], respond: Respond, continuous: tuple[Ask, Stream] | None = None
    ) -> list[Rollout]:
        """Plays this rank's share of the tasks; returns the rollouts of all ranks.

        `continuous`: for the environments whose episodes need not wait for each other.
        """
        mine = distributed.shard(list(enumerate(tasks)))

        def in_rounds(tasks: list[tuple[int, Task]]) -> list[tuple[int, Task]]:
            return [t for t in tasks if continuous is None or not self.is_late(t[1].env)]

        episodes: list[Episode] = []
        for wave in self._waves(in_rounds(mine)):
            episodes += self._play_wave(in_rounds(wave), respond, continuous)
        begun = {episode.number for episode in episodes}
        rest = [task for task in mine if task[0] not in begun]
        if continuous and rest:
            episodes += self._play_continuously([], rest, *continuous)
        episodes.sort(key=lambda episode: episode.number)
        rollouts = [rollout for episode in episodes for rollout in _own_rollouts(episode)]
        kept = [rollout for rollout in rollouts if rollout.turns or rollout.error]
        return _group_by_agent(distributed.all_gather(kept))

    def _waves(self, tasks: list[tuple[int, Task]]) -> list[list[tuple[int, Task]]]:
        """The tasks to play at the same time: at most `env_instances` with heavy environments."""
        heavy = {spec for spec in {task.env for _, task in tasks} if is_heavy(spec)}
        waves: dict[int, list[tuple[int, Task]]] = defaultdict(list)
        num_heavy = 0
        for number, task in tasks:
            wave = num_heavy // self.env_instances if task.env in heavy else 0
            waves[wave].append((number, task))
            num_heavy += task.env in heavy
        return [waves[number] for number in sorted(waves)]

    def _make_room(self, wave: list[tuple[int, Task]]) -> None:
        """Closes idle heavy environments that the wave does not need, if there are too many."""
        need = Counter(task.env for _, task in wave)
        heavy = [spec for spec in {**need, **self.idle_envs} if is_heavy(spec)]
        total = sum(max(need[spec], len(self.idle_envs[spec])) for spec in heavy)
        for spec in heavy:
            idle = self.idle_envs[spec]
            surplus = max(0, min(total - self.env_instances, len(idle) - need[spec]))
            self.close_envs([(spec, idle.pop()) for _ in range(surplus)])
            total -= surplus

    def close_envs(self, envs: list[tuple[str, MultiAgentEnv]]) -> None:
        self.calls.call_all("close", [(spec, env.close) for spec, env in envs])

    def _play_wave(
        self, wave: list[tuple[int, Task]], respond: Respond, continuous: tuple[Ask, Stream] | None
    ) -> list[Episode]:
        """Plays a wave in rounds, until an environment turns out to answer late."""
        self._make_room(wave)
        episodes = self._start(wave)
        late: set[str] = set()
        while True:
            if continuous:
                late |= {e.task.env for e in episodes if self.is_late(e.task.env)}
            going = [e for e in episodes if e.task.env not in late and not self.is_cut(e)]
            waiting = [(e, a) for e in going for a in e.agents.values() if a.prompt_ids]
            if not waiting:
                break
            responses: dict[int, dict[str, str]] = defaultdict(dict)  # of each episode and agent
            for (episode, agent), completion in zip(waiting, respond(waiting), strict=True):
                if completion is not None:
                    self.add_completion(agent, completion)
                    responses[episode.number][agent.rollout.agent] = completion.text
            for episode in going:
                episode.rounds += 1
            self._step(going, responses)
        ended = [e for e in episodes if e.task.env not in late]
        self.close_envs([env for episode in ended for env in self.finish(episode)])
        if continuous and late:
            begun = [e for e in episodes if e.task.env in late]
            self._play_continuously(begun, [], *continuous)
        return episodes

    def is_late(self, spec: str) -> bool:
        """Whether its episodes do not wait for each other.

        A batch of steps needs all of them, and an opponent samples for all of them.
        """
        has_opponent = self.opponents is not None and split_opponent(spec)[1]
        waits = spec in self.batched or has_opponent
        return self.calls.answers_late(spec) and not waits

    def _play_continuously(
        self, begun: list[Episode], tasks: list[tuple[int, Task]], ask: Ask, stream: Stream
    ) -> list[Episode]:
        """Plays episodes that have begun, and tasks, without rounds."""
        play = ContinuousPlay(self, begun, tasks, ask)
        stream(play.exchange)
        return play.ended

    def finish(self, episode: Episode) -> list[tuple[str, MultiAgentEnv]]:
        """Keeps its environment for another episode, or returns it to be closed."""
        with contain_failure(episode):
            _check_seats(episode)
        if episode.env is None or episode.given_up:
            return []
        if episode.failed:
            return [(episode.task.env, episode.env)]
        self.idle_envs[episode.task.env].append(episode.env)
        return []

    def is_cut(self, episode: Episode) -> bool:
        """Whether an agent that is asked to act has had all its turns."""
        agents = episode.agents.values()
        return any(a.prompt_ids and len(a.rollout.turns) >= self.max_turns for a in agents)

    def _start(self, wave: list[tuple[int, Task]]) -> list[Episode]:
        """Resets an environment for each task, and makes the first prompts."""
        episodes = [Episode(number, task) for number, task in wave]
        for episode in episodes:
            if idle := self.idle_envs[episode.task.env]:
                episode.env = idle.pop()
        calls: list[Call] = [(e.task.env, partial(self.reset, e)) for e in episodes]
        outcomes = self.calls.call_all("reset", calls)
        for episode, outcome in zip(episodes, outcomes, strict=True):
            self.read_reset(episode, outcome)
        return episodes

    def read_reset(self, episode: Episode, outcome: Outcome) -> None:
        """Makes the agents of an episode and the first prompts."""
        with contain_failure(episode):
            for name, messages in _value(outcome).items():
                agent = _new_agent(episode, name)
                self.begin(agent, messages)
                if messages:
                    self.set_prompt(agent)
                episode.agents[name] = agent
            if not any(agent.chat for agent in episode.agents.values()):
                raise ValueError("reset() returned no message")

    def reset(self, episode: Episode) -> dict[str, list[Message]]:
        """Builds the environment, unless the episode has one; returns its opening messages."""
        if episode.env is None:
            made = make(episode.task.env)
            if isinstance(made, Env):
                read_calls = partial(tools.read_calls, self.policy.tokenizer)
                made = _SingleAgentEnv(ToolEnv(made, read_calls))
            episode.env = made
            if not episode.env.thread_safe:
                self.calls.alone.add(episode.task.env)
            if _has_step_batch(episode.env):
                self.batched.add(episode.task.env)
        return episode.env.reset(episode.task.seed)

    def _act(
        self, kind: str, waiting: Waiting, calls: list[Callable[[], Any]]
    ) -> list[Completion | None]:
        specs = [episode.task.env for episode, _ in waiting]
        outcomes = self.calls.call_all(kind, list(zip(specs, calls, strict=True)))
        return [
            self._as_completion(episode, outcome)
            for (episode, _), outcome in zip(waiting, outcomes, strict=True)
        ]

    def _as_completion(self, episode: Episode, outcome: Outcome) -> Completion | None:
        """A demonstration as a completion; None if there is none, which fails the episode."""
        with contain_failure(episode):
            text = _value(outcome)
            if not isinstance(text, str):
                raise TypeError("the environment has no demonstration")
            text = tools.in_format_of(self.policy.tokenizer, text)
            ids = self.policy.tokenizer.encode(text, add_special_tokens=False)
            ids.append(self.policy.end_of_turn_id)
            return Completion(ids, [0.0] * len(ids), text, "stop")
        return None

    def _step(self, episodes: list[Episode], responses: dict[int, dict[str, str]]) -> None:
        """Passes the responses of each episode to its environment, and reads the steps."""
        acting = [e for e in episodes if responses[e.number] and not e.failed]
        groups: dict[str | int, list[Episode]] = defaultdict(list)  # one call for each
        for episode in acting:
            spec = episode.task.env
            groups[spec if spec in self.batched else episode.number].append(episode)
        calls: list[Call] = [
            (group[0].task.env, partial(steps_of, group, [responses[e.number] for e in group]))
            for group in groups.values()
        ]
        outcomes = self.calls.call_all("step", calls)
        for group, outcome in zip(groups.values(), outcomes, strict=True):
            self.read_steps(group, outcome)

    def read_steps(self, group: list[Episode], outcome: Outcome) -> None:
        """Reads what one call returned for each episode."""
        for i, episode in enumerate(group):
            with contain_failure(episode):
                for name, step in _value(_value(outcome)[i]).items():
                    # an agent may join after the start
                    agent = episode.agents.setdefault(name, _new_agent(episode, name))
                    self._read_step(agent, step)

    def _read_step(self, agent: AgentState, step: Step) -> None:
        """Adds the reward to the agent's last turn, and makes a prompt of the next message."""
        agent.has_step = True
        if agent.rollout.turns:
            agent.rollout.turns[-1].reward += step.reward
        agent.rollout.info = step.info or agent.rollout.info
        agent.rollout.episode_truncated = step.truncated or not step.done
        if step.message is None:
            return
        if step.fresh:
            agent.chat, agent.context_ids, agent.context_full = [], [], False
            self.begin(agent, [step.message])
        else:
            for message in messages_of(step):
                _add_message(agent, clean_message(message))
        if not step.done and not agent.context_full:
            self.set_prompt(agent)


class ContinuousPlay:
    """Episodes that do not wait for each other.

    `exchange` is what a sampler's `stream` calls between two tokens: it passes completions to
    their environments, in threads, and returns the prompts of environments that have answered. A
    task with a heavy environment begins when an instance is free.
    """

    def __init__(
        self,
        collector: RolloutCollector,
        begun: list[Episode],
        tasks: list[tuple[int, Task]],
        ask: Ask,
    ):
        self.collector, self.tasks, self.ask = collector, tasks, ask
        self.threads, self.generators = collector.calls.in_threads(), generators()
        self.playing = {episode.number: episode for episode in begun}
        self.closing: dict[int, str] = {}  # specs of environments that are being closed
        self.ended: list[Episode] = []
        self.responses: dict[int, dict[str, str]] = defaultdict(dict)
        self.num_asked: dict[int, int] = {}  # completions that an episode waits for
        self.requests: list[Request] = []
        for episode in begun:
            self._continue(episode)
        self._begin_tasks()

    def exchange(self, finished: list[tuple[Any, Completion]], idle: bool) -> list[Request] | None:
        """As `core.sampler.Exchange`."""
        for (number, name), completion in finished:
            self._respond(self.playing[number], name, completion)
        wait = POLL if idle and not self.requests else 0.0
        for (kind, number, _), outcome in self.threads.ended(wait).items():
            if kind == "close":
                del self.closing[number]
                self._begin_tasks()
                continue
            episode = self.playing[number]
            if kind == "reset":
                self.collector.read_reset(episode, outcome)
            else:
                self.collector.read_steps([episode], outcome)
            self._continue(episode)
        if not self.playing and not self.closing:
            specs = {episode.task.env for episode in self.ended}
            self.collector.calls.check_generators(specs, self.generators)
            return None
        requests, self.requests = self.requests, []
        return requests

    def _respond(self, episode: Episode, name: str, completion: Completion) -> None:
        """Steps the environment once all agents that were asked to act have responded."""
        with contain_failure(episode):
            if completion.error:
                raise EnvFailure(completion.error)
            if not episode.failed:
                self.collector.add_completion(episode.agents[name], completion)
                self.responses[episode.number][name] = completion.text
        self.num_asked[episode.number] -= 1
        if self.num_asked[episode.number] > 0:
            return
        responses = self.responses.pop(episode.number, {})
        if episode.failed:
            self._end(episode)
        else:
            call = partial(steps_of, [episode], [responses])
            self.threads.start(("step", episode.number, episode.rounds), call)

    def _continue(self, episode: Episode) -> None:
        """Asks the agents that have a prompt to act; ends the episode if there are none."""
        waiting = [agent for agent in episode.agents.values() if agent.prompt_ids]
        if not waiting or self.collector.is_cut(episode):
            self._end(episode)
            return
        self.requests += [self.ask(episode, agent) for agent in waiting]
        self.num_asked[episode.number] = len(waiting)
        episode.rounds += 1

    def _end(self, episode: Episode) -> None:
        self.ended.append(self.playing.pop(episode.number))
        for spec, env in self.collector.finish(episode):
            self.closing[episode.number] = spec
            self.threads.start(("close", episode.number, 0), env.close)
        self._begin_tasks()

    def _begin_tasks(self) -> None:
        """Resets an environment for each task that there is room for."""
        later, refused = [], set[str]()
        for number, task in self.tasks:
            if task.env in refused or not self._has_room(task.env):
                refused.add(task.env)
                later.append((number, task))
                continue
            episode = self.playing[number] = Episode(number, task)
            if idle := self.collector.idle_envs[task.env]:
                episode.env = idle.pop()
            reset = partial(self.collector.reset, episode)
            self.threads.start(("reset", number, 0), reset)
        self.tasks = later

    def _has_room(self, spec: str) -> bool:
        """Whether an environment can begin; may close an idle heavy one of another spec."""
        collector, idle_envs = self.collector, self.collector.idle_envs
        if idle_envs[spec] or not is_heavy(spec):
            return True
        used = [episode.task.env for episode in self.playing.values()] + [*self.closing.values()]
        idle = [other for other, envs in idle_envs.items() for _ in envs if is_heavy(other)]
        if sum(map(is_heavy, used)) + len(idle) < collector.env_instances:
            return True
        if idle:
            collector.close_envs([(idle[0], idle_envs[idle[0]].pop())])
        return bool(idle)


class _SingleAgentEnv(MultiAgentEnv):
    """Presents an Env as a MultiAgentEnv with one agent."""

    def __init__(self, env: ToolEnv):
        self.env, self.thread_safe, self.heavy = env, env.thread_safe, env.heavy

    def reset(self, seed: int) -> dict[str, list[Message]]:
        return {PLAYER: self.env.reset(seed)}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        return {PLAYER: self.env.step(responses[PLAYER])}

    def close(self) -> None:
        self.env.close()


def take_seat(episode: Episode, acting: str) -> None:
    """Gives one seat to the policy, or to the demonstrator, if the environment declares its agents.

    Consecutive seeds have the seats in turn. Fails the episode if `acting` is no declared agent.
    """
    agents = episode.env.agents if episode.env else ()
    if not agents:
        return
    with contain_failure(episode):
        if acting not in agents:
            raise ValueError(f"{acting!r} acts, but is not one of its agents, {', '.join(agents)}")
        episode.seat = agents[episode.task.seed % len(agents)]
        if episode.seat not in episode.agents:  # so that a failure before it acts is counted
            episode.agents[episode.seat] = _new_agent(episode, episode.seat)


def is_heavy(spec: str) -> bool:
    """Whether the environment's class is `heavy`; False for an unknown name."""
    with suppress(UsageError):
        return getattr(constructor(spec), "heavy", False)
    return False


def _demonstration(episode: Episode, agent: str, trivial: bool) -> str | None:
    env, hasty = episode.env, episode.task.hasty
    if isinstance(env, _SingleAgentEnv):
        return env.env.trivial() if trivial else env.env.demonstrate(hasty)
    assert env is not None  # an episode with a prompt has begun
    return env.demonstrate(agent, hasty or agent != episode.seat)


def _answer(method: str, env: MultiAgentEnv | None, agent: str, seed: int) -> str | None:
    assert env is not None  # an episode with a prompt has begun
    return env.guess(agent, random.Random(seed)) if method == "guess" else env.demonstrate(agent)


def _value(outcome: Outcome) -> Any:
    """What a call returned; raises what it raised."""
    value, error = outcome
    if error is not None:
        raise error
    return value


@contextmanager
def contain_failure(episode: Episode) -> Iterator[None]:
    """An exception in the block ends the episode of all its agents, and fails its environment."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: an environment must not end the run
        episode.failed = True
        episode.given_up |= isinstance(error, TimeLimit)
        if not episode.agents:
            episode.agents[PLAYER] = _new_agent(episode, PLAYER)
        for agent in episode.agents.values():
            agent.prompt_ids = []
            agent.rollout.error = _describe(error)
            agent.rollout.env_failure = isinstance(error, EnvFailure)


def _describe(error: BaseException) -> str:
    """The type and the message of an error, at most 500 characters."""
    try:
        message = str(error)
    except Exception:
        message = "its message cannot be read"
    return f"{type(error).__name__}: {message}"[:500]


def _new_agent(episode: Episode, name: str) -> AgentState:
    task = episode.task
    if len(episode.agents) == STREAMS_PER_EPISODE:
        raise ValueError(f"the environment has more than {STREAMS_PER_EPISODE} agents")
    stream = episode.number * STREAMS_PER_EPISODE + len(episode.agents)
    rollout = Rollout(short(task.env), name, task.seed, task.group_id, episode_truncated=True)
    schemas = episode.env.env.schemas if isinstance(episode.env, _SingleAgentEnv) else []
    return AgentState(stream, rollout, schemas=schemas)


def _add_message(agent: AgentState, message: Message) -> None:
    agent.rollout.messages.append(message)
    agent.chat.append(message)


def _has_step_batch(env: MultiAgentEnv | None) -> bool:
    """Whether the class steps several instances in one call, without tools to answer first."""
    if not isinstance(env, _SingleAgentEnv) or env.env.tools:
        return False
    own: Any = type(env.env.env).step_batch
    default: Any = Env.step_batch
    return getattr(own, "__func__", own) is not default.__func__


def steps_of(group: list[Episode], responses: list[dict[str, str]]) -> list[Outcome]:
    """Steps the environments of some episodes in one call; for each, its checked steps."""
    envs = [episode.env for episode in group]
    if _has_step_batch(envs[0]):
        players = [env.env.env for env in envs if isinstance(env, _SingleAgentEnv)]
        texts = [response[PLAYER] for response in responses]
        batch = type(players[0]).step_batch(players, texts)
        if len(batch) != len(group):
            raise ValueError(f"step_batch() returned {len(batch)} steps for {len(group)} responses")
        stepped = [{PLAYER: step} for step in batch]
    else:
        stepped = [env.step(texts) for env, texts in zip(envs, responses, strict=True) if env]
    outcomes: list[Outcome] = []
    for env, steps in zip(envs, stepped, strict=True):
        try:
            is_single = isinstance(env, _SingleAgentEnv)
            checked = {a: checked_step(step, a, is_single) for a, step in steps.items()}
            outcomes.append((checked, None))
        except Exception as error:
            outcomes.append((None, error))
    return outcomes


def _check_seats(episode: Episode) -> None:
    """Raises ValueError if the episode ended without a Step for an agent that has acted."""
    agents = episode.agents.values()
    if not any(agent.prompt_ids or agent.context_full for agent in agents):
        for agent in agents:
            if agent.rollout.turns and not agent.has_step and not agent.rollout.error:
                raise ValueError(f"step() never returned a Step for {agent.rollout.agent}")


def _own_rollouts(episode: Episode) -> list[Rollout]:
    """The rollouts of the agents that the policy plays; they name the others' players."""
    others = {
        name: {"player": player, "messages": episode.agents[name].rollout.messages}
        for name, player in episode.opponents.items()
    }
    seats = [episode.seat] if episode.seat in episode.agents else list(episode.agents)
    own = [episode.agents[name].rollout for name in seats]
    for rollout in own:
        rollout.opponents = others
    return own


def _group_by_agent(rollouts: list[Rollout]) -> list[Rollout]:
    """Gives each agent of a task its own group, so that only the same agent is compared."""
    numbers: dict[tuple[int, str], int] = {}
    for rollout in rollouts:
        key = (rollout.group_id, rollout.agent)
        rollout.group_id = numbers.setdefault(key, len(numbers))
    return rollouts
