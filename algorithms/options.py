"""The vocabulary of an algorithm's `Options`: the range of a number, the words of a choice.

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
    """Lowest and highest value of a number, and whether it may also be 0, which is off.

    The upper limits are far above what has a use, and far below what overflows float32.
    """

    low: float
    high: float
    or_zero: bool = False

    def has(self, value: Any) -> bool:
        """Whether `value` is such a number; NaN is none.

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
    """What the loop reads of the options of every algorithm, which derive from this class.

    These are no flags. An algorithm that needs another value declares the field in its `Options`:
    it is a flag then, such as `--ppo.target-kl`. `needs` is a plain attribute there, or a property.
    """

    loss_type: str = ""  # the variant, shown in the title of a run
    # by loss type: the values of the options that are None, which nobody has given
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    aggregation: Aggregation | None = "token"  # of the tokens of a step: tokens.token_weights
    value_lr: float = 1e-3  # of the value head, for algorithms that have one; 0: --lr
    value_warmup: int = 0  # number of initial updates that train the value head only
    target_kl: float = 0.0  # end an update when a minibatch's KL exceeds this; 0: never

    @property
    def needs(self) -> Set[str]:
        """What the algorithm needs of the settings: words of core/algorithm.py."""
        return frozenset()

    def divergence(self, logprobs: Any, teacher: Any) -> Any:
        """[n]: how far the policy is from its teacher (core/feedback.py), from log-probs [n, V]."""
        raise NotImplementedError("an algorithm that needs feedback has Options.divergence")

    def with_preset(self) -> Self:
        """These options, each one that is None with the value that the loss type sets.

        >>> from algorithms.grpo import Options
        >>> options = Options("dapo", clip_low=0.1).with_preset()
        >>> options.clip_low, options.clip_high
        (0.1, 0.28)
        """
        preset = self.presets.get(self.loss_type, {})
        values = {k: v for k, v in preset.items() if getattr(self, k) is None}
        return replace(self, **values)  # type: ignore[type-var]  # all that derive are dataclasses
