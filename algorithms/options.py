"""The options of each algorithm, for example `--grpo.clip-high 0.3`.

They are in a file without torch, so that `python train.py --help` answers at once. Each algorithm
file imports its own as `Options`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

Aggregation = Literal["token", "sequence", "prompt", "constant"]  # common.token_weights
Level = Literal["token", "sequence"]  # of the policy ratio
WeightLevel = Literal["token", "geometric", "product"]  # common.sampler_ratio
WeightMode = Literal["truncate", "mask"]  # common.importance_weights
KL = Literal["k1", "k2", "k3"]  # common.kl_estimate


@dataclass(frozen=True)
class Range:
    """Lowest and highest value of a number, and whether it may also be 0, which is off.

    The upper limits are far above what has a use, and far below what overflows float32.
    """

    low: float
    high: float
    or_zero: bool = False


@dataclass(frozen=True)
class Needs:
    """The setting without which a setting has no effect."""

    setting: str


Fraction = Annotated[float, Range(0, 1)]
Coefficient = Annotated[float, Range(0, 1000)]


@dataclass(frozen=True)
class ReinforceOptions:
    """Options of REINFORCE."""

    baseline: Literal["batch", "group", "leave_one_out", "none"] = "batch"
    """Subtracted from the return: the mean of the batch, of the group, of the other rollouts of the
    group (RLOO), or nothing."""
    normalize: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over the batch (as in
    REINFORCE++)."""


@dataclass(frozen=True)
class GrpoOptions:
    """Options of GRPO; None: the value that the loss type sets."""

    loss_type: Literal["grpo", "dr_grpo", "dapo", "lite_ppo", "gspo", "cispo", "scalerl"] = "dapo"
    """Variant of GRPO: sets every option below that you do not give, except dual_clip."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Divide advantages by the standard deviation of the group's or the batch's returns."""
    clip_low: Annotated[float | None, Range(0, 1)] = None
    """Clip the ratio at 1 - clip_low; acts where the advantage is negative (cispo: everywhere)."""
    clip_high: Annotated[float | None, Range(0, 1000)] = None
    """Clip the ratio at 1 + clip_high; acts where the advantage is positive (cispo: everywhere)."""
    ratio_level: Level | None = None
    """token: one ratio per token; sequence: the geometric mean of the ratios in the sequence (the
    rollout, or a part of it if the environment replaced the context)."""
    surrogate: Literal["min", "cispo"] | None = None
    """min: the smaller of the clipped and unclipped term; cispo: advantage times
    log-prob times the clipped ratio, which has no gradient."""
    aggregation: Aggregation | None = None
    """token: the mean over all tokens; sequence: the mean of each rollout, then over rollouts;
    prompt: the mean of each group, then over groups; constant: the sum divided by rollouts ·
    max_tokens."""
    dual_clip: Annotated[float, Range(1.01, 1000, or_zero=True)] = 0.0
    """Ratio, above 1, at which the loss of tokens with negative advantage stops growing; 0: off."""


@dataclass(frozen=True)
class PpoOptions:
    """Options of PPO."""

    gae_lambda: Fraction = 0.95
    """GAE's λ per token; 1: all later rewards count, 0: only the token's own reward and the next
    value."""
    value_lambda: Annotated[float | None, Range(0, 1)] = None
    """λ of the value targets, if it differs from gae_lambda; VC-PPO takes 1."""
    clip: Fraction = 0.2
    """Clip the ratio at 1 ± clip."""
    target_kl: Coefficient = 0.0
    """End an update when a minibatch's KL(π_old ‖ π) exceeds this, in nats per token, and
    drop that minibatch's gradient; 0: never."""
    value_clip: Annotated[float, Range(0, 10**15)] = 0.5
    """Moving a value further than this in an update no longer lowers its loss; 0: no clip."""
    value_coef: Coefficient = 0.5
    """Coefficient of the value loss; 0: the value head is not trained."""
    value_lr: Annotated[float, Range(0, 100)] = 1e-3
    """Learning rate of the value head."""
    value_warmup: Annotated[int, Range(0, 10**9)] = 0
    """Number of initial updates that train the value head only; 0: none."""
