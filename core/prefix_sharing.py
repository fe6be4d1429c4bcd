"""A group as a tree: its prompt computed once, followed by each of its completions.

    prompt  a a a  b b b b        a sees the prompt and a; b the prompt and b; all only backwards
    0 1 2   3 4 5  3 4 5 6        positions, as in a sequence alone

All tokens of a micro-batch stand in one row, without padding, and everything in a decoder layer but
attention takes each token by itself. `attend` is the attention: each prompt within itself; each
branch, which is what follows the prompt in one sequence, over its prompt and itself. So it is the
same mathematics, with fewer tokens. Where no prompt is shared, a sequence is a branch of nothing.

The function is registered with transformers under the name TREES; without a tree it is their sdpa.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

TREES = "trees"


@dataclass
class PackedGroups:
    """L tokens: those of p prompts, at most n each, and then of b branches, at most t each."""

    input_ids: Tensor  # [1, L] int64
    position_ids: Tensor  # [1, L] int64: where the token stands in its sequence
    num_prompts: int  # p
    prompt_of: Tensor  # [b] int64: the prompt that a branch follows
    mask: Tensor  # [b, 1, t, n + t] bool: what a branch's token attends to
    padded: Tensor  # [L] int64: where a token stands once prompts and branches are padded
    places: Tensor  # [b, T] int64: where the tokens of whole sequences stand in the L

    def to(self, device: torch.device | str) -> "PackedGroups":
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return PackedGroups(**(vars(self) | moved))


def pack_groups(prompts: list[list[int]], branches: list[tuple[int, list[int]]]) -> PackedGroups:
    """The tree of some prompts and of branches (number of its prompt or -1 for none, its ids).

    >>> tree = pack_groups([[7, 8]], [(0, [1]), (0, [2, 3])])
    >>> tree.input_ids.tolist(), tree.position_ids.tolist()
    ([[7, 8, 1, 2, 3]], [[0, 1, 2, 2, 3]])
    >>> tree.places.tolist()
    [[0, 1, 2, 0], [0, 1, 3, 4]]
    """
    shared = [len(prompts[number]) if number >= 0 else 0 for number, _ in branches]
    parts = [*prompts, *(ids for _, ids in branches)]
    starts = [0, *(0 for _ in prompts[1:]), *shared] if prompts else shared
    lengths = torch.tensor([len(part) for part in parts])
    begins = lengths.cumsum(0) - lengths
    positions = torch.cat([torch.arange(s, s + len(x)) for s, x in zip(starts, parts, strict=True)])
    p, b = len(prompts), len(branches)
    n, t = max(map(len, prompts), default=0), int(lengths[p:].max())

    number = torch.tensor([number for number, _ in branches])
    reach = torch.tensor(shared)  # tokens of its prompt that a branch sees
    mask = torch.ones(b, 1, t, n + t, dtype=torch.bool)
    mask[..., :n] = (torch.arange(n) < reach[:, None])[:, None, None]
    mask[..., n:] = torch.ones(t, t, dtype=torch.bool).tril()

    padded = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    places = torch.zeros(b, int((reach + lengths[p:]).max()), dtype=torch.int64)
    for row, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
        flat = row * n if row < p else p * n + (row - p) * t
        padded[begin : begin + length] = flat + torch.arange(length)
        if row >= p:
            before = shared[row - p]
            places[row - p, :before] = begins[number[row - p]] + torch.arange(before)
            places[row - p, before : before + length] = begin + torch.arange(length)
    ids = torch.tensor([[token for part in parts for token in part]])
    return PackedGroups(ids, positions[None], p, number.clamp(min=0), mask, padded, places)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    tree: PackedGroups | None = None,
    context: Any = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it: query [1, H, L, d], key and value [1, h, L, d] of the
    tokens of `tree`; returns [1, L, H, d].

    In sampling, `context` (kv_cache.SharedPrefixCache) attends. Without either, it is sdpa.
    """
    if context is not None:
        return context.attend(module.layer_idx, query, key, value, scaling), None
    if tree is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    (q_p, q), (k_p, k), (v_p, v) = (_padded(x, tree) for x in (query, key, value))
    pieces = []
    if tree.num_prompts:
        pieces.append(scaled_dot_product_attention(
            q_p, k_p, v_p, is_causal=True, scale=scaling, enable_gqa=True
        ))  # fmt: skip
        k = torch.cat([k_p[tree.prompt_of], k], 2)  # [b, h, n + t, d]
        v = torch.cat([v_p[tree.prompt_of], v], 2)
    pieces.append(scaled_dot_product_attention(
        q, k, v, attn_mask=tree.mask, scale=scaling, enable_gqa=True
    ))  # fmt: skip
    out = torch.cat([piece.transpose(1, 2).flatten(0, 1) for piece in pieces])
    return out.index_select(0, tree.padded)[None], None


def _padded(x: Tensor, tree: PackedGroups) -> tuple[Tensor, Tensor]:
    """[1, heads, L, d] -> prompts [p, heads, n, d] and branches [b, heads, t, d], padded with 0."""
    (b, _, t, n_and_t), p = tree.mask.shape, tree.num_prompts
    n = n_and_t - t
    x = x[0].transpose(0, 1)  # [L, heads, d]
    x = x.new_zeros(p * n + b * t, *x.shape[1:]).index_copy_(0, tree.padded, x)
    prompts, branches = x.split([p * n, b * t])
    shape = prompts.shape[1:]
    return prompts.view(p, n, *shape).transpose(1, 2), branches.view(b, t, *shape).transpose(1, 2)


AttentionInterface.register(TREES, attend)
AttentionMaskInterface.register(TREES, sdpa_mask)
