"""Sampling: the `Sampler` interface, and `TorchSampler`, which samples in plain PyTorch.

`sample` takes a list of prompts, `stream` takes prompts while others are being sampled: those of
episodes whose environments have answered.

`TorchSampler` computes each distinct prompt once (core/kv_cache.py). Its log-probs are those of the
distribution it draws from: after temperature, top-k and top-p.
"""

import gc
import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from core.kv_cache import prefill
from core.policy import Policy
from core.run.memory import ran_out
from core.seeds import derive_seed
from core.types import Completion, Fault, Message, OutOfMemory, UsageError

COMPACT_BELOW = 0.75  # drop finished rows once at most this share of the batch is unfinished
ADMIT_ABOVE = 0.25  # new prompts wait until they are this share of the batch: a prefill costs time


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


@dataclass(frozen=True)
class Request:
    """A prompt for `Sampler.stream`. `seed` and `stream` determine its draws, as SamplingParams."""

    key: Any  # its completion has the same
    prompt: list[int]
    seed: int = 0
    stream: int = 0
    chat: list[Message] | None = None  # the prompt as messages


# (finished completions, whether nothing is being sampled) -> new requests. If nothing is being
# sampled, it waits a moment for some. None: all completions were received, and none is wanted.
Exchange = Callable[[list[tuple[Any, Completion]], bool], list[Request] | None]

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

    def stream(
        self,
        exchange: Exchange,
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Samples the requests of `exchange`, which it calls until that returns None.

        Seeds and streams are those of the requests, not of `params`. Here requests that come while
        others are being sampled wait for these; the samplers of picoRL begin with them at once.
        """
        finished: list[tuple[Any, Completion]] = []
        while (requests := exchange(finished, True)) is not None:
            on_progress()
            by_seed: dict[int, list[Request]] = defaultdict(list)
            for request in requests:
                by_seed[request.seed].append(request)
            finished = []
            for seed, some in by_seed.items():
                now = replace(params, seed=seed, streams=tuple(r.stream for r in some))
                chats = [request.chat or [] for request in some]
                completions = self.sample([r.prompt for r in some], now, on_progress, chats)
                keys = [request.key for request in some]
                finished += zip(keys, completions, strict=True)

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
        return sample_all(self.stream, prompts, params, on_progress, chats)

    def stream(
        self,
        exchange: Exchange,
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """As `Sampler.stream`. Raises OutOfMemory, and UsageError as `completion_limits` does."""
        batch = _Batch()
        while True:
            try:
                return self._stream(batch, exchange, params, on_progress)
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error) or not batch.rows:
                    raise
            gc.collect()  # outside the except clause: its traceback keeps tensors alive
            torch.cuda.empty_cache()
            rows = [row for row in batch.rows if not row.done]
            if len(rows) == 1:
                raise OutOfMemory(
                    f"out of memory while sampling one completion of up to {rows[0].limit} tokens "
                    f"after a prompt of {len(rows[0].request.prompt)}; lower --max-tokens or "
                    "--max-turns, or use a smaller model"
                )
            self.max_rows = len(rows) // 2
            self.say(f"out of memory while sampling {len(rows)} completions at once: "
                     f"continuing with {self.max_rows}")  # fmt: skip
            # from their beginning: the draws are the same
            batch.waiting.extendleft(_Row(row.request, row.limit) for row in reversed(rows))
            batch.rows = []

    def _stream(
        self,
        batch: "_Batch",
        exchange: Exchange,
        params: SamplingParams,
        on_progress: Callable[[], None],
    ) -> None:
        self.policy.causal_lm.eval()
        cache: Any = None  # of the rows of the batch
        while True:
            requests = exchange(batch.finished, not batch.rows and not batch.waiting)
            if requests is None:
                return
            batch.finished = []
            prompts = [request.prompt for request in requests]
            limits = completion_limits(self.policy, prompts, params.max_tokens)
            batch.waiting.extend(map(_Row, requests, limits))
            if new := self._admitted(batch, cache):
                batch.rows += new
                cache = self._with_rows(cache, new)
            on_progress()
            if batch.rows:
                cache = self._sample_tokens(batch, cache, params)

    def _admitted(self, batch: "_Batch", cache: Any) -> list["_Row"]:
        """Takes the rows that begin now from those that wait."""
        running = sum(not row.done for row in batch.rows)
        if running and (len(batch.waiting) < ADMIT_ABOVE * running or not cache.can_merge):
            return []
        room = len(batch.waiting) if self.max_rows is None else self.max_rows - len(batch.rows)
        return [batch.waiting.popleft() for _ in range(min(room, len(batch.waiting)))]

    @torch.inference_mode()
    def _with_rows(self, cache: Any, rows: list["_Row"]) -> Any:
        """The cache with new rows."""
        for row in rows:
            request = row.request
            row.uniform = uniforms(request.seed, [request.stream], row.limit)[0].numpy()
        prompts = [row.request.prompt for row in rows]
        added = prefill(self.policy, prompts, max(row.limit for row in rows))
        if cache is None:
            return added
        cache.merge(added)
        return cache

    @torch.inference_mode()
    def _sample_tokens(self, batch: "_Batch", cache: Any, params: SamplingParams) -> Any:
        """Samples one token in each row, and drops finished rows; None if all have finished."""
        rows = batch.rows
        uniform = torch.tensor([row.next_uniform() for row in rows], dtype=torch.float64)
        drawn, logprobs = self.draw_function(cache.logits, params, uniform)  # [R]
        kept: Iterable[Tensor | None] = [None] * len(rows)
        if params.drops_tokens:
            kept = keep_likely(cache.logits.float() / params.temperature, params).isfinite()
        columns = (rows, drawn.tolist(), logprobs.tolist(), kept)
        for row, token_id, logprob, is_kept in zip(*columns, strict=True):
            if row.done:
                continue
            row.token_ids.append(token_id)
            row.logprobs.append(logprob)
            if is_kept is not None:
                row.kept_ids.append(is_kept.nonzero().squeeze(1).tolist())
            row.done = token_id in self.policy.stop_ids or len(row.token_ids) == row.limit
            if row.done:
                ids, kept_ids = row.token_ids, row.kept_ids or None
                completion = to_completion(self.policy, ids, row.logprobs, kept_ids)
                batch.finished.append((row.request.key, completion))
        unfinished = [i for i, row in enumerate(rows) if not row.done]
        if not unfinished:
            batch.rows = []
            return None
        if len(unfinished) <= COMPACT_BELOW * len(rows):
            batch.rows = [rows[i] for i in unfinished]
            index = torch.tensor(unfinished, device=drawn.device)
            cache.keep(index)
            drawn = drawn[index]
        cache.append(drawn)
        return cache


@dataclass
class _Row:
    """A completion while TorchSampler samples it."""

    request: Request
    limit: int  # of its tokens
    uniform: Any = None  # float64 [limit], once it has begun
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_ids: list[list[int]] = field(default_factory=list)
    done: bool = False  # until it is dropped, its row of the batch computes tokens without use

    def next_uniform(self) -> float:
        return 0.0 if self.done else self.uniform[len(self.token_ids)]


@dataclass
class _Batch:
    """What TorchSampler samples: when memory runs out, all of it is still known."""

    waiting: deque[_Row] = field(default_factory=deque)
    rows: list[_Row] = field(default_factory=list)
    finished: list[tuple[Any, Completion]] = field(default_factory=list)


def sample_all(
    stream: Callable[..., None],
    prompts: list[list[int]],
    params: SamplingParams,
    on_progress: Callable[[], None],
    chats: list[list[Message]] | None,
) -> list[Completion]:
    """`Sampler.sample` by means of `Sampler.stream`: all prompts come at once."""
    streams = params.streams or range(len(prompts))
    new = [
        Request(i, prompt, params.seed, stream_, chats[i] if chats else None)
        for i, (prompt, stream_) in enumerate(zip(prompts, streams, strict=True))
    ]
    completions: dict[Any, Completion] = {}

    def exchange(finished: list[tuple[Any, Completion]], idle: bool) -> list[Request] | None:
        completions.update(finished)
        if len(completions) == len(prompts):
            return None
        requests, new[:] = list(new), []
        return requests

    stream(exchange, params, on_progress)
    return [completions[i] for i in range(len(prompts))]


def completion_limits(policy: Policy, prompts: list[list[int]], max_tokens: int) -> list[int]:
    """For each prompt `max_tokens`, or what the prompt leaves of the context if that is less.

    Raises UsageError if a prompt leaves nothing.
    """
    longest, limit = max(map(len, prompts), default=0), policy.max_length
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
    """Builds a Completion; its text leaves out the stop token, if the last token is one.

    Raises Fault if a log-prob is NaN: then the model's logits are not finite.
    """
    if any(map(math.isnan, logprobs)):
        raise Fault("the model's logits are no longer finite: start again with a lower --lr, or "
                    "with --dtype bfloat16 or float32")  # fmt: skip
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
    token_ids = token_ids.to(logits.device).clamp(max=logits.shape[-1] - 1)  # for NaN it is V
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
