"""Sampling: the `Sampler` interface, and `TorchSampler`, which samples in plain PyTorch.

`TorchSampler` computes each distinct prompt once (core/kv_cache.py). Its log-probs are those of the
distribution it draws from: after temperature, top-k and top-p.
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from core.kv_cache import prefill
from core.memory import ran_out
from core.model import Policy
from core.seeds import derive_seed
from core.types import Completion, Message, OutOfMemory, UsageError

COMPACT_BELOW = 0.75  # drop finished rows once at most this share of the batch is unfinished


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `seed` and the stream number of a completion determine its random draws."""

    max_tokens: int  # limit of one completion, its end-of-turn token included
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: keeps all tokens
    top_k: int = 0  # 0: keeps all tokens
    seed: int = 0
    streams: tuple[int, ...] = ()  # one number per prompt; empty: 0, 1, 2, ...

    @property
    def drops_tokens(self) -> bool:
        """Whether top-k or top-p restrict which tokens can be drawn."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


DrawFunction = Callable[[Tensor, SamplingParams, Tensor], tuple[Tensor, Tensor]]  # as `draw`


class Sampler(ABC):
    """Samples completions, possibly with memory that it holds only inside `with sampler:`."""

    say: Callable[[str], None] = print  # prints one line
    remark = ""  # one line about this sampler that the run shows when it starts
    sync_seconds: float | None = None  # of the last `sync`; None: it copies no weights
    latest = ""  # end of the text received last, where a server streams text

    @abstractmethod
    def sample(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
        chats: list[list[Message]] | None = None,
    ) -> list[Completion]:
        """Samples one completion for each prompt (token ids), in the same order.

        `chats`: the same prompts as messages, for a server that takes no token ids. Calls
        `on_progress` repeatedly; an exception that it raises stops the sampling.
        """

    def sync(self) -> None:  # noqa: B027 (optional: nothing to do where weights are shared)
        """Makes the weights of the last optimizer step take effect. Call it after every step."""

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def close(self) -> None:  # noqa: B027
        """Frees all resources. The sampler cannot be used afterwards."""


class TorchSampler(Sampler):
    """Samples from the training model itself, so `sync` has nothing to do."""

    def __init__(self, policy: Policy, draw_function: DrawFunction | None = None):
        self.policy, self.draw_function = policy, draw_function or draw
        self.max_rows: int | None = None  # completions in one batch; None: no limit

    def sample(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
        chats: list[list[Message]] | None = None,
    ) -> list[Completion]:
        """As `Sampler.sample`. Raises OutOfMemory, and UsageError as `completion_limits` does."""
        if not prompts:
            return []
        limits = completion_limits(self.policy, prompts, params.max_tokens)
        streams = params.streams or tuple(range(len(prompts)))
        completions: list[Completion] = []
        while (start := len(completions)) < len(prompts):
            part = slice(start, start + (self.max_rows or len(prompts)))
            part_params = replace(params, streams=streams[part])
            try:
                completions += self._sample_batch(
                    prompts[part], limits[part], part_params, on_progress
                )
                continue
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error):
                    raise
            gc.collect()  # outside the except clause: its traceback keeps tensors alive
            torch.cuda.empty_cache()
            num_rows = len(prompts[part])
            if num_rows == 1:
                raise OutOfMemory(
                    f"out of memory while sampling one completion of up to {limits[start]} tokens "
                    f"after a prompt of {len(prompts[start])}; lower --max-tokens or --max-turns, "
                    "or use a smaller model"
                )
            self.max_rows = num_rows // 2
            self.say(f"out of memory while sampling {num_rows} completions at once: "
                     f"continuing with {self.max_rows}")  # fmt: skip
        return completions

    @torch.inference_mode()
    def _sample_batch(
        self,
        prompts: list[list[int]],
        limits: list[int],
        params: SamplingParams,
        on_progress: Callable[[], None],
    ) -> list[Completion]:
        """Samples B completions in one batch, row b of at most `limits[b]` <= T tokens."""
        device, num_rows, max_tokens = self.policy.device, len(prompts), max(limits)
        limit = torch.tensor(limits, device=device)  # [B]
        self.policy.causal_lm.eval()
        stop_ids = torch.tensor(self.policy.stop_ids, device=device)
        uniform = uniforms(params.seed, params.streams, max_tokens)  # [B, T]
        token_ids = torch.zeros(num_rows, max_tokens, dtype=torch.int64, device=device)  # [B, T]
        logprobs = torch.zeros(num_rows, max_tokens, device=device)  # [B, T]
        lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)  # [B]
        kept_ids: list[list[list[int]]] = [[] for _ in prompts]  # of each token of each row

        cache = prefill(self.policy, prompts, max_tokens)
        rows = torch.arange(num_rows, device=device)  # [R]: which of the B rows the cache holds
        unfinished = torch.ones(num_rows, dtype=torch.bool, device=device)  # [R]
        for step in range(max_tokens):
            on_progress()
            drawn, logprob = self.draw_function(
                cache.logits, params, uniform[rows.cpu(), step]
            )  # [R]
            token_ids[rows, step], logprobs[rows, step] = drawn, logprob
            if params.drops_tokens:
                likely = keep_likely(cache.logits.float() / params.temperature, params)
                for row, is_kept in zip(rows.tolist(), likely.isfinite(), strict=True):
                    kept_ids[row].append(is_kept.nonzero().squeeze(1).tolist())
            lengths[rows[unfinished]] = step + 1
            unfinished = unfinished & ~torch.isin(drawn, stop_ids) & (step + 1 < limit[rows])
            num_unfinished = int(unfinished.sum())
            if num_unfinished == 0:
                break
            if num_unfinished <= COMPACT_BELOW * len(rows):
                kept = unfinished.nonzero().squeeze(1)
                cache.keep(kept)
                rows, drawn, unfinished = rows[kept], drawn[kept], unfinished[kept]
            cache.append(drawn)
        columns = (token_ids.tolist(), logprobs.tolist(), lengths.tolist(), kept_ids)
        return [
            to_completion(self.policy, ids[:end], row[:end], kept[:end] or None)
            for ids, row, end, kept in zip(*columns, strict=True)
        ]


def completion_limits(policy: Policy, prompts: list[list[int]], max_tokens: int) -> list[int]:
    """For each prompt `max_tokens`, or what the prompt leaves of the context if that is less.

    Raises UsageError if a prompt leaves nothing.
    """
    longest, limit = max(map(len, prompts)), policy.max_length
    if longest >= limit:
        raise UsageError(f"a prompt of {longest} tokens does not fit into {limit} tokens, the "
                         "smaller of --max-model-len and the model's context length")  # fmt: skip
    return [min(max_tokens, limit - len(prompt)) for prompt in prompts]


def to_completion(
    policy: Policy,
    token_ids: list[int],
    logprobs: list[float],
    kept_ids: list[list[int]] | None = None,
) -> Completion:
    """Builds a Completion; its text leaves out the stop token, if the last token is one."""
    stopped = token_ids[-1] in policy.stop_ids
    text = cast(str, policy.tokenizer.decode(token_ids[:-1] if stopped else token_ids))
    return Completion(token_ids, logprobs, text, "stop" if stopped else "length", kept_ids)


def uniforms(seed: int, streams: Iterable[int], steps: int) -> Tensor:
    """Returns uniform numbers in [0, 1), float64 [B, steps] on the CPU: one row per stream.

    >>> a, b = uniforms(0, [3, 4], steps=2), uniforms(0, [4], steps=2)
    >>> torch.equal(a[1], b[0]), torch.equal(a[0], a[1])
    (True, False)
    """
    generators = (torch.Generator().manual_seed(derive_seed(seed, s)) for s in streams)
    return torch.stack(
        [torch.rand(steps, generator=generator, dtype=torch.float64) for generator in generators]
    )


def draw(logits: Tensor, params: SamplingParams, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draws token ids [B] int64 from logits [B, V]; returns also their log-probs [B], nats.

    Inverse transform sampling: `uniform` [B] float64 in [0, 1), on the CPU, selects the first token
    whose cumulative probability exceeds it. Float32 would be too coarse for a large vocabulary: of
    151,936 tokens with logits of standard deviation 2, it never draws over 6,000.

    >>> draw(torch.tensor([[0.0, 1.0]]), SamplingParams(max_tokens=1), torch.tensor([0.2]))
    (tensor([0]), tensor([-1.3133]))
    """
    logits = logits.float()
    if params.temperature == 0:
        token_ids = logits.argmax(-1)
        return token_ids, logits.log_softmax(-1).gather(1, token_ids[:, None]).squeeze(1)
    logits = keep_likely(logits / params.temperature, params)
    all_logprobs = logits.log_softmax(-1)
    cumulative = _cumulative(all_logprobs)  # [B, V]
    total = cumulative[:, -1:]  # 1 up to rounding
    below_total = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniform[:, None].to(total) * total, below_total)
    token_ids = torch.searchsorted(cumulative, threshold, right=True)  # never one of probability 0
    token_ids = token_ids.to(logits.device)
    return token_ids.squeeze(1), all_logprobs.gather(1, token_ids).squeeze(1)


def keep_likely(logits: Tensor, params: SamplingParams) -> Tensor:
    """`logits` [B, V] with -inf for the tokens that top-k or top-p drop."""
    if params.top_k > 0:
        kth = logits.topk(min(params.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = _cumulative(ordered.log_softmax(-1))[:, :-1]  # mass of the likelier tokens
        dropped = torch.nn.functional.pad(before >= params.top_p, (1, 0)).to(logits.device)
        dropped = torch.zeros_like(dropped).scatter(1, order, dropped)
        logits = logits.masked_fill(dropped, -torch.inf)
    return logits


def _cumulative(logprobs: Tensor) -> Tensor:
    """Cumulative probabilities, float64 [B, V]; on the CPU if the device has no float64 (MPS)."""
    probs = logprobs.exp()
    return (probs.cpu() if probs.device.type == "mps" else probs).cumsum(-1, dtype=torch.float64)
