"""The afternoon, 2 of 9. The data from environment to gradient.

    Message --> prompt ids --> Completion --> Turn --> Rollout --> Batch --> MicroBatch --> Tokens

The last three, tensors, are in core/batching.py and algorithms/tokens.py.

>>> turn = Turn([5, 6], [7, 8, 2], [-0.1, -0.2, -0.3], "stop", reward=1.0)
>>> Rollout("letter_counting", "player", seed=3, group_id=0, turns=[turn]).episode_return
1.0
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from environments.base import Message

# the policy ended its turn; it hit the token limit; a server gave no completion (`text`: why)
FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Completion:
    """One sampled completion; `token_ids` and `logprobs` (nats) include the end-of-turn token."""

    token_ids: list[int]
    logprobs: list[float]
    text: str  # without the end-of-turn token
    finish_reason: FinishReason
    # for each token the ids that --top-p and --top-k kept, None: all. The trainer's softmax is over
    # the same ids
    kept_ids: list[list[int]] | None = None


@dataclass
class Turn:
    """One prompt, the completion sampled in exactly that context, and its reward."""

    prompt_ids: list[int]
    completion_ids: list[int]
    sampler_logprobs: list[float]
    finish_reason: FinishReason
    reward: float = 0.0
    kept_ids: list[list[int]] | None = None  # as in Completion
    # a prompt with a right answer, then the question again (core/feedback.py); [] without feedback
    feedback_ids: list[int] = field(default_factory=list)


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
    env_failure: bool = False  # it raised EnvFailure: neither trained on nor evaluated
    no_reward: bool = False  # it raised NoReward, as nobody could judge it: not a failure
    info: dict[str, Any] = field(default_factory=dict)  # of the last step that has any
    steps: list[tuple[float, bool]] = field(default_factory=list)  # reward and fresh of each Step
    # further fields of the rollout in rollouts.jsonl, such as "tools" and "token_traces"
    for_log: dict[str, Any] = field(default_factory=dict)

    @property
    def episode_return(self) -> float:
        """Sum of the rewards of all turns: the return with γ = 1, which is the default."""
        return sum(turn.reward for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy sampled in this episode."""
        return sum(len(turn.completion_ids) for turn in self.turns)
