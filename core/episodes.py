"""An evening on episodes, 2 of 2. Plays many episodes at once; one Rollout per agent.

`episode` is one episode, from its reset to its last step. It is a generator: at each `yield` it
asks for something and pauses until the answers come back as the value of the `yield`:

    answers = yield [ask, ...]      each is a Request to a sampler, or an EnvCall of an environment

`play_out` is the loop around all episodes, and `resume` sends the answers into one. In the default
run all episodes move together, in rounds. A letter_counting episode has three:

    episode 0     reset        completion     step          the next `yield` of each episode
    episode 1     reset        completion     step
    ..            ..           ..             ..
    episode 127   reset        completion     step
                  the pool     the sampler    the pool      answers all of a round

The pool (core/pool.py) calls quick environments one after the other, and those that wait for
something (`Env.waits`) side by side. No episode continues before its round is answered, in whatever
order the answers come. So a run that is repeated is equal to the bit, if its environments are
deterministic and no call is near its time limit.

Where an environment (`Env.alone`) or a sampler on a server asks for it, episodes move alone: each
continues as soon as its own answers are there. Its random numbers stay the same, but the sampler
computes it together with other completions, so log-probs differ by rounding.

An environment that raises, exceeds its time limit or returns something invalid costs only its own
episode: `Rollout.error` gives the reason.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from core import distributed
from core.calls import Outcome, TimeLimit
from core.chat_template import read_calls, without_tools
from core.context import Agent, Renderer
from core.policy import Policy
from core.pool import EnvCall, Pool, PooledEnv, is_program
from core.sampler import Request, Sampler, SamplingParams
from core.seeds import derive_seed
from core.tasks import Task
from core.types import Rollout
from environments.base import PLAYER, TRAIN_SEEDS, EnvFailure, NoReward
from environments.plumbing.registry import place_of
from environments.plumbing.tools import name_of

STREAMS_PER_EPISODE = 1000  # random streams reserved for the agents of one episode


@dataclass(eq=False)
class Episode:
    """An episode while it is played."""

    number: int  # of the episode, among those of all ranks
    task: Task  # its environment and seed
    env: PooledEnv = field(init=False)
    agents: dict[str, Agent] = field(default_factory=dict)
    rounds: int = 0  # how often its agents were asked to act; part of the seed of the next draws
    seat: str = ""  # the only agent whose rollout is returned; "": those of all agents are


Wanted = Request | EnvCall
Play = Generator[Sequence[Wanted], Any, None]  # an episode while it is played
Answerer = Callable[[Episode, Agent], Wanted]  # whom to ask for an agent's next response


class RolloutCollector:
    """Plays tasks with a policy, and reuses the environments of finished episodes."""

    def __init__(
        self,
        policy: Policy,
        max_turns: int,
        env_timeout: float = 0.0,
        system_prompt: str = "",
        redirect: Callable[..., Request] | None = None,
        shows_right: bool = False,
        play_program: Any = None,
        say: Callable[[str], None] = lambda line: None,
    ):
        """`system_prompt`: as `Renderer`.
        `env_timeout`: limit of one call of an environment, in seconds; 0: no limit.
        `redirect`: gives another sampler to the requests of agents that the policy does not play.
        `shows_right`: whether turns of training get `feedback_ids`.
        `play_program`: plays the episode of an agent program (core/extras/programs.py).
        `say`: prints a line."""
        self.policy, self.max_turns = policy, max_turns
        self.renderer = Renderer(policy, system_prompt)
        self.pool = Pool(partial(read_calls, policy.tokenizer), env_timeout)
        self.say = say
        self.agent_errors: set[str] = set()  # kinds of errors of agent programs, said once each
        self.redirect, self.shows_right, self.play_program = redirect, shows_right, play_program

    def collect(
        self,
        tasks: list[Task],
        sampler: Sampler,
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[Rollout]:
        """Plays an episode of each task with completions of `sampler`; rollouts are in their order.

        An agent's draws depend only on `params.seed`, its task's place in `tasks`, its place among
        the agents of its episode, and how often these were asked to act.
        """

        def ask(episode: Episode, agent: Agent) -> Wanted:
            chat = without_tools(self.policy.tokenizer, agent.chat, agent.schemas)
            seed = derive_seed(params.seed, episode.rounds)
            request = Request(agent.prompt_ids, params, seed, agent.stream, chat, sampler)
            return self.redirect(self, episode, agent, request) if self.redirect else request

        return self.play(tasks, ask, on_progress)

    def demonstrate(self, tasks: list[Task], trivial: bool = False) -> list[Rollout]:
        """Plays each task with the environment's own demonstrations.

        Of several agents one demonstrates, the rest guess; only the demonstrator's rollout returns.
        `trivial`: with the trivial baseline of an environment for one agent instead.
        """

        def from_environment(episode: Episode, agent: Agent) -> Wanted:
            self.take_seat(episode, agent.rollout.agent)
            env, name = episode.env, agent.rollout.agent
            if trivial:
                return EnvCall(env, env.game.trivial)
            hasty = episode.task.hasty or name != episode.seat
            return EnvCall(env, env.game.demonstrate, (name, hasty))

        return self.play(tasks, from_environment)

    def play(
        self, tasks: list[Task], answerer: Answerer, on_progress: Callable[[], None] = lambda: None
    ) -> list[Rollout]:
        """Plays this rank's share of the tasks; returns the rollouts of all ranks."""
        mine = distributed.shard(list(enumerate(tasks)))
        episodes = [Episode(number, task) for number, task in mine]
        self.play_out([self.guarded(episode, answerer) for episode in episodes], on_progress)
        rollouts: list[Rollout] = []
        for episode in episodes:
            for name, agent in episode.agents.items():
                if episode.seat in ("", name) and (agent.rollout.turns or agent.rollout.error):
                    rollouts.append(agent.rollout)
        return group_by_agent(with_lowest_return(distributed.all_gather(rollouts)))

    def close(self) -> None:
        """Closes all environments."""
        idle = [env for envs in self.pool.idle.values() for env in envs]
        self.play_out([self.pool.discard(env) for env in idle])

    def episode(self, episode: Episode, answerer: Answerer) -> Play:
        """One episode, from its reset to its last step."""
        # The pool's environments are for several agents: openings, responses and steps are dicts by
        # agent. Where there is one, as in letter_counting, its name is PLAYER
        agents, env = episode.agents, episode.env
        shows_right = self.shows_right and episode.task.seed in TRAIN_SEEDS  # with --algo sdpo
        [openings] = yield [EnvCall(env, env.reset, (episode.task.seed,))]
        for name, messages in openings.items():
            agent = self.join(episode, name)
            agent.begin(messages)
            if messages:
                agent.set_prompt()  # prompt_ids: the messages in the chat template
        if not any(agent.chat for agent in agents.values()):
            raise ValueError("reset() returned no message")

        while acting := self.asked_to_act(episode):
            answers = yield [answerer(episode, agent) for agent in acting]
            responses = {}
            for agent, answer in zip(acting, answers, strict=True):
                # appends a Turn with the sampled ids, exactly as they are; returns their text
                responses[agent.rollout.agent] = response = agent.add(answer)
                response.is_last = len(agent.rollout.turns) == self.max_turns
            episode.rounds += 1

            right_answers: dict[str, str | None] = {}
            if shows_right:
                calls = [EnvCall(env, env.game.demonstrate, (name,)) for name in responses]
                demonstrations = yield calls
                right_answers = dict(zip(responses, demonstrations, strict=True))
            [steps] = yield [EnvCall(env, env.step, (responses,))]
            for name, step in steps.items():
                agent = agents.get(name) or self.join(episode, name)
                if shows_right and name in responses:
                    agent.add_feedback(step.feedback or right_answers[name])
                agent.rollout.steps.append((step.reward, step.fresh))
                agent.read(step)  # the last turn's reward; the prompt of the next turn
        if any(agent.prompt_ids or agent.context_full for agent in agents.values()):
            [steps] = yield [EnvCall(env, env.step_when_cut)]
            for name, step in steps.items():
                agents[name].rollout.steps.append((step.reward, step.fresh))
                agents[name].read(step)
        check_seats(episode)

    def guarded(self, episode: Episode, answerer: Answerer) -> Play:
        """`episode` in an environment of the pool; an exception costs only this episode."""
        env = episode.env = yield from self.pool.borrow(episode.task.env)
        try:
            if is_program(episode.task.env):
                yield from self.play_program(self, episode, answerer)
            else:
                yield from self.episode(episode, answerer)
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit too: an environment must not end the run
            if not episode.agents:
                self.join(episode, PLAYER)
            for rollout in (agent.rollout for agent in episode.agents.values()):
                rollout.error = error_text(error)
                rollout.env_failure = isinstance(error, EnvFailure)
                rollout.no_reward = isinstance(error, NoReward)
            if isinstance(error, NoReward):
                self.pool.give_back(env)
            elif isinstance(error, TimeLimit):  # it may still be at work: leave it alone
                self.pool.lent.remove(env)
            else:
                yield from self.pool.discard(env)
        else:
            self.pool.give_back(env)

    def play_out(self, plays: list[Play], on_progress: Callable[[], None] = lambda: None) -> None:
        """The loop around all episodes: lets each one continue until it has ended.

        While completions are sampled, the loop repeats once for each token of the longest one.
        """
        waits: dict[Play, Sequence[Wanted]] = {play: [] for play in plays}  # what each waits for
        answers: dict[Wanted, Outcome] = {}  # (value, None), or (None, exception)
        sampling, calling = Counter[Sampler](), 0  # requests and calls without an answer
        alone = False  # whether episodes move alone, not in rounds
        try:
            while waits:
                # 1. Each episode that has all its answers, or has not begun, continues to its next
                #    `yield`. In rounds they do so together
                alone = alone or self.pool.moves_alone()  # an environment says so once it is built
                if alone or not (sampling or calling):
                    calls, requests = list[EnvCall](), list[Request]()
                    for play in [p for p, asks in waits.items() if answers.keys() >= {*asks}]:
                        asks = resume(play, [answers.pop(ask) for ask in waits.pop(play)])
                        if asks is not None:
                            waits[play] = asks
                            calls += [ask for ask in asks if isinstance(ask, EnvCall)]
                            requests += [ask for ask in asks if isinstance(ask, Request)]
                    # 2. Their calls and requests begin
                    self.pool.begin(calls)
                    calling += len(calls)
                    alone = alone or any(request.sampler.alone for request in requests)
                    for request in requests:
                        request.sampler.add(request)
                        sampling[request.sampler] += 1
                on_progress()
                # 3. The samplers sample on, such as one token for each request
                for sampler in [*sampling]:
                    completions = sampler.step()
                    answers |= {request: (answer, None) for request, answer in completions}
                    sampling[sampler] -= len(completions)
                sampling = +sampling  # drops the samplers that have no request left
                # 4. Environments answer
                outcomes = self.pool.finished(on_progress, may_wait=not sampling)
                answers |= outcomes
                calling -= len(outcomes)
        finally:  # after Ctrl-C nothing goes on, and no environment in use is used again
            for play in waits:
                play.close()
            for sampler in sampling:
                sampler.clear()
            if self.pool.lent:
                self.pool.abandon()

    def asked_to_act(self, episode: Episode) -> list[Agent]:
        """The agents that have a prompt; none if one of them has had all its turns."""
        agents = [agent for agent in episode.agents.values() if agent.prompt_ids]
        may_act = all(len(agent.rollout.turns) < self.max_turns for agent in agents)
        return agents if may_act else []

    def join(self, episode: Episode, name: str) -> Agent:
        """A new agent of the episode, with a random stream of its own."""
        task, number = episode.task, len(episode.agents)
        rollout = Rollout(task.env.short, name, task.seed, task.group_id, episode_truncated=True)
        if episode.env.schemas:
            rollout.for_log["tools"] = [*map(name_of, episode.env.schemas)]
        stream = episode.number * STREAMS_PER_EPISODE + number
        agent = Agent(self.renderer, rollout, stream, episode.env.schemas)
        episode.agents[name] = agent
        return agent

    def take_seat(self, episode: Episode, acting: str) -> None:
        """Gives one seat to the policy, or to the demonstrator, if the environment has `agents`.

        Consecutive seeds have the seats in turn. Raises ValueError if `acting` is no such agent.
        """
        agents = episode.env.game.agents
        if agents and acting not in agents:
            raise ValueError(f"{acting!r} acts, but is not one of its agents, {', '.join(agents)}")
        if agents:
            episode.seat = agents[episode.task.seed % len(agents)]
            if episode.seat not in episode.agents:  # so that a failure before it acts is counted
                self.join(episode, episode.seat)


def resume(play: Play, answers: list[Outcome]) -> Sequence[Wanted] | None:
    """Lets an episode continue with its answers; returns its next requests, None at its end."""
    try:
        for _, error in answers:
            if error is not None:
                return play.throw(error)
        return play.send([value for value, _ in answers] or None)  # a generator begins with None
    except StopIteration:
        return None


def check_seats(episode: Episode) -> None:
    """Raises ValueError if the episode ended without a Step for an agent that has acted, or without
    the end of an agent."""
    agents = episode.agents.values()
    if not any(agent.prompt_ids or agent.context_full for agent in agents):
        for agent in agents:
            if agent.rollout.turns and not agent.step:
                raise ValueError(f"step() never returned a Step for {agent.rollout.agent}")
        if not any(agent.step and agent.step.done for agent in agents):
            raise ValueError("step() asks no agent to act, and done is False for all of them")


def error_text(error: BaseException) -> str:
    """The type and the message of an error, at most 500 characters, and the user's line."""
    place = "" if isinstance(error, EnvFailure) else place_of(error)
    return f"{type(error).__name__}: {error}"[:500] + place


def with_lowest_return(rollouts: list[Rollout]) -> list[Rollout]:
    """Lowers the return of agent programs that the policy broke to the lowest of their batch."""
    for broken in [r for r in rollouts if r.turns and r.info.get("agent_error")]:
        lowest = min(r.episode_return for r in rollouts if r.env == broken.env and not r.error)
        broken.turns[-1].reward -= broken.episode_return - lowest
    return rollouts


def group_by_agent(rollouts: list[Rollout]) -> list[Rollout]:
    """Gives each agent of a task its own group, so that only the same agent is compared."""
    group_ids: dict[tuple[int, str], int] = {}
    for rollout in rollouts:
        key = (rollout.group_id, rollout.agent)
        rollout.group_id = group_ids.setdefault(key, len(group_ids))
    return rollouts
