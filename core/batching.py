"""Rollouts to micro-batches.

All that is known of an update's sampled tokens lives in tensors [B, N]: one row for each of the B
rollouts, its sampled tokens side by side (N: the most of any rollout), nothing else. A micro-batch
is [b, T] tokens in their contexts, and says with `index` where each sampled token stands in [B, N]:

    rows(advantages, batch)              # [B, N] -> [b, T-1], 0 off the mask
    put(values, batch, into=all_values)  # [b, T-1] -> [B, N]

Turn i+1 goes on in the sequence of turn i when its prompt begins with turn i's prompt and
completion, and starts a new sequence when it doesn't; so each token is trained in the context that
it was sampled in.

With `trees`, sequences of a micro-batch that open alike share the opening (core/prefix_sharing.py).
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core import distributed
from core.prefix_sharing import PackedGroups, pack_groups
from core.types import Rollout, Turn


@dataclass
class Sequence:
    """Token ids, and for each its place in the flattened [B, N], or -1 where it wasn't sampled."""

    rollout: int  # its row in [B, N]
    token_ids: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


@dataclass
class MicroBatch:
    """One micro-batch: b right-padded sequences; T-1 because the first token is never predicted."""

    input_ids: Tensor  # [b, T] int64
    completion_mask: Tensor  # [b, T-1] bool: the *next* token was sampled
    index: Tensor  # [b, T-1] int64: place of the next token in the flattened [B, N]; 0 off the mask
    tree: PackedGroups | None = None  # None: every prompt is computed with each of its completions

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens in the micro-batch."""
        return int(self.completion_mask.sum())


@dataclass
class RolloutBatch:
    """What the rollouts of one update brought, as tensors of [B, N] or [B] on the CPU."""

    sequences: list[Sequence]
    mask: Tensor  # [B, N] bool: sampled tokens are to the left, padding to the right
    rewards: Tensor  # [B, N] float32: each turn's reward stands on its last token
    lengths: Tensor  # [B, N] int64: so does the length of its completion; 0 elsewhere
    turn_ids: Tensor  # [B, N] int64: which turn of its rollout, from 0
    hit_token_limit: Tensor  # [B, N] bool: of a completion that ran into the token limit
    sampler_logprobs: Tensor  # [B, N] float32, nats
    group_ids: Tensor  # [B] int64
    episode_truncated: Tensor  # [B] bool: cut, not ended

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens of the update: what is trained on, each once."""
        return int(self.mask.sum())


def to_rollout_batch(rollouts: list[Rollout]) -> RolloutBatch:
    """Lay the rollouts out. Raises ValueError if there is no sampled token at all."""
    width = max((rollout.num_tokens for rollout in rollouts), default=0)
    if width == 0:
        raise ValueError("no rollout has a sampled token")
    shape = (len(rollouts), width)
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
        sequences,
        mask,
        rewards,
        lengths,
        turn_ids,
        hit_token_limit,
        logprobs,
        group_ids=torch.tensor([rollout.group_id for rollout in rollouts]),
        episode_truncated=torch.tensor([rollout.episode_truncated for rollout in rollouts]),
    )


def longest_update(longest: int, tokens: int) -> RolloutBatch:
    """As many sequences of `longest` tokens as a micro-batch of `tokens` takes, of no meaning."""
    count = max(1, tokens // longest) * distributed.num_ranks()
    turn = Turn([0], [0] * (longest - 1), [0.0] * (longest - 1), "length")
    return to_rollout_batch([Rollout("", "", 0, 0, turns=[turn]) for _ in range(count)])


def minibatches(num_rollouts: int, epochs: int, count: int, seed: int) -> list[list[int]]:
    """The rows to learn from at each step: in each epoch all of them, in `count` random parts.

    >>> minibatches(4, epochs=2, count=1, seed=0)
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    rng, parts = random.Random(f"minibatches {seed}"), min(count, num_rollouts)
    edges = [round(i * num_rollouts / parts) for i in range(parts + 1)]
    steps = []
    for _ in range(epochs):
        rows = list(range(num_rollouts))
        if parts > 1:
            rng.shuffle(rows)
        steps += [sorted(rows[a:b]) for a, b in itertools.pairwise(edges)]
    return steps


def micro_batches(
    sequences: list[Sequence],
    max_tokens: int,
    device: torch.device | str = "cpu",
    trees: bool = False,
) -> Iterator[MicroBatch]:
    """Cut the sequences, longest first, into batches of at most `max_tokens` tokens.

    A sequence longer than that gets a batch of its own. Padding counts; with `trees` there is none,
    and a prompt counts once for all of its sequences in the batch.
    """
    if trees:
        for bundle in _bundles(sequences, max_tokens):
            batch = _pad([sequence for part in bundle for sequence in part], device)
            batch.tree = _tree(bundle).to(device)
            yield batch
        return
    ordered = sorted(sequences, key=lambda sequence: -length(sequence))
    start = 0
    while start < len(ordered):
        size = max(1, max_tokens // length(ordered[start]))
        yield _pad(ordered[start : start + size], device)
        start += size


def length(sequence: Sequence) -> int:
    return len(sequence.token_ids)


def longest(sequences: list[Sequence]) -> int:
    """Tokens of the longest sequence."""
    return max(map(length, sequences), default=0)


def rows(values: Tensor, batch: MicroBatch) -> Tensor:
    """Look up [B, N] at a micro-batch's sampled tokens: [b, T-1], 0 off the mask."""
    found = values.flatten().to(batch.index.device)[batch.index]
    return torch.where(batch.completion_mask, found, 0)


def put(values: Tensor, batch: MicroBatch, into: Tensor) -> None:
    """Write a micro-batch's [b, T-1] to where its sampled tokens stand in `into` [B, N]."""
    mask = batch.completion_mask
    into.view(-1)[batch.index[mask].to(into.device)] = values[mask].to(into.device, into.dtype)


def _pad(sequences: list[Sequence], device: torch.device | str) -> MicroBatch:
    width = max(len(sequence.token_ids) for sequence in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    places = torch.full((len(sequences), width), -1)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence.token_ids)] = torch.tensor(sequence.token_ids)
        places[row, : len(sequence.places)] = torch.tensor(sequence.places)
    mask = places[:, 1:] >= 0  # the causal shift: position t predicts token t+1
    index = places[:, 1:].clamp(min=0)
    return MicroBatch(ids.to(device), mask.to(device), index.to(device))


def _opening(sequence: Sequence) -> int:
    """Tokens before the first one that was sampled."""
    return next(i for i, place in enumerate(sequence.places) if place >= 0)


def _bundles(sequences: list[Sequence], max_tokens: int) -> Iterator[list[list[Sequence]]]:
    """Micro-batches, each a list of parts that share their opening; the longest parts first."""
    groups: dict[tuple[int, ...], list[Sequence]] = {}
    for sequence in sorted(sequences, key=lambda sequence: -length(sequence)):
        prompt = tuple(sequence.token_ids[: _opening(sequence)])
        groups.setdefault(prompt, []).append(sequence)
    bundle: list[list[Sequence]] = []
    room = max_tokens
    for prompt, group in groups.items():
        for part in _parts(group, len(prompt), max_tokens):
            size = len(prompt) + sum(length(sequence) - len(prompt) for sequence in part)
            if bundle and size > room:  # a group that fits whole is not torn apart
                yield bundle
                bundle, room = [], max_tokens
            bundle.append(part)
            room -= size
    if bundle:
        yield bundle


def _parts(group: list[Sequence], shared: int, max_tokens: int) -> Iterator[list[Sequence]]:
    """A group in as few parts as fit, the shared opening counted once in each."""
    part: list[Sequence] = []
    room = max_tokens - shared
    for sequence in group:
        own = length(sequence) - shared
        if part and own > room:
            yield part
            part, room = [], max_tokens - shared
        part.append(sequence)
        room -= own
    yield part


def _tree(bundle: list[list[Sequence]]) -> PackedGroups:
    """A part of one sequence has nothing to share: it is a branch from its first token on."""
    prompts: list[list[int]] = []
    branches: list[tuple[int, list[int]]] = []
    for part in bundle:
        shared = _opening(part[0]) if len(part) > 1 else 0
        if shared:
            prompts.append(part[0].token_ids[:shared])
        number = len(prompts) - 1 if shared else -1
        branches += [(number, sequence.token_ids[shared:]) for sequence in part]
    return pack_groups(prompts, branches)
