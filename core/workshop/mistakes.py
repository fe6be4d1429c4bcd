"""Wrong answers to the exercises, as people give them, each with what to say about it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from core.workshop import solutions as right

MISTAKES: dict[str, list[tuple[str, Callable]]] = {}  # of each function: (hint, the wrong one)


wrong: Callable


def mistake(name: str, hint: str, wrong: Callable) -> None:
    MISTAKES.setdefault(name, []).append((hint, wrong))


def _picked(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids[:, :, None]).squeeze(-1)


for hint, wrong in (
    ("not shifted: logits[t] predict the token at t+1, not the one at t",
     lambda x, ids: _picked(x[:, :-1].log_softmax(-1), ids[:, :-1])),
    ("shifted the wrong way: it's the logits whose last position is dropped, the ids their first",
     lambda x, ids: _picked(x[:, 1:].log_softmax(-1), ids[:, :-1])),
    ("the logits' first position was dropped; drop their last one, nothing came after it",
     lambda x, ids: _picked(x[:, 1:].log_softmax(-1), ids[:, 1:])),
    ("these are logits: log_softmax them", lambda x, ids: _picked(x[:, :-1], ids[:, 1:])),
    ("these are probabilities: take their logarithm (log_softmax)",
     lambda x, ids: _picked(x[:, :-1].softmax(-1), ids[:, 1:])),
    ("log_softmax went over the positions; the vocabulary is the last axis",
     lambda x, ids: _picked(x[:, :-1].log_softmax(1), ids[:, 1:])),
    ("the sign: a log-prob is at most 0 (cross_entropy gives minus the log-prob)",
     lambda x, ids: -_picked(x[:, :-1].log_softmax(-1), ids[:, 1:])),
    ("the gradient was cut off: no detach, no no_grad",
     lambda x, ids: _picked(x[:, :-1].log_softmax(-1), ids[:, 1:]).detach()),
):  # fmt: skip
    mistake("token_logprobs", hint, wrong)

for hint, wrong in (
    ("not shifted: leave out the first id, which no logits predict", lambda turns: _flags(turns)),
    ("the last id was left out; it's the first one that no logits predict",
     lambda turns: _flags(turns)[:-1]),
    ("the wrong way round: True is what the policy sampled", lambda turns: ~_flags(turns)[1:]),
    ("only the last turn counts here; every completion was sampled",
     lambda turns: torch.cat([torch.zeros_like(_flags(turns[:-1])), _flags(turns[-1:])])[1:]),
    ("the <end> of a completion is missing: the policy sampled it too, and has to learn to stop",
     lambda turns: _flags([(c, [*done[:-1]]) for c, done in turns], gap=1)[1:]),
    ("the first token of a completion is missing: it was sampled, from the last of the context",
     lambda turns: _flags([([*c, 0], done[1:]) for c, done in turns])[1:]),
    ("these are 0 and 1: a mask is bool, or indexing with it means something else",
     lambda turns: _flags(turns)[1:].long()),
):  # fmt: skip
    mistake("completion_mask", hint, wrong)


def _flags(turns: list, gap: int = 0) -> Tensor:
    """True at completions of all T ids, with `gap` ids of nobody's behind each."""
    parts = [[False] * len(c) + [True] * len(done) + [False] * gap for c, done in turns]
    return torch.tensor([flag for part in parts for flag in part], dtype=torch.bool)


for hint, wrong in (
    ("compared with the whole batch: each group has a mean and a deviation of its own",
     lambda r, g: (r - r.mean()) / (r.std() + 1e-4)),
    ("the standard deviation is that of a population; divide by n - 1 (Tensor.std() does)",
     lambda r, g: _by_group(r, g, lambda x: (x - x.mean()) / (x.std(correction=0) + 1e-4))),
    ("not divided by the standard deviation of the group",
     lambda r, g: _by_group(r, g, lambda x: x - x.mean())),
    ("divided by the variance: take its square root",
     lambda r, g: _by_group(r, g, lambda x: (x - x.mean()) / (x.var() + 1e-4))),
    ("the sign: better than the mean is above 0",
     lambda r, g: -right.group_advantages(r, g)),
    ("add 1e-4 to the standard deviation: a group paid alike divides 0 by 0",
     lambda r, g: _by_group(r, g, lambda x: (x - x.mean()) / x.std())),
    ("the baseline is missing: subtract the mean of the group",
     lambda r, g: _by_group(r, g, lambda x: x / (x.std() + 1e-4))),
    ("divided by the deviation of the batch: each group has its own",
     lambda r, g: _by_group(r, g, lambda x: x - x.mean()) / (r.std() + 1e-4)),
    ("the groups were taken as neighbours of equal size; go by group_ids",
     lambda r, g: right.group_advantages(r, torch.arange(len(r)) // 2)),
):  # fmt: skip
    mistake("group_advantages", hint, wrong)


def _by_group(returns: Tensor, group_ids: Tensor, scaled: Callable[[Tensor], Tensor]) -> Tensor:
    found = torch.zeros_like(returns)
    for group in group_ids.unique():
        found[group_ids == group] = scaled(returns[group_ids == group])
    return found


for hint, wrong in (
    ("the sign: an optimiser goes down, so minus what should go up",
     lambda x, a, m: (a * x)[m].sum() / m.sum()),
    ("a sum: divide by the number of sampled tokens", lambda x, a, m: -(a * x)[m].sum()),
    ("the mask is not used: only sampled tokens count", lambda x, a, m: -(a * x).mean()),
    ("divided by all positions: divide by the sampled ones, mask.sum()",
     lambda x, a, m: -(a * x)[m].sum() / m.numel()),
    ("divided by the rollouts: divide by the sampled tokens, mask.sum()",
     lambda x, a, m: -(a * x)[m].sum() / len(m)),
    ("the mean of each rollout's mean: here every token counts the same",
     lambda x, a, m: -(torch.where(m, a * x, 0).sum(1) / m.sum(1)).mean()),
    ("multiplied by the mask: 0 · infinity is not a number; pick with [mask]",
     lambda x, a, m: -(a * x * m).sum() / m.sum()),
    ("the probability instead of its logarithm",
     lambda x, a, m: -(a * x.exp())[m].sum() / m.sum()),
    ("the gradient was cut off: no detach on the log-probs",
     lambda x, a, m: -(a * x.detach())[m].sum() / m.sum()),
):  # fmt: skip
    mistake("reinforce_loss", hint, wrong)


def _surrogate(
    x: Tensor, old: Tensor, a: Tensor, m: Tensor, clip: float, **how: Callable
) -> Tensor:
    ratio = how.get("ratio", lambda: (x - old).exp())()
    gain = how.get("gain", lambda r, c: torch.minimum(r * a, c * a))
    return -gain(ratio, ratio.clamp(1 - clip, 1 + clip))[m].sum() / m.sum()


for hint, wrong in (
    ("the sign: an optimiser goes down, so minus what should go up",
     lambda x, old, a, m, clip=0.2: -_surrogate(x, old, a, m, clip)),
    ("the larger of the two products: take the smaller, a clip is there to take away",
     lambda x, old, a, m, clip=0.2: _surrogate(
         x, old, a, m, clip, gain=lambda r, c: torch.maximum(r * a, c * a))),
    ("only the clipped product: where the ratio went the wrong way nothing would pull it back",
     lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, m, clip, gain=lambda r, c: c * a)),
    ("not clipped: clamp the ratio to 1-clip..1+clip",
     lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, m, clip, gain=lambda r, c: r * a)),
    ("the ratio upside down: π over π_old",
     lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, m, clip, ratio=lambda: (old - x).exp())),
    ("log-probs were divided: a ratio of probabilities is exp(log π - log π_old)",
     lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, m, clip, ratio=lambda: x / old)),
    ("the logarithm of the ratio: take exp of the difference",
     lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, m, clip, ratio=lambda: x - old)),
    ("the smaller ratio was taken before A came in: for A < 0 that is the wrong one",
     lambda x, old, a, m, clip=0.2: _surrogate(
         x, old, a, m, clip, gain=lambda r, c: torch.minimum(r, c) * a)),
    ("the mask is not used: only sampled tokens count",
     lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, torch.ones_like(m), clip)),
    ("a sum: divide it by the number of sampled tokens",
     lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, m, clip) * m.sum()),
    ("the clip is always 0.2 here: use the argument",
     lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, m, 0.2)),
    ("the gradient was cut off: detach the old log-probs only",
     lambda x, old, a, m, clip=0.2: _surrogate(x.detach(), old, a, m, clip)),
):  # fmt: skip
    mistake("clipped_loss", hint, wrong)

for hint, wrong in (
    ("this is k1, log π - log π_ref: for one token it can be negative", lambda x, ref: x - ref),
    ("this is k2, half the square of the difference", lambda x, ref: (x - ref) ** 2 / 2),
    ("r upside down: π_ref over π", lambda x, ref: (x - ref).exp() - 1 - (x - ref)),
    ("the sign: r - 1 - log r is never negative",
     lambda x, ref: -((ref - x).exp() - 1 - (ref - x))),
    ("log r is missing: without it this is not 0 on average", lambda x, ref: (ref - x).exp() - 1),
    ("1 is missing: where both agree r is 1, and there should be 0",
     lambda x, ref: (ref - x).exp() - (ref - x)),
    ("the log-probs were divided: r = exp(log π_ref - log π)",
     lambda x, ref: ref / x - 1 - (ref / x).log()),
    ("an average: an estimate for each token is wanted",
     lambda x, ref: right.kl_k3(x, ref).mean()),
):  # fmt: skip
    mistake("kl_k3", hint, wrong)


def _gae(r: Tensor, v: Tensor, gamma: float, carry: float, behind: float = 0.0) -> Tensor:
    found, later = torch.zeros_like(r), torch.tensor(0.0)
    following = torch.cat([v[1:], v[-1:] * behind])
    for t in reversed(range(len(r))):
        later = found[t] = r[t] + gamma * following[t] - v[t] + carry * later
    return found


for hint, wrong in (
    ("the next value is missing: δ_t = r_t + γ V_t+1 - V_t",
     lambda r, v, g=1.0, lam=0.95: _gae(r, torch.zeros_like(v), g, g * lam) - v),
    ("the value is not subtracted: δ_t = r_t + γ V_t+1 - V_t",
     lambda r, v, g=1.0, lam=0.95: _gae(r + v, v, g, g * lam)),
    ("these are returns: an advantage is what they are above the value",
     lambda r, v, g=1.0, lam=0.95: right.gae(r, v, g, lam) + v),
    ("γ is missing before the next advantage: γ λ A_t+1",
     lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, lam)),
    ("γ is missing before the next value: γ V_t+1",
     lambda r, v, g=1.0, lam=0.95: _gae(r, v, 1.0, g * lam)),
    ("λ is missing before the next advantage: γ λ A_t+1",
     lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, g)),
    ("the episode ended: behind its last token there is no value, not the last one again",
     lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, g * lam, behind=1.0)),
    ("from left to right: credit flows back, from the last token to the first",
     lambda r, v, g=1.0, lam=0.95: _forward_gae(r, v, g, g * lam)),
    ("only δ: add γ λ times the next advantage",
     lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, 0.0)),
):  # fmt: skip
    mistake("gae", hint, wrong)


def _forward_gae(r: Tensor, v: Tensor, gamma: float, carry: float) -> Tensor:
    deltas, earlier = _gae(r, v, gamma, 0.0), 0.0
    return torch.stack([earlier := delta + carry * earlier for delta in deltas])


def _draw(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def _with(ids: Tensor, logits: Tensor, then: Callable = torch.clone) -> tuple[Tensor, Tensor]:
    return ids, then(logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1))


def _heat(t: float) -> float:
    return t or 1e-6


for hint, wrong in (
    ("the likeliest was taken: draw with torch.multinomial",
     lambda x, t, g: _with(x.argmax(-1), x / _heat(t))),
    ("the temperature is not used: divide the logits by it",
     lambda x, t, g: _with(_draw(x if t else x * 1e6, g), x)),
    ("multiplied by the temperature: divide, so that a low one sharpens",
     lambda x, t, g: _with(_draw(x * t, g), x * t)),
    ("the log-prob is that of another distribution: take it after the temperature",
     lambda x, t, g: _with(_draw(x / _heat(t), g), x)),
    ("these are probabilities, not their logarithms",
     lambda x, t, g: _with(_draw(x / _heat(t), g), x / _heat(t), torch.exp)),
    ("temperature 0 divides by 0: take the argmax there, with its log-prob under the logits",
     lambda x, t, g: _with(_draw(x / _heat(t), g), x / _heat(t))),
    ("draws keep an axis of one: squeeze(-1)",
     lambda x, t, g: tuple(y[:, None] for y in _with(_draw(x / _heat(t), g), x / _heat(t)))),
):  # fmt: skip
    mistake("sample", hint, wrong)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, mask: Tensor, returns: Tensor,
    group_ids: Tensor, detach: bool = True, clip: bool = True, zero: str = "after", sign: int = 1,
    baseline: bool = True, masked: bool = True, step: bool = True,
) -> float:  # fmt: skip
    if zero == "before":
        optimizer.zero_grad()
    logprobs = right.token_logprobs(model(ids), ids)
    better = right.group_advantages(returns, group_ids) if baseline else returns
    old = logprobs.detach() if detach else logprobs
    mask = mask if masked else torch.ones_like(mask)
    loss = sign * right.clipped_loss(logprobs, old, better[:, None].expand_as(logprobs), mask)
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


for hint, how in (
    ("nothing moved: the old log-probs must be constant (detach), or the ratio has no gradient",
     {"detach": False}),
    ("nothing moved: optimizer.step() is missing", {"step": False}),
    ("nothing moved: the gradient was zeroed before the step", {"zero": "early"}),
    ("the gradient's norm was not clipped to 1", {"clip": False}),
    ("the gradient is left behind and adds up: zero_grad after the step", {"zero": "never"}),
    ("the gradient is left behind: zero_grad after the step, not only before the next one",
     {"zero": "before"}),
    ("the wrong way: the loss already has its minus", {"sign": -1}),
    ("returns were used as they are: take their advantages, exercise 3", {"baseline": False}),
    ("the mask is not used: what the policy did not write must not be learnt", {"masked": False}),
):  # fmt: skip
    mistake("training_step", hint, lambda *args, how=how: _step(*args, **how))


def _credit(returns: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    same = (group_ids[:, None] == group_ids[None, :]).float()
    return (returns - (same @ returns) / same.sum(1))[:, None] * mask


UNTOUCHED = "as it was given: paid a token, so a long answer gets less"
for hint, wrong in (
    (UNTOUCHED, lambda r, m, g: _credit((r * m).sum(1) / m.sum(1), m, g)),
    ("divided by the width of the batch: a return is a sum, and depends on no other rollout",
     lambda r, m, g: _credit((r * m).mean(1), m, g)),
    ("only the last column: what was paid stands where it was paid",
     lambda r, m, g: _credit((r * m)[:, -1], m, g)),
    ("the largest reward: a return is the sum of all",
     lambda r, m, g: _credit((r * m).amax(1), m, g)),
    ("the baseline is gone: subtract the mean of the group",
     lambda r, m, g: (r * m).sum(1, keepdim=True) * m),
    ("padding was paid: multiply by the mask before the sum",
     lambda r, m, g: _credit(r.sum(1), m, g)),
    ("padding gets credit: multiply by the mask at the end",
     lambda r, m, g: _credit((r * m).sum(1), torch.ones_like(m), g)),
):  # fmt: skip
    mistake("advantages_of_tokens", hint, wrong)
