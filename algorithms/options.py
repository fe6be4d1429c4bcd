"""The options of each algorithm, shown under its name: `--grpo.clip-high 0.3`.

They stand apart from the algorithms' files because those import torch, which takes seconds, and
`python train.py --help` or a mistyped flag should be answered at once. Each algorithm's file has
its own as `Options`.
"""

from dataclasses import dataclass
from typing import Literal

Aggregation = Literal["token", "sequence", "constant"]  # common.token_scale
Level = Literal["token", "sequence"]  # common.sampler_ratio
KL = Literal["k1", "k2", "k3"]  # common.kl_estimate


@dataclass(frozen=True)
class ReinforceOptions:
    """Options of REINFORCE."""

    baseline: Literal["batch", "group", "leave_one_out", "none"] = "batch"
    """What a return is compared with: a mean of the batch, of its group, or of the others there."""
    normalize: bool = False
    """Whether advantages are brought to mean 0 and standard deviation 1 over the batch."""


@dataclass(frozen=True)
class GrpoOptions:
    """Options of GRPO; None: as the variant has it."""

    loss_type: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "dapo"
    """A name for the values of the fields below that aren't given; grpo: as first published."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Which standard deviation of returns advantages are divided by."""
    clip_low: float | None = None
    """Ratio below 1 - this: no further push down."""
    clip_high: float | None = None
    """Ratio above 1 + this: no further push up."""
    ratio_level: Level | None = None
    """Of each token, or the geometric mean over its sequence."""
    surrogate: Literal["min", "cispo"] | None = None
    """The smaller of clipped and unclipped; or log-probs under clipped weights."""
    aggregation: Aggregation | None = None
    """Mean over all tokens, over each completion and then all, or over B·max_tokens."""
    dual_clip: float = 0.0
    """Ratio, above 1, beyond which a negative advantage pushes no harder; 0: off."""


@dataclass(frozen=True)
class PpoOptions:
    """Options of PPO."""

    gae_lambda: float = 0.95
    """GAE's λ, a token: 1 trusts the rewards alone, 0 the value head alone."""
    clip: float = 0.2
    """Ratio outside of 1 ± this: no further push away."""
    target_kl: float = 0.0
    """KL from the policy that sampled, in nats a token, at which an update takes no more steps; 0:
    never."""
    value_clip: float = 0.5
    """How far a value may move from its old one in an update, in units of reward; 0: no limit."""
    value_coef: float = 0.5
    """Weight of the value loss; 0: the value head stays as it is."""
    value_lr: float = 1e-3
    """Learning rate of the value head."""
    value_warmup: int = 0
    """First updates, in which the value head alone learns; 0: none."""
