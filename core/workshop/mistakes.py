"""Typical wrong answers to the exercises of scratch.py, each with its own hint.

The checker runs these functions too. If one of them gives the same wrong answer as the participant,
its hint explains what the participant did.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.workshop import solutions as right

UNCHANGED = "the function as it was given: reward per token, so a long answer gets less"


def _pick(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids[:, :, None]).squeeze(-1)


def _flags(turns: list[tuple[list[int], list[int]]], gap: int = 0) -> Tensor:
    """True at the completions among all T ids, with `gap` extra False after each completion."""
    parts = [[False] * len(c) + [True] * len(done) + [False] * gap for c, done in turns]
    return torch.tensor([flag for part in parts for flag in part], dtype=torch.bool)


def _by_group(returns: Tensor, group_ids: Tensor, scaled: Callable[[Tensor], Tensor]) -> Tensor:
    advantages = torch.zeros_like(returns)
    for group in group_ids.unique():
        advantages[group_ids == group] = scaled(returns[group_ids == group])
    return advantages


def _surrogate(
    x: Tensor, old: Tensor, a: Tensor, m: Tensor, clip: float,
    ratio: Callable[[Tensor, Tensor], Tensor] = lambda x, old: (x - old).exp(),
    objective: Callable[..., Tensor] = lambda r, c, a: torch.minimum(r * a, c * a),
) -> Tensor:  # fmt: skip
    r = ratio(x, old)
    return -objective(r, r.clamp(1 - clip, 1 + clip), a)[m].sum() / m.sum()


def _gae(r: Tensor, v: Tensor, gamma: float, decay: float, bootstrap: float = 0.0) -> Tensor:
    advantages, later = torch.zeros_like(r), torch.tensor(0.0)
    next_values = torch.cat([v[1:], v[-1:] * bootstrap])
    for t in reversed(range(len(r))):
        later = advantages[t] = r[t] + gamma * next_values[t] - v[t] + decay * later
    return advantages


def _forward_gae(r: Tensor, v: Tensor, gamma: float, decay: float) -> Tensor:
    deltas, earlier = _gae(r, v, gamma, 0.0), 0.0
    return torch.stack([earlier := delta + decay * earlier for delta in deltas])


def _draw(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def _with_logprobs(
    ids: Tensor, logits: Tensor, then: Callable[[Tensor], Tensor] = torch.clone
) -> tuple[Tensor, Tensor]:
    return ids, then(logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1))


def _nonzero(temperature: float) -> float:
    return temperature or 1e-6


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, mask: Tensor, returns: Tensor,
    group_ids: Tensor, detach: bool = True, clip: bool = True, zero: str = "after", sign: int = 1,
    baseline: bool = True, masked: bool = True, step: bool = True,
) -> float:  # fmt: skip
    if zero == "before":
        optimizer.zero_grad()
    logprobs = right.token_logprobs(model(ids), ids)
    advantages = right.group_advantages(returns, group_ids) if baseline else returns
    old = logprobs.detach() if detach else logprobs
    mask = mask if masked else torch.ones_like(mask)
    loss = sign * right.clipped_loss(logprobs, old, advantages[:, None].expand_as(logprobs), mask)
    loss.backward()
    if zero == "early":
        optimizer.zero_grad()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if step:
        optimizer.step()
    if zero == "after":
        optimizer.zero_grad()
    return loss.item()


def _token_advantages(returns: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    same = (group_ids[:, None] == group_ids[None, :]).float()
    return (returns - (same @ returns) / same.sum(1))[:, None] * mask


MISTAKES: dict[str, list[tuple[str, Callable[..., Any]]]] = {  # by exercise: (hint, function)
    "token_logprobs": [
        ("not shifted: logits[t] predict the token at t+1, not the one at t",
         lambda x, ids: _pick(x[:, :-1].log_softmax(-1), ids[:, :-1])),
        ("shifted the wrong way: drop the last position of the logits and the first id",
         lambda x, ids: _pick(x[:, 1:].log_softmax(-1), ids[:, :-1])),
        ("you dropped the first position of the logits; drop the last one, which predicts nothing",
         lambda x, ids: _pick(x[:, 1:].log_softmax(-1), ids[:, 1:])),
        ("these are logits: apply log_softmax", lambda x, ids: _pick(x[:, :-1], ids[:, 1:])),
        ("these are probabilities: take their logarithm (log_softmax)",
         lambda x, ids: _pick(x[:, :-1].softmax(-1), ids[:, 1:])),
        ("log_softmax went over the positions; the vocabulary is the last axis",
         lambda x, ids: _pick(x[:, :-1].log_softmax(1), ids[:, 1:])),
        ("wrong sign: a log-prob is at most 0 (cross_entropy returns minus the log-prob)",
         lambda x, ids: -_pick(x[:, :-1].log_softmax(-1), ids[:, 1:])),
        ("no gradient reaches the logits: remove detach and no_grad",
         lambda x, ids: _pick(x[:, :-1].log_softmax(-1), ids[:, 1:]).detach()),
    ],
    "completion_mask": [
        ("not shifted: drop the entry of the first id, which no logits predict", _flags),
        ("you dropped the last id; drop the first one, which no logits predict",
         lambda turns: _flags(turns)[:-1]),
        ("inverted: True marks the tokens that the policy sampled",
         lambda turns: ~_flags(turns)[1:]),
        ("only the last turn counts here; the completions of all turns were sampled",
         lambda turns: torch.cat([torch.zeros_like(_flags(turns[:-1])), _flags(turns[-1:])])[1:]),
        ("the <end> of a completion is missing: the policy samples it too, and must learn to stop",
         lambda turns: _flags([(c, [*done[:-1]]) for c, done in turns], gap=1)[1:]),
        ("the first token of a completion is missing: the last token of the context predicts it",
         lambda turns: _flags([([*c, 0], done[1:]) for c, done in turns])[1:]),
        ("these are 0 and 1; a mask must be bool, or indexing with it means something else",
         lambda turns: _flags(turns)[1:].long()),
    ],
    "group_advantages": [
        ("compared with the whole batch: use the mean and standard deviation of each group",
         lambda r, g: (r - r.mean()) / (r.std() + 1e-4)),
        ("this is the population standard deviation; divide by n - 1, as Tensor.std() does",
         lambda r, g: _by_group(r, g, lambda x: (x - x.mean()) / (x.std(correction=0) + 1e-4))),
        ("not divided by the standard deviation of the group",
         lambda r, g: _by_group(r, g, lambda x: x - x.mean())),
        ("divided by the variance: take its square root",
         lambda r, g: _by_group(r, g, lambda x: (x - x.mean()) / (x.var() + 1e-4))),
        ("wrong sign: a return above the mean has a positive advantage",
         lambda r, g: -right.group_advantages(r, g)),
        ("add 1e-4 to the standard deviation: a group of equal returns divides 0 by 0",
         lambda r, g: _by_group(r, g, lambda x: (x - x.mean()) / x.std())),
        ("the baseline is missing: subtract the mean of the group",
         lambda r, g: _by_group(r, g, lambda x: x / (x.std() + 1e-4))),
        ("divided by the standard deviation of the batch: use that of each group",
         lambda r, g: _by_group(r, g, lambda x: x - x.mean()) / (r.std() + 1e-4)),
        ("you took neighbors as groups of equal size; use group_ids",
         lambda r, g: right.group_advantages(r, torch.arange(len(r)) // 2)),
    ],
    "reinforce_loss": [
        ("wrong sign: the optimizer minimizes the loss, so negate what should grow",
         lambda x, a, m: (a * x)[m].sum() / m.sum()),
        ("this is a sum: divide by the number of sampled tokens",
         lambda x, a, m: -(a * x)[m].sum()),
        ("the mask is not used: only sampled tokens count", lambda x, a, m: -(a * x).mean()),
        ("divided by the number of positions: divide by that of sampled tokens, mask.sum()",
         lambda x, a, m: -(a * x)[m].sum() / m.numel()),
        ("divided by the number of rollouts: divide by that of sampled tokens, mask.sum()",
         lambda x, a, m: -(a * x)[m].sum() / len(m)),
        ("this is the mean of each rollout's mean; here every token has the same weight",
         lambda x, a, m: -(torch.where(m, a * x, 0).sum(1) / m.sum(1)).mean()),
        ("multiplied by the mask: 0 · infinity is nan; select with [mask]",
         lambda x, a, m: -(a * x * m).sum() / m.sum()),
        ("this uses the probability instead of its logarithm",
         lambda x, a, m: -(a * x.exp())[m].sum() / m.sum()),
        ("no gradient reaches the log-probs: remove detach",
         lambda x, a, m: -(a * x.detach())[m].sum() / m.sum()),
    ],
    "clipped_loss": [
        ("wrong sign: the optimizer minimizes the loss, so negate what should grow",
         lambda x, old, a, m, clip=0.2: -_surrogate(x, old, a, m, clip)),
        ("you took the larger of the two products; take the smaller one",
         lambda x, old, a, m, clip=0.2: _surrogate(
             x, old, a, m, clip, objective=lambda r, c, a: torch.maximum(r * a, c * a))),
        ("only the clipped product: a ratio that moved the wrong way then has no gradient back",
         lambda x, old, a, m, clip=0.2: _surrogate(
             x, old, a, m, clip, objective=lambda r, c, a: c * a)),
        ("not clipped: clamp the ratio to 1-clip..1+clip",
         lambda x, old, a, m, clip=0.2: _surrogate(
             x, old, a, m, clip, objective=lambda r, c, a: r * a)),
        ("the ratio is inverted: it is π over π_old",
         lambda x, old, a, m, clip=0.2: _surrogate(
             x, old, a, m, clip, ratio=lambda x, old: (old - x).exp())),
        ("you divided log-probs: a ratio of probabilities is exp(log π - log π_old)",
         lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, m, clip, ratio=torch.div)),
        ("this is the logarithm of the ratio: take exp of the difference",
         lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, m, clip, ratio=torch.sub)),
        ("you took the smaller ratio before multiplying by A; for A < 0 that is the wrong one",
         lambda x, old, a, m, clip=0.2: _surrogate(
             x, old, a, m, clip, objective=lambda r, c, a: torch.minimum(r, c) * a)),
        ("the mask is not used: only sampled tokens count",
         lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, torch.ones_like(m), clip)),
        ("this is a sum: divide it by the number of sampled tokens",
         lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, m, clip) * m.sum()),
        ("the clip is always 0.2 here: use the argument",
         lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, m, 0.2)),
        ("no gradient reaches the log-probs: detach only the old ones",
         lambda x, old, a, m, clip=0.2: _surrogate(x.detach(), old, a, m, clip)),
    ],
    "kl_k3": [
        ("this is k1, log π - log π_ref, which can be negative for a token",
         lambda x, ref: x - ref),
        ("this is k2, half the square of the difference", lambda x, ref: (x - ref) ** 2 / 2),
        ("r is inverted: it is π_ref over π", lambda x, ref: (x - ref).exp() - 1 - (x - ref)),
        ("wrong sign: r - 1 - log r is never negative",
         lambda x, ref: -((ref - x).exp() - 1 - (ref - x))),
        ("log r is missing: subtract it", lambda x, ref: (ref - x).exp() - 1),
        ("the 1 is missing: where both policies agree, r is 1 and the estimate must be 0",
         lambda x, ref: (ref - x).exp() - (ref - x)),
        ("you divided log-probs: r = exp(log π_ref - log π)",
         lambda x, ref: ref / x - 1 - (ref / x).log()),
        ("this is an average: return one estimate for each token",
         lambda x, ref: right.kl_k3(x, ref).mean()),
    ],
    "gae": [
        ("the next value is missing: δ_t = r_t + γ V_t+1 - V_t",
         lambda r, v, g=1.0, lam=0.95: _gae(r, torch.zeros_like(v), g, g * lam) - v),
        ("the value is not subtracted: δ_t = r_t + γ V_t+1 - V_t",
         lambda r, v, g=1.0, lam=0.95: _gae(r + v, v, g, g * lam)),
        ("these are returns: subtract the value to get the advantage",
         lambda r, v, g=1.0, lam=0.95: right.gae(r, v, g, lam) + v),
        ("γ is missing before the next advantage: γ λ A_t+1",
         lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, lam)),
        ("γ is missing before the next value: γ V_t+1",
         lambda r, v, g=1.0, lam=0.95: _gae(r, v, 1.0, g * lam)),
        ("λ is missing before the next advantage: γ λ A_t+1",
         lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, g)),
        ("the episode has ended: after its last token the value is 0, not the last value again",
         lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, g * lam, bootstrap=1.0)),
        ("you went from left to right; go from the last token to the first",
         lambda r, v, g=1.0, lam=0.95: _forward_gae(r, v, g, g * lam)),
        ("this is only δ_t: add γ λ A_t+1",
         lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, 0.0)),
    ],
    "sample": [
        ("this takes the most likely token: sample with torch.multinomial",
         lambda x, t, g: _with_logprobs(x.argmax(-1), x / _nonzero(t))),
        ("the temperature is not used: divide the logits by it",
         lambda x, t, g: _with_logprobs(_draw(x if t else x * 1e6, g), x)),
        ("multiplied by the temperature: divide, so that a low temperature sharpens",
         lambda x, t, g: _with_logprobs(_draw(x * t, g), x * t)),
        ("the log-prob is that of another distribution: compute it after dividing by temperature",
         lambda x, t, g: _with_logprobs(_draw(x / _nonzero(t), g), x)),
        ("these are probabilities, not their logarithms",
         lambda x, t, g: _with_logprobs(
             _draw(x / _nonzero(t), g), x / _nonzero(t), torch.exp)),
        ("temperature 0 divides by 0: use argmax there, and the log-prob under the logits",
         lambda x, t, g: _with_logprobs(_draw(x / _nonzero(t), g), x / _nonzero(t))),
        ("the results have an extra axis of size 1: squeeze(-1)",
         lambda x, t, g: tuple(
             y[:, None] for y in _with_logprobs(_draw(x / _nonzero(t), g), x / _nonzero(t)))),
    ],
    "training_step": [
        ("the weights did not change: detach the old log-probs, or the ratio has no gradient",
         partial(_step, detach=False)),
        ("the weights did not change: optimizer.step() is missing", partial(_step, step=False)),
        ("the weights did not change: the gradient was set to zero before the step",
         partial(_step, zero="early")),
        ("the norm of the gradient was not clipped to 1", partial(_step, clip=False)),
        ("the gradient remains and adds up over steps: zero_grad after the step",
         partial(_step, zero="never")),
        ("the gradient remains after the step: call zero_grad after it, not only before the next",
         partial(_step, zero="before")),
        ("wrong direction: the loss is already negated", partial(_step, sign=-1)),
        ("this uses the returns themselves: compute their advantages, exercise 3",
         partial(_step, baseline=False)),
        ("the mask is not used: only tokens that the policy sampled are trained",
         partial(_step, masked=False)),
    ],
    "advantages_of_tokens": [
        (UNCHANGED, lambda r, m, g: _token_advantages((r * m).sum(1) / m.sum(1), m, g)),
        ("divided by the width of the batch: a return is a sum and depends on no other rollout",
         lambda r, m, g: _token_advantages((r * m).mean(1), m, g)),
        ("only the last column: a reward can be at any token",
         lambda r, m, g: _token_advantages((r * m)[:, -1], m, g)),
        ("this is the largest reward: a return is the sum of all rewards",
         lambda r, m, g: _token_advantages((r * m).amax(1), m, g)),
        ("the baseline is missing: subtract the mean of the group",
         lambda r, m, g: (r * m).sum(1, keepdim=True) * m),
        ("rewards in the padding were counted: multiply by the mask before the sum",
         lambda r, m, g: _token_advantages(r.sum(1), m, g)),
        ("padding got an advantage: multiply by the mask at the end",
         lambda r, m, g: _token_advantages((r * m).sum(1), torch.ones_like(m), g)),
    ],
}  # fmt: skip
