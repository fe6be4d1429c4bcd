"""Compute each prompt once for all completions of its group, in training.

    one group:  prompt 0 1 2   suffix A: 3 4 5   suffix B: 3 4 5 6     (numbers: position ids)

A suffix is what follows the shared prompt in one sequence, or a whole sequence that shares none.
`pack_groups` puts all prompts and suffixes of a micro-batch into one row, without padding. Only
attention mixes tokens: in `attend`, a token of a prompt attends to that prompt, a token of a suffix
to its prompt and its own suffix, both causally. So the results equal those of separate sequences,
up to rounding. Importing this file registers `attend` with transformers, as ATTENTION.

On a GPU, in 16 bits, FlashAttention computes all parts of different lengths in one call. Elsewhere
they are padded, and a mask says which keys a token of a suffix attends to.
"""

from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "packed_groups"  # value of the model's `_attn_implementation`
# the first versions of varlen_attn need as many heads of keys as of queries
VARLEN_TAKES_GQA = "enable_gqa" in signature(varlen_attn).parameters


@dataclass
class PackedGroups:
    """L tokens: p prompts of at most n tokens each, then b suffixes of at most t tokens each."""

    input_ids: Tensor  # [1, L] int64
    position_ids: Tensor  # [1, L] int64: position of each token in its own sequence
    num_prompts: int  # p
    prompt_of: Tensor  # [b] int64: the prompt of each suffix; 0 for a suffix without a prompt
    suffix_mask: Tensor  # [b, 1, t, n + t] bool: keys that each token of a suffix attends to
    padded_index: Tensor  # [L] int64: place of each token in the p·n + b·t padded ones
    sequence_index: Tensor  # [b, T] int64: place in the L of each token of the b whole sequences
    key_index: Tensor  # [K] int64: places in the L of the keys of each prompt, then of each suffix
    query_ends: Tensor  # [1 + p + b] int32: 0, then where each prompt or suffix ends in the L
    key_ends: Tensor  # [1 + p + b] int32: 0, then where its keys end in the K
    max_queries: int  # of a prompt or suffix
    max_keys: int  # of a prompt or suffix
    additive_mask: Tensor | None = None  # `suffix_mask` as 0 and -inf; see `mask_for`

    def mask_for(self, query: Tensor) -> Tensor:
        """`additive_mask` for all layers; given a bool mask, each would make and keep its own."""
        if self.additive_mask is None:
            zeros = torch.zeros_like(self.suffix_mask, dtype=query.dtype)
            self.additive_mask = zeros.masked_fill_(~self.suffix_mask, -torch.inf)
        return self.additive_mask

    def to(self, device: torch.device | str) -> "PackedGroups":
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return PackedGroups(**(vars(self) | moved))


def pack_groups(prompts: list[list[int]], suffixes: list[tuple[int, list[int]]]) -> PackedGroups:
    """Packs the token ids of prompts and of suffixes.

    A suffix is the index of its prompt in `prompts`, or -1 for no prompt, and its token ids.

    >>> packed = pack_groups([[7, 8]], [(0, [1]), (0, [2, 3])])
    >>> packed.input_ids.tolist(), packed.position_ids.tolist()
    ([[7, 8, 1, 2, 3]], [[0, 1, 2, 2, 3]])
    >>> packed.sequence_index.tolist()  # 0 where a sequence has ended
    [[0, 1, 2, 0], [0, 1, 3, 4]]
    """
    p, b = len(prompts), len(suffixes)
    prompt_lengths = [len(prompts[prompt]) if prompt >= 0 else 0 for prompt, _ in suffixes]
    parts = [*prompts, *(ids for _, ids in suffixes)]
    first_positions = [0] * p + prompt_lengths
    lengths = [len(part) for part in parts]
    n, t = max(lengths[:p], default=0), max(lengths[p:])

    mask = torch.ones(b, 1, t, n + t, dtype=torch.bool).tril(n)
    mask[..., :n] = (torch.arange(n) < torch.tensor(prompt_lengths)[:, None])[:, None, None]
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()  # of each part in the L tokens
    padded_starts = [*range(0, p * n, n or 1), *range(p * n, p * n + b * t, t)]
    sequence_index = [
        _ranges([starts[prompt], starts[p + row]], [prompt_lengths[row], len(ids)])
        for row, (prompt, ids) in enumerate(suffixes)
    ]
    key_counts = [*lengths[:p], *map(len, sequence_index)]
    return PackedGroups(
        input_ids=torch.tensor([[token for part in parts for token in part]]),
        position_ids=_ranges(first_positions, lengths)[None],
        num_prompts=p,
        prompt_of=torch.tensor([max(0, prompt) for prompt, _ in suffixes]),
        suffix_mask=mask,
        padded_index=_ranges(padded_starts, lengths),
        sequence_index=pad_sequence(sequence_index, batch_first=True),
        key_index=torch.cat([torch.arange(starts[p]), *sequence_index]),
        query_ends=torch.tensor(starts, dtype=torch.int32),
        key_ends=torch.tensor([0, *accumulate(key_counts)], dtype=torch.int32),
        max_queries=max(lengths),
        max_keys=max(key_counts),
    )


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, packed: PackedGroups | None = None,
    context: Any = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention with the signature that transformers requires of a registered function.

    `query` [1, H, L, d], `key` and `value` [1, h, L, d] of the tokens of `packed`; returns
    [1, L, H, d]. In sampling, `context`, a SharedPrefixCache, computes the attention.
    With neither, this is sdpa.
    """
    if context is not None:
        return context.attend(cast(int, module.layer_idx), query, key, value, scaling), None
    if packed is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    if takes_varlen(query):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, heads, d]
        # causal: the last query of each part is at its last key
        output = varlen_attn(
            q, k[packed.key_index], v[packed.key_index], packed.query_ends, packed.key_ends,
            packed.max_queries, packed.max_keys, scale=scaling, window_size=(-1, 0),
            enable_gqa=True,
        )  # fmt: skip
        return cast(Tensor, output)[None], None
    if query.is_cuda:  # with a mask, only the slowest kernel takes fewer heads of keys
        heads_per_key = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(heads_per_key, 1) for x in (key, value))
    (prompt_q, q), (prompt_k, k), (prompt_v, v) = (_pad(x, packed) for x in (query, key, value))
    sdpa = partial(scaled_dot_product_attention, scale=scaling, enable_gqa=True)
    outputs = []
    if packed.num_prompts:
        outputs.append(sdpa(prompt_q, prompt_k, prompt_v, is_causal=True))
        k = torch.cat([prompt_k[packed.prompt_of], k], 2)  # [b, h, n + t, d]
        v = torch.cat([prompt_v[packed.prompt_of], v], 2)
    outputs.append(sdpa(q, k, v, attn_mask=packed.mask_for(q)))
    padded = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])
    return padded.index_select(0, packed.padded_index)[None], None


def takes_varlen(query: Tensor) -> bool:
    """Whether FlashAttention for parts of different lengths can compute on `query` [.., d]."""
    if not query.is_cuda or query.dtype.itemsize != 2 or not VARLEN_TAKES_GQA:
        return False
    return query.shape[-1] <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _ranges(starts: list[int], lengths: list[int]) -> Tensor:
    """The concatenation of start, start + 1, .. (length numbers) for each start: int64."""
    return torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])


def _pad(x: Tensor, packed: PackedGroups) -> tuple[Tensor, Tensor]:
    """[1, heads, L, d] -> prompts [p, heads, n, d] and suffixes [b, heads, t, d], padded with 0."""
    (b, _, t, n_plus_t), p = packed.suffix_mask.shape, packed.num_prompts
    n = n_plus_t - t
    x = x[0].transpose(0, 1)  # [L, heads, d]
    x = x.new_zeros(p * n + b * t, *x.shape[1:]).index_copy_(0, packed.padded_index, x)
    prompts, suffixes = x.split([p * n, b * t])
    shape = prompts.shape[1:]
    return prompts.view(p, n, *shape).transpose(1, 2), suffixes.view(b, t, *shape).transpose(1, 2)


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
