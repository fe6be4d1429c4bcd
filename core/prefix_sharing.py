"""An evening on prefixes, 2 of 2. Each distinct prefix is computed once.

The sequences of an update begin alike. All have the chat template, the completions of a group have
its prompt, and many completions begin with the same tokens, or are equal. A hidden state depends
only on the tokens up to its own, so sequences that begin alike have the same ones: each distinct
prefix needs one. The prefixes form a tree. Each is a node, numbered depth first:

    sequences    a b c d     a b c e f     a b g           12 tokens, 7 nodes

    nodes        a0 ─ b1 ─┬─ c2 ─┬─ d3
                          │      └─ e4 ─ f5
                          └─ g6

Only attention mixes tokens: each attends to its ancestors and itself. In this order the descendants
of a node follow it without a gap, so a comparison of numbers says who sees whom:

    node i attends to node j if j <= i < end of j       here the ends are 7 7 6 4 6 6 7

and a block of consecutive nodes needs no keys but its own and those of the ancestors of its first
node. So `attend` computes the queries in blocks, at the cost of short sequences, not of one row of
U tokens. On a GPU, in 16 bits, FlashAttention computes the chains of new nodes, one per sequence.

The results equal those of separate sequences, up to rounding. Importing this file registers
`attend` with transformers, as ATTENTION.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding, pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "prefix_tree"  # value of the model's `_attn_implementation`
MIN_BLOCK = 64  # queries; larger blocks compute more that is masked, smaller ones look up more keys
# the first versions of varlen_attn need as many heads of keys as of queries
VARLEN_TAKES_GQA = "enable_gqa" in signature(varlen_attn).parameters


@dataclass
class PrefixTree:
    """The U distinct prefixes of Q sequences of at most T tokens. Integers are int64."""

    input_ids: Tensor  # [1, U]: the last token of each prefix
    position_ids: Tensor  # [1, U]: number of tokens before it
    nodes: Tensor  # [Q, T]: the node of each token of each sequence; 0 where it has ended
    ends: Tensor  # [U]: one more than the last descendant of each node
    block: int  # queries in each block; the last has padding
    ancestors: Tensor  # [blocks, m]: of the first node of each block; U where there is no more
    key_index: Tensor  # for FlashAttention: the nodes of each sequence that has new ones, in a row
    query_ends: Tensor  # int32: 0, then where the new nodes of each of these sequences end in the U
    key_ends: Tensor  # int32: 0, then where each of these sequences ends in `key_index`
    max_queries: int  # of new nodes of a sequence
    max_keys: int  # of tokens of a sequence
    blocks: tuple[Tensor, Tensor] | None = None  # see `keys_and_mask`

    def __len__(self) -> int:
        """Number of nodes."""
        return self.input_ids.shape[1]

    def inputs(self) -> dict[str, Any]:
        """Arguments of a decoder of transformers, which passes `tree` on to `attend`."""
        unused = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.ends.device)
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": unused,  # 4-D: transformers builds no mask of its own
            "tree": self,
        }

    def keys_and_mask(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For each block: the nodes [blocks, m] of its keys, and a mask [blocks, 1, block, m].

        It is 0 where a query sees a key, else -inf. All layers share this float mask.
        """
        if self.blocks is None:
            length, device = len(self), self.ends.device
            queries = torch.arange(len(self.ancestors) * self.block, device=device)
            queries = queries.view(-1, self.block)
            keys = torch.cat([self.ancestors, queries], 1)  # [blocks, m]
            ends = pad(self.ends, (0, queries.numel() - length + 1))  # 0 where there is no node
            i, j, end = queries[..., None], keys[:, None], ends[keys][:, None]
            sees = (j <= i) & (i < end) | (i >= length)  # padding sees all: nothing would give NaN
            mask = torch.zeros(sees.shape, dtype=dtype, device=device)
            self.blocks = keys.clamp(max=length - 1), mask.masked_fill_(~sees, -torch.inf)[:, None]
        return self.blocks

    def to(self, device: torch.device | str) -> "PrefixTree":
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return PrefixTree(**(vars(self) | moved))


def make_tree(sequences: Sequence[list[int]], min_block: int = MIN_BLOCK) -> PrefixTree:
    """The tree of the prefixes of token ids. A block has at least a quarter of the longest one.

    >>> tree = make_tree([[7, 8, 1, 2], [7, 8, 1, 3, 4], [7, 8, 5]])
    >>> tree.input_ids.tolist(), tree.position_ids.tolist()
    ([[7, 8, 1, 2, 3, 4, 5]], [[0, 1, 2, 3, 3, 4, 2]])
    >>> tree.nodes.tolist()
    [[0, 1, 2, 3, 0], [0, 1, 2, 4, 5], [0, 1, 6, 0, 0]]
    >>> tree.ends.tolist()
    [7, 7, 6, 4, 6, 6, 7]
    """
    tokens: list[int] = []
    positions: list[int] = []
    paths: dict[int, Tensor] = {}  # the nodes of each sequence
    path = torch.zeros(0, dtype=torch.int64)
    previous: list[int] = []
    block = max(min_block, max(map(len, sequences)) // 4)
    ancestors: list[Tensor] = []
    chains: list[tuple[Tensor, int]] = []  # of sequences with new nodes: all nodes, number of new
    # in sorted order a sequence shares most with the one before it
    for i in sorted(range(len(sequences)), key=sequences.__getitem__):
        ids, start = sequences[i], len(tokens)
        shared = num_shared(previous, ids)
        tokens += ids[shared:]
        positions += range(shared, len(ids))
        paths[i] = path = torch.cat([path[:shared], torch.arange(start, len(tokens))])
        for first in range(start + -start % block, len(tokens), block):  # of a block
            ancestors.append(path[: shared + first - start])
        if len(tokens) > start:
            chains.append((path, len(tokens) - start))
        previous = ids
    int32 = partial(torch.tensor, dtype=torch.int32)
    ends = torch.zeros(len(tokens), dtype=torch.int64)
    for i in paths:  # still sorted: the last sequence of a node ends in its last descendant
        ends[paths[i]] = paths[i][-1] + 1
    return PrefixTree(
        input_ids=torch.tensor([tokens]),
        position_ids=torch.tensor([positions]),
        nodes=pad_sequence([paths[i] for i in range(len(paths))], batch_first=True),
        ends=ends,
        block=min(block, len(tokens)),
        ancestors=pad_sequence(ancestors, batch_first=True, padding_value=len(tokens)),
        key_index=torch.cat([nodes for nodes, _ in chains]),
        query_ends=int32([0, *accumulate(new for _, new in chains)]),
        key_ends=int32([0, *accumulate(len(nodes) for nodes, _ in chains)]),
        max_queries=max(new for _, new in chains),
        max_keys=max(len(nodes) for nodes, _ in chains),
    )


def parts(sequences: Sequence[list[int]], max_nodes: int) -> Iterator[list[int]]:
    """Indices of the sequences, in parts whose trees have at most `max_nodes` nodes each.

    A longer sequence is a part of its own, with those that begin it.

    >>> list(parts([[1, 2, 3], [4, 5], [1, 2, 4], [1, 2]], max_nodes=4))
    [[3, 0, 2], [1]]
    """
    part: list[int] = []
    room, previous = max_nodes, list[int]()
    for i in sorted(range(len(sequences)), key=sequences.__getitem__):
        ids = sequences[i]
        new = len(ids) - num_shared(previous, ids)
        if part and new > room:
            yield part
            part, room, new = [], max_nodes, len(ids)
        part.append(i)
        room, previous = room - new, ids
    if part:
        yield part


def num_shared(a: list[int], b: list[int]) -> int:
    """Number of equal tokens at the beginning of two lists."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    tree: PrefixTree | None = None,
    node_kv: dict[int, tuple[Tensor, Tensor]] | None = None,
    context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature that transformers requires of a registered function.

    `query` [1, H, U, d], `key` and `value` [1, h, U, d] of the nodes of `tree`; returns
    [1, U, H, d], and puts key and value into `node_kv`, by layer. In sampling, `context`, a
    SharedPrefixCache, computes the attention. With neither, this is sdpa.
    """
    if context is not None:
        return context.attend(cast(int, module.layer_idx), query, key, value, scaling), None
    if tree is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    if node_kv is not None:
        node_kv[cast(int, module.layer_idx)] = key, value
    varlen = takes_varlen(query)
    # on a GPU, with a mask, only the slowest kernel takes fewer heads of keys
    must_repeat = not VARLEN_TAKES_GQA if varlen else query.is_cuda
    if must_repeat:
        heads_per_key = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(heads_per_key, 1) for x in (key, value))
    if varlen:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [U, heads, d]
        options: dict[str, Any] = {"enable_gqa": True} if VARLEN_TAKES_GQA else {}
        # causal: the last query of each sequence is at its last key
        output = varlen_attn(
            q, k[tree.key_index], v[tree.key_index], tree.query_ends, tree.key_ends,
            tree.max_queries, tree.max_keys, scale=scaling, window_size=(-1, 0), **options,
        )  # fmt: skip
        return cast(Tensor, output)[None], None
    keys, mask = tree.keys_and_mask(query.dtype)
    q = pad(query[0], (0, 0, 0, len(keys) * tree.block - len(tree)))
    q = q.unflatten(1, (-1, tree.block)).transpose(0, 1)  # [blocks, H, block, d]
    output = scaled_dot_product_attention(
        q, look_up(keys, key), look_up(keys, value), mask, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).flatten(0, 1)[None, : len(tree)], None


def look_up(nodes: Tensor, x: Tensor) -> Tensor:
    """The keys or values [1, h, U, d] of `nodes` [blocks, m]: [blocks, h, m, d]."""
    _, heads, _, width = x.shape
    rows = embedding(nodes, x[0].transpose(0, 1).flatten(1))  # its gradient is fast, on a CPU too
    return rows.unflatten(-1, (heads, width)).transpose(1, 2)


def takes_varlen(query: Tensor) -> bool:
    """Whether FlashAttention for parts of different lengths can compute on `query` [.., d]."""
    if not query.is_cuda or query.dtype.itemsize != 2:
        return False
    return query.shape[-1] <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
