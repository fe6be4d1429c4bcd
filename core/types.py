"""The data that passes from environment to gradient, and the errors that end a run.

    Message --> prompt ids --> Completion --> Turn --> Rollout

>>> turn = Turn([5, 6], [7, 8, 2], [-0.1, -0.2, -0.3], "stop", reward=1.0)
>>> Rollout("letter_counting", "player", seed=3, group_id=0, turns=[turn]).episode_return
1.0
"""

import io
import re
import sys
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length"]  # the policy ended its turn, or hit the token limit
# All but line breaks, tabs and text: also surrogates, and marks that reorder what is on the screen
CONTROL_CHARACTERS = re.compile(r"[^\n\t -~\xa0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]")
# The same in ASCII JSON, but for surrogates and line ends, which a page may show
ESCAPED = re.compile(r"(\\\\)|\\u00(?:[01][0-9a-f]|7f|[89][0-9a-f])|\\u20(?:2[a-e]|6[6-9])|\\[bf]")


def printable(text: str) -> str:
    """`text` without control characters, which would act on the terminal: for all foreign text.

    >>> printable("a\\x1b[2J\\nb")
    'a�[2J\\nb'
    """
    return CONTROL_CHARACTERS.sub("\ufffd", text)


def printable_json(text: str) -> str:
    """ASCII JSON without control characters and bidirectional marks, for all foreign text in pages.

    >>> print(printable_json(r'["a\\u001b[2J\\n", "\\\\u202e \\u202e"]'))
    ["a\\ufffd[2J\\n", "\\\\u202e \\ufffd"]
    """
    return ESCAPED.sub(lambda found: found[1] or r"\ufffd", text)


def print_any_character() -> None:
    """Lets stdout print ? for what its encoding lacks, as a pipe on Windows lacks ✓; stderr can."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # no notebook's, nor None of a program in a window
        sys.stdout.reconfigure(errors="replace")


def one_line(error: BaseException | str) -> str:
    """A text, or the message of an error, without line breaks and control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())


class UsageError(ValueError):
    """Invalid user input. Printed as one line; exit code 2."""


class Fault(RuntimeError):
    """Ends a run for a reason other than its input. Printed as one line; exit code 1."""


class CannotWrite(Fault):
    """The disk is full or read-only; everything saved before is complete."""


class OutOfMemory(Fault):
    """GPU or host memory ran out."""


class RankLost(Fault):
    """Another process of torchrun ended; it may know why."""


class Stopped(Exception):
    """Ctrl-C, SIGTERM or SIGHUP stopped the run at a safe point; exit code 130."""


class Message(TypedDict):
    """One chat message. `role` is "system", "user", "assistant" or "tool", a tool's result."""

    role: str
    content: str


@dataclass(frozen=True)
class Completion:
    """One sampled completion; `token_ids` and `logprobs` (nats) include the end-of-turn token."""

    token_ids: list[int]
    logprobs: list[float]
    text: str  # without the end-of-turn token
    finish_reason: FinishReason
    # for each token the ids that top-k and top-p kept for it, the sampler's support; None: all ids
    kept_ids: list[list[int]] | None = None
    error: str = ""  # why a server gave no completion: then its episode fails


@dataclass
class Turn:
    """One prompt, the completion sampled in exactly that context, and its reward."""

    prompt_ids: list[int]
    completion_ids: list[int]
    sampler_logprobs: list[float]
    finish_reason: FinishReason
    reward: float = 0.0
    kept_ids: list[list[int]] | None = None  # as in Completion


@dataclass
class Rollout:
    """One agent's episode. Rollouts of a group share environment, seed and agent."""

    env: str
    agent: str
    seed: int
    group_id: int
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    # cut before its end by --max-turns, the context length or the environment (Step.truncated)
    episode_truncated: bool = False
    error: str = ""  # why the environment failed; such a rollout is counted but not trained on
    env_failure: bool = False  # it raised EnvFailure; such a rollout is not evaluated either
    info: dict[str, Any] = field(default_factory=dict)  # of the last step that has any
    # the agents that others play: the "player" of each, and its "messages"; only for the log
    opponents: dict[str, dict[str, Any]] = field(default_factory=dict)
    # one dict per turn, one value per token: its "text", log-probs (nats) of the "sampler" and of
    # the "trainer" before and "after" the update, its "advantage", and with several turns the
    # "sequence" that it was trained in; empty: not traced
    token_traces: list[dict[str, list]] = field(default_factory=list)

    @property
    def episode_return(self) -> float:
        """Sum of the rewards of all turns, undiscounted."""
        return sum(turn.reward for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy sampled in this episode."""
        return sum(len(turn.completion_ids) for turn in self.turns)
