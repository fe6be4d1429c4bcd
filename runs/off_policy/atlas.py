"""Which gradient does each loss follow, and how noisily? Computed exactly, by enumeration.

    python runs/off_policy/atlas.py      # two minutes; writes its table into README.md

Two tasks, an easy and a hard one, each with a policy of its own over four completions: at each of
three tokens it goes on or ends. An update has a group of four rollouts for each task, so all its
1,225 possible batches can be listed. Each is given to `compute_advantages` and `compute_loss` as
training gives it, in float64; the sum over all batches, weighted by their probability, is the exact
expectation of the gradient, and of its square.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402

from algorithms import grpo, ppo, reinforce  # noqa: E402
from algorithms.tokens import Tokens, token_weights  # noqa: E402
from algorithms.variants import cispo, dppo, gspo  # noqa: E402

LENGTHS = torch.tensor([1, 2, 3, 3])  # of the completions: end; on, end; on, on, end; on, on, on
TOKENS = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]])  # 1: end
RIGHT = torch.tensor([[False, True, True, False], [False, False, True, False]])  # by task
# of going on and ending, for each token, by task
LOGITS = [[[0, -0.8], [0, 0.3], [0, 1.0]], [[0, 1.5], [0, 0.5], [0, 0.2]]]
MOVED = 0.2  # standard deviation of the change of the logits before a later step
GROUP = 4  # rollouts of a task


@dataclass
class Tasks:
    """Two tasks: logits [task, token, go on or end], float64, and what they determine."""

    logits: Tensor

    def logprobs(self) -> Tensor:
        """Log-prob of each token of each completion, [task, completion, token]; 0 off the mask."""
        logprobs = self.logits.log_softmax(-1)[:, None].expand(-1, 4, -1, -1)
        index = TOKENS.expand(2, -1, -1)[..., None]
        return torch.where(mask(), logprobs.gather(-1, index).squeeze(-1), 0.0)

    def success(self) -> Tensor:
        """Probability of a right completion, by task: [2]."""
        return (self.logprobs().sum(-1).exp() * RIGHT).sum(-1)

    def values(self) -> Tensor:
        """The expected return of each token: [task, completion, 3].

        All tokens at a place follow the same ones, so it depends on the place alone.
        """
        weights = self.logprobs().sum(-1).exp()[..., None] * mask()
        means = (weights * RIGHT[..., None]).sum(1) / weights.sum(1)
        return means[:, None].expand(-1, 4, -1)

    def batches(self) -> Iterator[tuple[Tensor, float]]:
        """Every batch: the completions of the rollouts, [2 · GROUP], and its probability."""
        easy, hard = self.logprobs().sum(-1).exp().tolist()  # probabilities of the completions
        groups = list(itertools.combinations_with_replacement(range(4), GROUP))
        for first, second in itertools.product(groups, repeat=2):
            yield torch.tensor(first + second), chance(first, easy) * chance(second, hard)


def chance(group: tuple[int, ...], probabilities: list[float]) -> float:
    """The probability of a group's completions, in any order."""
    orders = len({*itertools.permutations(group)})
    return orders * math.prod(probabilities[completion] for completion in group)


def mask() -> Tensor:
    """The tokens of each completion, [completion, token]."""
    return torch.arange(3) < LENGTHS[:, None]


def scores(tasks: Tasks) -> Tensor:
    """∇ log-prob of a token: 1 at its logit, minus the probabilities; [task, completion, 3, 2]."""
    return torch.nn.functional.one_hot(TOKENS, 2) - tasks.logits.softmax(-1)[:, None]


def estimate(
    algorithm: Any, options: Any, old: Tasks, new: Tasks, values: Tensor | None
) -> tuple[Tensor, float]:
    """Expectation of the gradient that is followed, [task, token, 2], and its variance.

    `old` samples; the gradient is taken at `new`. `values` [task, completion, 3] are PPO's. The
    variance is E|g - E g|².
    """
    options = options.with_preset()
    task = torch.arange(2).repeat_interleave(GROUP)
    old_logprobs, logprobs = old.logprobs(), new.logprobs()
    gradients = scores(new)
    mean, square = torch.zeros(2, 3, 2), 0.0
    for completions, probability in old.batches():
        sampled = mask()[completions]
        rewards = torch.zeros(2 * GROUP, 3)
        right = RIGHT[task, completions].to(rewards.dtype)
        rewards[torch.arange(2 * GROUP), LENGTHS[completions] - 1] = right
        rollout, place = sampled.nonzero(as_tuple=True)  # of each token: [S] and [S]
        sampled_logprobs = old_logprobs[task, completions][sampled]
        ones = torch.ones_like(sampled_logprobs)
        tokens = Tokens(rollout=rollout, turn=rollout * 0, sequence=rollout, group=task[rollout])
        tokens.add({"rewards": rewards[sampled], "in_loss": rollout >= 0, "place": place})
        tokens.add({"discounts": ones, "importance_weights": ones})
        tokens.add({"old_logprobs": sampled_logprobs, "sampler_logprobs": sampled_logprobs})
        tokens.logprobs = logprobs[task, completions][sampled].requires_grad_()
        if values is not None:
            tokens.old_values = tokens.values = values[task, completions][sampled]
        vectors = algorithm.compute_advantages(tokens, options)
        tokens.add(vectors if isinstance(vectors, dict) else {"advantages": vectors})
        rollouts = list(range(2 * GROUP))
        tokens.token_weights = token_weights(tokens, rollouts, options.aggregation, 3)
        loss, _ = algorithm.compute_loss(tokens, options)
        (by_token,) = torch.autograd.grad(-loss, tokens.logprobs)  # [S]
        terms = by_token[:, None] * gradients[task, completions][sampled]  # [S, 2]
        gradient = torch.zeros(2, 3, 2).index_put((task[rollout], place), terms, accumulate=True)
        mean += probability * gradient
        square += probability * gradient.square().sum().item()
    return mean, square - mean.square().sum().item()


def gradient_of(tasks: Tasks, objective: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of the mean over the tasks of `objective`(probability of success)."""
    leaf = Tasks(tasks.logits.clone().requires_grad_())
    return torch.autograd.grad(objective(leaf.success()).mean(), leaf.logits)[0]


def estimators() -> dict[str, tuple[Any, Any, str]]:
    """By name: the algorithm, its options, and the name of PPO's values."""
    rows: dict[str, tuple[Any, Any, str]] = {}
    for baseline in ("none", "batch", "group", "leave_one_out"):
        options = reinforce.Options(baseline=baseline)  # type: ignore[arg-type]
        rows[f"`reinforce`, baseline {baseline}"] = reinforce, options, ""
    for loss_type in grpo.LOSS_TYPES:
        rows[f"`grpo`, loss type {loss_type}"] = grpo, grpo.Options(loss_type), ""  # type: ignore[arg-type]
    for algorithm in (gspo, cispo, dppo):
        rows[f"`{algorithm.__name__.rpartition('.')[2]}`"] = algorithm, algorithm.Options(), ""
    for drop in ("further", "any"):
        tight = dppo.Options(limit=0.1, drop=drop)  # type: ignore[arg-type]
        rows[f"`dppo`, limit 0.1, drop {drop}"] = dppo, tight, ""
    for kind, gae_lambda in itertools.product(("exact values", "wrong values"), (0.0, 0.95, 1.0)):
        options = ppo.Options(gae_lambda=gae_lambda)
        rows[f"`ppo`, λ = {gae_lambda:g}, {kind}"] = ppo, options, kind
    return rows


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


def atlas() -> dict[str, list[float]]:
    """For each row: cosine with ∇J and with ∇ log p, and noise per rollout, in the first step of an
    update; cosine with ∇J and noise in a later step."""
    old = Tasks(torch.tensor(LOGITS))
    noise = torch.randn(old.logits.shape, generator=torch.Generator().manual_seed(0))
    new = Tasks(old.logits + MOVED * noise)
    wrong = torch.full((2, 4, 3), 0.5)
    values = {"": None, "exact values": old.values(), "wrong values": wrong}
    rows = {}
    for name, estimator in track(estimators().items(), "estimators", transient=True):
        algorithm, options, kind = estimator
        row = []
        for tasks in (old, new):
            mean, variance = estimate(algorithm, options, old, tasks, values[kind])
            row.append(cosine(mean, gradient_of(tasks, lambda p: p)))
            if tasks is old:
                row.append(cosine(mean, gradient_of(tasks, torch.log)))
            row.append(2 * GROUP * variance / mean.square().sum().item())
        rows[name] = row
    return rows


def main() -> None:
    torch.set_default_dtype(torch.float64)
    rows = []
    for name, row in atlas().items():
        cells = [f"{x:.{digits}f}" for x, digits in zip(row, (3, 3, 1, 3, 1), strict=True)]
        rows.append([name, *cells])
    first = "estimator | cosine with ∇J | cosine with ∇ log p | noise per rollout"
    later = "later step: cosine with ∇J | later step: noise per rollout"
    record.write_table(HERE, record.markdown(f"{first} | {later}", rows), "of losses")


if __name__ == "__main__":
    main()
