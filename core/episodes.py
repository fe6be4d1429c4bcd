"""Play tasks in many environments at once: tasks in, one Rollout per agent out.

Reading path, 7 of 9. `episode` is one episode, from top to bottom. Where it has to wait, it yields
what it waits for: requests for completions of the policy, or calls of its environment, which
threads make (core/threads.py). `run` is the loop around all episodes: it lets each one continue
when it has its answers.

In rounds, the episodes continue together: all agents act when no environment is at work, and their
completions are one batch. Once environments answer late, each episode continues alone. Its draws
are the same, its log-probs up to rounding.

All episodes are kept, so short ones are not favored. An environment that raises, exceeds its time
limit, changes the working directory or returns something invalid costs only its own episode:
`Rollout.error` gives the reason.
"""

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from core import distributed
from core.context import Agent, Renderer
from core.policy import Policy
from core.sampler import Request, Sampler, SamplingParams
from core.seeds import derive_seed
from core.tasks import Task
from core.threads import Outcome, Threads, TimeLimit
from core.types import Message, Rollout, UsageError
from environments.base import PLAYER, Env, EnvFailure, Step, as_multi, checked_step
from environments.registry import constructor, make, short, split_opponent

LATE = 0.03  # seconds; if half of the latest steps take longer, episodes do not wait for each other
ENOUGH = 8  # steps to know this from: a busy machine delays a few calls of a fast environment
POLL = 0.05  # seconds that the loop waits for environments before it looks at Ctrl-C again
STREAMS_PER_EPISODE = 1000  # random streams reserved for the agents of one episode


@dataclass(eq=False)
class Call:
    """A call of a method of an environment, which a thread makes."""

    env: "Instance"
    method: Callable[..., Any]
    args: tuple[Any, ...] = ()


@dataclass(eq=False)
class Episode:
    """One task while it is played."""

    number: int  # of the task, among the tasks of all ranks
    task: Task
    env: "Instance" = field(init=False)
    rounds: int = 0  # how often its agents were asked to act
    agents: dict[str, Agent] = field(default_factory=dict)
    seat: str = ""  # the only agent whose rollout is kept; empty: that of all agents


Ask = Request | Call
Play = Generator[list[Ask], Any, None]  # an episode: it yields what it waits for
Answerer = Callable[[Episode, Agent], Ask]  # whom to ask for an agent's next response


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
        renderer: type[Renderer] = Renderer,
    ):
        """`drop_thinking` and `system_prompt`: as `Renderer`.
        `env_timeout`: limit of one call of an environment, in seconds; 0: no limit.
        `env_workers`: calls of slow environments at the same time.
        `env_instances`: heavy environments (`Env.heavy`) that exist at the same time.
        `renderer`: core/extras/tools.py has the one for environments with tools."""
        self.policy, self.max_turns, self.env_instances = policy, max_turns, env_instances
        self.renderer = renderer(policy, drop_thinking, system_prompt)
        self.threads = Threads(env_workers, env_timeout)
        self.opponents: Any = None  # core/extras/opponents.py; None: the policy plays all agents
        self.step_seconds: dict[str, deque[float]] = defaultdict(partial(deque, maxlen=64))
        self.idle_envs: dict[str, list[Instance]] = defaultdict(list)  # by spec
        self.lent: set[Instance] = set()  # to episodes

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

        def from_policy(episode: Episode, agent: Agent) -> Ask:
            chat, _ = self.renderer.for_template(agent.chat, agent.schemas)
            seed = derive_seed(params.seed, episode.rounds)
            return Request(agent.prompt_ids, params, seed, agent.stream, chat, sampler)

        def from_policy_or_opponent(episode: Episode, agent: Agent) -> Ask:
            opponent = split_opponent(episode.task.env)[1]
            if opponent:
                self.take_seat(episode, agent.rollout.agent)
            if not opponent or episode.seat in ("", agent.rollout.agent):
                return from_policy(episode, agent)
            return self.opponents.ask(opponent, episode, agent, params)

        if self.opponents is None:
            return self.play(tasks, from_policy, on_progress)
        self.opponents.update_copies(tasks)
        return self.play(tasks, from_policy_or_opponent, on_progress)

    def demonstrate(self, tasks: list[Task], trivial: bool = False) -> list[Rollout]:
        """Plays each task with the environment's own demonstrations.

        With several agents one demonstrates, and the others guess; only its rollout is returned.
        `trivial`: with the trivial baseline of an environment for one agent instead.
        """

        def from_environment(episode: Episode, agent: Agent) -> Ask:
            self.take_seat(episode, agent.rollout.agent)
            if trivial:
                return Call(episode.env, episode.env.env.trivial)
            name = agent.rollout.agent
            hasty = episode.task.hasty or name != episode.seat
            return Call(episode.env, episode.env.env.demonstrate, (name, hasty))

        return self.play(tasks, from_environment)

    def play(
        self, tasks: list[Task], answerer: Answerer, on_progress: Callable[[], None] = lambda: None
    ) -> list[Rollout]:
        """Plays this rank's share of the tasks; returns the rollouts of all ranks."""
        mine = distributed.shard(list(enumerate(tasks)))
        episodes = [Episode(number, task) for number, task in mine]
        self.run([self.episode(episode, answerer) for episode in episodes], on_progress)
        rollouts = [rollout for episode in episodes for rollout in own_rollouts(episode)]
        kept = [rollout for rollout in rollouts if rollout.turns or rollout.error]
        return group_by_agent(distributed.all_gather(kept))

    def close(self) -> None:
        """Closes all environments, and ends the threads."""
        self.run([self.discard(env) for envs in self.idle_envs.values() for env in envs])
        self.idle_envs.clear()
        self.threads.close()

    def episode(self, episode: Episode, answerer: Answerer) -> Play:
        """One episode, from its opening to its last step. It waits at each `yield`."""
        agents = episode.agents
        env = episode.env = yield from self.borrow(episode.task.env)
        try:
            [openings] = yield [Call(env, env.reset, (episode.task.seed,))]
            for name, messages in openings.items():
                agent = self.new_agent(episode, name)
                agent.begin(messages)
                if messages:
                    agent.set_prompt()
                agents[name] = agent
            if not any(agent.chat for agent in agents.values()):
                raise ValueError("reset() returned no message")

            while acting := self.asked_to_act(episode):
                answers = yield [answerer(episode, agent) for agent in acting]
                responses = {}
                for agent, answer in zip(acting, answers, strict=True):
                    responses[agent.rollout.agent] = agent.add(answer)  # its exact ids
                episode.rounds += 1

                [steps] = yield [Call(env, env.step, (responses,))]
                for name, step in steps.items():
                    if name not in agents:  # it joins after the start
                        agents[name] = self.new_agent(episode, name)
                    agents[name].read(step)  # the reward, and the next prompt
            check_seats(episode)
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit too: an environment must not end the run
            self.fail(episode, error)
            if isinstance(error, TimeLimit):  # its environment may still be at work: leave it alone
                self.lent.discard(env)
            else:
                yield from self.discard(env)
        else:
            self.lent.remove(env)
            self.idle_envs[episode.task.env].append(env)

    def run(self, plays: list[Play], on_progress: Callable[[], None] = lambda: None) -> None:
        """The loop around all episodes: lets each continue until it has ended."""
        waits: dict[Play, list[Ask]] = {play: [] for play in plays}  # what each one waits for
        held: list[Ask] = []  # what they wait for and nobody has begun
        sampling, calling = Counter[Sampler](), 0  # requests and calls that have begun
        answers: dict[Ask, Outcome] = {}
        in_rounds = True
        try:
            while waits:
                if not (in_rounds and (sampling or calling)):
                    # 1. Each episode that has its answers continues to its next `yield`
                    for play in [p for p, asks in waits.items() if answers.keys() >= {*asks}]:
                        asks = resume(play, [answers.pop(ask) for ask in waits.pop(play)])
                        if asks is not None:
                            waits[play] = asks
                            held += asks
                    # 2. What they wait for begins; in rounds first all calls, then all requests
                    in_rounds = in_rounds and not self.answers_late()
                    calls = [ask for ask in held if isinstance(ask, Call)]
                    requests = [ask for ask in held if isinstance(ask, Request)]
                    self.begin(calls)
                    calling += len(calls)
                    held = [*requests] if in_rounds and calling else []
                    for request in [] if held else requests:
                        request.alone = not in_rounds
                        request.sampler.add(request)
                        sampling[request.sampler] += 1
                on_progress()
                # 3. The samplers sample on, such as one token for each request
                for sampler in [*sampling]:
                    ended = sampler.step()
                    answers |= {request: (completion, None) for request, completion in ended}
                    sampling[sampler] -= len(ended)
                sampling = +sampling  # only those with requests left
                # 4. Environments answer
                wait = POLL if calling and not sampling else 0.0
                for group, outcome, seconds in self.threads.ended(wait):
                    answers |= self.answers_of(group, outcome, seconds)
                    calling -= len(group)
        finally:  # after Ctrl-C nothing goes on, and no environment in use is used again
            if waits:
                self.abandon(waits, sampling)

    def borrow(self, spec: str) -> Generator[list[Ask], Any, "Instance"]:
        """An idle environment, or a new one; waits while too many heavy ones exist."""
        heavy = is_heavy(spec)
        while not self.idle_envs[spec]:
            idle = [env for envs in self.idle_envs.values() for env in envs if env.heavy]
            if not heavy or len(idle) + sum(env.heavy for env in self.lent) < self.env_instances:
                self.idle_envs[spec].append(Instance(spec, heavy, self))
            elif idle:
                self.idle_envs[idle[0].spec].remove(idle[0])
                yield from self.discard(idle[0])
            else:
                yield []  # until another episode has ended
        self.lent.add(env := self.idle_envs[spec].pop())
        return env

    def discard(self, env: "Instance") -> Play:
        """Closes an environment that is not used again."""
        self.lent.add(env)
        with suppress(Exception, SystemExit):
            yield [Call(env, env.close)]
        self.lent.remove(env)

    def abandon(self, plays: Iterable[Play], samplers: Iterable[Sampler]) -> None:
        """Ends episodes before their end; closes their environments as far as none is at work."""
        for play in plays:
            play.close()
        for sampler in samplers:
            sampler.clear()
        at_work = {call.env for calls in self.threads.clear() for call in calls}
        for env in self.lent - at_work:
            self.threads.start([], (env.spec, "close"), env.close)
        self.lent.clear()

    def asked_to_act(self, episode: Episode) -> list[Agent]:
        """The agents that have a prompt; none if one of them has had all its turns."""
        asked = [agent for agent in episode.agents.values() if agent.prompt_ids]
        return asked if all(len(a.rollout.turns) < self.max_turns for a in asked) else []

    def new_agent(self, episode: Episode, name: str) -> Agent:
        """An agent of the episode, with a random stream of its own."""
        task, number = episode.task, len(episode.agents)
        if number == STREAMS_PER_EPISODE:
            raise ValueError(f"the environment has more than {STREAMS_PER_EPISODE} agents")
        rollout = Rollout(short(task.env), name, task.seed, task.group_id, episode_truncated=True)
        stream = episode.number * STREAMS_PER_EPISODE + number
        return Agent(self.renderer, rollout, stream, episode.env.schemas)

    def take_seat(self, episode: Episode, acting: str) -> None:
        """Gives one seat to the policy, or to the demonstrator, if the environment has `agents`.

        Consecutive seeds have the seats in turn. Raises ValueError if `acting` is no such agent.
        """
        agents = episode.env.env.agents
        if agents and acting not in agents:
            raise ValueError(f"{acting!r} acts, but is not one of its agents, {', '.join(agents)}")
        if agents:
            episode.seat = agents[episode.task.seed % len(agents)]
            if episode.seat not in episode.agents:  # so that a failure before it acts is counted
                episode.agents[episode.seat] = self.new_agent(episode, episode.seat)

    def fail(self, episode: Episode, error: BaseException) -> None:
        """Gives the error to the rollouts of all agents."""
        if not episode.agents:
            episode.agents[PLAYER] = self.new_agent(episode, PLAYER)
        for agent in episode.agents.values():
            agent.rollout.error = describe(error)
            agent.rollout.env_failure = isinstance(error, EnvFailure)

    def begin(self, calls: list[Call]) -> None:
        """Starts calls in threads; the steps of a class with `step_batch` are one call."""
        groups: dict[Any, list[Call]] = defaultdict(list)
        for call in calls:
            together = is_step(call) and call.env.steps_together
            groups[call.env.spec if together else call].append(call)
        for key, group in groups.items():
            make_them = step_together if isinstance(key, str) else make_one
            kind = group[0].env.spec, group[0].method.__name__
            self.threads.start(group, kind, partial(make_them, group))

    def answers_of(self, calls: list[Call], outcome: Outcome, seconds: float) -> dict[Ask, Outcome]:
        """The outcome of each call of a group; an exception is that of all of them."""
        if not calls:  # an abandoned environment is closed
            return {}
        if is_step(calls[0]):
            self.step_seconds[calls[0].env.spec].append(seconds)
        found, error = outcome
        return dict(zip(calls, [outcome] * len(calls) if error else found, strict=True))

    def answers_late(self) -> bool:
        """Whether the steps of an environment in use take long; batches of steps need rounds."""
        return any(
            statistics.median(self.step_seconds[spec]) > LATE
            for spec in {env.spec for env in self.lent if not env.steps_together}
            if self.threads.is_parallel((spec, "step")) and len(self.step_seconds[spec]) >= ENOUGH
        )


class Instance:
    """An environment of the collector; its first reset builds it, in a thread."""

    def __init__(self, spec: str, heavy: bool, collector: RolloutCollector):
        self.spec, self.heavy, self.collector = spec, heavy, collector
        self.env: Any = None  # a MultiAgentEnv
        self.is_single = self.steps_together = False

    def reset(self, seed: int) -> dict[str, list[Message]]:
        if self.env is None:
            made = make(self.spec)
            if isinstance(made, Env):
                self.is_single, self.steps_together = True, has_step_batch(made)
                made = self.collector.renderer.prepare(made)
            if not made.thread_safe:
                self.collector.threads.alone.add(self.spec)
            self.env = as_multi(made)
        return self.env.reset(seed)

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        return self.checked(self.env.step(responses))

    def checked(self, steps: dict[str, Step]) -> dict[str, Step]:
        return {name: checked_step(step, name, self.is_single) for name, step in steps.items()}

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of the tools that the agents may call."""
        return getattr(self.env.env, "schemas", []) if self.is_single and self.env else []


def resume(play: Play, answers: list[Outcome]) -> list[Ask] | None:
    """Lets an episode continue with its answers; returns what it waits for, None at its end."""
    try:
        for _, error in answers:
            if error is not None:
                return play.throw(error)
        return play.send([value for value, _ in answers] or None)
    except StopIteration:
        return None


def is_step(call: Call) -> bool:
    return call.method == call.env.step


def make_one(calls: list[Call]) -> list[Outcome]:
    """Makes a call that is not part of a batch."""
    [call] = calls
    return [(call.method(*call.args), None)]


def step_together(calls: list[Call]) -> list[Outcome]:
    """The steps of environments of one class, made by its `step_batch`."""
    envs: list[Any] = [call.env.env.env for call in calls]
    steps = type(envs[0]).step_batch(envs, [call.args[0][PLAYER] for call in calls])
    if len(steps) != len(calls):
        raise ValueError(f"step_batch() returned {len(steps)} steps for {len(calls)} responses")
    outcomes: list[Outcome] = []
    for call, step in zip(calls, steps, strict=True):
        try:
            outcomes.append((call.env.checked({PLAYER: step}), None))
        except Exception as error:
            outcomes.append((None, error))
    return outcomes


def has_step_batch(env: Env) -> bool:
    """Whether the class steps several instances in one call, without tools to answer first."""
    own: Any = type(env).step_batch
    default: Any = Env.step_batch
    return getattr(own, "__func__", own) is not default.__func__ and not env.tools


def is_heavy(spec: str) -> bool:
    """Whether the environment's class is `heavy`; False for an unknown name."""
    with suppress(UsageError):
        return getattr(constructor(spec), "heavy", False)
    return False


def check_seats(episode: Episode) -> None:
    """Raises ValueError if the episode ended without a Step for an agent that has acted."""
    agents = episode.agents.values()
    if not any(agent.prompt_ids or agent.context_full for agent in agents):
        for agent in agents:
            if agent.rollout.turns and not agent.has_step:
                raise ValueError(f"step() never returned a Step for {agent.rollout.agent}")


def describe(error: BaseException) -> str:
    """The type and the message of an error, at most 500 characters."""
    try:
        message = str(error)
    except Exception:
        message = "its message cannot be read"
    return f"{type(error).__name__}: {message}"[:500]


def own_rollouts(episode: Episode) -> list[Rollout]:
    """The rollouts of the agents that the policy plays; they name the others' players."""
    others = {
        name: {"player": agent.player, "messages": agent.rollout.messages}
        for name, agent in episode.agents.items()
        if agent.player
    }
    seats = [episode.seat] if episode.seat in episode.agents else [*episode.agents]
    own = [episode.agents[name].rollout for name in seats]
    for rollout in own:
        rollout.opponents = others
    return own


def group_by_agent(rollouts: list[Rollout]) -> list[Rollout]:
    """Gives each agent of a task its own group, so that only the same agent is compared."""
    numbers: dict[tuple[int, str], int] = {}
    for rollout in rollouts:
        key = (rollout.group_id, rollout.agent)
        rollout.group_id = numbers.setdefault(key, len(numbers))
    return rollouts
