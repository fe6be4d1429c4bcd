"""An evening on sampling, 3 of 3. Keys and values of all layers, and the logits of the next token.

A row is a distinct prefix: a prompt and the tokens sampled after it. Completions that are equal so
far are one row, which splits when their next tokens differ:

    cache = prefill(policy, prompts, max_new_tokens=64)    # a row for each distinct prompt
    cache.logits                # [U, V]: logits of the token after each row
    cache.select([0, 0, 2])     # row 0 becomes two rows, row 1 is dropped
    cache.append(token_ids)     # [U]: one token per row; then `logits` are those of the next token

`SharedPrefixCache` stores each prompt once, for all its rows. It serves the models that compute
trees of prefixes (core/prefix_sharing.py). Others get a `RepeatedPrefixCache`.

Shapes: U rows (distinct prefixes), Q prompts, T tokens of the longest prompt, V vocabulary; in a
layer, H heads of queries, h <= H heads of keys and values (grouped queries), d the width of a head.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from inspect import signature
from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers import DynamicCache

from core.policy import Policy
from core.prefix_sharing import look_up, make_tree

KeysAndValues = tuple[Tensor, Tensor]  # of one layer


def prefill(
    policy: Policy, prompts: list[list[int]], max_new_tokens: int
) -> "SharedPrefixCache | RepeatedPrefixCache":
    """Computes Q distinct prompts, a row for each.

    `max_new_tokens`: how many tokens `append` will add to a row.
    """
    model, device = policy.causal_lm, policy.device
    # left padding: all prompts end in the last column, where their completions begin
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = max(map(len, prompts))
    mask = torch.arange(longest, device=device) >= longest - lengths[:, None]  # [Q, T]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    if policy.shares_prefixes:
        tree = make_tree(prompts).to(device)
        node_kv: dict[int, KeysAndValues] = {}  # by layer, of the nodes of the tree
        decoder = model.get_decoder()
        hidden = decoder(**tree.inputs(), use_cache=False, node_kv=node_kv).last_hidden_state[0]
        nodes = tree.nodes.gather(1, positions)  # [Q, T]
        layers = [node_kv[layer] for layer in sorted(node_kv)]
        prompt_kv = [(look_up(nodes, k), look_up(nodes, v)) for k, v in layers]
        logits = policy.to_logits(hidden[nodes[:, -1]])
        return SharedPrefixCache(model, prompt_kv, mask, logits, max_new_tokens)
    padded = [[policy.end_of_turn_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    cache = DynamicCache(config=model.config)  # some models mix kinds of layers
    logits = model(
        input_ids=torch.tensor(padded, device=device),
        attention_mask=mask.long(),
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **{cache_argument(model): cache},
    ).logits[:, -1]
    return RepeatedPrefixCache(model, cache, mask.long(), logits)


def cache_argument(model: Any) -> str:
    """The name of the cache among the arguments of `forward`; transformers 5.24 renamed it."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


class RepeatedPrefixCache:
    """The cache of transformers: every row has a copy of its prompt's keys and values."""

    def __init__(self, model: Any, cache: DynamicCache, mask: Tensor, logits: Tensor):
        """`cache`, `mask` [Q, T] int64 and `logits` [Q, V] of Q prompts, a row each."""
        self.model, self.cache, self.mask, self.logits = model, cache, mask, logits

    def append(self, token_ids: Tensor) -> None:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.logits = self.model(
            input_ids=token_ids[:, None],
            attention_mask=self.mask,
            position_ids=self.mask.sum(1, keepdim=True) - 1,
            use_cache=True,
            **{cache_argument(self.model): self.cache},
        ).logits[:, -1]

    def select(self, rows: Tensor) -> None:
        self.cache.reorder_cache(cast(LongTensor, rows))
        self.mask = self.mask[rows]


class SharedPrefixCache:
    """Keys and values of Q prompts, and of the tokens of U rows; each row continues one prompt.

    Attention to a prompt is one matrix product for all its rows. For it `_by_prompt` puts the rows
    of a prompt side by side, and `_by_row` takes them apart again. W is the largest number of rows
    of a prompt. With Q = 2, U = 3, W = 2, where rows 0 and 2 continue prompt 0, row 1 prompt 1:

        prompt_of      [U]       [0, 1, 0]
        row_table      [Q, W]    [[0, 2], [1, 0]]    the rows of each prompt; padded with row 0
        table_index    [U]       [0, 2, 1]           where in row_table.flatten() each row is

        queries        [U, h, H/h, d]        for each row, those of the heads that share keys
        _by_prompt     [Q, h, W · H/h, d]    prompt 0: queries of rows 0 and 2; prompt 1: of 1 and 0
        @ prompt keys  [Q, h, d, T]     ->   scores [Q, h, W · H/h, T]
        _by_row        [U, h, H/h, T]        the copy of row 0 under prompt 1 is left out
    """

    def __init__(
        self, model: Any, prompt_kv: list[KeysAndValues], mask: Tensor, logits: Tensor,
        max_new_tokens: int,
    ):  # fmt: skip
        """`prompt_kv` of each layer [Q, h, T, d], `mask` [Q, T] bool, `logits` [Q, V]; U is Q."""
        self.model, self.logits = model, logits
        self.prompt_of = torch.arange(len(mask), device=mask.device)  # [U]
        self.width = 0  # tokens appended to each row
        self.position = mask.sum(1) - 1  # [U]
        self.padding = None if mask.all() else ~mask[:, None, None]  # [Q, 1, 1, T]
        self.prompt_kv = [(k.transpose(2, 3).contiguous(), v.contiguous()) for k, v in prompt_kv]
        _, kv_heads, _, head_dim = prompt_kv[0][1].shape
        shape = (len(mask), kv_heads, max_new_tokens, head_dim)
        self.row_kv = [(v.new_empty(shape), v.new_empty(shape)) for _, v in prompt_kv]
        self._index_rows()

    def append(self, token_ids: Tensor) -> None:
        self.position = self.position + 1
        self.logits = self.model(
            input_ids=token_ids[:, None],
            # `attend` uses no mask; given one of four axes, transformers does not make its own
            attention_mask=token_ids.new_ones(1, 1, 1, 1, dtype=torch.bool),
            position_ids=self.position[:, None],
            use_cache=False,
            context=self,  # transformers passes it to prefix_sharing.attend, which calls `attend`
        ).logits[:, -1]
        self.width += 1

    def select(self, rows: Tensor) -> None:
        self.position = self.position[rows]
        for layer, (k, v) in enumerate(self.row_kv):  # frees the old tensors layer by layer
            self.row_kv[layer] = self._copies(k, rows), self._copies(v, rows)
        prompts, self.prompt_of = torch.unique(self.prompt_of[rows], return_inverse=True)
        if len(prompts) < len(self.row_table):  # some prompt has no row left
            self.prompt_kv = [(k[prompts], v[prompts]) for k, v in self.prompt_kv]
            self.padding = None if self.padding is None else self.padding[prompts]
        self._index_rows()

    def _copies(self, x: Tensor, rows: Tensor) -> Tensor:
        """`x[rows]`; copies only the tokens that were appended."""
        copies = x.new_empty(len(rows), *x.shape[1:])
        copies[:, :, : self.width] = x[rows, :, : self.width]
        return copies

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Attends from the appended tokens to their prompts and rows: [U, 1, H, d].

        `query` [U, H, 1, d]; `key` and `value` [U, h, 1, d].
        """
        row_keys, row_values = self.row_kv[layer]
        width = self.width + 1  # with the appended token
        row_keys[:, :, width - 1 : width] = key
        row_values[:, :, width - 1 : width] = value
        num_rows, heads, _, head_dim = query.shape
        kv_heads = key.shape[1]
        q = (query * scaling).view(num_rows, kv_heads, heads // kv_heads, head_dim)
        prompt_keys, prompt_values = self.prompt_kv[layer]  # [Q, h, d, T], [Q, h, T, d]
        prompt_scores = self._by_prompt(q) @ prompt_keys
        if self.padding is not None:
            prompt_scores = prompt_scores.masked_fill(self.padding, -torch.inf)
        prompt_scores = self._by_row(prompt_scores)  # [U, h, H/h, T]
        row_scores = q @ row_keys[:, :, :width].transpose(2, 3)
        scores = torch.cat([prompt_scores, row_scores], -1)
        weights = scores.softmax(-1, torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        prompt_length = prompt_values.shape[2]
        out = self._by_row(self._by_prompt(weights[..., :prompt_length]) @ prompt_values)
        out = out + weights[..., prompt_length:] @ row_values[:, :, :width]
        return out.reshape(num_rows, 1, heads, head_dim)

    def _index_rows(self) -> None:
        """Sets `row_table`, `table_index` and `in_order` from `prompt_of`."""
        num_prompts, device = len(self.prompt_kv[0][1]), self.prompt_of.device
        counters: dict[int, Iterator[int]] = defaultdict(itertools.count)
        columns = [next(counters[prompt]) for prompt in self.prompt_of.tolist()]
        width = max(columns) + 1
        self.table_index = self.prompt_of * width + torch.tensor(columns, device=device)
        rows = torch.arange(len(columns), device=device)
        self.row_table = rows.new_zeros(num_prompts, width)
        self.row_table.view(-1)[self.table_index] = rows
        # whole groups in order: moving between the layouts needs no copy
        self.in_order = torch.equal(self.row_table.view(-1), rows)

    def _by_prompt(self, x: Tensor) -> Tensor:
        """[U, h, H/h, ·] -> [Q, h, W · H/h, ·]"""
        x = x.unflatten(0, self.row_table.shape) if self.in_order else x[self.row_table]
        return x.transpose(1, 2).flatten(2, 3)

    def _by_row(self, x: Tensor) -> Tensor:
        """[Q, h, W · H/h, ·] -> [U, h, H/h, ·]"""
        x = x.unflatten(2, (self.row_table.shape[1], -1)).transpose(1, 2).flatten(0, 1)
        return x if self.in_order else x[self.table_index]
