"""What TorchSampler's completions stand on while they are written: keys and values of all layers.

`SharedPrefixCache`, for the models that train on packed groups, keeps the keys and values of each
prompt once, however many completions follow it. Other models get `RepeatedPrefixCache`: the cache
of transformers, with a copy of the prompt for every completion.

    context = make_context(policy, prompts, room=64)
    context.logits                    # [R, V], of the token after each of R prompts
    context.write(token_ids)          # [R]; then context.logits are of the token after that
    context.keep(rows)                # go on with these only
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from core.model import Policy


def make_context(
    policy: Policy, prompts: list[list[int]], room: int
) -> "SharedPrefixCache | RepeatedPrefixCache":
    """Prefill; each distinct prompt is computed once. `room`: most tokens that will be written."""
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    width, device = max(map(len, number)), policy.device
    # left padding: all prompts end where their completions begin
    padded = [[policy.end_of_turn_id] * (width - len(p)) + list(p) for p in number]
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in number], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache()
    logits = policy.causal_lm(
        input_ids=torch.tensor(padded, device=device),
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    prompt_of = [number[tuple(prompt)] for prompt in prompts]
    kind = SharedPrefixCache if policy.packs_groups else RepeatedPrefixCache
    return kind(policy.causal_lm, cache, mask, positions[:, -1], logits, prompt_of, room)


class RepeatedPrefixCache:
    """Every row has a copy of its prompt's keys and values; any model."""

    def __init__(
        self, model: Any, cache: DynamicCache, mask: Tensor, position: Tensor, logits: Tensor,
        prompt_of: list[int], room: int,
    ):  # fmt: skip
        of = torch.tensor(prompt_of, device=logits.device)
        cache.batch_select_indices(of)
        self.model, self.cache, self.mask = model, cache, mask[of]
        self.position, self.logits = position[of], logits[of]

    def write(self, token_ids: Tensor) -> None:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.position = self.position + 1
        self.logits = self.model(
            input_ids=token_ids[:, None],
            attention_mask=self.mask,
            position_ids=self.position[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.mask, self.position = self.mask[rows], self.position[rows]


class SharedPrefixCache:
    """P prompts once, and R rows of their own, each behind one of them.

    Attention to the prompt is one matrix product for all rows of a prompt: `grid` [P, W] has their
    numbers, W the most of any prompt, and `place` [R] says where in it a row is.
    """

    def __init__(
        self, model: Any, cache: DynamicCache, mask: Tensor, position: Tensor, logits: Tensor,
        prompt_of: list[int], room: int,
    ):  # fmt: skip
        self.model, self.step = model, 0
        self.prompt_of = torch.tensor(prompt_of, device=logits.device)
        self.position, self.logits = position[self.prompt_of], logits[self.prompt_of]
        self.padding = None if mask.all() else (mask == 0)[:, None, None]  # [P, 1, 1, n]
        layers: list[Any] = cache.layers
        self.prompts = [(x.keys.transpose(2, 3).contiguous(), x.values) for x in layers]
        _, kv_heads, _, d = layers[0].values.shape
        shape = (len(prompt_of), kv_heads, room, d)
        self.own = [(v.new_empty(shape), v.new_empty(shape)) for _, v in self.prompts]
        self._lay_out()

    def write(self, token_ids: Tensor) -> None:
        self.position = self.position + 1
        self.logits = self.model(
            input_ids=token_ids[:, None],
            attention_mask=token_ids.new_ones(1, 1, 1, 1, dtype=torch.bool),  # or one is made
            position_ids=self.position[:, None],
            use_cache=False,
            context=self,
        ).logits[:, -1]
        self.step += 1

    def keep(self, rows: Tensor) -> None:
        self.position = self.position[rows]
        self.own = [(k[rows], v[rows]) for k, v in self.own]
        used, self.prompt_of = torch.unique(self.prompt_of[rows], return_inverse=True)
        if len(used) < len(self.grid):
            self.prompts = [(k[used], v[used]) for k, v in self.prompts]
            self.padding = None if self.padding is None else self.padding[used]
        self._lay_out()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Query [R, H, 1, d], key and value [R, h, 1, d] of the token written now: [R, 1, H, d]."""
        (own_keys, own_values), now = self.own[layer], self.step
        own_keys[:, :, now : now + 1], own_values[:, :, now : now + 1] = key, value
        (rows, heads, _, d), kv_heads = query.shape, key.shape[1]
        q = (query * scaling).view(rows, kv_heads, heads // kv_heads, d)
        keys, values = self.prompts[layer]  # [P, h, d, n], [P, h, n, d]
        to_prompt = self._across(q) @ keys
        if self.padding is not None:
            to_prompt = to_prompt.masked_fill(self.padding, -torch.inf)
        to_prompt = self._back(to_prompt)  # [R, h, H/h, n]
        to_own = q @ own_keys[:, :, : now + 1].transpose(2, 3)
        weights = torch.cat([to_prompt, to_own], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        n = values.shape[2]
        out = self._back(self._across(weights[..., :n]) @ values)
        out = out + weights[..., n:] @ own_values[:, :, : now + 1]
        return out.reshape(rows, 1, heads, d)

    def _lay_out(self) -> None:
        columns = [0] * len(self.prompts[0][1])
        places = []
        for prompt in self.prompt_of.tolist():
            places.append((prompt, columns[prompt]))
            columns[prompt] += 1
        width, device = max(columns), self.prompt_of.device
        flat = [p * width + c for p, c in places]
        self.place = torch.tensor(flat, device=device)
        grid = torch.zeros(len(columns) * width, dtype=torch.int64, device=device)
        grid[self.place] = torch.arange(len(flat), device=device)
        self.grid = grid.view(len(columns), width)
        self.in_order = flat == list(range(len(grid)))  # whole groups side by side: nothing to move

    def _across(self, x: Tensor) -> Tensor:
        """[R, h, r, k] -> [P, h, W · r, k]."""
        x = x.unflatten(0, self.grid.shape) if self.in_order else x[self.grid]
        return x.transpose(1, 2).flatten(2, 3)

    def _back(self, x: Tensor) -> Tensor:
        """[P, h, W · r, k] -> [R, h, r, k]."""
        x = x.unflatten(2, (self.grid.shape[1], -1)).transpose(1, 2).flatten(0, 1)
        return x if self.in_order else x[self.place]
