"""A canary: has the sampler the weights of the trainer?

A small update moves log-probs by less than the limit of the warning `sampler_gap`, so a sampler
with older weights looks healthy for long. Here the sampler draws four tokens after several
beginnings of a short text, the first in the pass of the prompts, the others in steps of decoding.
Each has three log-probs: t, the trainer's after the last update, b, the trainer's before it, and s,
the sampler's. The part of the update that the sampler lacks:

    canary = Σ (t - s) · (t - b) / Σ (t - b)²

It is 0 if the sampler has the trainer's weights, 1 if it has those before the update, and grows
with each further update that it misses, at any learning rate.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from core.batching import to_tokens
from core.faults import UsageError
from core.policy import Policy, borrowed
from core.prefix_sharing import num_shared
from core.sampler import Sampler, SamplingParams
from core.scoring import score_tokens
from core.types import Completion, Rollout, Turn

TEXT = "Once upon a time, 1 + 1 = 2. What is the next line, and why? Count to ten."
PLACES = 8  # beginnings of the text, the longest
PARAMS = SamplingParams(max_tokens=4)  # at temperature 1, always with the same draws
# in machine epsilons, in nats: 0.5 in bfloat16, where kernels that round differently give SmolLM2's
# tokens log-probs that differ by 0.04 on average and by up to 0.7; 8e-6 in float32
ROUNDING = 64
NOISE = 0.02  # standard deviation; new adapters have B = 0, which would hide mistakes
Canary = tuple[dict[str, float], dict[str, Any]]  # metrics, and `before` of the next comparison
# nats per token; in bfloat16, SmolLM2-135M has 0.051 on some processors
MAX_GAP = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 0.1}
# an update counts if it moves log-probs at least as far as FEWEST tokens moved by ROUNDING each
FEWEST = 8


def compare(
    policy: Policy,
    sampler: Sampler,
    before: dict[str, Any],
    on_progress: Callable[[], None] = lambda: None,
) -> Canary:
    """The metric `gap/canary`, and the `before` of the next call, which is {} in the first.

    Equal weights draw the same tokens, and weights that have moved a little mostly do. Only tokens
    that the previous call drew, too, are compared. There is no metric if these have moved by less
    than ROUNDING (root mean square), or less than FEWEST tokens moved by ROUNDING would have.
    """
    ids = policy.tokenizer.encode(TEXT, add_special_tokens=False)
    ids = ids[: max(1, policy.max_length - PARAMS.max_tokens)]
    prompts = [ids[: i + 1] for i in range(len(ids))][-PLACES:]
    drawn = sampler.sample(prompts, PARAMS, on_progress)
    logprobs = score(policy, prompts, drawn, PARAMS.temperature)
    rows: list[tuple[float, ...]] = []  # t, b and s of each token that both calls drew
    previous = before.get("drawn", [])
    for completion, trainer, (ids, earlier) in zip(drawn, logprobs, previous, strict=False):
        count = num_shared(completion.token_ids, ids)
        rows += zip(trainer[:count], earlier, completion.logprobs, strict=False)
    t, b, s = torch.tensor(rows, dtype=torch.float64).view(-1, 3).T
    metrics = {}
    rounding = ROUNDING * torch.finfo(policy.dtype).eps
    moved = (t - b).square().sum().item()
    if moved > max(len(t), FEWEST) * rounding**2:
        metrics["gap/canary"] = ((t - s) @ (t - b)).item() / moved
    token_ids = [completion.token_ids for completion in drawn]
    return metrics, {"drawn": [*map(list, zip(token_ids, logprobs, strict=True))]}


def score(
    policy: Policy, prompts: list[list[int]], drawn: list[Completion], temperature: float = 1.0
) -> list[list[float]]:
    """Log-probs of the tokens of each completion after its prompt, computed as in training."""
    rollouts = []
    for prompt, completion in zip(prompts, drawn, strict=True):
        turn = Turn(prompt, completion.token_ids, completion.logprobs, completion.finish_reason)
        rollouts.append(Rollout("", "", 0, 0, turns=[turn]))
    batch = to_tokens(rollouts)
    logprobs = score_tokens(policy, batch, temperature, batch.sequences)["logprobs"]
    lengths = [len(completion.token_ids) for completion in drawn]
    return [vector.tolist() for vector in logprobs.split(lengths)]


def gaps(policy: Policy, prompt: list[int], drawn: Completion, temperature: float = 1.0) -> Tensor:
    """|log-prob in training - log-prob of the sampler| of each sampled token, in nats: [N]."""
    (ours,) = score(policy, [prompt], [drawn], temperature)
    return (torch.tensor(ours) - torch.tensor(drawn.logprobs)).abs()


def check_gap(
    policy: Policy,
    sampler: Sampler,
    prompts: list[list[int]],
    params: SamplingParams,
    subject: str,
    advice: str,
) -> float:
    """The mean of `gaps` over a completion, of the prompt where it is largest.

    Raises UsageError if the mean is above MAX_GAP or NaN, or a token is not in the vocabulary.
    """
    gap = math.inf
    limit = MAX_GAP.get(policy.dtype, MAX_GAP[torch.float32])
    drawn = sampler.sample(prompts, params)
    vocab_size = policy.causal_lm.config.get_text_config().vocab_size
    if max(max(completion.token_ids) for completion in drawn) < vocab_size:
        pairs = zip(prompts, drawn, strict=True)
        means = [gaps(policy, *pair, params.temperature).mean() for pair in pairs]
        gap = torch.stack(means).max().item()
    if not gap <= limit:
        difference = f"log-probs differ by {gap:.1e} nats from the trainer's"
        raise UsageError(f"{subject}: its {difference}, {limit:.0e} is allowed: {advice}")
    return gap


@contextmanager
def noise(policy: Policy) -> Iterator[None]:
    """Inside, random numbers are added to B of the adapters, so that a sampler with other adapters
    has other log-probs."""
    generator = torch.Generator(policy.device).manual_seed(0)
    weights = {n: w for n, w in policy.model.named_parameters() if "lora_B" in n}
    with borrowed(weights):
        with torch.no_grad():
            for weight in weights.values():
                weight += torch.empty_like(weight).normal_(std=NOISE, generator=generator)
        yield
