"""`--algo scratch`: turns the functions of scratch.py into an algorithm of train.py's loop.

    compute_advantages    exercise 3; with --scratch.advantages 10 or 7, one of these
    compute_loss          exercise 5; exercise 4 as long as 5 is not written, or --scratch.loss 4
    weighted_kl           exercise 6, which --kl-coef adds to the loss
    draw                  exercise 8, once it is written: TorchSampler samples every token with it

Everything else (batch, micro-batches, optimizer, metrics) is shared with the other algorithms.
"""

import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms import common
from algorithms.common import Batch, Micro
from algorithms.options import LoopOptions
from core import sampler
from core.config import Config
from core.sampler import SamplingParams
from core.types import UsageError, ran_out
from core.workshop import checker

CLIP = 0.2  # the default clip of exercise 5, for the clip metrics
VALUE_COEF = 0.5  # coefficient of the value loss, as in PPO


@dataclass(frozen=True)
class ScratchOptions(LoopOptions):
    """Which exercises of scratch.py --algo scratch trains with."""

    # Exercise that computes the advantages. 3: within the group; 10: the same without dividing by
    # the standard deviation; 7: GAE, which adds a value head.
    advantages: Literal["3", "7", "10"] = "3"
    # Exercise that computes the loss; None: 5, or 4 as long as 5 is not written.
    loss: Literal["4", "5"] | None = None


@dataclass(frozen=True)
class ScratchAlgorithm:
    """Exercises of a scratch.py, with the signatures of the files in algorithms/.

    An exception in the participant's code, or a result of the wrong shape, raises UsageError: one
    line with the file, line and exercise.
    """

    Options: ClassVar = ScratchOptions

    module: ModuleType
    exercises: tuple[int, ...] = (3, 5, 8)  # those that train; without 8 the library samples
    remarks: tuple[str, ...] = ()  # lines to show when the run starts

    @staticmethod
    def needs(options: ScratchOptions) -> set[str]:
        """What the training loop has to provide (core/algorithm.py)."""
        return {"episode_credit", "value_head" if options.advantages == "7" else "groups"}

    @staticmethod
    def start(cfg: Config) -> "ScratchAlgorithm":
        """The participant's functions, imported and checked: see `load_scratch`."""
        return load_scratch(cfg)

    def compute_advantages(self, batch: Batch, options: object) -> None:
        """Sets advantages [B, N] float32, 0 off the mask; with exercise 7 also value targets.

        3     group_advantages of the returns [B], repeated at each sampled token; rollouts that
              are alone in their group have advantage 0
        10    advantages_of_tokens as it is
        7     gae of each rollout, normalized over the loss mask; target: advantage + value
        """
        rewards, mask = batch.rewards, batch.completion_mask
        advantages = torch.zeros_like(rewards)
        if 7 in self.exercises:
            for row, sampled in enumerate(mask):
                if sampled.any():
                    episode = rewards[row, sampled], batch.values[row, sampled]
                    advantages[row, sampled] = self._call("gae", *episode, like=episode[0])
            batch.value_targets = torch.where(mask, advantages + batch.values, 0.0)
            batch.advantages = common.normalize(advantages, batch.loss_mask)
            return
        if 10 in self.exercises:
            inputs = rewards, mask, batch.group_ids
            advantages = self._call("advantages_of_tokens", *inputs, like=rewards)
            batch.advantages = torch.where(mask, advantages, 0.0)
            return
        returns = common.turn_returns(batch)[0][:, 0].float()  # [B]
        ones = torch.ones_like(returns)[:, None]
        compared = common.group_sum(ones, batch.group_ids)[:, 0] > 1  # [B]
        of_rollouts = torch.zeros_like(returns)
        if compared.any():
            group = returns[compared], batch.group_ids[compared]
            of_rollouts[compared] = self._call("group_advantages", *group, like=group[0])
        batch.advantages = torch.where(mask, of_rollouts[:, None], 0.0)

    def compute_loss(
        self, logprobs: Tensor, values: Tensor | None, micro: Micro, options: object
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns exercise 5 or 4 times the sum of the token weights, and metrics (token sums).

        All tensors are [b, T-1]. The exercise returns a mean over the tokens of one micro-batch;
        multiplied by Σ token_weights, the losses of the micro-batches add up to the mean over the
        step. An importance weight w >= 0 is a factor of the advantage: min(ρwA, ρ'wA) = w min(ρA,
        ρ'A). So is the ratio in exercise 4, as in algorithms/reinforce.py; it is 1 in the first
        step. Tokens of weight 0 are left out. With exercise 7 the error of the values is added.
        Gradients flow through `logprobs` and `values`.
        """
        sampled, token_weights = micro.completion_mask, micro.token_weights
        mask = sampled & (token_weights > 0)
        logprobs = torch.where(sampled, logprobs, 0.0)
        ratio = (logprobs.detach() - micro.old_logprobs).exp()
        weighted = micro.importance_weights * micro.advantages
        loss = 0 * logprobs.sum()
        if mask.any():
            if 5 in self.exercises:
                inputs = logprobs, micro.old_logprobs, weighted, mask
                mean = self._call("clipped_loss", *inputs, like=loss)
            else:
                mean = self._call("reinforce_loss", logprobs, ratio * weighted, mask, like=loss)
            loss = mean * token_weights.sum()
        clip = (CLIP, CLIP) if 5 in self.exercises else (1.0, math.inf)  # 4 does not clip
        metrics = common.surrogate_metrics(ratio, logprobs, micro, *clip)
        if 7 in self.exercises:
            assert values is not None
            error = torch.where(sampled, values - micro.value_targets, 0.0) ** 2 / 2
            loss = loss + VALUE_COEF * (token_weights * error).sum()
            metrics["value/loss"] = error.sum().item()
        return loss, metrics

    def weighted_kl(self, logprobs: Tensor, ratio: Tensor, other: Tensor, kind: str) -> Tensor:
        """Returns ρ times exercise 6 for each token, as common.weighted_kl does for k3: [b, T-1].

        `kind` is ignored. Gradients flow through `logprobs` and `ratio`.
        """
        return ratio * self._call("kl_k3", logprobs, other, like=logprobs)

    def draw(self, logits: Tensor, params: SamplingParams, chance: Tensor) -> tuple[Tensor, Tensor]:
        """Samples token ids [R] from logits [R, V] with exercise 8; returns them and log-probs [R].

        `chance` [R], uniform in [0, 1), seeds the exercise's generator. Without exercise 8, this is
        the library's `draw`.
        """
        if 8 not in self.exercises:
            return sampler.draw(logits, params, chance)
        generator = torch.Generator(logits.device).manual_seed(int(chance[0] * 2**31))
        with explain_errors(self.module):
            ids, logprobs = self.module.sample(logits.float(), params.temperature, generator)
        _require_tensor("sample", ids, chance)
        _require_tensor("sample", logprobs, chance)
        return ids.long(), logprobs

    @property
    def __file__(self) -> str:
        """The participant's file, which a run keeps a copy of."""
        return str(self.module.__file__)

    @property
    def variant(self) -> str:
        """What the title of a run says after the name."""
        return f"exercises {', '.join(map(str, self.exercises))}"

    def _call(self, name: str, *inputs: Tensor, like: Tensor) -> Tensor:
        """Returns the result of an exercise, a tensor of the shape of `like`."""
        with explain_errors(self.module):
            result = getattr(self.module, name)(*inputs)
        _require_tensor(name, result, like)
        return result


def load_scratch(cfg: Config) -> ScratchAlgorithm:
    """Imports ./scratch.py, or the one beside train.py, and checks its exercises.

    Raises UsageError if the file cannot be imported, or if an exercise that training needs is not
    written yet. An exercise that is wrong is allowed; `remarks` names it.
    """
    options = cfg.options
    assert isinstance(options, ScratchOptions)
    local = Path("scratch.py")
    module = checker.load(local if local.exists() else checker.FILE)
    verdicts = {v.exercise.number: v for v in checker.check_all(module)}
    written = {number for number, v in verdicts.items() if v.state != "not yet"}
    loss = int(options.loss or (5 if 5 in written else 4))
    needed = {int(options.advantages), loss} | ({6} if cfg.kl_coef else set())
    exercises = tuple(sorted(needed | ({8} & written)))
    missing = [verdicts[n].exercise for n in exercises if n not in written and n != 10]
    if missing:
        raise UsageError(
            "--algo scratch needs "
            + " and ".join(f"exercise {e.number} ({e.name})" for e in missing)
            + " of scratch.py, not written yet; python scratch.py checks what you write"
        )
    remarks = [
        f"exercise {n} ({verdicts[n].exercise.name}) is wrong; training with it anyway. Details: "
        "python scratch.py"
        for n in exercises
        if verdicts[n].state == "wrong"
    ]
    if 10 in exercises and 10 not in written:
        remarks.append("exercise 10 still has its bug; training with it: watch length/mean")
    return ScratchAlgorithm(module, exercises, tuple(remarks))


@contextmanager
def explain_errors(module: ModuleType) -> Iterator[None]:
    """Turns an exception of the participant's code into a UsageError that names line and exercise.

    Running out of memory is passed on: the training loop handles it.
    """
    try:
        yield
    except Exception as error:
        if ran_out(error):
            raise
        file = Path(str(module.__file__))
        line, name = checker.innermost_line(file, traceback.extract_tb(error.__traceback__))
        number = next((f" (exercise {e.number})" for e in checker.EXERCISES if e.name == name), "")
        where = f", line {line}{number}" if line else ""
        raise UsageError(f"{file.name}{where}: {checker.describe_error(error)}") from error


def _require_tensor(name: str, result: object, like: Tensor) -> None:
    """Raises UsageError unless `result` is a finite tensor of the shape of `like`, with a gradient
    if `like` has one."""
    number = next(e.number for e in checker.EXERCISES if e.name == name)
    if not isinstance(result, Tensor):
        problem = f"{type(result).__name__}, not a tensor"
    elif result.shape != like.shape:
        problem = f"a tensor of shape {list(result.shape)}, not {list(like.shape)}"
    elif like.isfinite().all() and not result.isfinite().all():
        problem = "a value that is not finite (nan or infinity)"
    elif like.requires_grad and not result.requires_grad:
        problem = "a tensor without a gradient"
    else:
        return
    raise UsageError(f"scratch.py: {name} (exercise {number}) returned {problem}")
