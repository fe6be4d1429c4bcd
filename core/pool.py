"""The environments of a collector: built, lent to episodes, called in threads, reused and closed.

Each episode has an environment of its own while it is played. At most `max_heavy` environments with
a process or a connection of their own (`Env.heavy`), or programs, exist at the same time.
"""

import os
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from core.threads import Outcome, Threads
from environments.base import PLAYER, Env, Message, Step, as_multi, checked_step, has_step_batch
from environments.plumbing.registry import EnvSpec, make

LATE = 0.03  # seconds; if half of the latest steps take longer, episodes do not wait for each other
ENOUGH = 8  # steps to know this from: a busy machine delays a few calls of a fast environment


@dataclass(eq=False)  # so that a call can be the key of a dict
class EnvCall:
    """A call of a method of an environment, which a thread makes."""

    env: "PooledEnv"
    method: Callable[..., Any]
    args: tuple[Any, ...] = ()

    @property
    def is_step(self) -> bool:
        return self.method == self.env.step


class Pool:
    """`prepare`: what makes an environment playable, such as one with tools (core/context.py).
    `max_heavy`: None: `most_at_once`."""

    def __init__(self, prepare: Callable[[Env], Env], threads: Threads, max_heavy: int | None):
        self.prepare, self.threads, self.max_heavy = prepare, threads, max_heavy
        self.idle: dict[EnvSpec, list[PooledEnv]] = defaultdict(list)
        self.lent: set[PooledEnv] = set()  # to episodes
        self.step_seconds: dict[EnvSpec, deque[float]] = defaultdict(partial(deque, maxlen=64))

    def borrow(self, spec: EnvSpec) -> Generator[list[EnvCall], Any, "PooledEnv"]:
        """An idle environment, or a new one; waits while too many heavy ones exist."""
        heavy = bool(spec.declares("heavy") or is_program(spec))
        most = self.max_heavy or most_at_once(spec)
        while not self.idle[spec]:
            idle = [env for envs in self.idle.values() for env in envs if env.heavy]
            if not heavy or len(idle) + sum(env.heavy for env in self.lent) < most:
                self.idle[spec].append(PooledEnv(spec, heavy, self))
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

    def begin(self, calls: list[EnvCall]) -> None:
        """Starts calls in threads; the steps of a class with `step_batch` are one call."""
        groups: dict[Any, list[EnvCall]] = defaultdict(list)
        for call in calls:
            together = call.is_step and call.env.steps_together
            groups[call.env.spec if together else call].append(call)
        for key, group in groups.items():
            make_them = step_together if isinstance(key, str) else make_one
            kind = group[0].env.spec, group[0].method.__name__
            self.threads.start(group, kind, partial(make_them, group))

    def ended(self, wait: float) -> dict[Any, Outcome]:
        """The outcome of each call that has ended, after at most `wait` seconds."""
        outcomes: dict[Any, Outcome] = {}
        for calls, (found, error), seconds in self.threads.ended(wait):
            if calls and calls[0].is_step:
                self.step_seconds[calls[0].env.spec].append(seconds)
            for i, call in enumerate(calls):  # an exception is that of all of them
                outcomes[call] = (None, error) if error else found[i]
        return outcomes

    def answers_late(self) -> bool:
        """Whether the steps of an environment in use take long. Batches of steps need rounds."""
        return any(
            statistics.median(self.step_seconds[spec]) > LATE
            for spec in {env.spec for env in self.lent if not env.steps_together}
            if self.threads.is_parallel((spec, "step")) and len(self.step_seconds[spec]) >= ENOUGH
        )

    def abandon(self) -> None:
        """Forgets all calls; closes the environments in use, but for those still at work."""
        at_work = {call.env for calls in self.threads.clear() for call in calls}
        for env in self.lent - at_work:
            self.threads.start([], (env.spec, "close"), env.close)
        self.lent.clear()


class PooledEnv:
    """One environment of a pool; its first reset builds it, in a thread."""

    def __init__(self, spec: EnvSpec, heavy: bool, pool: Pool):
        self.spec, self.heavy, self.pool = spec, heavy, pool
        self.game: Any = None  # a MultiAgentEnv
        self.made: Any = None  # the same, but of one player an Env
        self.is_single = self.steps_together = False

    def reset(self, seed: int) -> dict[str, list[Message]]:
        if self.game is None:
            made: Any = make(self.spec)
            if isinstance(made, Env):
                self.is_single, self.steps_together = True, has_step_batch(made)
                made = self.pool.prepare(made)
            if not made.thread_safe:
                self.pool.threads.alone.add(self.spec)
            if made.main_thread:
                self.pool.threads.in_main.add(self.spec)
            if is_program(self.spec):
                made.waits = False  # no call takes longer than a moment
                self.pool.threads.draws_freely.add(self.spec)  # programs draw at the same time
            self.made, self.game = made, as_multi(made)
        return self.game.reset(seed)

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        return self.checked(self.game.step(responses))

    def checked(self, steps: dict[str, Step]) -> dict[str, Step]:
        return {name: checked_step(step, name, self.is_single) for name, step in steps.items()}

    def close(self) -> None:
        if self.game is not None:
            self.game.close()

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of the tools that the agents may call."""
        return getattr(self.made, "schemas", []) if self.is_single else []


def make_one(calls: list[EnvCall]) -> list[Outcome]:
    """Makes a call that is not part of a batch."""
    [call] = calls
    return [(call.method(*call.args), None)]


def step_together(calls: list[EnvCall]) -> list[Outcome]:
    """The steps of environments of one class, made by its `step_batch`."""
    envs: list[Any] = [call.env.made for call in calls]
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
    """How many heavy environments exist while one of these begins: more would only wait."""
    if not is_program(spec):
        return 32
    return (os.cpu_count() or 1) + 4 if spec.values["command"] else 64  # processes, threads


def is_program(spec: EnvSpec) -> bool:
    """Whether the environment is an agent program, which asks for its answers."""
    return bool(spec.declares("is_program"))
