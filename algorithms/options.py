"""Types for the `Options` of algorithms: the range of a number, the values of a choice.

Each algorithm has its `Options` in its own file; the fields are flags, such as `--grpo.clip-high`.
"""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

Scale = Literal["group", "batch", "mean", "none"]  # grpo.compute_advantages
Aggregation = Literal["token", "sequence", "prompt", "constant"]  # tokens.token_weights
WeightLevel = Literal["token", "geometric", "product"]  # off_policy.sampler_ratio
WeightMode = Literal["truncate", "mask"]  # off_policy.importance_weights
KL = Literal["k1", "k2", "k3"]  # kl.kl_estimate


@dataclass(frozen=True)
class Range:
    """Lowest and highest value of a number; `or_zero`: it may also be 0, which switches it off.

    The upper limits are far above what has a use, and far below what overflows float32.
    """

    low: float
    high: float
    or_zero: bool = False

    def has(self, value: Any) -> bool:
        """Whether `value` is a number in this range; NaN never is.

        >>> [Range(1, 8, or_zero=True).has(value) for value in (0, 0.5, 8, "1")]
        [True, False, True, False]
        """
        is_number = isinstance(value, int | float)
        return is_number and (self.low <= value <= self.high or (value == 0 and self.or_zero))

    def __str__(self) -> str:
        return f"{'0 or ' if self.or_zero else ''}from {self.low:,} to {self.high:,}"


Fraction = Annotated[float, Range(0, 1)]
Coefficient = Annotated[float, Range(0, 1000)]


class LoopOptions:
    """The options that the loop reads; the `Options` of every algorithm derive from this class.

    They are not flags. An algorithm that needs another value declares the field in its `Options`,
    which makes it a flag, such as `--ppo.target-kl`. `needs` is an attribute there, or a property.
    """

    loss_type: str = ""  # the variant, shown in the title of a run
    # loss type -> the values of those options that are None
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    aggregation: Aggregation | None = "token"  # of the tokens of a step: tokens.token_weights
    value_lr: float = 1e-3  # of the value head, for algorithms that have one; 0: --lr
    value_warmup: int = 0  # number of initial updates that train the value head only
    target_kl: float = 0.0  # end an update when a minibatch's KL exceeds this; 0: never

    @property
    def needs(self) -> Set[str]:
        """What the algorithm needs beyond single rewards: keys of NEEDS in core/algorithm.py."""
        return frozenset()

    def divergence(self, logprobs: Any, teacher: Any) -> Any:
        """Divergence [n] of the policy from its teacher (core/feedback.py); both [n, V]."""
        raise NotImplementedError("an algorithm that needs feedback has Options.divergence")

    def with_preset(self) -> Self:
        """These options, each one that is None with the value that the loss type sets.

        >>> from algorithms.grpo import Options
        >>> options = Options("dapo", clip_low=0.1).with_preset()
        >>> options.clip_low, options.clip_high
        (0.1, 0.28)
        """
        preset = self.presets.get(self.loss_type, {})
        values = {name: value for name, value in preset.items() if getattr(self, name) is None}
        return replace(self, **values)  # type: ignore[type-var]  # every Options is a dataclass
