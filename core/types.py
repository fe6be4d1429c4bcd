"""The afternoon, 2 of 6. The data from environment to gradient.

    Message --> prompt ids --> Completion --> Turn --> Rollout --> RolloutBatch --> MicroBatch

The last two, tensors, are in core/batching.py.

>>> turn = Turn([5, 6], [7, 8, 2], [-0.1, -0.2, -0.3], "stop", reward=1.0)
>>> Rollout("letter_counting", "player", seed=3, group_id=0, turns=[turn]).episode_return
1.0
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from environments.base import Message

Kept = list[int] | bytes  # token ids; or one bit for each id of the vocabulary, lowest bit first
FinishReason = Literal["stop", "length"]  # the policy ended its turn, or hit the token limit


@dataclass(frozen=True)
class Completion:
    """One sampled completion; `token_ids` and `logprobs` (nats) include the end-of-turn token."""

    token_ids: list[int]
    logprobs: list[float]
    text: str  # without the end-of-turn token
    finish_reason: FinishReason
    # the ids that each token was drawn from, if a JSON schema, top-k or top-p left some out; None:
    # all. Tokens with equal sets share the bytes
    kept_ids: list[Kept] | None = None
    error: str = ""  # why a server gave no completion: then its episode fails


@dataclass
class Turn:
    """One prompt, the completion sampled in exactly that context, and its reward."""

    prompt_ids: list[int]
    completion_ids: list[int]
    sampler_logprobs: list[float]
    finish_reason: FinishReason
    reward: float = 0.0
    kept_ids: list[Kept] | None = None  # as in Completion
    # the prompt that shows what would have been right and asks again (core/feedback.py); [] if none
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
    env_failure: bool = False  # it raised EnvFailure; such a rollout is not evaluated either
    info: dict[str, Any] = field(default_factory=dict)  # of the last step that has any
    tools: list[str] = field(default_factory=list)  # names of the tools on offer; for the log
    # of each agent that the policy does not play: its "player" and "messages"; for the log
    opponents: dict[str, dict[str, Any]] = field(default_factory=dict)
    # one dict per turn, one value per token: its "text", log-probs (nats) of the "sampler" and of
    # the "trainer" before and "after" the update, and its "advantage"; empty: not traced
    token_traces: list[dict[str, list]] = field(default_factory=list)

    @property
    def episode_return(self) -> float:
        """Sum of the rewards of all turns, undiscounted."""
        return sum(turn.reward for turn in self.turns)

    @property
    def reward_parts(self) -> dict[str, tuple[float, float]]:
        """For --algo gdpo: (info["reward_<name>"], its weight info["weight_<name>"]) by name.

        >>> info = {"reward_right": True, "reward_brief": 0.5, "weight_brief": 0.1}
        >>> Rollout("e", "player", 0, 0, info=info).reward_parts
        {'right': (1.0, 1.0), 'brief': (0.5, 0.1)}
        """
        numbers = {k: float(x) for k, x in self.info.items() if isinstance(x, bool | int | float)}
        names = [k.removeprefix("reward_") for k in numbers if k.startswith("reward_")]
        return {k: (numbers[f"reward_{k}"], numbers.get(f"weight_{k}", 1.0)) for k in names}

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy sampled in this episode."""
        return sum(len(turn.completion_ids) for turn in self.turns)
