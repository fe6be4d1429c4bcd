"""`--algo scratch`: an update of RL with what somebody wrote in scratch.py.

The sampler draws with exercise 8; exercise 2 makes the mask, and exercise 9 the step, from the log-
probs, advantages and loss of exercises 1, 3 and 5, or whatever else it was changed to. Unlike
train.py's, the whole update is one batch with all its logits: meant for the tiny policy.
"""

import math
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from core import batching
from core.batching import MicroBatch, Sequence
from core.model import Policy
from core.report.token_traces import trace_tokens
from core.sampler import SamplingParams
from core.types import Rollout, UsageError
from core.workshop import checker

USED = (1, 2, 3, 5, 8, 9)


def open_exercises() -> ModuleType:
    """The functions of ./scratch.py, or of the one beside train.py.

    Raises UsageError for a file that can't be imported, and names the exercises that are missing.
    """
    here = Path("scratch.py")
    mine = checker.load(here if here.exists() else checker.FILE)
    missing = [v.exercise for v in checker.check_all(mine) if v.state == "not yet"]
    named = ", ".join(f"{e.number} ({e.name})" for e in missing if e.number in USED)
    if named:
        raise UsageError(f"--algo scratch needs exercise {named} of scratch.py: python scratch.py")
    return mine


def remarks(mine: ModuleType) -> list[str]:
    """What to know before training with exercises that aren't right, or not right any more."""
    wrong = [v.exercise for v in checker.check_all(mine) if v.state == "wrong"]
    return [
        f"exercise {e.number} ({e.name}) is not what was asked for; training with it as it is"
        for e in wrong
        if e.number in USED
    ]


def keep(mine: ModuleType, folder: Path) -> None:
    """Put the scratch.py that a run is made with into its folder."""
    shutil.copy(str(mine.__file__), folder / "scratch.py")


def drawing(mine: ModuleType) -> Callable:
    """Exercise 8 as the sampler calls it."""

    def draw(logits: Tensor, params: SamplingParams, chance: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(logits.device).manual_seed(int(chance[0] * 2**31))
        with blamed(mine):
            return mine.sample(logits.float(), params.temperature, generator)

    return draw


class Model(nn.Module):
    """The policy as exercise 9 sees it: ids in, logits out, at the temperature of sampling."""

    def __init__(self, policy: Policy, temperature: float):
        super().__init__()
        self.lm, self.policy, self.temperature = policy.causal_lm, policy, temperature
        self.first: Tensor | None = None  # logits under the weights that sampled

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.policy.to_logits(self.policy.hidden_states(input_ids)).float()
        logits = logits / self.temperature
        self.first = logits.detach() if self.first is None else self.first
        return logits


def learn(run: Any, rollouts: list[Rollout], temperature: float, budget: int) -> dict[str, float]:
    """One update from its rollouts, by exercise 9; looked at one by one. Returns its metrics.

    `run` is core.run.Run, with exercises; `budget` as --microscope.
    Raises UsageError that names the line where somebody's code raised, or a loss that isn't finite.
    """
    mine, policy = run.exercises, run.policy
    update = batching.to_rollout_batch(rollouts)
    sequences = sorted(update.sequences, key=lambda s: -len(s.token_ids))  # as micro_batches does
    most = len(sequences) * len(sequences[0].token_ids)
    (batch,) = batching.micro_batches(sequences, most, policy.device)
    masks = torch.zeros_like(batch.completion_mask)
    with blamed(mine):
        for row, sequence in enumerate(sequences):
            masks[row, : len(sequence.token_ids) - 1] = mine.completion_mask(turns_of(sequence))
    of = [rollouts[sequence.rollout] for sequence in sequences]
    returns = torch.tensor([r.episode_return for r in of], device=policy.device)
    group_ids = torch.tensor([r.group_id for r in of], device=policy.device)
    model = Model(policy, temperature)
    with blamed(mine):
        loss = mine.training_step(
            model, run.optimizer.adamw, batch.input_ids, masks, returns, group_ids
        )
        if not isinstance(loss, float) or not math.isfinite(loss):
            raise ValueError(f"training_step returned {loss}, not a finite number")
        found = {"loss": loss, "update/skipped": 0.0, "tokens/trained": int(masks.sum())}
        if model.first is not None:
            logprobs = mine.token_logprobs(model.first, batch.input_ids)
            gap = (logprobs - batching.rows(update.sampler_logprobs, batch))[masks].abs()
            all_logprobs = model.first[:, :-1][masks].log_softmax(-1)
            entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
            found |= {"gap/logprob_mean": gap.mean().item(), "gap/logprob_max": gap.max().item()}
            found["policy/entropy"] = entropy.mean().item()
            known = {"sampler_logprobs": update.sampler_logprobs}
            known |= {k: torch.zeros_like(update.rewards) for k in ("old_logprobs", "advantages")}
            batching.put(logprobs, batch, into=known["old_logprobs"])
            better = mine.group_advantages(returns, group_ids)[:, None].expand_as(logprobs)
            batching.put(better, batch, into=known["advantages"])
            now = partial(_logprobs_of, mine, model)
            trace_tokens(policy, rollouts, update, known, budget, now)
    return found


def _logprobs_of(mine: ModuleType, model: Model, batch: MicroBatch) -> tuple[Tensor, None, None]:
    return mine.token_logprobs(model(batch.input_ids), batch.input_ids), None, None


def turns_of(sequence: Sequence) -> list[tuple[list[int], list[int]]]:
    """(context, completion) of each turn of a sequence.

    >>> turns_of(Sequence(0, [5, 6, 7, 8, 9, 4], [-1, -1, 0, 1, -1, 2]))
    [([5, 6], [7, 8]), ([9], [4])]
    """
    turns: list[tuple[list[int], list[int]]] = []
    for i, (token, place) in enumerate(zip(sequence.token_ids, sequence.places, strict=True)):
        if place < 0 and (i == 0 or sequence.places[i - 1] >= 0):
            turns.append(([], []))
        turns[-1][place >= 0].append(token)
    return turns


@contextmanager
def blamed(mine: ModuleType) -> Iterator[None]:
    """What somebody's code raises becomes one line that names theirs."""
    try:
        yield
    except Exception as error:
        file = Path(str(mine.__file__))
        line, name = checker.line_in(file, traceback.extract_tb(error.__traceback__))
        number = next((f" (exercise {e.number})" for e in checker.EXERCISES if e.name == name), "")
        where = f", line {line}{number}" if line else ""
        raise UsageError(f"{file.name}{where}: {checker.named(error)}") from error
