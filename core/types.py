"""The data that passes from environment to gradient, and the one error for bad input.

    Message --> prompt ids --> Completion --> Turn --> Rollout

>>> turn = Turn([5, 6], [7, 8, 2], [-0.1, -0.2, -0.3], "stop", reward=1.0)
>>> Rollout("letter_counting", "player", seed=3, group_id=0, turns=[turn]).episode_return
1.0
"""

from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length"]  # the policy ended its turn, or ran into the token limit


class UsageError(ValueError):
    """Bad input that the person at the keyboard can mend: shown as one line, exit code 2."""


class Fault(RuntimeError):
    """What ends a run and is nobody's mistake: shown as one line, exit code 1."""


class RankLost(Fault):
    """Another process of a data-parallel run has died."""


class CannotWrite(Fault):
    """The disk takes no more; what was saved before is whole."""


class OutOfMemory(Fault):
    """Memory ran out, and nothing more can give."""


class Message(TypedDict):
    """One chat message. `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True)
class Completion:
    """What the sampler wrote: `token_ids` and `logprobs` (nats) have equal length, EOS included."""

    token_ids: list[int]
    logprobs: list[float]
    text: str  # without the token that ended the turn
    finish_reason: FinishReason


@dataclass
class Turn:
    """One prompt, the completion sampled in exactly that context, and what it was paid."""

    prompt_ids: list[int]
    completion_ids: list[int]
    sampler_logprobs: list[float]
    finish_reason: FinishReason
    reward: float = 0.0


@dataclass
class Rollout:
    """One agent's episode: its turns in order. A `group_id` shares environment, seed and agent."""

    env: str
    agent: str
    seed: int
    group_id: int
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    episode_truncated: bool = False  # the episode was cut by --max-turns or the context, not ended
    error: str = ""  # why its environment failed; such an episode is counted and not learnt from
    info: dict[str, Any] = field(default_factory=dict)  # of the last step; "correct": bool if known
    # of each turn, a value a token: its "text", log-probs (nats) by the "sampler", by the "trainer"
    # before and "after" the update, and its "advantage"; no turns: its tokens weren't looked at
    token_traces: list[dict[str, list]] = field(default_factory=list)

    @property
    def episode_return(self) -> float:
        """Sum of the rewards of all turns, undiscounted."""
        return sum(turn.reward for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy sampled in this episode."""
        return sum(len(turn.completion_ids) for turn in self.turns)
