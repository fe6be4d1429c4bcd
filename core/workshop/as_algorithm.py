"""`--algo scratch`: turns the functions of scratch.py into an algorithm of train.py's loop.

    compute_advantages    exercise 3, group_advantages, on the return of each episode
    compute_loss          exercise 5, clipped_loss
    draw                  exercise 8, sample, with which TorchSampler samples every token

Everything else (batch, micro-batches, optimizer, metrics) is shared with the other algorithms.
"""

import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from algorithms import common
from core.memory import ran_out
from core.sampler import SamplingParams
from core.types import UsageError
from core.workshop import checker

EXERCISES = (3, 5, 8)  # those that --algo scratch calls
CLIP = 0.2  # the default clip of exercise 5, for the clip metrics


@dataclass(frozen=True)
class ScratchAlgorithm:
    """The exercises of a scratch.py, with the signatures of the files in algorithms/.

    An exception in the participant's code, or a result of the wrong shape, raises UsageError: one
    line with the file, line and exercise.
    """

    module: ModuleType
    remarks: tuple[str, ...] = ()  # one line for each exercise that the checker finds wrong

    def compute_advantages(
        self,
        rewards: Tensor,
        completion_mask: Tensor,
        loss_mask: Tensor,
        turn_ids: Tensor,
        group_ids: Tensor,
        values: Tensor | None,
        gamma: float,
        options: object,
    ) -> tuple[Tensor, None]:
        """Returns advantages [B, N] float32: exercise 3, repeated at each sampled token; 0 off the
        mask.

        `rewards` [B, N] float32; `completion_mask` [B, N] bool; `turn_ids` [B, N] int64;
        `group_ids` [B] int64; `gamma` is the discount factor per turn. Rollouts that are alone in
        their group have advantage 0. The other arguments are those of PPO and are ignored.
        """
        returns = common.turn_returns(rewards, completion_mask, turn_ids, gamma)[0]
        returns = returns[:, 0].float()  # [B]
        compared = common.group_sum(torch.ones_like(returns)[:, None], group_ids)[:, 0] > 1  # [B]
        advantages = torch.zeros_like(returns)
        if compared.any():
            with explain_errors(self.module):
                result = self.module.group_advantages(returns[compared], group_ids[compared])
            _require_tensor("group_advantages", result, returns[compared])
            advantages[compared] = result.to(advantages)
        return torch.where(completion_mask, advantages[:, None], 0.0), None

    def compute_loss(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        completion_mask: Tensor,
        importance_weights: Tensor,
        token_weights: Tensor,
        options: object,
        values: Tensor | None = None,
        old_values: Tensor | None = None,
        value_targets: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns exercise 5 times the sum of the token weights, and metrics (sums over tokens).

        All tensors are [b, T-1]. Exercise 5 returns a mean over the tokens of one micro-batch;
        multiplied by Σ token_weights, the losses of the micro-batches add up to the mean over the
        step. An importance weight w >= 0 is a factor of the advantage: min(ρwA, ρ'wA) = w min(ρA,
        ρ'A). Tokens of weight 0 are left out. Gradients flow through `logprobs`.
        """
        mask = completion_mask & (token_weights > 0)
        logprobs = torch.where(completion_mask, logprobs, 0.0)
        if mask.any():
            weighted = importance_weights * advantages
            with explain_errors(self.module):
                mean = self.module.clipped_loss(logprobs, old_logprobs, weighted, mask)
            _require_tensor("clipped_loss", mean, logprobs.sum())
            loss = mean * token_weights.sum()
        else:
            loss = 0 * logprobs.sum()
        ratio = (logprobs.detach() - old_logprobs).exp()
        metrics = common.surrogate_metrics(
            ratio, logprobs, old_logprobs, advantages, completion_mask, CLIP, CLIP
        )
        return loss, metrics

    def draw(self, logits: Tensor, params: SamplingParams, chance: Tensor) -> tuple[Tensor, Tensor]:
        """Samples token ids [R] from logits [R, V] with exercise 8; returns them and log-probs [R].

        `chance` [R], uniform in [0, 1), seeds the exercise's generator.
        """
        generator = torch.Generator(logits.device).manual_seed(int(chance[0] * 2**31))
        with explain_errors(self.module):
            ids, logprobs = self.module.sample(logits.float(), params.temperature, generator)
        _require_tensor("sample", ids, chance)
        _require_tensor("sample", logprobs, chance)
        return ids.long(), logprobs

    def save_source(self, run_dir: Path) -> None:
        """Copies scratch.py into the run's directory."""
        shutil.copy(str(self.module.__file__), run_dir / "scratch.py")


def load_scratch() -> ScratchAlgorithm:
    """Imports ./scratch.py, or the one beside train.py, and checks its exercises.

    Raises UsageError if the file cannot be imported, or if an exercise that training needs is not
    written yet. An exercise that is wrong is allowed; `remarks` names it.
    """
    local = Path("scratch.py")
    module = checker.load(local if local.exists() else checker.FILE)
    verdicts = [v for v in checker.check_all(module) if v.exercise.number in EXERCISES]
    missing = [f"{v.exercise.number} ({v.exercise.name})" for v in verdicts if v.state == "not yet"]
    if missing:
        raise UsageError(
            f"--algo scratch needs exercise {', '.join(missing)} of scratch.py: write it, then "
            "check it with python scratch.py"
        )
    wrong = [v.exercise for v in verdicts if v.state == "wrong"]
    remarks = (
        f"exercise {e.number} ({e.name}) is wrong; training with it anyway. Details: python "
        "scratch.py"
        for e in wrong
    )
    return ScratchAlgorithm(module, tuple(remarks))


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
