"""Rollouts to tensors, tensors to micro-batches.

`to_rollout_batch` lays the sampled tokens of an update out as tensors [B, N]: one row per rollout,
its sampled tokens side by side, padding on the right (N: the most sampled tokens of any rollout).
Prompts are not in there. They are in `sequences`, the token ids that the model computes on:

    rollout 0, one turn     prompt ids | completion ids                          1 sequence
    rollout 1, two turns    prompt ids | completion | new prompt ids | completion    1 sequence

A turn continues the sequence of the turn before it if its prompt begins with that whole sequence;
otherwise it starts a new sequence. So each token is trained in the context that it was sampled in.

`micro_batches` cuts the sequences of some rollouts into micro-batches [b, T] and looks up the
tensors of [B, N] for their tokens: `micro.advantages` is [b, T-1], aligned with the next token.
Sequences with the same prompt share its computation (core/prefix_sharing.py).
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from core import distributed
from core.model import Policy
from core.prefix_sharing import PackedGroups, pack_groups
from core.types import Rollout, Turn


@dataclass
class Sequence:
    """Token ids, and the place of each in the flattened [B, N]; -1 for tokens not sampled."""

    rollout: int  # row in [B, N]
    token_ids: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class TokenTensors:
    """What the training loop knows about each sampled token, in nats or units of reward.

    float32, [B, N] in a RolloutBatch, [b, T-1] in a MicroBatch. None: not computed (yet).
    """

    sampler_logprobs: Tensor | None = None  # log-probs that the sampler reported
    old_logprobs: Tensor | None = None  # of the trainer, under the weights that sampled
    ref_logprobs: Tensor | None = None  # under the reference policy
    values: Tensor | None = None  # PPO's value estimates before the first gradient step
    advantages: Tensor | None = None
    value_targets: Tensor | None = None
    token_weights: Tensor | None = None  # what each token's loss is multiplied by


TOKEN_TENSORS = [tensor.name for tensor in fields(TokenTensors)]


@dataclass(kw_only=True)
class RolloutBatch(TokenTensors):
    """The sampled tokens of one update; tensors [B, N] or [B] on the CPU."""

    sequences: list[Sequence]
    completion_mask: Tensor  # [B, N] bool: True for sampled tokens, False for padding
    rewards: Tensor  # [B, N] float32: the reward of a turn, at its last token
    completion_lengths: Tensor  # [B, N] int64: tokens of a completion, at its last token; else 0
    turn_ids: Tensor  # [B, N] int64: the turn of each token, from 0
    hit_token_limit: Tensor  # [B, N] bool: the completion of this token hit the token limit
    group_ids: Tensor  # [B] int64
    episode_truncated: Tensor  # [B] bool: the episode was truncated before its end

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.completion_mask.sum())

    def loss_mask(self, mask_truncated_completions: bool) -> Tensor:
        """[B, N] bool: the sampled tokens that count in the loss (--mask-truncated-completions)."""
        if mask_truncated_completions:
            return self.completion_mask & ~self.hit_token_limit
        return self.completion_mask


@dataclass(kw_only=True)
class MicroBatch(TokenTensors):
    """b right-padded sequences. Column t of a [b, T-1] tensor is about the token at t+1."""

    input_ids: Tensor  # [b, T] int64
    completion_mask: Tensor  # [b, T-1] bool: True if the next token was sampled
    index: Tensor  # [b, T-1] int64: place of the next token in the flattened [B, N]; 0 off the mask
    packed: PackedGroups | None = None  # the same sequences with each shared prompt once

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.completion_mask.sum())

    def gather(self, values: Tensor) -> Tensor:
        """Looks up [B, N] at the sampled tokens of this micro-batch: [b, T-1], 0 off the mask."""
        found = values.flatten().to(self.index.device)[self.index]
        return torch.where(self.completion_mask, found, 0)

    def scatter(self, values: Tensor, into: Tensor) -> None:
        """Writes [b, T-1] to the places of the sampled tokens in `into` [B, N]."""
        mask = self.completion_mask
        into.view(-1)[self.index[mask].to(into.device)] = values[mask].to(into.device, into.dtype)


def to_rollout_batch(rollouts: list[Rollout]) -> RolloutBatch:
    """Lays out the sampled tokens of `rollouts`.

    Without any sampled token the batch is one row of padding, so that an update without rollouts
    needs no special case: nothing is scored, and no gradient step is taken.
    """
    width = max((rollout.num_tokens for rollout in rollouts), default=0)
    shape = (max(1, len(rollouts)), max(1, width))
    rewards, logprobs = torch.zeros(shape), torch.zeros(shape)
    lengths, turn_ids = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    mask, hit_token_limit = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
    sequences: list[Sequence] = []
    for row, rollout in enumerate(rollouts):
        column = 0
        current: Sequence | None = None
        for number, turn in enumerate(rollout.turns):
            if current is None or turn.prompt_ids[: len(current.token_ids)] != current.token_ids:
                current = Sequence(row)
                sequences.append(current)
            context = turn.prompt_ids[len(current.token_ids) :]
            end = column + len(turn.completion_ids)
            current.token_ids += context + turn.completion_ids
            current.places += [-1] * len(context)
            current.places += range(row * width + column, row * width + end)
            mask[row, column:end] = True
            logprobs[row, column:end] = torch.tensor(turn.sampler_logprobs)
            rewards[row, end - 1] = turn.reward
            lengths[row, end - 1] = end - column
            turn_ids[row, column:end] = number
            hit_token_limit[row, column:end] = turn.finish_reason == "length"
            column = end
    return RolloutBatch(
        sequences=sequences,
        completion_mask=mask,
        rewards=rewards,
        completion_lengths=lengths,
        turn_ids=turn_ids,
        hit_token_limit=hit_token_limit,
        sampler_logprobs=logprobs,
        group_ids=torch.tensor([r.group_id for r in rollouts] or [0]),
        episode_truncated=torch.tensor([r.episode_truncated for r in rollouts] or [False]),
    )


def largest_batch(max_length: int, max_tokens: int) -> RolloutBatch:
    """As many rollouts of `max_length` dummy tokens as one micro-batch of `max_tokens` holds."""
    count = max(1, max_tokens // max_length) * distributed.num_ranks()
    turn = Turn([0], [0] * (max_length - 1), [0.0] * (max_length - 1), "length")
    return to_rollout_batch([Rollout("", "", 0, 0, turns=[turn]) for _ in range(count)])


def minibatches(
    num_rollouts: int, num_epochs: int, num_minibatches: int, seed: int
) -> Iterator[tuple[int, list[int]]]:
    """(epoch, rows to train on) of each gradient step; an epoch splits all rows at random.

    >>> list(minibatches(4, num_epochs=2, num_minibatches=1, seed=0))
    [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3])]
    """
    rng, parts = random.Random(seed), min(num_minibatches, num_rollouts)
    edges = [round(i * num_rollouts / parts) for i in range(parts + 1)] if parts else []
    for epoch in range(num_epochs):
        rows = list(range(num_rollouts))
        if parts > 1:
            rng.shuffle(rows)
        for start, end in itertools.pairwise(edges):
            yield epoch, sorted(rows[start:end])


def micro_batches(
    policy: Policy, batch: RolloutBatch, rows: list[int] | None = None
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of the rollouts `rows` (None: all), with their token tensors.

    Each has at most `policy.micro_batch_tokens` tokens, padding included; a longer sequence has a
    micro-batch of its own. A prompt that several sequences share counts once.
    """
    chosen = batch.sequences
    if rows is not None:
        wanted = set(rows)
        chosen = [sequence for sequence in chosen if sequence.rollout in wanted]
    mine = distributed.shard(chosen, length)
    for micro in cut(mine, policy.micro_batch_tokens, policy.device, policy.packs_groups):
        for name in TOKEN_TENSORS:
            values = getattr(batch, name)
            setattr(micro, name, None if values is None else micro.gather(values))
        yield micro


def cut(
    sequences: list[Sequence],
    max_tokens: int,
    device: torch.device | str = "cpu",
    pack: bool = False,
) -> Iterator[MicroBatch]:
    """Cuts sequences, longest first, into micro-batches of at most `max_tokens` tokens.

    With `pack`, sequences that share their prompt are packed: the prompt counts once, and there
    is no padding.
    """
    if pack:
        for groups in _bundles(sequences, max_tokens):
            micro = _pad([sequence for group in groups for sequence in group], device)
            micro.packed = _pack(groups).to(device)
            yield micro
        return
    ordered = sorted(sequences, key=lambda sequence: -length(sequence))
    start = 0
    while start < len(ordered):
        size = max(1, max_tokens // length(ordered[start]))
        yield _pad(ordered[start : start + size], device)
        start += size


def length(sequence: Sequence) -> int:
    """Number of tokens, prompts and completions."""
    return len(sequence.token_ids)


def _pad(sequences: list[Sequence], device: torch.device | str) -> MicroBatch:
    width = max(map(length, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    places = torch.full((len(sequences), width), -1)
    for row, sequence in enumerate(sequences):
        ids[row, : length(sequence)] = torch.tensor(sequence.token_ids)
        places[row, : length(sequence)] = torch.tensor(sequence.places)
    mask = places[:, 1:] >= 0  # the causal shift: position t predicts token t+1
    index = places[:, 1:].clamp(min=0)
    return MicroBatch(
        input_ids=ids.to(device), completion_mask=mask.to(device), index=index.to(device)
    )


def _prompt_length(sequence: Sequence) -> int:
    """Number of tokens before the first sampled one."""
    return next(i for i, place in enumerate(sequence.places) if place >= 0)


def _bundles(sequences: list[Sequence], max_tokens: int) -> Iterator[list[list[Sequence]]]:
    """Micro-batches as lists of groups; the sequences of a group share their prompt.

    Groups with the longest sequences come first. A group that fits is not split.
    """
    groups: dict[tuple[int, ...], list[Sequence]] = {}
    for sequence in sorted(sequences, key=lambda sequence: -length(sequence)):
        prompt = tuple(sequence.token_ids[: _prompt_length(sequence)])
        groups.setdefault(prompt, []).append(sequence)
    bundle: list[list[Sequence]] = []
    room = max_tokens
    for prompt, group in groups.items():
        for part in _split(group, len(prompt), max_tokens):
            size = len(prompt) + sum(length(sequence) - len(prompt) for sequence in part)
            if bundle and size > room:
                yield bundle
                bundle, room = [], max_tokens
            bundle.append(part)
            room -= size
    if bundle:
        yield bundle


def _split(group: list[Sequence], prompt: int, max_tokens: int) -> Iterator[list[Sequence]]:
    """Splits a group into as few parts as fit; each part computes the prompt's tokens once."""
    part: list[Sequence] = []
    room = max_tokens - prompt
    for sequence in group:
        suffix = length(sequence) - prompt
        if part and suffix > room:
            yield part
            part, room = [], max_tokens - prompt
        part.append(sequence)
        room -= suffix
    yield part


def _pack(groups: list[list[Sequence]]) -> PackedGroups:
    """A group of one sequence has no prompt to share: the whole sequence is the suffix."""
    prompts: list[list[int]] = []
    suffixes: list[tuple[int, list[int]]] = []  # (prompt, or -1 for none; token ids)
    for group in groups:
        shared = _prompt_length(group[0]) if len(group) > 1 else 0
        if shared:
            prompts.append(group[0].token_ids[:shared])
        number = len(prompts) - 1 if shared else -1
        suffixes += [(number, sequence.token_ids[shared:]) for sequence in group]
    return pack_groups(prompts, suffixes)
