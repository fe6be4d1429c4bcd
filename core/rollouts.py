"""Many environments at once: tasks in, rollouts out.

Each round asks every episode that is still open for its next prompt, samples all of them in one
batch, and steps each environment with its text. Every episode that was begun is kept, however early
it ended, so short games aren't favoured. An environment that raises, takes too long or answers with
what is no Step costs its own episode only: `Rollout.error` says why.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from core import distributed
from core.chat_template import clean, following_ids, prompt_ids, without_thinking
from core.interrupt import limited
from core.model import Policy
from core.sampler import Sampler, SamplingParams
from core.tasks import Task
from core.types import Completion, Message, Rollout, Turn
from environments.base import Env, MultiAgentEnv, Step
from environments.registry import make

T = TypeVar("T")
PLAYER = "player"  # the one agent of a single-player environment
MOST_TEXT, MOST_INFO = 500_000, 100_000  # characters of a step's message; of its info, as JSON
MOST_SEATS = 1000  # of an episode; their numbers don't run into the next one's
ROUND = 1_000_000_007  # between the seeds of two rounds


class BatchedEnv:
    """Plays tasks with a policy. Environments are built once for each spec and used again."""

    def __init__(
        self, policy: Policy, max_turns: int, drop_thinking: bool = False, patience: float = 0.0
    ):
        self.policy = policy
        self.max_turns = max_turns
        self.patience = patience  # seconds that an environment may take to answer; 0: for ever
        self.drop_thinking = drop_thinking  # <think>..</think> leaves the context of later turns
        self.idle: dict[str, list[MultiAgentEnv]] = {}

    def collect(
        self,
        tasks: list[Task],
        sampler: Sampler,
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[Rollout]:
        """Play each task with the sampler; a Rollout for each agent, in the order of the tasks."""

        numbered = list(enumerate(tasks))  # play the same wherever they are played

        def respond(seats: list["_Seat"], round_: int) -> list[Completion]:
            # a seat draws the same whoever else is asked, and something else in each round
            streams = tuple(seat.number for seat in seats)
            now = replace(params, seed=params.seed + round_ * ROUND, streams=streams)
            chats = [seat.chat for seat in seats]
            return sampler.sample([seat.prompt for seat in seats], now, on_progress, chats)

        return _numbered(distributed.all_gather(self._play(distributed.shard(numbered), respond)))

    def demonstrate(self, tasks: list[Task]) -> list[Rollout]:
        """Play each task as its environment demonstrates it; single-player environments only."""
        tokenizer, closing = self.policy.tokenizer, self.policy.end_of_turn_id

        def show(seat: "_Seat") -> Completion:
            env = seat.env.env if isinstance(seat.env, _Solo) else None
            with limited(self.patience):
                text = env.demonstrate(hasty=seat.task.hasty) if env else None
            if not isinstance(text, str):
                raise TypeError("it has no demonstration to give")
            ids = [*tokenizer.encode(text, add_special_tokens=False), closing]
            return Completion(ids, [0.0] * len(ids), text, "stop")

        def respond(seats: list["_Seat"], round_: int) -> list[Completion | None]:
            return [seat.episode.attempt(partial(show, seat)) for seat in seats]

        mine = distributed.shard(list(enumerate(tasks)))
        return _numbered(distributed.all_gather(self._play(mine, respond)))

    def _play(self, tasks: list[tuple[int, Task]], respond: Callable) -> list[Rollout]:
        episodes = [_Episode(self, number, task) for number, task in tasks]
        for round_ in range(self.max_turns):
            asked = [seat for episode in episodes for seat in episode.asked()]
            if not asked:
                break
            written = respond(asked, round_)
            for seat, completion in zip(asked, written, strict=True):
                if completion is not None:
                    seat.write(completion)
            for episode in episodes:
                episode.step()
        for episode in episodes:
            episode.leave()
        seats = [seat for episode in episodes for seat in episode.seats.values()]
        return [seat.finish() for seat in seats if seat.rollout.turns or seat.error]

    def take(self, spec: str) -> MultiAgentEnv:
        pool = self.idle.setdefault(spec, [])
        if pool:
            return pool.pop()
        env = make(spec)
        return _Solo(env) if isinstance(env, Env) else env


class _Episode:
    """One task being played: an environment and the seats of its agents."""

    def __init__(self, table: BatchedEnv, number: int, task: Task):
        self.table, self.task = table, task
        self.number = number * MOST_SEATS  # of its first seat
        self.seats: dict[str, _Seat] = {}
        self.env: MultiAgentEnv | None = None
        self.attempt(self.begin)

    def attempt(self, act: Callable[[], T]) -> T | None:
        """What `act` makes; None if it fails, and then the episode has."""
        try:
            return act()
        except Exception as error:  # what is everybody's mistake ends the run by its number
            self.fail(error)
            return None

    def begin(self) -> None:
        with limited(self.table.patience):
            self.env = self.table.take(self.task.env)
            openings = self.env.reset(self.task.seed)
        for agent, messages in openings.items():
            self.sit(agent, messages)

    def sit(self, agent: str, messages: list[Message]) -> None:
        number = self.number + len(self.seats)
        self.seats[agent] = _Seat(self, number, agent, messages)

    def asked(self) -> list["_Seat"]:
        return [seat for seat in self.seats.values() if seat.prompt]

    def step(self) -> None:
        """Give the environment what was written since; read its answer."""
        responses = {a: s.written for a, s in self.seats.items() if s.written is not None}
        if not responses or self.env is None:
            return
        for agent in responses:
            self.seats[agent].written = None
        self.attempt(partial(self.give, self.env, responses))

    def give(self, env: MultiAgentEnv, responses: dict[str, str]) -> None:
        with limited(self.table.patience):
            steps = checked(env.step(responses))
        for agent, step in steps.items():
            if agent not in self.seats:  # joins late: its first message opens its chat
                self.sit(agent, [])
            self.seats[agent].read(step)

    def fail(self, error: Exception) -> None:
        """End the episode for every agent, and never use this environment again."""
        self.env = None
        if not self.seats:
            self.sit(PLAYER, [])
        for seat in self.seats.values():
            seat.prompt, seat.error = [], f"{type(error).__name__}: {error}"[:500]

    def leave(self) -> None:
        if self.env is not None:
            self.table.idle[self.task.env].append(self.env)


class _Solo(MultiAgentEnv):
    """A single-player environment, seen as one with one agent."""

    def __init__(self, env: Env):
        self.env = env

    def reset(self, seed: int) -> dict[str, list[Message]]:
        return {PLAYER: self.env.reset(seed)}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        return {PLAYER: self.env.step(responses[PLAYER])}


class _Seat:
    """One agent of one episode: its chat so far, as messages and as ids."""

    def __init__(self, episode: _Episode, number: int, agent: str, messages: list[Message]):
        self.policy, self.drop_thinking = episode.table.policy, episode.table.drop_thinking
        self.episode, self.task, self.env = episode, episode.task, episode.env
        self.number, self.agent, task = number, agent, episode.task
        self.chat = [clean(message) for message in messages]  # those that the policy sees
        self.rollout = Rollout(task.env, agent, task.seed, task.group_id, list(self.chat))
        self.context: list[int] = []  # their ids, up to the last one sampled
        # []: don't ask
        self.prompt = self._fitting(prompt_ids) if self.chat else []
        self.written: str | None = None  # what the environment has not seen yet
        self.error = ""
        self.done = False
        self.ended_turn = False
        self.full = False  # a message did not fit: what comes after it would lack it

    def write(self, completion: Completion) -> None:
        """Record what was sampled in the context of `self.prompt`."""
        ids = completion.token_ids
        self.rollout.turns.append(
            Turn(self.prompt, ids, completion.logprobs, completion.finish_reason)
        )
        self._add({"role": "assistant", "content": completion.text})
        self.ended_turn = ids[-1] == self.policy.end_of_turn_id
        kept = without_thinking(self.policy.tokenizer, ids) if self.drop_thinking else ids
        self.context = self.prompt + kept
        self.prompt = []
        self.written = completion.text

    def read(self, step: Step) -> None:
        """Take the reward for the last turn, and the next message if there is one."""
        if self.rollout.turns:
            self.rollout.turns[-1].reward += float(step.reward)
        self.rollout.info = step.info or self.rollout.info
        self.done = step.done
        if step.message is None:
            return
        if step.fresh:
            self.chat, self.context, self.full = [], [], False
        self._add(clean(step.message))
        if step.done or self.full:
            return
        render, how = (following_ids, [self.ended_turn]) if self.context else (prompt_ids, [])
        more = self._fitting(render, *how)
        self.full = len(self.context) + len(more) >= self.policy.max_length  # no room to write
        self.prompt = [] if self.full else self.context + more

    def _fitting(self, render: Callable, *how: Any) -> list[int]:
        """The ids of what the policy is told; ValueError if they alone are more than fits."""
        ids = render(self.policy.tokenizer, self.chat, *how)
        if len(ids) >= self.policy.max_length:
            most = self.policy.max_length
            raise ValueError(f"{len(ids)} tokens at once; an episode has {most} (--max-model-len)")
        return ids

    def _add(self, message: Message) -> None:
        self.rollout.messages.append(message)
        self.chat.append(message)

    def finish(self) -> Rollout:
        self.rollout.episode_truncated = not self.done
        self.rollout.error = self.error
        return self.rollout


def checked(steps: dict[str, Step]) -> dict[str, Step]:
    """The steps themselves; raises TypeError or ValueError for what an environment may not say."""
    for agent, step in steps.items():
        if not isinstance(step, Step):
            raise TypeError(f"step() returned {type(step).__name__} for {agent}, not a Step")
        if not math.isfinite(step.reward):
            raise ValueError(f"the reward of {agent} is {step.reward}")
        if step.message is not None and not isinstance(step.message.get("content"), str):
            raise TypeError(f"the message to {agent} has no text")
        if step.message is not None and len(step.message["content"]) > MOST_TEXT:
            raise ValueError(f"the message to {agent} has more than {MOST_TEXT} characters")
        if not isinstance(step.info, dict):
            raise TypeError(f"the info of {agent} is a {type(step.info).__name__}, not a dict")
        if len(json.dumps(step.info)) > MOST_INFO:  # TypeError for what rollouts.jsonl can't hold
            raise ValueError(f"the info of {agent} has more than {MOST_INFO} characters")
    return steps


def _numbered(rollouts: list[Rollout]) -> list[Rollout]:
    """With a group for each agent of a task: like is compared with like, seat with seat."""
    numbers: dict[tuple[int, str], int] = {}
    for rollout in rollouts:
        key = (rollout.group_id, rollout.agent)
        rollout.group_id = numbers.setdefault(key, len(numbers))
    return rollouts
