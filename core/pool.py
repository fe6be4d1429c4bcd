"""The environments of a collector: built, lent to episodes, called, reused and closed.

Each episode has an environment of its own while it is played. At most `most_at_once` of those with
a process or a connection of their own (`Env.heavy`) exist at the same time.

Quick environments are called as functions are, one after the other, in the order of their
episodes. Those that wait (`Env.waits`) are called side by side, each call in a thread.
"""

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

from core.calls import Calls, Outcome, in_thread, outcome_of, quick_calls
from core.faults import Stopped
from environments.base import (
    PLAYER,
    Env,
    Message,
    Step,
    checked_openings,
    checked_steps,
    has_step_batch,
)
from environments.plumbing.registry import EnvSpec, make
from environments.plumbing.tools import ReadCalls, ToolEnv, with_tools

MAX_CALLS = 64  # of environments that wait, at the same time
MAX_HEAVY = 32
POLL = 0.05  # seconds after which the loop looks at Ctrl-C again, and at the sampler
FIRST = defaultdict[EnvSpec, Lock](Lock)  # held while an environment of a spec is first built
BUILT = set[EnvSpec]()  # specs of which one has been built


@dataclass(eq=False)  # so that a call can be the key of a dict
class EnvCall:
    """A call of a method of an environment."""

    env: "PooledEnv"
    method: Callable[..., Any]
    args: tuple[Any, ...] = ()

    @property
    def is_in_batch(self) -> bool:
        """Whether it is a step of a class with `step_batch`."""
        return self.method == self.env.step and self.env.steps_together


class Pool:
    """The environments of a collector.

    `read_calls`: finds the calls of tools in a response. `limit`: seconds of a call of an
    environment that waits; 0: none.
    """

    def __init__(self, read_calls: ReadCalls, limit: float):
        self.read_calls, self.limit = read_calls, limit
        self.idle: dict[EnvSpec, list[PooledEnv]] = defaultdict(list)
        self.lent: set[PooledEnv] = set()  # to episodes
        self.quick = deque[list[EnvCall]]()  # groups of calls
        self.slow = Calls(MAX_CALLS)

    def borrow(self, spec: EnvSpec) -> Generator[list[EnvCall], Any, "PooledEnv"]:
        """An idle environment, or a new one; waits while too many heavy ones exist."""
        while not self.idle[spec]:
            new = PooledEnv(spec, self.read_calls)
            idle = [env for envs in self.idle.values() for env in envs if env.heavy]
            num_heavy = len(idle) + sum(env.heavy for env in self.lent)
            if not new.heavy or num_heavy < most_at_once(spec):
                self.idle[spec].append(new)
            elif idle:
                self.idle[idle[0].spec].remove(idle[0])
                yield from self.discard(idle[0])
            else:
                yield []  # asks for nothing: looks again after the other episodes have moved
        self.lent.add(env := self.idle[spec].pop())
        return env

    def give_back(self, env: "PooledEnv") -> None:
        """Keeps an environment for another episode."""
        self.lent.remove(env)
        self.idle[env.spec].append(env)

    def discard(self, env: "PooledEnv") -> Generator[list[EnvCall], Any, None]:
        """Closes an environment that is not used again."""
        self.lent.add(env)
        with suppress(Exception, SystemExit):
            yield [EnvCall(env, env.close)]
        self.lent.remove(env)

    def moves_alone(self) -> bool:
        """Whether episodes move alone with an environment in use; batches of steps need rounds."""
        return any(env.alone and not env.steps_together for env in self.lent)

    def begin(self, calls: list[EnvCall]) -> None:
        """Begins calls. The steps of a class with `step_batch` are one call; the calls of one
        environment, such as a demonstration of each agent, are made in turn."""
        groups: dict[Any, list[EnvCall]] = defaultdict(list)
        for call in calls:
            groups[call.env.spec if call.is_in_batch else call.env].append(call)
        for group in groups.values():
            env = group[0].env
            if env.waits:  # a program has a limit of its own
                limit = 0.0 if is_program(env.spec) else self.limit
                self.slow.start(group, partial(make_calls, group), limit)
            else:
                self.quick.append(group)

    def finished(self, on_progress: Callable[[], None], may_wait: bool) -> dict[Any, Outcome]:
        """The outcome of each call that has finished. Makes quick calls for a moment; if there are
        none, and it `may_wait`, waits a moment for calls that wait.

        A signal that ends the run calls `on_progress` within a quick call.
        """
        finished: list[tuple[Any, Outcome]] = []  # groups of calls with their outcomes
        until = time.monotonic() + POLL
        with quick_calls(on_progress) if self.quick else nullcontext():
            while self.quick and time.monotonic() < until:
                group = self.quick.popleft()
                outcome = outcome_of(partial(make_calls, group))
                if isinstance(outcome[1], (KeyboardInterrupt, Stopped)):
                    raise outcome[1]
                finished.append((group, outcome))
        if self.slow.at_work:
            finished += self.slow.finished(POLL if may_wait and not finished else 0.0)
        outcomes: dict[Any, Outcome] = {}
        for group, (results, error) in finished:
            for i, call in enumerate(group):  # an exception is the outcome of all calls of a group
                outcomes[call] = results[i] if error is None else (None, error)
        return outcomes

    def abandon(self) -> None:
        """Forgets all calls; closes the environments in use, but for those still at work in a call.
        A program is at work in any case: it is ended."""
        self.quick.clear()
        at_work = {call.env for group in self.slow.clear() for call in group}
        for env in self.lent:
            if is_program(env.spec) or env not in at_work:
                in_thread(env.close)
        self.lent.clear()


class PooledEnv:
    """One environment of a pool; its first reset builds it."""

    def __init__(self, spec: EnvSpec, read_calls: ReadCalls):
        self.spec, self.read_calls = spec, read_calls
        self.heavy = bool(spec.declares("heavy"))
        self.built: Any = None  # an Env or a MultiAgentEnv
        self.game: Any = None  # `built` as a MultiAgentEnv, whose tools answer

    def reset(self, seed: int) -> dict[str, list[Message]]:
        if self.game is None:
            self.built = self.build()
            self.game = with_tools(self.built, self.read_calls)
        return checked_openings(self.game.reset(seed))

    def build(self) -> Any:
        with FIRST[self.spec]:  # one at first, as it reads data that all share
            if self.spec not in BUILT:
                env = make(self.spec)
                BUILT.add(self.spec)
                return env
        return make(self.spec)

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        return self.checked(self.game.step(responses))

    def step_when_cut(self) -> dict[str, Step]:
        """The last step of an episode that a limit has cut off between calls of tools, if any."""
        return self.checked(self.game.step_when_cut() if isinstance(self.game, ToolEnv) else {})

    def checked(self, steps: dict[str, Step]) -> dict[str, Step]:
        return checked_steps(steps, isinstance(self.built, Env))

    def close(self) -> None:
        if self.game is not None:
            self.game.close()

    @property
    def waits(self) -> bool:
        """Whether its calls wait for something; once it is built, the instance may say so."""
        return bool(self.spec.declares("waits") if self.game is None else self.game.waits)

    @property
    def alone(self) -> bool:
        return self.game is not None and self.game.alone

    @property
    def steps_together(self) -> bool:
        return isinstance(self.built, Env) and has_step_batch(self.built)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the agents may call."""
        return self.game.schemas if isinstance(self.game, ToolEnv) else []


def make_calls(calls: list[EnvCall]) -> list[Outcome]:
    """Makes the calls of one environment, or those of a batch of steps."""
    if not calls[0].is_in_batch:
        return [(call.method(*call.args), None) for call in calls]
    envs: list[Any] = [call.env.built for call in calls]
    steps = type(envs[0]).step_batch(envs, [call.args[0][PLAYER] for call in calls])
    if len(steps) != len(calls):
        raise ValueError(f"step_batch() returned {len(steps)} steps for {len(calls)} responses")
    outcomes: list[Outcome] = []
    for call, step in zip(calls, steps, strict=True):
        try:
            if isinstance(step, Exception):
                raise step
            outcomes.append((call.env.checked({PLAYER: step}), None))
        except Exception as error:
            outcomes.append((None, error))
    return outcomes


def most_at_once(spec: EnvSpec) -> int:
    """How many heavy environments may exist when one of this spec is to be built."""
    if not is_program(spec):
        return MAX_HEAVY
    return (os.cpu_count() or 1) + 4 if spec.values["command"] else 64


def is_program(spec: EnvSpec) -> bool:
    """Whether the environment is an agent program, which asks for its answers."""
    return bool(spec.declares("is_program"))
