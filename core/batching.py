"""The afternoon, 6 of 9. Rollouts to tokens, tokens to micro-batches.

`to_tokens` numbers the sampled tokens of an update, rollout after rollout, and makes vectors [S] of
them. Prompts are in `sequences`, the token ids that the model computes on:

    rollout 0, one turn     prompt ids | completion ids                          1 sequence
    rollout 1, two turns    prompt ids | completion | new prompt ids | completion    1 sequence

A turn is appended to the longest sequence of its rollout that its prompt starts with. If there is
none, it begins one. So each token is trained in the context that it was sampled in. For example:

    token_ids    p0 p1 a b c      a prompt of two tokens, a completion of three
    indices      -1 -1 5 6 7      -1: not sampled

`micro_batches` cuts sequences into micro-batches, each with the indices [n] of the tokens that were
sampled in it. `batch[micro.indices]` has the vectors of these tokens.

The model computes `input_ids`, a row for each sequence; or, where it can, as `tiny` does, each
distinct prefix once: update 1 of the default run has 128 sequences of up to 55 tokens, and 831
prefixes (`tree`, core/prefix_sharing.py). No value changes beyond rounding.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from algorithms.tokens import Tokens
from core import distributed
from core.config import Config
from core.faults import UsageError
from core.policy import Policy
from core.prefix_sharing import PrefixTree, make_tree, parts
from core.seeds import MINIBATCHES, derive_seed
from core.types import Rollout, Turn


@dataclass(eq=False)
class Sequence:
    """Token ids that the model computes on, and the index of each that was sampled, else -1."""

    rollout: int
    token_ids: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)  # those whose completions are in the sequence

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, context: list[int], turn: Turn, first: int) -> None:
        """Appends tokens that were not sampled, and a completion, numbered from `first`."""
        sampled = turn.completion_ids
        self.token_ids += context + sampled
        self.indices += [-1] * len(context) + [*range(first, first + len(sampled))]
        self.turns.append(turn)


class Batch(Tokens):
    """The S sampled tokens of an update, on the CPU, with their rollouts and sequences.

    Beside the vectors that algorithms read, it has those that `shape_rewards` computes them from.
    """

    rollouts: list[Rollout]
    sequences: list[Sequence]
    advantage_metrics: dict[str, float]  # by name, from compute_advantages
    env_rewards: Tensor  # the environment's, of a turn at its last token; 0 elsewhere
    env_turn: Tensor  # int64: the index of the token's turn
    completion_lengths: Tensor  # int64: tokens of a completion, at its last token; else 0
    hit_token_limit: Tensor  # bool: the completion of this token hit the token limit

    def __getitem__(self, indices: Tensor | slice) -> Tokens:
        """The tokens with these indices [n], with the vectors that a loss may read."""
        readable = {name: x for name, x in self.vectors().items() if name not in BEFORE_ADVANTAGES}
        return Tokens(**readable)[indices]

    def write(self, name: str, indices: Tensor, values: Tensor) -> None:
        """Sets a vector at the tokens with these indices; where nothing was written it is 0."""
        vars(self).setdefault(name, torch.zeros(len(self)))[indices] = values.cpu()

    def sum_over_ranks(self, name: str) -> None:
        """Completes a vector: each rank has written the tokens of its own sequences."""
        distributed.all_reduce_sum([vars(self).setdefault(name, torch.zeros(len(self)))])


BEFORE_ADVANTAGES = {*Batch.__annotations__, "discounts"}  # no loss reads them
# vectors that the loop computes; `compute_advantages` may not return others by these names
RESERVED = {*Tokens.__annotations__, *Batch.__annotations__} - {"advantages", "value_targets"}


@dataclass(kw_only=True)
class MicroBatch:
    """Q sequences, right-padded, and the n sampled tokens in them, sequence after sequence."""

    sequences: list[Sequence]
    input_ids: Tensor  # [Q, T] int64
    tree: PrefixTree | None  # the distinct prefixes, which are computed in place of `input_ids`
    indices: Tensor  # [n] int64, on the CPU: of the sampled tokens
    predictors: Tensor  # [n] int64: for each sampled token the hidden state that predicts it
    targets: Tensor  # [n] int64: the ids of the sampled tokens
    kept_ids: list[list[int] | None] | None  # [n]: Completion.kept_ids of each; None: all ids


def to_tokens(rollouts: list[Rollout]) -> Batch:
    """Numbers the sampled tokens of `rollouts`."""
    sequences: list[Sequence] = []
    table = defaultdict[str, list](list)  # a list for each vector [S]
    for rollout_index, rollout in enumerate(rollouts):
        of_rollout: list[Sequence] = []
        for turn_index, turn in enumerate(rollout.turns):
            prompt, count = turn.prompt_ids, len(turn.completion_ids)
            continued = [s for s in of_rollout if prompt[: len(s)] == s.token_ids]
            if not continued:
                continued = [Sequence(rollout_index)]
                of_rollout += continued
            sequence = max(continued, key=len)
            sequence.extend(prompt[len(sequence) :], turn, first=len(table["rollout"]))
            table["rollout"] += [rollout_index] * count
            table["group"] += [rollout.group_id] * count
            table["sequence"] += [len(sequences) + of_rollout.index(sequence)] * count
            table["env_turn"] += [turn_index] * count
            table["hit_token_limit"] += [turn.finish_reason == "length"] * count
            table["completion_lengths"] += [0] * (count - 1) + [count]
            table["env_rewards"] += [0.0] * (count - 1) + [float(turn.reward)]
            table["sampler_logprobs"] += turn.sampler_logprobs
        sequences += of_rollout
    vectors = {name: torch.tensor(table[name], dtype=dtype) for name, dtype in VECTORS.items()}
    vectors["index"] = torch.arange(len(vectors["rollout"]))
    return Batch(rollouts=rollouts, sequences=sequences, advantage_metrics={}, **vectors)


VECTORS = {
    "rollout": torch.int64,
    "group": torch.int64,
    "sequence": torch.int64,
    "env_turn": torch.int64,
    "hit_token_limit": torch.bool,
    "completion_lengths": torch.int64,
    "env_rewards": torch.float32,
    "sampler_logprobs": torch.float32,
}  # the vectors that `to_tokens` makes


def shape_rewards(cfg: Config, batch: Batch) -> None:
    """Sets the vectors that `compute_advantages` reads: rewards, turn, discounts (γ) and in_loss.

    With --credit episode (the default of all but PPO) rewards are discounted here, from the
    episode's start (by default γ is 1), and all tokens belong to turn 0, so REINFORCE and GRPO
    credit each token with the episode's return.
    """
    batch.in_loss = ~(batch.hit_token_limit & cfg.mask_truncated_completions)
    batch.discounts = torch.ones(len(batch), dtype=torch.float64)
    if cfg.credit == "turn":
        batch.rewards, batch.turn = batch.env_rewards, batch.env_turn
        batch.discounts[batch.completion_lengths > 0] = cfg.gamma
    else:
        batch.rewards = batch.env_rewards * cfg.gamma**batch.env_turn
        batch.turn = torch.zeros_like(batch.env_turn)


def add_advantages(batch: Batch, returned: Tensor | dict[str, Tensor | float]) -> None:
    """Adds what `compute_advantages` has returned: the advantages [S], or a dict with them.

    Further tensors [S] are for `compute_loss`, numbers for the log. Raises UsageError.
    """
    named: dict[str, Any] = {"advantages": None}  # which stays None if a dict lacks them
    named |= returned if isinstance(returned, dict) else {"advantages": returned}
    for name, value in named.items():
        if name in RESERVED:
            raise UsageError(f"compute_advantages: {name} is a vector of the loop: rename yours")
        is_number = type(value) in (int, float) or getattr(value, "shape", None) == ()
        if is_number and name != "advantages":
            batch.advantage_metrics[name] = float(value)
        elif not isinstance(value, Tensor) or value.shape != batch.rollout.shape:
            shape = [*getattr(value, "shape", [type(value).__name__])]
            raise UsageError(
                f"compute_advantages: {name} has the shape {shape}, not [{len(batch)}], a tensor "
                "with a number for each sampled token (algorithms/README.md)"
            )
        else:
            batch.add({name: value.float() if value.is_floating_point() else value})


def minibatches(cfg: Config, num_rollouts: int, update: int) -> Iterator[tuple[int, list[int]]]:
    """Yields (epoch, places of the rollouts in the batch) for each gradient step of an update.

    Each epoch splits all rollouts at random.

    >>> list(minibatches(Config(num_epochs=2), 4, update=1))
    [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3])]
    """
    rng = random.Random(derive_seed(cfg.seed, MINIBATCHES, update))
    count = min(cfg.num_minibatches, num_rollouts)
    edges = [round(i * num_rollouts / count) for i in range(count + 1)] if count else []
    for epoch in range(cfg.num_epochs):
        rollouts = list(range(num_rollouts))
        if count > 1:
            rng.shuffle(rollouts)
        for start, end in itertools.pairwise(edges):
            yield epoch, sorted(rollouts[start:end])


def micro_batches(
    policy: Policy, batch: Batch, rollouts: list[int] | None = None
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of the rollouts at these places in the batch (None: all).

    Each has at most `policy.micro_batch_tokens` tokens to compute; a longer sequence has a
    micro-batch of its own. Rollouts whose advantages are all 0 get micro-batches of their own,
    which by default need no backward pass.
    """
    places = set(range(len(batch.rollouts)) if rollouts is None else rollouts)
    with_gradient = places
    if "advantages" in batch:
        with_gradient = places & set(batch.rollout[batch.advantages != 0].tolist())
    for part in (with_gradient, places - with_gradient):
        sequences = [sequence for sequence in batch.sequences if sequence.rollout in part]
        yield from cut(distributed.shard(sequences, len), policy)


def cut(sequences: list[Sequence], policy: Policy) -> Iterator[MicroBatch]:
    """Cuts sequences into micro-batches: as trees if prefixes are shared, else longest first."""
    if policy.shares_prefixes:
        ids = [sequence.token_ids for sequence in sequences]
        for part in parts(ids, policy.micro_batch_tokens):
            tree = make_tree([ids[i] for i in part])
            yield _micro([sequences[i] for i in part], policy.device, tree)
        return
    ordered = sorted(sequences, key=len, reverse=True)
    start = 0
    while start < len(ordered):
        size = max(1, policy.micro_batch_tokens // len(ordered[start]))
        yield _micro(ordered[start : start + size], policy.device, None)
        start += size


def _micro(sequences: list[Sequence], device: torch.device, tree: PrefixTree | None) -> MicroBatch:
    ids = pad_sequence([torch.tensor(s.token_ids) for s in sequences], batch_first=True)
    indices = pad_sequence(
        [torch.tensor(s.indices) for s in sequences], batch_first=True, padding_value=-1
    )
    # [Q, T]: the place of each token's hidden state among the U that are computed
    nodes = tree.nodes if tree else torch.arange(ids.numel()).view(ids.shape)
    # the causal shift: the state at t predicts the token at t+1
    rows, columns = (indices[:, 1:] >= 0).nonzero(as_tuple=True)  # [n] and [n]
    kept_ids: list[list[int] | None] = []
    for sequence in sequences:  # in the order of the tokens
        for turn in sequence.turns:
            kept_ids += turn.kept_ids or [None] * len(turn.completion_ids)
    return MicroBatch(
        sequences=sequences,
        input_ids=ids.to(device),
        tree=tree and tree.to(device),
        indices=indices[rows, columns + 1],
        predictors=nodes[rows, columns].to(device),
        targets=ids[rows, columns + 1].to(device),
        kept_ids=kept_ids if any(kept_ids) else None,
    )
