"""`--algo scratch` or `--algo scratch.py`: the functions of scratch.py as an algorithm of train.py.

    compute_advantages    exercise 3; with --scratch.advantages 10 or 7, one of these
    compute_loss          exercise 5; exercise 4 as long as 5 is not written, or --scratch.loss 4
    weighted_kl           exercise 6, which --kl-coef adds to the loss
    draw                  exercise 8, once it is written: TorchSampler samples every token with it

Everything else (batch, micro-batches, optimizer, metrics) is shared with the other algorithms.
"""

import math
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from algorithms.options import LoopOptions
from algorithms.tokens import Tokens, group_sum, normalize, surrogate_metrics, turns_of
from core import sampler
from core.algorithm import Algorithm, is_file
from core.config import Config
from core.faults import UsageError, ran_out
from core.sampler import SamplingParams
from core.workshop import checker
from environments.plumbing.registry import describe_error


@dataclass(frozen=True)
class Options(LoopOptions):
    """Which exercises of scratch.py --algo scratch trains with."""

    advantages: Literal["3", "7", "10"] = "3"
    """Exercise that computes the advantages. 3: within the group; 10: the same without dividing by
    the standard deviation; 7: GAE, which adds a value head."""
    loss: Literal["4", "5"] | None = None
    """Exercise that computes the loss; None: 5, or 4 as long as 5 is not written."""

    @property
    def needs(self) -> Set[str]:
        first = "value_head" if self.advantages == "7" else "groups"
        return {first, "own_kl", "own_draw", "episode_credit"}


def pad(x: Tensor, ids: Tensor) -> Tensor:
    """Turns a vector [n] into rows for the exercises: one for each id, padded with 0 on the right.

    >>> pad(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3, 3, 5]))
    tensor([[1., 2.],
            [3., 0.]])
    """
    lengths = ids.unique_consecutive(return_counts=True)[1].tolist()
    return pad_sequence(x.split(lengths), batch_first=True)


@dataclass(frozen=True)
class Exercises:
    """Exercises of a scratch.py as an algorithm. A method raises UsageError if its exercise raises,
    or returns a wrong type or shape."""

    module: ModuleType
    exercises: tuple[int, ...] = (3, 5, 8)  # their numbers; without 8 the library samples

    def compute_advantages(self, tokens: Tokens, options: object) -> dict[str, Tensor]:
        """Advantages [S] float32; with exercise 7 also value targets.

        3     group_advantages of the returns of the rollouts, repeated at each sampled token;
              rollouts that are alone in their group have advantage 0
        10    advantages_of_tokens as it is
        7     gae of each rollout, normalized over the tokens in the loss; target: advantage + value
        """
        if 7 in self.exercises:
            advantages = torch.zeros_like(tokens.rewards)
            for rollout in tokens.rollout.unique():
                mask = tokens.rollout == rollout
                rewards, values = tokens.rewards[mask], tokens.old_values[mask]
                advantages[mask] = self._call(7, rewards, values, like=rewards)
            targets = advantages + tokens.old_values
            advantages = normalize(advantages, tokens.in_loss).float()
            return {"advantages": advantages, "value_targets": targets}
        turns = turns_of(tokens)  # one for each rollout
        if 10 in self.exercises:
            mask = pad(torch.ones_like(tokens.rewards), tokens.rollout) > 0
            rows = pad(tokens.rewards, tokens.rollout)
            group_ids = tokens.group[turns.last_token]
            return {"advantages": self._call(10, rows, mask, group_ids, like=rows)[mask]}
        returns = turns.returns.float()  # [rollouts]
        compared = group_sum(torch.ones_like(returns), turns.peers) > 1
        advantages = torch.zeros_like(returns)
        if compared.any():
            returns, group_ids = returns[compared], turns.peers[compared]
            advantages[compared] = self._call(3, returns, group_ids, like=returns)
        return {"advantages": advantages[turns.of_token]}

    def compute_loss(self, tokens: Tokens, options: object) -> tuple[Tensor, dict[str, float]]:
        """Returns exercise 5 or 4 times the sum of the token weights, and metrics (token sums).

        The exercises return a mean over the tokens of a micro-batch, without those of weight 0;
        times Σ token_weights, the micro-batches add up to the mean over the step. An importance
        weight w >= 0 is a factor of the advantage: min(ρwA, ρ'wA) = w min(ρA, ρ'A). So is the ratio
        in exercise 4, as in algorithms/reinforce.py. With exercise 7 the error of the values is
        added. Gradients flow through `tokens.logprobs` and `tokens.values`.
        """
        sequence, token_weights = tokens.sequence, tokens.token_weights
        mask = pad(token_weights, sequence) > 0  # [Q, N]
        ratio = (tokens.logprobs.detach() - tokens.old_logprobs).exp()
        factors = tokens.importance_weights * tokens.advantages
        loss = 0 * tokens.logprobs.sum()
        if mask.any():
            number, vectors = 4, [tokens.logprobs, ratio * factors]
            if 5 in self.exercises:
                number, vectors = 5, [tokens.logprobs, tokens.old_logprobs, factors]
            rows = [pad(vector, sequence) for vector in vectors]
            loss = self._call(number, *rows, mask, like=loss) * token_weights.sum()
        clip = (0.2, 0.2) if 5 in self.exercises else (1.0, math.inf)  # 4 does not clip
        metrics = surrogate_metrics(tokens, ratio, *clip)
        if 7 in self.exercises:
            error = (tokens.values - tokens.value_targets) ** 2 / 2
            loss = loss + 0.5 * (token_weights * error).sum()
            metrics["value/loss"] = error[tokens.in_loss].sum().item()
        return loss, metrics

    def weighted_kl(self, logprobs: Tensor, ratio: Tensor, other: Tensor, kind: str) -> Tensor:
        """Returns ρ times exercise 6 for each token, as algorithms/kl.py does for k3: [n]."""
        return ratio * self._call(6, logprobs, other, like=logprobs)

    def draw(self, logits: Tensor, params: SamplingParams, chance: Tensor) -> tuple[Tensor, Tensor]:
        """Draws ids and their log-probs, [C], from logits [C, V], with exercise 8. The first number
        of `chance` [C], which is in [0, 1), seeds its generator."""
        generator = torch.Generator(logits.device).manual_seed(int(chance[0] * 2**31))
        like = chance.long(), chance
        ids, logprobs = self._call(8, logits.float(), params.temperature, generator, like=like)
        return ids.long(), logprobs

    def _call(self, number: int, *inputs: Any, like: Any) -> Any:
        """The result of an exercise, which has the types and shapes of `like`."""
        try:
            result = getattr(self.module, checker.EXERCISES[number - 1].name)(*inputs)
        except Exception as error:
            if ran_out(error):  # the training loop handles it
                raise
            raise UsageError(f"exercise {number}: {describe_error(error)}") from error
        if wrong := checker.difference(like, result, None):
            raise UsageError(f"exercise {number}: {wrong}")
        return result


def load_scratch(cfg: Config) -> Algorithm:
    """Imports the file of --algo and checks its exercises; `remarks` names those that are wrong.

    `scratch` is ./scratch.py, or else the one beside train.py. Raises UsageError if the file cannot
    be imported, or if an exercise that training needs is not written yet.
    """
    options = cfg.options
    assert isinstance(options, Options)
    file = Path(cfg.algo if is_file(cfg.algo) else "scratch.py")
    file = file if file.exists() else checker.FILE
    module = checker.load(file)
    command = f"python {checker.path_in_command(file)}"
    states = {verdict.exercise.number: verdict.state for verdict in checker.check_all(module)}
    written = {number for number, state in states.items() if state != "not yet"}
    loss = int(options.loss or (5 if 5 in written else 4))
    used = {int(options.advantages), loss} | ({6} if cfg.kl_coef else set()) | ({8} & written)
    if missing := sorted(used - written - {10}):  # 10 has its bug from the beginning
        algo, needs = Path(cfg.algo).name, " and ".join(f"exercise {n}" for n in missing)
        raise UsageError(f"--algo {algo} needs {needs}, not written yet; {command} checks it")
    wrong = [f"exercise {n} is not right" for n in sorted(used) if states[n] != "right"]
    exercises = Exercises(module, tuple(sorted(used)))
    return Algorithm(
        exercises.compute_advantages,
        exercises.compute_loss,
        Path(str(module.__file__)),
        weighted_kl=exercises.weighted_kl,
        draw=exercises.draw if 8 in used else sampler.draw,
        variant=f"exercises {', '.join(map(str, sorted(used)))}",
        remarks=tuple(f"{text}; training with it anyway. Details: {command}" for text in wrong),
    )
