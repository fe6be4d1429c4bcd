"""The interface of an environment: `reset` and `step`.

`reset(seed)` returns the opening messages; `step(response)` returns the reward and the next
message. The seed alone determines the task, on any machine: all rollouts of a group receive the
same task, and a run can be repeated.

Training, demonstrations and evaluation draw their seeds from three disjoint ranges:

>>> [TRAIN_SEEDS.start, DEMO_SEEDS.start, EVAL_SEEDS.start]
[0, 1000000000, 1500000000]
"""

import inspect
import json
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NotRequired, TypedDict

TRAIN_SEEDS = range(0, 1_000_000_000)
DEMO_SEEDS = range(1_000_000_000, 1_500_000_000)
EVAL_SEEDS = range(1_500_000_000, 2_000_000_000)
PLAYER = "player"  # the agent of an environment for one agent
MAX_MESSAGE = 500_000  # characters in a step's message
MAX_REWARD = 1e15  # float32 can represent sums of its square
FLAGS = ("done", "fresh", "truncated")  # of a step


class Message(TypedDict):
    """One chat message. `role` is "system", "user", "assistant", or "tool" for a tool's result. A
    single message "raw" is a prompt that is tokenized as it is, without the chat template.

    `tool_calls`: the calls of an assistant's message, in OpenAI's form.
    """

    role: str
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]


def is_held_out(text: str) -> bool:
    """Whether a task is reserved for evaluation, from a text that identifies it.

    True for one text in eight, on any machine. Equivalent tasks (3 + 4 and 4 + 3) need the same
    text. Of texts that differ in a number alone ("Say 1.", "Say 2.", ..) it may hold out none.
    """
    return zlib.crc32(text.encode(errors="replace")) % 8 == 0


class UsageError(ValueError):
    """Invalid user input. Printed as one line; exit code 2."""


def check_range(option: str, value: float, low: float, high: float = math.inf) -> None:
    """Raises UsageError if the value of an option is not from `low` to `high`."""
    if not low <= value <= high:
        limits = f"{low} to {high}" if high < math.inf else f"at least {low}"
        raise UsageError(f"{option} must be {limits}, not {value}")


class EnvFailure(Exception):
    """Infrastructure failed, such as a server that stopped: not the policy's doing.

    Raise it in `reset` or `step`. The episode is neither trained on nor evaluated; it is counted
    and reported. A run ends when more than half of its episodes fail. An episode with any other
    exception is not trained on either, but evaluations count it as wrong.
    """


class NoReward(EnvFailure):
    """A response could not be judged. The episode is left out of its group, as one that failed, but
    metrics count it apart from failures, and it never ends a run."""


@dataclass(frozen=True)
class Step:
    """The result of one response.

    `message`: the next message. At the end of the episode None, or what readers of the episode see
    last, such as the board; no policy reads it.
    `reward`: the reward of this response alone.
    `done`: whether the episode has ended.
    `info`: details. `info["correct"]` says whether the task was solved, independent of partial
    credit. Every other number is averaged into the metrics as `info/<key>`.
    `fresh`: `message` starts a new context: the policy no longer sees the earlier turns.
    `truncated`: with `done`: a limit, such as a number of steps, ended the episode before the task
    did. It is counted as truncated; algorithms/ppo.py says how it is trained on.
    `feedback`: a response that would have been right in place of this one, for --algo sdpo; "": the
    environment's demonstration, if it has any.

    `done`, `fresh`, `truncated` and `info["correct"]` are True or False; 1 and 0 count as these, of
    NumPy too. None: nobody knows `correct`, and no mean counts it. Another value fails the episode.
    """

    message: Message | None
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict)
    fresh: bool = False
    truncated: bool = False
    feedback: str = ""

    @property
    def messages(self) -> list[Message]:
        """The messages that come next, in their order."""
        return [] if self.message is None else [self.message]


def checked_openings(openings: Any) -> dict[str, list[Message]]:
    """Returns the opening messages of each agent. Raises TypeError for any other type."""
    if not isinstance(openings, dict):
        raise TypeError(f"reset() returned {_type_of(openings)}, not a dict of messages by agent")
    for agent, messages in openings.items():
        is_list = isinstance(messages, list | tuple)
        if not is_list or not all(isinstance(message, Mapping) for message in messages):
            returned = f"reset() returned {_type_of(messages)} for {agent}"
            raise TypeError(f'{returned}, not a list of messages, [user("..")]')
    return openings


def checked_steps(steps: Any, is_single: bool) -> dict[str, Step]:
    """Returns the checked Step of each agent. Raises as `checked_step` does."""
    if not isinstance(steps, dict):
        raise TypeError(f"step() returned {_type_of(steps)}, not a dict of Steps by agent")
    return {name: checked_step(step, name, is_single) for name, step in steps.items()}


def checked_step(step: Any, agent: str, is_single: bool) -> Step:
    """The step that an environment returned, with all its values as JSON would restore them.

    `is_single`: the environment has one agent, which must act or be done. Raises TypeError or
    ValueError if the step is invalid; then training drops the episode.
    """
    if not isinstance(step, Step):
        raise TypeError(f"step() returned {_type_of(step)} for {agent}, not a Step")
    flags: dict[str, Any] = {name: _flag(agent, name, getattr(step, name)) for name in FLAGS}
    message, reward = step.message, step.reward
    if is_single and message is None and not flags["done"]:
        raise ValueError("step() returned no message, and done is False")
    if isinstance(reward, str | bytes) or not hasattr(reward, "__float__"):
        raise TypeError(f"the reward of {agent} is {reward!r:.50}, not a number")
    if not abs(reward) <= MAX_REWARD:  # nor NaN
        raise ValueError(f"the reward of {agent} is {float(reward):g}, not within ±{MAX_REWARD:g}")
    if message is not None:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise TypeError(f'the message to {agent} is {_type_of(message)}, not user("..")')
        if len(message["content"]) > MAX_MESSAGE:
            raise ValueError(f"the message to {agent} has more than {MAX_MESSAGE} characters")
    try:
        text = json.dumps(dict(step.info), default=lambda value: value.tolist(), allow_nan=False)
        info = json.loads(text)
    except (AttributeError, TypeError, ValueError) as error:  # NaN, or contains itself
        raise ValueError(f"the info of {agent} is not JSON: {error}; {step.info!r:.200}") from None
    if info.get("correct") is not None:
        info["correct"] = _flag(agent, 'info["correct"]', info["correct"])
    return replace(step, reward=float(reward), info=info, **flags)


def _type_of(value: Any) -> str:
    if inspect.iscoroutine(value):
        value.close()  # it would be reported as never awaited
        return "a coroutine (an environment is not async: `asyncio.run` within it, waits = True)"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {', '.join(type(part).__name__ for part in value)}"
    return type(value).__name__


def _flag(agent: str, name: str, value: Any) -> bool:
    """True for True and 1, False for False and 0, also NumPy's; raises for anything else."""
    if hasattr(value, "__float__") and not getattr(value, "shape", ()) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name} of {agent} is {value!r:.50}, not True or False")


class Response(str):
    """A response of the policy. `token_ids`: the ids of its context after the opening messages,
    with the end of the turn. Of an environment with tools also `earlier`: the messages since the
    prompt, calls and their results; and `message`: the response as a message, with its calls.
    `is_last`: --max-turns allows no further response."""

    token_ids: Sequence[int] = ()
    earlier: Sequence[Message] = ()
    message: Message | None = None
    is_last: bool = False


@dataclass
class RunInfo:
    """What a run tells its environments: see `Instance.begin_run`."""

    train_envs: Sequence[str]  # the specs of --env
    eval_envs: Sequence[str]  # the specs of --eval-env
    num_updates: int = 0  # of the whole run; 0: none, or as many as --max-sampled-tokens allows
    num_prompts: float = 0  # of each environment of `train_envs`, in an update
    updates_done: int = 0  # grows while the run goes on


class Instance:
    """What environments for one agent and for several have in common.

    `waits`: whether a call of `reset` or `step` waits for something, such as a server, a process or
    a judge. Calls of several instances that wait are made side by side, each in a thread; all
    others are made one after the other, in the order of their episodes.
    `alone`: whether an episode goes on as soon as its own responses are sampled, without waiting
    for the other episodes: faster where some take much longer than others. A run that is repeated
    may then differ in the last digits.
    `heavy`: whether each instance has a process, a container or a connection of its own. Then at
    most 32 instances exist at the same time, on each rank.
    `meanings`: for numbers in `Step.info`, what their mean over rollouts says. The screen, the
    picture and the report show it.
    """

    waits: bool = False
    alone: bool = False
    heavy: bool = False
    meanings: Mapping[str, str] = {}

    @classmethod
    def begin_run(cls, info: RunInfo) -> None:
        """Called once for each class of --env and --eval-env, before a run makes the first
        instance: a class may divide its data then; `info.updates_done` grows during the run."""

    def close(self) -> None:
        """Frees what the instance holds. The run does not use the instance afterwards."""


class Env(Instance, ABC):
    """An environment for one agent.

    `tools`: functions that the policy may call before it responds, such as methods of the instance,
    with type hints and Google-style docstrings; plumbing/tools.py says how they are called.
    `luck`: whether a correct response may lose by chance. Else a run checks at its start that the
    demonstrations are right, and that the same answers earn the same again.
    """

    tools: Sequence[Callable[..., Any]] = ()
    luck: bool = False

    @abstractmethod
    def reset(self, seed: int) -> list[Message]:
        """Starts the episode of `seed` and returns its opening messages."""

    @abstractmethod
    def step(self, response: str) -> Step:
        """Applies the policy's response. Accepts any text; never raises because of its content."""

    @classmethod
    def step_batch(cls, envs: Sequence["Env"], responses: list[str]) -> list[Step | Exception]:
        """Steps several instances of one spec, in a class that overrides this: one Step for each,
        or the exception that fails its episode.

        Training and evaluation then call this instead of `step`, once for all of a rank's
        episodes that act at the same time. An exception fails all these episodes.
        """
        return [env.step(response) for env, response in zip(envs, responses, strict=True)]

    def demonstrate(self, hasty: bool = False) -> str | None:
        """Returns a correct response to the current state, with its reasoning.

        `hasty`: a response in the right format with a guess instead. None if the environment has
        no demonstrations.
        """
        return None

    def trivial(self) -> str | None:
        """Returns the response of the trivial baseline, such as a constant; None if there is none.

        Evaluations show its accuracy beside the policy's: a policy that does no better has not
        learned the task.
        """
        return None


def has_step_batch(env: Env) -> bool:
    """Whether the class steps several instances in one call, without tools to answer first."""
    method: Any = type(env).step_batch
    default: Any = Env.step_batch
    return getattr(method, "__func__", method) is not default.__func__ and not env.tools


class MultiAgentEnv(Instance, ABC):
    """An environment for several agents. Agents that are absent from a dict are not asked to act.

    `agents`: all of them, in the order of their seats. Declare them for demonstrations, and for
    others to play the rest: in the episode of `seed` the policy then has the seat
    `agents[seed % len(agents)]`.
    """

    agents: tuple[str, ...] = ()

    @abstractmethod
    def reset(self, seed: int) -> dict[str, list[Message]]:
        """Starts the episode and returns the opening messages of the agents that act first."""

    @abstractmethod
    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        """Applies one response of each asked agent and returns a Step for each affected agent.

        A Step with a `message` asks its agent to act next; a Step with `done` ends its episode.
        """

    def demonstrate(self, agent: str, hasty: bool = False) -> str | None:
        """Returns a correct response for an agent that is asked to act, as `Env.demonstrate`.

        In the warm start one agent demonstrates, and the others answer with `hasty` demonstrations.
        """
        return None


class SingleAgentEnv(MultiAgentEnv):
    """An `Env` as an environment for several agents; it has one, PLAYER."""

    agents = (PLAYER,)

    def __init__(self, env: Env):
        self.env, self.waits, self.alone = env, env.waits, env.alone

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        return self.env.tools

    def reset(self, seed: int) -> dict[str, list[Message]]:
        return checked_openings({PLAYER: self.env.reset(seed)})

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        return {PLAYER: self.env.step(responses[PLAYER])}

    def demonstrate(self, agent: str, hasty: bool = False) -> str | None:
        return self.env.demonstrate(hasty)

    def trivial(self) -> str | None:
        return self.env.trivial()

    def close(self) -> None:
        self.env.close()


def as_multi(env: Env | MultiAgentEnv) -> MultiAgentEnv:
    """Returns a MultiAgentEnv for either, so that callers treat both in the same way."""
    return SingleAgentEnv(env) if isinstance(env, Env) else env
