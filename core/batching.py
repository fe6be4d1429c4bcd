"""An evening on episodes, 3 of 3. Rollouts to tensors, tensors to micro-batches.

`to_rollout_batch` makes tensors [B, N]: one row per rollout, its sampled tokens side by side,
padded on the right. Prompts are in `sequences`, the token ids that the model computes on:

    rollout 0, one turn     prompt ids | completion ids                          1 sequence
    rollout 1, two turns    prompt ids | completion | new prompt ids | completion    1 sequence

A turn is appended to the longest sequence of its rollout that its prompt starts with. If there is
none, it begins one. So each token is trained in the context that it was sampled in.

`micro_batches` cuts sequences into micro-batches [b, T] and looks up the values [B, N] of their
tokens: `micro.advantages` is [b, T-1], aligned with the next token. It finds a token by its place
in the flattened [B, N], row · N + column. For example in row 1 of a batch with N = 5:

    token_ids    p0 p1 a b c      a prompt of two tokens, a completion of three
    places       -1 -1 5 6 7      -1: not sampled; -2: nor that, but predicted by --algo echo

Where the model allows it, as `tiny` does, sequences that begin alike share the computation of what
they share (core/prefix_sharing.py): `tree` changes no value beyond rounding.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from algorithms.common import NOT_YET, Batch, Micro
from algorithms.kl import kl_estimate
from algorithms.token_logprobs import Compare
from core import distributed
from core.config import Config
from core.faults import UsageError
from core.policy import Policy
from core.prefix_sharing import PrefixTree, make_tree, parts
from core.types import Kept, Rollout, Turn


@dataclass
class Sequence:
    """What the model computes on: token ids, and the place of each in the flattened [B, N]."""

    rollout: int  # row in [B, N]
    token_ids: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def begins(self, prompt: list[int]) -> bool:
        """Whether `prompt` goes on with this whole sequence."""
        end = len(self.token_ids)
        return prompt[end - 1 : end] == self.token_ids[-1:] and prompt[:end] == self.token_ids


OBSERVED = -2  # the place of a token that the environment wrote: core/observations.py
# What a micro-batch looks up of its batch
TENSORS = "loss_mask turn_ids rewards sampler_logprobs old_logprobs ref_logprobs values".split()
TENSORS += "advantages value_targets token_weights".split()


@dataclass(kw_only=True)
class RolloutBatch(Batch):
    """The sampled tokens of one update; tensors [B, N] or [B] on the CPU."""

    sequences: list[Sequence]
    env_rewards: Tensor  # [B, N]: the environment's, of a turn at its last token; 0 elsewhere
    turns: Tensor  # [B, N] int64: the number of the token's turn
    completion_lengths: Tensor  # [B, N] int64: tokens of a completion, at its last token; else 0
    hit_token_limit: Tensor  # [B, N] bool: the completion of this token hit the token limit
    env_reward_parts: Tensor  # [B, M] float64: see Batch.reward_parts
    # place of a token in the flattened [B, N] -> the ids that could be drawn (Completion.kept_ids)
    kept_ids: dict[int, Kept] = field(default_factory=dict)
    # place of a turn's first token -> the turn with other tokens before it: core/feedback.py
    feedback: dict[int, Sequence] = field(default_factory=dict)


@dataclass(kw_only=True)
class MicroBatch(Micro):
    """b right-padded sequences. Column t of a [b, T-1] tensor is about the token at t+1."""

    input_ids: Tensor  # [b, T] int64
    index: Tensor  # [b, T-1] int64: place of the next token in the flattened [B, N]; 0 off the mask
    rows: list[int]  # of [B, N]: the rollout of each sequence
    nodes: Tensor  # [b, T] int64: place of each token's hidden state among those computed
    tree: PrefixTree | None = None  # what is computed; None: `input_ids`, padding included
    kept_ids: list[Kept | None] | None = None  # of each sampled token, row by row; None: all ids
    teacher: Compare | None = None  # core/feedback.py
    observed: Tensor = NOT_YET  # [b, T-1] bool: the next token has the place OBSERVED

    def gather(self, values: Tensor) -> Tensor:
        """Looks up [B, N] at the sampled tokens of this micro-batch: [b, T-1], 0 off the mask."""
        return values.flatten()[self.index].masked_fill(~self.completion_mask, 0)

    def scatter(self, values: Tensor, into: Tensor) -> None:
        """Writes [b, T-1] to the places of the sampled tokens in `into` [B, N]."""
        mask = self.completion_mask
        into.view(-1)[self.index[mask].to(into.device)] = values[mask].to(into.device, into.dtype)


def to_rollout_batch(rollouts: list[Rollout]) -> RolloutBatch:
    """Lays out the sampled tokens of `rollouts`; without any, the batch is one row of padding."""
    width = max((rollout.num_tokens for rollout in rollouts), default=0)
    shape = (max(1, len(rollouts)), max(1, width))
    logprobs = torch.zeros(shape)
    named = [rollout.reward_parts for rollout in rollouts]
    names = sorted({name for row in named for name in row})
    values = [[row.get(name, (math.nan, 0.0)) for name in names] for row in named]
    reward_parts = torch.tensor(values, dtype=torch.float64).view(shape[0], len(names), 2)
    batch = RolloutBatch(
        sequences=[],
        completion_mask=torch.zeros(shape, dtype=torch.bool),
        sampler_logprobs=logprobs,
        env_rewards=torch.zeros(shape),
        completion_lengths=torch.zeros(shape, dtype=torch.int64),
        turns=torch.zeros(shape, dtype=torch.int64),
        hit_token_limit=torch.zeros(shape, dtype=torch.bool),
        group_ids=torch.tensor([r.group_id for r in rollouts] or [0]),
        env_reward_parts=reward_parts[..., 0],
        reward_weights=reward_parts[..., 1],
    )
    for row, rollout in enumerate(rollouts):
        column, begun = 0, list[Sequence]()
        for number, turn in enumerate(rollout.turns):
            prompt = turn.prompt_ids
            current = max((s for s in begun if s.begins(prompt)), key=len, default=None)
            if current is None:
                begun.append(current := Sequence(row))
            context = prompt[len(current.token_ids) :]
            end = column + len(turn.completion_ids)
            current.token_ids += context + turn.completion_ids
            current.places += [-1] * len(context)
            current.places += range(row * width + column, row * width + end)
            batch.completion_mask[row, column:end] = True
            logprobs[row, column:end] = torch.tensor(turn.sampler_logprobs)
            batch.env_rewards[row, end - 1] = turn.reward
            batch.completion_lengths[row, end - 1] = end - column
            batch.turns[row, column:end] = number
            batch.hit_token_limit[row, column:end] = turn.finish_reason == "length"
            for place, kept in enumerate(turn.kept_ids or [], row * width + column):
                batch.kept_ids[place] = kept
            if other := turn.feedback_ids:
                places = [-1] * len(other) + [*range(row * width + column, row * width + end)]
                taught = Sequence(row, other + turn.completion_ids, places)
                batch.feedback[places[len(other)]] = taught
            column = end
        batch.sequences += begun
    return batch


def shape_rewards(cfg: Config, batch: RolloutBatch) -> None:
    """Sets what `compute_advantages` reads: rewards with penalties, turns, loss mask, γ.

    With --credit episode (the default of all but PPO) rewards are discounted here, from the
    episode's start (by default γ is 1), and all tokens belong to turn 0, so REINFORCE and GRPO
    credit each token with the episode's return. The KL of --kl-in reward is subtracted if the
    batch has the log-probs of the reference.
    """
    batch.gamma = cfg.gamma
    batch.loss_mask = batch.completion_mask & ~(
        batch.hit_token_limit & cfg.mask_truncated_completions
    )
    rewards = cfg.reward_coef * batch.env_rewards
    if cfg.overlong_buffer:
        # soft overlong punishment, DAPO eq. 13: 0 up to --overlong-buffer before the limit, then
        # down to -1; lengths are at the last token of each turn, 0 elsewhere
        beyond = batch.completion_lengths - (cfg.max_tokens - cfg.overlong_buffer)
        rewards = rewards + -(beyond / cfg.overlong_buffer).clamp(0, 1)
    if cfg.kl_in == "reward" and batch.ref_logprobs is not None:
        kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, cfg.kl_estimator)
        rewards = rewards - cfg.kl_coef * kl
    if cfg.credit == "episode":
        rewards = rewards * cfg.gamma**batch.turns
    batch.rewards = rewards
    batch.turn_ids = batch.turns * (cfg.credit != "episode")
    batch.reward_parts = cfg.reward_coef * batch.env_reward_parts


def add_advantages(batch: Batch, found: Tensor | dict[str, Tensor | float]) -> None:
    """Keeps what `compute_advantages` returned: the advantages [B, N], or a dict with them.

    Further tensors [B, N] are for `compute_loss`, numbers for the log. Raises UsageError.
    """
    found = found if isinstance(found, dict) else {"advantages": found}
    if not isinstance(found.get("advantages"), Tensor):
        raise UsageError("compute_advantages must return the advantages, a tensor [B, N], or a "
                         'dict {"advantages": .., ..}')  # fmt: skip
    shape = batch.completion_mask.shape
    for name, value in found.items():
        if not isinstance(value, Tensor) or not value.dim():
            batch.metrics[name] = float(value)
        elif value.shape != shape:
            raise UsageError(f"compute_advantages: {name} has the shape {[*value.shape]}, not that "
                             f"of batch.completion_mask, {[*shape]}")  # fmt: skip
        elif name in TENSORS:
            setattr(batch, name, value)
        else:
            batch.own[name] = value


def largest_batch(max_length: int, max_tokens: int, vocab_size: int) -> RolloutBatch:
    """As many rollouts of `max_length` tokens, none shared, as one micro-batch holds."""
    count = max(1, max_tokens // max_length) * distributed.num_ranks()
    rest = [0] * (max_length - 1)
    turns = [Turn([i % vocab_size], rest, [0.0] * len(rest), "length") for i in range(count)]
    return to_rollout_batch([Rollout("", "", 0, 0, turns=[turn]) for turn in turns])


def minibatches(
    num_rollouts: int, num_epochs: int, num_minibatches: int, seed: int
) -> Iterator[tuple[int, list[int]]]:
    """(epoch, rows to train on) of each gradient step; an epoch splits all rows at random.

    >>> list(minibatches(4, num_epochs=2, num_minibatches=1, seed=0))
    [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3])]
    """
    rng, count = random.Random(seed), min(num_minibatches, num_rollouts)
    edges = [round(i * num_rollouts / count) for i in range(count + 1)] if count else []
    for epoch in range(num_epochs):
        rows = list(range(num_rollouts))
        if count > 1:
            rng.shuffle(rows)
        for start, end in itertools.pairwise(edges):
            yield epoch, sorted(rows[start:end])


def micro_batches(
    policy: Policy, batch: RolloutBatch, rows: list[int] | None = None
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of the rollouts `rows` (None: all), with their token tensors.

    Each has at most `policy.micro_batch_tokens` tokens to compute; a longer sequence has a
    micro-batch of its own. Rollouts without an advantage have theirs, which need no backward pass.
    """
    wanted = set(range(len(batch.completion_mask)) if rows is None else rows)
    known = {name: getattr(batch, name) for name in TENSORS}
    known = {name: x.to(policy.device) for name, x in known.items() if x is not None}
    own = {name: x.to(policy.device) for name, x in batch.own.items()}
    sequences = [sequence for sequence in batch.sequences if sequence.rollout in wanted]
    num_observed = sum(sequence.places.count(OBSERVED) for sequence in sequences)  # of the step
    by_gradient = [sequences]
    if batch.advantages is not None:
        alive = batch.advantages.ne(0).any(1).tolist()
        by_gradient = [
            [s for s in sequences if alive[s.rollout] == moves] for moves in (True, False)
        ]
    for chosen in by_gradient:
        mine = distributed.shard(chosen, len)
        for micro in cut(mine, policy.micro_batch_tokens, policy.device, policy.shares_prefixes):
            for name, values in known.items():
                setattr(micro, name, micro.gather(values))
            micro.own = {name: micro.gather(values) for name, values in own.items()}
            micro.group_ids = batch.group_ids[micro.rows].to(policy.device)
            if num_observed:
                micro.observation_weights = micro.observed / num_observed
            micro.kept_ids = kept_in(batch, micro)
            yield micro


def kept_in(batch: RolloutBatch, micro: MicroBatch) -> list[Kept | None] | None:
    """The ids that each sampled token of a micro-batch was drawn from; None: all ids."""
    if not batch.kept_ids:
        return None
    places = micro.index[micro.completion_mask].tolist()
    return [batch.kept_ids.get(place) for place in places]


def cut(
    sequences: list[Sequence],
    max_tokens: int,
    device: torch.device | str = "cpu",
    share: bool = False,
) -> Iterator[MicroBatch]:
    """Cuts sequences into micro-batches of `max_tokens`; `share`: as trees, else longest first."""
    if share:
        ids = [sequence.token_ids for sequence in sequences]
        for part in parts(ids, max_tokens):
            micro = _pad([sequences[i] for i in part], device)
            micro.tree = make_tree([ids[i] for i in part]).to(device)
            micro.nodes = micro.tree.nodes
            yield micro
        return
    ordered = sorted(sequences, key=len, reverse=True)
    start = 0
    while start < len(ordered):
        size = max(1, max_tokens // len(ordered[start]))
        yield _pad(ordered[start : start + size], device)
        start += size


def _pad(sequences: list[Sequence], device: torch.device | str) -> MicroBatch:
    ids = pad_sequence([torch.tensor(s.token_ids) for s in sequences], batch_first=True)
    places = pad_sequence(
        [torch.tensor(s.places) for s in sequences], batch_first=True, padding_value=-1
    )[:, 1:].to(device)  # the causal shift: position t predicts token t+1
    return MicroBatch(
        input_ids=ids.to(device), completion_mask=places >= 0, index=places.clamp(min=0),
        rows=[s.rollout for s in sequences], observed=places == OBSERVED,
        nodes=torch.arange(ids.numel(), device=device).view(ids.shape),
    )  # fmt: skip
