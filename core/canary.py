"""A canary: has the sampler the weights of the trainer?

A small update moves log-probs less than the limit of `sampler_gap`, so that a sampler with older
weights looks healthy for long. Here both give a short text its log-probs: the trainer now, t, and
before the last update, b, and the sampler, s. What the sampler lacks, as a multiple of the update:

    canary = Σ (t - s) · (t - b) / Σ (t - b)²

It is 0 if the sampler has the trainer's weights, 1 if it has those before the update, and grows
with each further update that it misses, at any learning rate.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from core.policy import Policy, borrowed
from core.sampler import Sampler, SamplingParams
from core.types import Completion

TEXT = "Once upon a time, 1 + 1 = 2. What is the next line, and why? Count to ten."
PARAMS = SamplingParams(max_tokens=16)  # at temperature 1, always with the same draws
# in machine epsilons, in nats: 0.5 in bfloat16, where kernels that round differently give SmolLM2's
# tokens log-probs that differ by 0.04 on average and by up to 0.7; 8e-6 in float32
ROUNDING = 64
NOISE = 0.02  # standard deviation; new adapters have B = 0, which would hide mistakes
Canary = tuple[dict[str, float], dict[str, Any]]  # metrics, and what the next comparison needs
FEWEST = 8  # tokens that have to move by ROUNDING, or fewer further: one may be moved by rounding


def compare(
    policy: Policy,
    sampler: Sampler,
    before: dict[str, Any],
    on_progress: Callable[[], None] = lambda: None,
) -> Canary:
    """The metric `gap/canary`, and what the next call needs as `before`; {} at first.

    Samples a continuation of TEXT. Equal weights draw the same tokens, and weights that have moved
    a little mostly do; only tokens that were drawn the last time, too, are compared. There is no
    metric if these have not moved by ROUNDING (root mean square), at least as far as FEWEST would.
    """
    prompt = policy.tokenizer.encode(TEXT, add_special_tokens=False)
    prompt = prompt[: max(1, policy.max_length - PARAMS.max_tokens)]
    [drawn] = sampler.sample([prompt], PARAMS, on_progress)
    now = score(policy, prompt, drawn.token_ids).double()  # [N]
    pairs = zip(drawn.token_ids, before.get("token_ids", []), strict=False)
    same = [a == b for a, b in pairs]
    n = [*same, False].index(False)  # equal tokens at the beginning
    moved = now[:n] - torch.tensor(before.get("logprobs", [])[:n], dtype=now.dtype)
    lacking = now[:n] - torch.tensor(drawn.logprobs[:n], dtype=now.dtype)
    metrics = {}
    rounding = ROUNDING * torch.finfo(policy.dtype).eps
    if moved.square().sum() > max(n, FEWEST) * rounding**2:
        metrics["gap/canary"] = (lacking @ moved / (moved @ moved)).item()
    return metrics, {"token_ids": drawn.token_ids, "logprobs": now.tolist()}


@torch.no_grad()
def score(
    policy: Policy, prompt: list[int], completion: list[int], temperature: float = 1.0
) -> Tensor:
    """Log-probs of the completion's tokens after the prompt: [N] float32, on the CPU."""
    ids = torch.tensor([prompt + completion], device=policy.device)
    hidden = policy.hidden_states(ids)[0, len(prompt) - 1 : -1]
    logprobs = (policy.to_logits(hidden) / temperature).log_softmax(-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None]).squeeze(1).cpu()


def gaps(policy: Policy, prompt: list[int], drawn: Completion, temperature: float = 1.0) -> Tensor:
    """|log-prob in training - log-prob of the sampler| of each sampled token, in nats: [N]."""
    ours = score(policy, prompt, drawn.token_ids, temperature)
    return (ours - torch.tensor(drawn.logprobs)).abs()


@contextmanager
def noise(policy: Policy) -> Iterator[None]:
    """Inside, random numbers are added to B of the adapters: mistakes in what a sampler gets then
    show in its log-probs."""
    generator = torch.Generator(policy.device).manual_seed(0)
    weights = {n: w for n, w in policy.model.named_parameters() if "lora_B" in n}
    with borrowed(weights):
        with torch.no_grad():
            for weight in weights.values():
                weight += torch.empty_like(weight).normal_(std=NOISE, generator=generator)
        yield
