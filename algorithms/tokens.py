"""The afternoon, 5 of 9. Code that all algorithms share: tokens, turns, token weights.

Every token that was sampled in an update has an index, 0 to S-1, rollout after rollout. Every
quantity of the tokens is a vector [S] in this order; a micro-batch has the indices of n tokens, and
its formulas read vectors [n], without padding. `rollout`, `group` and `sequence` are
vectors of integers, equal for tokens that belong together; `group_sum` adds up over such tokens.

Every loss is a sum over tokens, and each token's term is multiplied by its token weight. The
weights are computed once per gradient step, so the gradients of micro-batches add up to the
gradient of the step, however the step was cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from algorithms.kl import kl_estimate
from algorithms.options import Aggregation

# of `needs`: the word that gives a vector
WORDS = {"old_logprobs": "old_logprobs", "old_values": "value_head", "values": "value_head"}
ROUNDING = 1e-7  # relative difference below which returns are equal, as rewards are float32


class Tokens:
    """Vectors [n] of n sampled tokens, by name; float32 unless stated otherwise.

    Reading a vector before it was computed raises AttributeError. An algorithm may add vectors of
    its own (core/algorithm.py).

    >>> tokens = Tokens(rollout=torch.tensor([0, 0, 1]), advantages=torch.tensor([1.0, 1.0, -1.0]))
    >>> tokens[torch.tensor([2])].advantages
    tensor([-1.])
    """

    # from the rollouts: where a token was sampled, and how likely it was
    index: Tensor  # int64: of the token, 0 to S-1
    rollout: Tensor  # int64: 0 for the tokens of the first rollout, 1 for the next, ..
    group: Tensor  # int64: equal for the rollouts that one agent played of one task
    sequence: Tensor  # int64: the sequence that has the token: a rollout, or a part of one
    sampler_logprobs: Tensor  # log-prob that the sampler reported, in nats
    # before the first gradient step of the update; with one step they are computed in its pass
    old_logprobs: Tensor  # for the policy
    old_values: Tensor  # the value head's estimate (PPO)
    ref_logprobs: Tensor  # for the reference of --kl-coef
    # from shape_rewards
    turn: Tensor  # int64: the index of the token's turn in the rollout; --credit episode: 0
    rewards: Tensor  # the reward of a turn, at its last token; 0 elsewhere
    discounts: Tensor  # float64: --credit turn: γ at the last token of a turn; else 1
    in_loss: Tensor  # bool: whether the token counts in the loss; by default all do
    # from compute_advantages
    advantages: Tensor
    value_targets: Tensor  # if there is a value head
    # for one gradient step
    token_weights: Tensor  # factor of the token's term in the loss; 0: not in the loss
    # from the forward pass of a micro-batch
    logprobs: Tensor  # with gradient
    entropy: Tensor  # of the policy's distribution from which the token was drawn
    varentropy: Tensor  # the variance of -log π there, whose mean is the entropy
    values: Tensor  # with gradient (PPO)
    sampler_ratio: Tensor  # π_old / π_sampler
    importance_weights: Tensor  # that ratio, capped, or 0 where a token is rejected
    outputs: list[Tensor]  # of the forward pass: logprobs, entropy, values

    def __init__(self, **vectors: Any) -> None:
        vars(self).update(vectors)

    def __getattr__(self, name: str) -> Tensor:  # called only where there is no such vector
        word = f' (Options: needs = {{"{WORDS[name]}"}})' if name in WORDS else ""
        message = f"these tokens have no {name}{word}; they have {', '.join(self.vectors())}"
        raise AttributeError(message, name=name, obj=self)

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def __len__(self) -> int:
        return len(self.rollout)

    def vectors(self) -> dict[str, Tensor]:
        """All vectors by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def __getitem__(self, indices: Tensor | slice) -> "Tokens":
        """The tokens with these indices [n]."""
        return Tokens(**{name: x[indices] for name, x in self.vectors().items()})

    def to(self, device: torch.device) -> "Tokens":
        """The same tokens on another device."""
        return Tokens(**{name: x.to(device) for name, x in self.vectors().items()})

    def add(self, vectors: Mapping[str, Tensor]) -> None:
        """Adds vectors [n] of these tokens, by name."""
        vars(self).update(vectors)


@dataclass
class Turns:
    """The K turns of an update, rollout after rollout.

    With --credit episode (the default of all but PPO) a rollout counts as one turn, so `returns`
    are those of the rollouts.
    """

    returns: Tensor  # [K] float64: discounted return from this turn on, R_k = r_k + γ R_{k+1}
    index: Tensor  # [K] int64: of the turn in its rollout
    peers: Tensor  # [K] int64: equal for turns that are compared: turn k of a group's rollouts
    last_token: Tensor  # [K] int64: the turn's last token; tokens.group[last_token] is [K]
    of_token: Tensor  # [S] int64: the turn of each token; returns[of_token] is [S]


def turns_of(tokens: Tokens) -> Turns:
    """The turns of the sampled tokens. Returns are float64, so that sums round far below ROUNDING.

    >>> tokens = Tokens(rewards=torch.tensor([0.0, 1.0, 4.0]), rollout=torch.tensor([0, 0, 0]),
    ...                 turn=torch.tensor([0, 0, 1]), group=torch.tensor([7, 7, 7]),
    ...                 discounts=torch.tensor([1.0, 0.5, 0.5]).double())
    >>> turns = turns_of(tokens)
    >>> turns.returns, turns.of_token
    (tensor([3., 4.], dtype=torch.float64), tensor([0, 0, 1]))
    """
    _, of_token, lengths = torch.stack([tokens.rollout, tokens.turn]).unique_consecutive(
        dim=1, return_inverse=True, return_counts=True
    )
    last = lengths.cumsum(0) - 1
    rewards = tokens.rewards.double()
    returns = sums(rewards, of_token)
    # rewards that cancel leave a sum that is rounding alone; see `minus`
    returns[returns.abs() <= ROUNDING * sums(rewards.abs(), of_token)] = 0.0
    rollouts, discounts = tokens.rollout[last].tolist(), tokens.discounts[last].tolist()
    for k in reversed(range(len(last) - 1)):
        if rollouts[k] == rollouts[k + 1]:
            returns[k] += discounts[k] * returns[k + 1]
    index = tokens.turn[last]
    _, peers = torch.stack([tokens.group[last], index]).unique(dim=1, return_inverse=True)
    return Turns(returns, index, peers, last, of_token)


def minus(returns: Tensor, baseline: Tensor) -> Tensor:
    """`returns - baseline`, float64; 0 where they differ by rounding only.

    The mean of equal numbers can be off in the last digit, and the rewards 0.1 and 0.2 of two turns
    do not add up to the reward 0.3. Adam, which divides the gradient by its size, would turn such a
    difference into a step of the full learning rate.

    >>> mean = torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64).sum() / 3
    >>> 0.1 - mean.item() == 0, minus(torch.tensor(0.1, dtype=torch.float64), mean).item()
    (False, 0.0)
    """
    difference = returns.double() - baseline.double()
    return torch.where(difference.abs() <= ROUNDING * returns.abs(), 0.0, difference)


def sums(x: Tensor, ids: Tensor) -> Tensor:
    """The sum of `x` [n, ..] for each id in `ids` [n], from 0 to the highest.

    Adds in float64 (float32 on a Mac's GPU), as a GPU adds in an arbitrary order, and sums in
    float32 would differ from run to run.

    >>> sums(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 0, 1]))
    tensor([3., 5.])
    """
    count = int(ids.max()) + 1 if len(ids) else 0
    exact = torch.float32 if x.device.type == "mps" else torch.float64
    zeros = x.new_zeros(count, *x.shape[1:], dtype=exact)
    return zeros.index_add(0, ids, x.to(exact)).type_as(x)


def group_sum(x: Tensor, ids: Tensor) -> Tensor:
    """For each element of `x`, the sum over all elements with the same id in `ids`.

    >>> group_sum(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 0, 1]))
    tensor([3., 3., 5.])
    """
    return sums(x, ids)[ids]


def group_mean(x: Tensor, ids: Tensor) -> Tensor:
    """For each element of `x`, the mean over all elements with the same id in `ids`."""
    return group_sum(x, ids) / group_sum(torch.ones_like(x), ids)


def group_std(x: Tensor, ids: Tensor) -> Tensor:
    """As `group_mean`, the standard deviation of a sample (n-1); 0 for a single element."""
    squares = group_sum(minus(x, group_mean(x, ids)) ** 2, ids)
    return (squares / (group_sum(torch.ones_like(x), ids) - 1).clamp(min=1)).sqrt()


def token_weights(
    tokens: Tokens, rollouts: list[int], aggregation: Aggregation | None, max_tokens: int
) -> Tensor:
    """Weight of each token's term in the loss of one step; the loss is the weighted sum.

        token       1 / tokens in the loss: all count the same      DAPO in verl and TRL (grpo.py)
        sequence    1 / (rollouts · tokens of its rollout)           GRPO, arXiv:2402.03300
        prompt      1 / (groups · tokens of its group in the step)   ScaleRL, arXiv:2510.13786
        constant    1 / (rollouts · max_tokens)                      Dr. GRPO, arXiv:2503.20783

    All counts are of the step: `rollouts` lists its rollouts. Tokens with an advantage of 0 count,
    too; rollouts whose tokens are all left out count in all but `token`. With `sequence` each token
    of a long rollout weighs less, so a long wrong answer is pushed down less per token. With
    `constant` the weight does not depend on the rollout's length; `max_tokens` is the limit of one
    completion, so a rollout of several turns can weigh more than 1 / rollouts.

    Returns [S] of the default dtype, 0 for the tokens of other rollouts and those out of the loss.

    >>> tokens = Tokens(rollout=torch.tensor([0, 0, 1]), in_loss=torch.ones(3) > 0)
    >>> token_weights(tokens, [0, 1], "sequence", 8)
    tensor([0.2500, 0.2500, 0.5000])
    """
    in_step = torch.isin(tokens.rollout, torch.tensor(rollouts))
    counts = (in_step & tokens.in_loss).to(torch.get_default_dtype())  # 1 for tokens that count
    if aggregation == "token":
        return counts / counts.sum().clamp(min=1)
    if aggregation == "sequence":
        return counts / group_sum(counts, tokens.rollout).clamp(min=1) / len(rollouts)
    if aggregation == "prompt":
        num_groups = len(tokens.group[in_step].unique())
        return counts / group_sum(counts, tokens.group).clamp(min=1) / max(1, num_groups)
    return counts / (len(rollouts) * max_tokens)


def normalize(x: Tensor, in_loss: Tensor) -> Tensor:
    """`x` [S] with mean 0 and standard deviation 1 over the tokens in the loss, 0 for the others;
    float64."""
    inside = x[in_loss].double()
    centered = minus(inside, inside.mean())
    result = torch.zeros_like(x, dtype=torch.float64)
    result[in_loss] = centered / (centered.square().mean().sqrt() + 1e-4)
    return result


def surrogate_metrics(
    tokens: Tokens, ratio: Tensor, clip_low: float, clip_high: float, either_sign: bool = False
) -> dict[str, float]:
    """Metrics as sums over the tokens in the loss; the loop divides them by the number of tokens.

    A token counts as clipped if its ratio is above the clip and its advantage positive, or its
    ratio below the clip and its advantage negative: there the clip removes the gradient.
    `either_sign`: whatever the sign of the advantage (CISPO). kl/approx is KL(π_old ‖ π).
    """
    low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
    if not either_sign:
        low, high = low & (tokens.advantages < 0), high & (tokens.advantages > 0)
    kl = kl_estimate(tokens.old_logprobs, tokens.logprobs)
    metrics = {"clip/low_fraction": low, "clip/high_fraction": high, "kl/approx": kl}
    return {name: x[tokens.in_loss].sum().item() for name, x in metrics.items()}
