"""The environments of a collector: built, lent to episodes, called, reused and closed.

Each episode has an environment of its own while it is played. At most `max_heavy` environments with
a process or a connection of their own (`Env.heavy`), or programs, exist at the same time.

Quick environments are called one after the other, in the order of their episodes: by the main
thread, where it can end a call (core/calls.py), else by one other thread. Those that wait
(`Env.waits`) are called side by side, each call in a thread.
"""

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch

from core.calls import (
    Calls,
    Outcome,
    TimeLimit,
    call_here,
    can_call_here,
    in_thread,
    traceback_of,
)
from environments.base import (
    PLAYER,
    Env,
    Message,
    Step,
    as_multi,
    checked_openings,
    checked_steps,
    has_step_batch,
)
from environments.plumbing.registry import EnvSpec, make, place_of

POLL = 0.05  # seconds of quick calls after which the loop looks at Ctrl-C again
LONG = 10.0  # seconds of quick calls in a round after which a line says so
FIRST, BUILT = threading.Lock(), set[EnvSpec]()  # held while the first one of a spec is built
WAITS = "; if it waits for something, such as a server, set waits = True in its class"


@dataclass(eq=False)  # so that a call can be the key of a dict
class EnvCall:
    """A call of a method of an environment."""

    env: "PooledEnv"
    method: Callable[..., Any]
    args: tuple[Any, ...] = ()

    @property
    def is_step(self) -> bool:
        return self.method == self.env.step


class Pool:
    """`prepare`: what makes an environment playable, such as one with tools (core/context.py).
    `count`: calls of waiting environments at the same time. `limit`: seconds of a call; 0: none.
    `max_heavy`: None: `most_at_once`. `say`: prints a line."""

    def __init__(
        self, prepare: Callable[[Env], Env], count: int, limit: float, max_heavy: int | None,
        say: Callable[[str], None],
    ):  # fmt: skip
        self.prepare, self.max_heavy, self.say = prepare, max_heavy, say
        self.said = set[Any]()  # keys of lines
        self.idle: dict[EnvSpec, list[PooledEnv]] = defaultdict(list)
        self.lent: set[PooledEnv] = set()  # to episodes
        # groups of calls; those for this thread have not begun
        self.here = deque[tuple[list[EnvCall], Callable[[], list[Outcome]]]]()
        self.in_order = Calls(1, limit, interrupts=True)
        self.side_by_side = Calls(max(count, max_heavy or 0), limit, interrupts=True)
        self.seconds = defaultdict[EnvSpec, float](float)  # of this round's quick calls
        self.folder, self.dtype = os.getcwd(), torch.get_default_dtype()  # before all calls

    def borrow(self, spec: EnvSpec) -> Generator[list[EnvCall], Any, "PooledEnv"]:
        """An idle environment, or a new one; waits while too many heavy ones exist."""
        heavy = bool(spec.declares("heavy") or is_program(spec))
        most = self.max_heavy or most_at_once(spec)
        while not self.idle[spec]:
            idle = [env for envs in self.idle.values() for env in envs if env.heavy]
            if not heavy or len(idle) + sum(env.heavy for env in self.lent) < most:
                self.idle[spec].append(PooledEnv(spec, heavy, self.prepare))
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
        if not (self.here or self.in_order.num_open or self.side_by_side.num_open):
            self.seconds.clear()
        groups: dict[Any, list[EnvCall]] = defaultdict(list)
        for call in calls:
            together = call.is_step and call.env.steps_together
            groups[call.env.spec if together else call.env].append(call)
        for key, group in groups.items():
            make_them = step_together if isinstance(key, EnvSpec) else make_in_turn
            function, env = partial(self._make, make_them, group), group[0].env
            finish = partial(self._finish, env=env)
            if env.waits:  # a program has a limit of its own
                limited = not is_program(env.spec)
                self.side_by_side.start(group, function, finish, limited)
            elif can_call_here():
                self.here.append((group, function))
            else:
                self.in_order.start(group, function, finish)

    def ended(self, wait: float, on_progress: Callable[[], None]) -> dict[Any, Outcome]:
        """The outcome of each call that has ended. Makes quick calls for a moment; where there are
        none, waits up to `wait` seconds for each kind of thread.

        `on_progress` is called once a second of a long call.
        """
        made, until = list[tuple[Any, Outcome]](), time.monotonic() + POLL
        while self.here and time.monotonic() < until:
            group, function = self.here.popleft()
            made.append((group, self._call_here(group[0], function, on_progress)))
        for calls in (self.in_order, self.side_by_side):
            made += calls.ended(0.0 if made or not calls.num_open else wait)
        outcomes: dict[Any, Outcome] = {}
        for group, (found, error) in made:
            if isinstance(error, TimeLimit):
                self._restore()
            if group:
                self._say_if_long(group[0], 0.0, None)
            for i, call in enumerate(group):  # an exception is that of all of them
                outcomes[call] = found[i] if error is None else (None, error)
        return outcomes

    def abandon(self) -> None:
        """Forgets all calls; closes the environments in use, but for those still at work in a call.
        A program is at work in any case: it is ended."""
        self._restore()
        self.here.clear()
        under_way = [*self.in_order.clear(), *self.side_by_side.clear()]
        at_work = {call.env for group in under_way for call in group}
        unused = [env for env in self.lent if is_program(env.spec) or env not in at_work]
        for env in unused:
            if env.waits:
                in_thread(env.close)
        in_thread(lambda: [*map(close_quietly, (env for env in unused if not env.waits))])
        self.lent.clear()

    def close(self) -> None:
        """Ends the threads."""
        self.in_order.close()
        self.side_by_side.close()

    def say_once(self, line: str, key: Any = None) -> None:
        """Says a line, unless one with its `key` was said before; None: the line itself."""
        if (key or line) not in self.said:
            self.said.add(key or line)
            self.say(line)

    def _call_here(
        self, call: EnvCall, function: Callable[[], Any], on_progress: Callable[[], None]
    ) -> Outcome:
        """Makes a quick call in this thread."""

        def look(seconds: float, frame: FrameType | None) -> None:
            self._say_if_long(call, seconds, frame)
            with suppress(RuntimeError):  # the call was writing to the terminal
                on_progress()

        return self._finish(call_here(function, self.in_order.limit, look), call.env)

    def _make(
        self, make_them: Callable[[list[EnvCall]], list[Outcome]], group: list[EnvCall]
    ) -> list[Outcome]:
        """Makes a call in any thread."""
        env, since, is_new = group[0].env, time.monotonic(), group[0].env.game is None
        self._restore()  # a call that was given up may have gone on
        try:
            with torch.enable_grad():
                return make_them(group)
        finally:
            torch.set_default_dtype(self.dtype)
            if not is_new:  # to build one may take long
                self.seconds[env.spec] += time.monotonic() - since

    def _finish(self, outcome: Outcome, env: "PooledEnv") -> Outcome:
        """The outcome of a call; it is an error if the call has left the working directory."""
        if not self._restore():
            return outcome
        if not is_program(env.spec):
            return None, RuntimeError("the environment changed the working directory")
        self.say_once("an agent changed the working directory, which all share: the run changed it "
                      "back")  # fmt: skip
        return outcome  # another program may have left it

    def _restore(self) -> bool:
        """Restores the working directory, which the run's paths need, and PyTorch's dtype; whether
        the directory was another one."""
        torch.set_default_dtype(self.dtype)
        with suppress(OSError):  # the new one may be deleted already
            if os.getcwd() == self.folder:
                return False
        os.chdir(self.folder)
        return True

    def _say_if_long(self, call: EnvCall, seconds: float, frame: FrameType | None) -> None:
        """Names a quick environment whose calls in this round, the last one with `seconds` so far,
        are not quick."""
        env, name = call.env, call.method.__name__
        if not env.waits and self.seconds[env.spec] + seconds >= LONG:
            where = place_of(TimeLimit().with_traceback(traceback_of(frame)))
            line = f"{env.spec.short}: {name}() takes long: {LONG:g} s of one round so far{where}"
            self.say_once(line + WAITS, env.spec)


class PooledEnv:
    """One environment of a pool; its first reset builds it."""

    def __init__(self, spec: EnvSpec, heavy: bool, prepare: Callable[[Env], Env]):
        self.spec, self.heavy, self.prepare = spec, heavy, prepare
        self.game: Any = None  # a MultiAgentEnv
        self.made: Any = None  # the same, but of one player an Env
        self.is_single = self.steps_together = False

    def reset(self, seed: int) -> dict[str, list[Message]]:
        if self.game is None:
            made = self.build()
            if isinstance(made, Env):
                self.is_single, self.steps_together = True, has_step_batch(made)
                made = self.prepare(made)
            self.made, self.game = made, as_multi(made)
        return checked_openings(self.game.reset(seed))

    def build(self) -> Any:
        # the first one alone: it imports modules and reads data that the others share
        is_alone = FIRST.acquire(timeout=LONG)  # one may hang
        try:
            if self.spec not in BUILT:
                made = make(self.spec)
                BUILT.add(self.spec)
                return made
        finally:
            if is_alone:
                FIRST.release()
        return make(self.spec)

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        return self.checked(self.game.step(responses))

    def checked(self, steps: dict[str, Step]) -> dict[str, Step]:
        return checked_steps(steps, self.is_single)

    def close(self) -> None:
        if self.game is not None:
            self.game.close()

    @property
    def waits(self) -> bool:
        """Whether its calls wait for something; once it is built, the instance may say so."""
        return bool(self.spec.declares("waits") if self.made is None else self.made.waits)

    @property
    def alone(self) -> bool:
        return self.made is not None and self.made.alone

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of the tools that the agents may call."""
        return getattr(self.made, "schemas", []) if self.is_single else []


def make_in_turn(calls: list[EnvCall]) -> list[Outcome]:
    """Makes the calls of one environment."""
    return [(call.method(*call.args), None) for call in calls]


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


def close_quietly(env: PooledEnv) -> None:
    """Closes an environment after which nobody asks."""
    with suppress(Exception, SystemExit):
        env.close()


def most_at_once(spec: EnvSpec) -> int:
    """How many heavy environments exist while one of these begins: more would only wait."""
    if not is_program(spec):
        return 32
    return (os.cpu_count() or 1) + 4 if spec.values["command"] else 64  # processes, threads


def is_program(spec: EnvSpec) -> bool:
    """Whether the environment is an agent program, which asks for its answers."""
    return bool(spec.declares("is_program"))
