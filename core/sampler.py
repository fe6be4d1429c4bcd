"""Sampling: the interface, and TorchSampler in plain PyTorch.

TorchSampler prefills each distinct prompt once and drops finished rows as it goes; what the rows
stand on meanwhile is in core/kv_cache.py. The log-probs that it returns are those of the
distribution it drew from: temperature, top-k and top-p included.
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.kv_cache import make_context
from core.memory import ran_out
from core.model import Policy
from core.types import Completion, Message, OutOfMemory, UsageError

SPREAD = 1_000_003  # between the streams of two seeds
KEEP_ROWS = 0.75  # compact the batch once fewer rows than this share of it are still being written


@dataclass(frozen=True)
class SamplingParams:
    """How to draw: `temperature` 0 is greedy, `top_p` 1 and `top_k` 0 are off; lengths in tokens.

    The seed and a completion's stream decide its draws, whatever else is sampled beside it; so a
    call can be repeated, or shared among processes, without any hidden state.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    streams: tuple[int, ...] = ()  # a number for each prompt; none given: their places in the list


class Sampler(ABC):
    """Writes completions. Memory for sampling is held only inside `with sampler:`."""

    say: Callable[[str], None] = print  # shows a line
    remark = ""  # what the user should know of the choice of this sampler
    latest = ""  # the end of what is being written, where it comes as a stream

    @abstractmethod
    def sample(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        """One completion for each prompt, in order; equal prompts are prefilled once.

        `on_progress` is called now and then; what it raises stops the sampling.
        """

    def reply(
        self,
        chats: list[list[Message]],
        prompts: list[list[int]],
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        """As `sample`, for one that is given the chats as well: a server takes no ids."""
        return self.sample(prompts, params, on_progress)

    def sync(self) -> None:  # noqa: B027 (nothing to do is right where weights are shared)
        """After optimizer.step: make sure that the next sample uses the new weights."""

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def close(self) -> None:  # noqa: B027
        """Give back all that the sampler took; it can't be used again."""


class TorchSampler(Sampler):
    """Samples from the training model itself, so the weights are always the newest."""

    def __init__(self, policy: Policy, draw_with: Callable | None = None):
        self.policy = policy
        self.draw_with = draw_with  # in place of `draw`
        self.at_once: int | None = None  # completions; None: as many as are asked for

    def sample(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        if not prompts:
            return []
        steps = room(self.policy, prompts, params.max_tokens)
        streams = params.streams or tuple(range(len(prompts)))
        completions: list[Completion] = []
        while (start := len(completions)) < len(prompts):
            some = slice(start, start + (self.at_once or len(prompts)))
            now = replace(params, max_tokens=steps, streams=streams[some])
            try:
                completions += self._write(prompts[some], now, on_progress)
                continue
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error):
                    raise
            gc.collect()  # out of the except clause, which would hold on to what was computed
            torch.cuda.empty_cache()
            self._lower(len(prompts[some]), len(prompts[start]), steps)
        return completions

    def _lower(self, at_once: int, prompt: int, steps: int) -> None:
        """Write fewer completions at one time from here on: memory ran out with `at_once`."""
        if at_once == 1:
            raise OutOfMemory(
                f"one completion of {steps} tokens behind a prompt of {prompt} does not fit in "
                "memory; lower --max-tokens or --max-turns, or take a smaller model"
            )
        self.at_once = at_once // 2
        self.say(f"out of memory with {at_once} completions at one time: from here on "
                 f"{self.at_once}")  # fmt: skip

    @torch.inference_mode()
    def _write(
        self, prompts: list[list[int]], params: SamplingParams, on_progress: Callable[[], None]
    ) -> list[Completion]:
        """The completions of prompts that are written at one time."""
        device, steps, streams = self.policy.device, params.max_tokens, params.streams
        self.policy.causal_lm.eval()
        stop_ids = torch.tensor(self.policy.stop_ids, device=device)
        context = make_context(self.policy, prompts, steps)
        chance = uniforms(params.seed, streams, steps).to(device)  # [B, T]
        tokens = torch.zeros(len(prompts), steps, dtype=torch.int64, device=device)  # [B, T]
        logprobs = torch.zeros(len(prompts), steps, device=device)
        lengths = torch.full((len(prompts),), steps, device=device)
        stopped = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        rows = torch.arange(len(prompts), device=device)  # the context's, as rows of tokens

        draw_next = self.draw_with or draw
        for step in range(steps):
            on_progress()
            drawn, logprob = draw_next(context.logits, params, chance[rows, step])  # [R], [R]
            tokens[rows, step], logprobs[rows, step] = drawn, logprob
            ended = torch.isin(drawn, stop_ids) & ~stopped[rows]
            stopped[rows[ended]] = True
            lengths[rows[ended]] = step + 1
            writing = ~stopped[rows]
            num_writing = int(writing.sum())
            if num_writing == 0 or step == steps - 1:
                break
            if num_writing <= KEEP_ROWS * len(rows):
                kept = writing.nonzero().squeeze(1)
                context.keep(kept)
                rows, drawn = rows[kept], drawn[kept]
            context.write(drawn)
        ids = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        probs = [row[:n] for row, n in zip(logprobs.tolist(), lengths.tolist(), strict=True)]
        return to_completions(self.policy, ids, probs, stopped.tolist())


def room(policy: Policy, prompts: list[list[int]], max_tokens: int) -> int:
    """`max_tokens`, or what is left of the model's length behind the longest prompt.

    Raises UsageError when nothing is left.
    """
    longest = max(map(len, prompts))
    left = policy.max_length - longest
    if left < 1:
        limit = policy.max_length
        raise UsageError(f"a prompt of {longest} tokens does not fit the model's {limit}")
    return min(max_tokens, left)


def to_completions(
    policy: Policy, ids: list[list[int]], logprobs: list[list[float]], ended: list[bool]
) -> list[Completion]:
    """Completions of sampled ids and log-probs; `ended` ones close with the token that says so."""
    spoken = [row[:-1] if end else row for row, end in zip(ids, ended, strict=True)]
    texts = policy.tokenizer.batch_decode(spoken, skip_special_tokens=False)
    return [
        Completion(i, p, text, "stop" if end else "length")
        for i, p, text, end in zip(ids, logprobs, texts, ended, strict=True)
    ]


def uniforms(seed: int, streams: Iterable[int], steps: int) -> Tensor:
    """A row of float32 in [0, 1) for each stream: [B, steps], on the CPU.

    >>> a, b = uniforms(0, [3, 4], steps=2), uniforms(0, [4], steps=2)
    >>> torch.equal(a[1], b[0]), torch.equal(a[0], a[1])
    (True, False)
    """
    generator = torch.Generator()
    rows = []
    for stream in streams:
        generator.manual_seed((seed * SPREAD + stream) % 2**63)
        rows.append(torch.rand(steps, generator=generator))
    return torch.stack(rows)


def draw(logits: Tensor, params: SamplingParams, chance: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids [B] int64 from logits [B, V], and their log-probs [B] float32 (nats).

    `chance` [B] in [0, 1) picks the token at which so much of the probability lies before it.

    >>> draw(torch.tensor([[0.0, 1.0]]), SamplingParams(max_tokens=1), torch.tensor([0.2]))
    (tensor([0]), tensor([-1.3133]))
    """
    logits = logits.float()
    if params.temperature == 0:
        chosen = logits.argmax(-1)
        return chosen, logits.log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)
    logits = logits / params.temperature
    if params.top_k > 0:
        kth = logits.topk(min(params.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # mass of what ranks higher
        dropped = (before >= params.top_p).scatter(1, order, before >= params.top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    all_logprobs = logits.log_softmax(-1)
    mass = all_logprobs.exp().cumsum(-1)  # [B, V]: up to each token, itself included
    whole = mass[:, -1:]  # 1, but for rounding
    at = torch.minimum(chance[:, None] * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    chosen = (mass <= at).sum(-1, keepdim=True)  # so none of no probability is ever chosen
    return chosen.squeeze(1), all_logprobs.gather(1, chosen).squeeze(1)
