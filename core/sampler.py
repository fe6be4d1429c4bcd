"""An evening on sampling, 2 of 3. `add` takes requests, `step` samples on, as in vLLM's engine.

`TorchSampler` samples in plain PyTorch. Its batch is C completions, and one step samples one token
of each, in four parts, each a method:

    _admit      once a batch has ended, the requests that wait are the next one: computes prompts
    _draw       draws the next token of each completion
    _end        completions that are complete leave the batch
    _regroup    computes the drawn tokens, and with them the logits for the next step

The cache makes the forward passes (core/kv_cache.py). It has a row for each of U distinct prefixes
(a prompt and the tokens sampled after it): completions that are equal so far share a row, until
their draws differ. If memory runs out, half of the batch begins again.

Its log-probs are those of the distribution that it draws from, after temperature, top-k and top-p;
at temperature 0, which draws nothing, those of temperature 1.
"""

import gc
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, cast

import torch
from torch import Tensor

from core.config import Config
from core.faults import Fault, OutOfMemory, UsageError, ran_out
from core.kv_cache import prefill
from core.policy import Policy
from core.seeds import derive_seed
from core.types import Completion, Message


@dataclass(frozen=True)
class SamplingParams:
    """How to sample."""

    max_tokens: int  # limit of one completion, its end-of-turn token included
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: keeps all tokens
    top_k: int = 0  # 0: keeps all tokens
    seed: int = 0
    stop: tuple[str, ...] = ()  # texts that end a completion, which contains them


def params_of(cfg: Config, seed: int) -> SamplingParams:
    """How a run samples in training, with a seed for these draws."""
    return SamplingParams(cfg.max_tokens, cfg.temperature, cfg.top_p, cfg.top_k, seed, cfg.stop)


@dataclass(eq=False)
class Request:
    """A prompt whose completion is wanted. `seed` and `stream` determine its random draws."""

    prompt: list[int]  # token ids
    params: SamplingParams
    seed: int = 0  # the same for all requests of a round
    stream: int = 0  # another one for each agent
    chat: list[Message] | None = None  # the prompt as messages, for a server
    sampler: Any = None  # the Sampler that gets the request (core/episodes.py)
    max_tokens: int = 0  # limit of this completion, at most that of `params`; 0: that of `params`

    def __post_init__(self) -> None:
        self.max_tokens = min(self.max_tokens or self.params.max_tokens, self.params.max_tokens)


DrawFunction = Callable[[Tensor, SamplingParams, Tensor], tuple[Tensor, Tensor]]  # as `draw`


class Sampler(ABC):
    """Samples completions, possibly with memory that it holds only inside `with sampler:`."""

    say: Callable[[str], None] = print  # prints one line
    alone = False  # whether episodes move alone: a server answers each request when it can
    remark = ""  # one line about this sampler that the run shows when it starts
    sync_seconds: float | None = None  # of the last `sync`; None: it copies no weights

    @abstractmethod
    def add(self, request: Request) -> None:
        """Takes a request, also while others are being sampled.

        Raises UsageError if its prompt leaves no room for a completion.
        """

    @abstractmethod
    def step(self) -> list[tuple[Request, Completion]]:
        """Samples on, such as one token for each request; returns the completions that ended."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets all requests."""

    def sample(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        """One completion for each prompt, in the same order.

        The draws of a prompt depend on `params.seed` and its place in the list. Calls `on_progress`
        before each step; an exception that it raises ends the sampling.
        """
        requests = [Request(prompt, params, params.seed, i) for i, prompt in enumerate(prompts)]
        completions: dict[Request, Completion] = {}
        try:
            for request in requests:
                self.add(request)
            while len(completions) < len(requests):
                on_progress()
                completions |= self.step()
        finally:
            self.clear()
        return [completions[request] for request in requests]

    def sync(self) -> None:  # noqa: B027 (optional: nothing to do where weights are shared)
        """Makes the weights of the optimizer's steps take effect. Call it before sampling again."""

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def close(self) -> None:  # noqa: B027
        """Frees all resources. The sampler cannot be used afterwards."""


class TorchSampler(Sampler):
    """Samples from the training model itself, so `sync` has nothing to do.

    Requests that are sampled at the same time have the same SamplingParams.
    """

    def __init__(self, policy: Policy, draw_function: DrawFunction | None = None):
        self.policy, self.draw_function = policy, draw_function or draw
        self.max_batch: int | None = None  # completions in one batch; None: no limit
        self.clear()

    def clear(self) -> None:
        self.waiting = deque[Request]()
        self.batch: list[_Partial] = []
        self.cache: Any = None  # keys and values of the batch, and the logits of its next tokens
        self.completions: list[tuple[Request, Completion]] = []  # for the next return of `step`

    def add(self, request: Request) -> None:
        completion_limit(self.policy, request)  # raises if the prompt is too long
        self.waiting.append(request)

    def step(self) -> list[tuple[Request, Completion]]:
        """As `Sampler.step`. Raises OutOfMemory if not even one completion fits into memory."""
        memory_ran_out = False
        try:
            self._sample_tokens()
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error) or not self.batch:
                raise
            memory_ran_out = True  # handled below, because the traceback keeps tensors alive
        if memory_ran_out:
            self._begin_again_with_half()
        completions, self.completions = self.completions, []
        return completions

    @torch.inference_mode()
    def _sample_tokens(self) -> None:
        """Samples one token of each of the C completions in the batch."""
        if not self.batch:
            self._admit()
        if self.batch:
            self._end(self._draw())
        if self.batch:
            self._regroup()

    def _admit(self) -> None:
        """Makes a batch of the requests that wait, and computes each distinct prompt once."""
        row_of: dict[tuple[int, ...], int] = {}
        for _ in range(min(len(self.waiting), self.max_batch or len(self.waiting))):
            request = self.waiting.popleft()
            limit = completion_limit(self.policy, request)
            row = row_of.setdefault(tuple(request.prompt), len(row_of))
            uniform = uniforms(request.seed, request.stream, limit).numpy()
            self.batch.append(_Partial(request, limit, row, uniform))
        if self.batch:
            longest = max(partial.limit for partial in self.batch)
            self.cache = prefill(self.policy, [list(prompt) for prompt in row_of], longest)

    def _draw(self) -> Iterable[tuple[int, float, list[int] | None]]:
        """The next token of each completion, its log-prob, and the ids that could be drawn."""
        params = self.batch[0].request.params
        rows = torch.tensor([partial.row for partial in self.batch], device=self.policy.device)
        logits = self.cache.logits[rows]  # [C, V]
        uniform_list = [partial.uniform[len(partial.token_ids)] for partial in self.batch]
        uniform = torch.tensor(uniform_list, dtype=torch.float64)
        drawn, logprobs = self.draw_function(logits, params, uniform)  # [C]
        kept_ids: Iterable[list[int] | None] = repeat(None, len(drawn))
        if params.temperature > 0 and (params.top_p < 1 or params.top_k > 0):
            likely = keep_likely(logits.float() / params.temperature, params).isfinite()
            kept_ids = (row.nonzero().squeeze(1).tolist() for row in likely)
        return zip(drawn.tolist(), logprobs.tolist(), kept_ids, strict=True)

    def _end(self, draws: Iterable[tuple[int, float, list[int] | None]]) -> None:
        """Appends the tokens; completions that end, with a stop token or at their limit, leave."""
        going: list[_Partial] = []
        for partial, (token_id, logprob, kept_ids) in zip(self.batch, draws, strict=True):
            ids, stop = partial.token_ids, partial.request.params.stop
            ids.append(token_id)
            partial.logprobs.append(logprob)
            if kept_ids is not None:
                partial.kept_ids.append(kept_ids)
            has_ended = token_id in self.policy.stop_ids or ends_with(self.policy, ids, stop)
            if not has_ended and len(ids) < partial.limit:
                going.append(partial)
                continue
            all_kept_ids = partial.kept_ids or None
            completion = to_completion(self.policy, ids, partial.logprobs, all_kept_ids, stop)
            self.completions.append((partial.request, completion))
        self.batch = going
        if not going:
            self.cache = None

    def _regroup(self) -> None:
        """The next rows are the distinct pairs of a row and the token after it; computes these."""
        next_row: dict[tuple[int, int], int] = {}  # (current row, token) -> row in the next step
        for partial in self.batch:
            pair = partial.row, partial.token_ids[-1]
            partial.row = next_row.setdefault(pair, len(next_row))
        # the pairs, [U, 2], as two vectors [U]: the row that each continues, and the token
        before, token_ids = torch.tensor(list(next_row), device=self.policy.device).T
        if before.tolist() != list(range(len(self.cache.logits))):
            self.cache.select(before)
        self.cache.append(token_ids)

    def _begin_again_with_half(self) -> None:
        """Lets all completions wait, and from now on samples half as many of them at once."""
        batch, self.batch, self.cache = self.batch, [], None
        gc.collect()
        torch.cuda.empty_cache()
        if len(batch) == 1:
            raise OutOfMemory(
                f"out of memory while sampling one completion of up to {batch[0].limit} tokens "
                f"after a prompt of {len(batch[0].request.prompt)}; lower --max-tokens or "
                "--max-turns, or use a smaller model"
            )
        self.max_batch = len(batch) // 2
        count = f"{len(batch)} completions at once"
        self.say(f"out of memory while sampling {count}: continuing with {self.max_batch}")
        # they begin again, with the same draws
        self.waiting.extendleft(partial.request for partial in reversed(batch))


@dataclass
class _Partial:
    """A completion while TorchSampler samples it."""

    request: Request
    limit: int  # of its tokens
    row: int  # of the cache: its prompt and the tokens sampled so far
    uniform: Any  # float64 [limit]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_ids: list[list[int]] = field(default_factory=list)


def completion_limit(policy: Policy, request: Request) -> int:
    """The `max_tokens` of the request, or the rest of the context after its prompt, if smaller.

    Raises UsageError if the prompt fills the context.
    """
    length, limit = len(request.prompt), policy.max_length
    if length >= limit:
        context = f"{limit} ({policy.limited_by})"
        raise UsageError(f"a prompt of {length} tokens does not fit into {context}")
    return min(request.max_tokens, limit - length)


def to_completion(
    policy: Policy,
    token_ids: list[int],
    logprobs: list[float],
    kept_ids: list[list[int]] | None = None,
    stop: Sequence[str] = (),
) -> Completion:
    """Builds a Completion, without the tokens after a text of `stop`, as an engine may sample on.
    The text of the completion leaves out a stop token at its end, but not a text of `stop`.

    Raises Fault if a log-prob is NaN: then the model's logits are not finite.
    """
    if any(map(math.isnan, logprobs)):
        hint = "start again with a lower --lr, or with --dtype bfloat16 or float32"
        raise Fault(f"the model's logits are no longer finite: {hint}")
    if stop:
        lengths = range(1, len(token_ids))
        end = next((n for n in lengths if ends_with(policy, token_ids[:n], stop)), len(token_ids))
        token_ids, logprobs, kept_ids = token_ids[:end], logprobs[:end], kept_ids and kept_ids[:end]
    stopped = token_ids[-1] in policy.stop_ids
    text = cast(str, policy.tokenizer.decode(token_ids[:-1] if stopped else token_ids))
    has_ended = stopped or ends_with(policy, token_ids, stop)
    return Completion(token_ids, logprobs, text, "stop" if has_ended else "length", kept_ids)


def ends_with(policy: Policy, token_ids: list[int], stop: Sequence[str]) -> bool:
    """Whether the last token completes a text of `stop`; it may have more characters after that."""
    if not stop:
        return False
    most = max(len(text.encode()) for text in stop)  # tokens: each has at least a byte
    end = cast(str, policy.tokenizer.decode(token_ids[-most:]))
    return any(text in end for text in stop)


def uniforms(seed: int, stream: int, steps: int) -> Tensor:
    """Uniform numbers in [0, 1), float64 [steps] on the CPU, of a random stream."""
    generator = torch.Generator().manual_seed(derive_seed(seed, stream))
    return torch.rand(steps, generator=generator, dtype=torch.float64)


def draw(logits: Tensor, params: SamplingParams, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draws token ids [C] int64 from logits [C, V]; returns also their log-probs [C], nats.

    Inverse transform sampling: `uniform` [C] float64 in [0, 1), on the CPU, selects the first token
    whose cumulative probability exceeds it. Each row has a number of its own, so its draws do not
    depend on the other rows, as those of torch.multinomial would. Float32 would be too coarse for a
    large vocabulary: of 151,936 tokens with logits of standard deviation 2, it never draws over
    6,000.

    >>> draw(torch.tensor([[0.0, 1.0]]), SamplingParams(max_tokens=1), torch.tensor([0.2]))
    (tensor([0]), tensor([-1.3133]))
    """
    logits = logits.float()
    if params.temperature == 0:
        token_ids = logits.argmax(-1)
        return token_ids, logits.log_softmax(-1).gather(1, token_ids[:, None]).squeeze(1)
    logits = keep_likely(logits / params.temperature, params)
    all_logprobs = logits.log_softmax(-1)
    cumulative = _cumulative(all_logprobs)  # [C, V]
    total = cumulative[:, -1:]  # 1 up to rounding
    # so that no rounding selects a token of probability 0
    below_total = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniform[:, None].to(total) * total, below_total)
    token_ids = torch.searchsorted(cumulative, threshold, right=True)
    token_ids = token_ids.to(logits.device).clamp(max=logits.shape[-1] - 1)  # for NaN it is V
    return token_ids.squeeze(1), all_logprobs.gather(1, token_ids).squeeze(1)


def keep_likely(logits: Tensor, params: SamplingParams) -> Tensor:
    """`logits` [C, V] with -inf for the tokens that top-k or top-p drop, in this order."""
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
    """Cumulative probabilities, float64 [C, V]; on the CPU if the device has no float64 (MPS)."""
    probs = logprobs.exp()
    return (probs.cpu() if probs.device.type == "mps" else probs).cumsum(-1, dtype=torch.float64)
