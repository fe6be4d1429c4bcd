"""Typical mistakes in the exercises of scratch.py, each with its cause.

The checker runs these functions too. If one of them gives the same answers as the participant's
function, its cause says what the participant did. Two mistakes with the same answers on all facts
share one entry, whose cause names both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from core.workshop import solutions as right

REWARD_PER_TOKEN = "still the reward per token, so a long answer gets less"


@dataclass(frozen=True)
class Mistake:
    """A mistake: its cause, the idea that corrects it (the second hint), and a function that makes
    it. `variants` make the same mistake with other numbers. `line` is part of the line of the
    solution that the third hint shows, `question` the first hint; "": those of the fact that fails.
    """

    cause: str
    idea: str
    wrong: Callable[..., Any]
    line: str = ""
    variants: tuple[Callable[..., Any], ...] = ()
    question: str = ""


def advantages_as_given(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """Exercise 10 with its bug, as scratch.py gives it."""
    returns = (rewards * mask).sum(1) / mask.sum(1)  # [B]
    same = (group_ids[:, None] == group_ids[None, :]).float()  # [B, B]: 1 within a group
    baseline = (same @ returns) / same.sum(1)  # [B]
    return (returns - baseline)[:, None] * mask


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


def _in_order_of_groups(returns: Tensor, group_ids: Tensor) -> Tensor:
    advantages = right.group_advantages(returns, group_ids)
    return torch.cat([advantages[group_ids == group] for group in group_ids.unique()])


def _in_integers(returns: Tensor, group_ids: Tensor) -> Tensor:
    advantages = torch.zeros_like(group_ids)
    advantages[group_ids == group_ids[0]] = returns[group_ids == group_ids[0]]  # raises
    return advantages


def _neighbors(returns: Tensor, size: int) -> Tensor:
    rows = returns.view(-1, size)
    scaled = (rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-4)
    return scaled.flatten()


def _loss(x: Tensor, a: Tensor, m: Tensor, tokens: Callable[[Tensor], Any]) -> Tensor:
    """Exercise 4 with another divisor than the number of sampled tokens."""
    return -(a[m] * x[m]).sum() / tokens(m)


def _rows_mean(values: Tensor, m: Tensor) -> Tensor:
    """The mean of each row over the mask: [B, 1]."""
    return torch.where(m, values, 0.0).sum(1, True) / m.sum(1, True)


def _surrogate(
    x: Tensor, old: Tensor, a: Tensor, m: Tensor, clip: float = 0.2,
    ratio: Callable[[Tensor, Tensor], Tensor] = lambda x, old: (x - old).exp(),
    bounds: Callable[[float], tuple[float, float]] = lambda clip: (1 - clip, 1 + clip),
    objective: Callable[..., Tensor] = lambda r, c, a: torch.minimum(r * a, c * a),
    tokens: Callable[[Tensor], Any] = torch.sum,
) -> Tensor:  # fmt: skip
    """Exercise 5 with one part exchanged."""
    x, old, a = x[m], old[m], a[m]
    r = ratio(x, old)
    return -objective(r, r.clamp(*bounds(clip)), a).sum() / tokens(m)


def _surrogate_tokens(x: Tensor, old: Tensor, a: Tensor, clip: float) -> Tensor:
    r = (x - old).exp()
    return torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a)


def _columns_mean(values: Tensor, m: Tensor) -> Tensor:
    return values.mean(1, keepdim=True)


def _rows_sum(values: Tensor, m: Tensor) -> Tensor:
    return torch.where(m, values, 0.0).sum(1, keepdim=True)


OF_A_ROLLOUT = (  # its advantage
    lambda a, m: a[:, :1], lambda a, m: a[:, -1:], _columns_mean, _rows_mean, _rows_sum,
)  # fmt: skip


def _sequence_ratio(
    x: Tensor, old: Tensor, a: Tensor, m: Tensor, clip: float = 0.2,
    of: Callable[[Tensor, Tensor], Tensor] = _rows_mean,
    per_row: Callable[[Tensor, Tensor], Tensor] | None = None,
    tokens: Callable[[Tensor], Any] = torch.sum,
) -> Tensor:  # fmt: skip
    """Exercise 5 with one ratio for each rollout, and perhaps one advantage."""
    r = of(x - old, m).exp()
    a = per_row(a, m) if per_row else a
    objective = torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a)
    return -(objective if per_row else objective[m]).sum() / tokens(m)


def _gae(r: Tensor, v: Tensor, gamma: float, decay: float, bootstrap: float = 0.0) -> Tensor:
    advantages, later = torch.zeros_like(r), torch.tensor(0.0)
    next_values = torch.cat([v[1:], v[-1:] * bootstrap])
    for t in reversed(range(len(r))):
        later = advantages[t] = r[t] + gamma * next_values[t] - v[t] + decay * later
    return advantages


def _forward_gae(r: Tensor, v: Tensor, gamma: float, decay: float) -> Tensor:
    deltas, earlier = _gae(r, v, gamma, 0.0), 0.0
    return torch.stack([earlier := delta + decay * earlier for delta in deltas])


def _gae_without_last(r: Tensor, v: Tensor, gamma: float, lam: float) -> Tensor:
    last = torch.zeros(1)  # the loop starts at N-2, with the last value as the next one
    rewards = torch.cat([r[:-2], (r[-2] + gamma * v[-1])[None]])
    return torch.cat([right.gae(rewards, v[:-1], gamma, lam), last])


def _draw(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def _with_logprobs(
    ids: Tensor, logits: Tensor, then: Callable[[Tensor], Tensor] = torch.clone
) -> tuple[Tensor, Tensor]:
    return ids, then(logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1))


def _with_logits(ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    return ids, logits.gather(-1, ids[:, None]).squeeze(-1)


def _two_draws(logits: Tensor, t: float, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return right.sample(logits, t, g)[0], right.sample(logits, t, g)[1]


def _sorted_draw(logits: Tensor, t: float, g: torch.Generator) -> tuple[Tensor, Tensor]:
    ids, logprobs = right.sample(logits, t, g)
    return ids, logprobs.sort().values


def _nonzero(temperature: float) -> float:
    return temperature or 1e-6


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, mask: Tensor, returns: Tensor,
    group_ids: Tensor, detach: bool = True, clip: str = "last", norm: float = 1.0,
    zero: str = "after", sign: int = 1, baseline: bool = True, masked: bool = True,
    step: str = "last", steps: int = 1, backwards: int = 1, direction: int = 1,
    loss_of: Callable[..., Tensor] | None = None, scaled: Callable[..., Tensor] | None = None,
    repeated: Callable[[Tensor, Tensor], Tensor] = lambda a, x: a[:, None].expand_as(x),
    returned: Callable[..., Tensor] = lambda loss, again: loss,
) -> float:  # fmt: skip
    """A training step with one mistake."""
    if zero == "before":
        optimizer.zero_grad()
    logprobs = right.token_logprobs(model(ids), ids)
    advantages = (scaled or right.group_advantages)(returns, group_ids) if baseline else returns
    old = logprobs.detach() if detach else logprobs
    mask = mask if masked else torch.ones_like(mask)
    repeats = repeated(advantages, logprobs)
    loss = sign * (loss_of or right.clipped_loss)(logprobs, old, repeats, mask)
    if clip == "early":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if step == "early":
        optimizer.step()
    for _ in range(backwards):
        (direction * loss).backward(retain_graph=True)
    if zero == "early":
        optimizer.zero_grad()
    if clip == "last":
        nn.utils.clip_grad_norm_(model.parameters(), norm)
    if clip == "value":
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    if clip == "always":
        for weights in model.parameters():
            weights.grad = None if weights.grad is None else weights.grad / weights.grad.norm()
    if step == "last":
        for _ in range(steps):
            optimizer.step()
    if zero == "after":
        optimizer.zero_grad()
    again = right.token_logprobs(model(ids), ids)
    return returned(loss, right.clipped_loss(again, old, repeats, mask)).item()


def _same(group_ids: Tensor) -> Tensor:
    return (group_ids[:, None] == group_ids[None, :]).float()


def _token_advantages(
    returns: Tensor, mask: Tensor, group_ids: Tensor,
    mean: Callable[[Tensor, Tensor], Tensor] = lambda same, r: (same @ r) / same.sum(1),
) -> Tensor:  # fmt: skip
    return (returns - mean(_same(group_ids), returns))[:, None] * mask


def _mean_of_others(same: Tensor, returns: Tensor, least: float = 0.0) -> Tensor:
    return (same @ returns - returns) / (same.sum(1) - 1).clamp(min=least)


def _per_token(advantages: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The bug of exercise 10 before another mistake."""
    return lambda rewards, mask, group_ids: advantages(
        rewards / mask.sum(1, keepdim=True), mask, group_ids
    )


def _rewards_to_go(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    same, rewards = _same(group_ids), rewards * mask
    later = rewards.flip(1).cumsum(1).flip(1)
    return (later - ((same @ rewards.sum(1)) / same.sum(1))[:, None]) * mask


MISTAKES: dict[str, tuple[Mistake, ...]] = {  # by exercise
    "token_logprobs": (
        Mistake("not shifted: each token is looked up in the logits at its own position",
                "The logits at t predict the token at t+1: drop the last logits and the first id.",
                lambda x, ids: _pick(x[:, :-1].log_softmax(-1), ids[:, :-1])),
        Mistake("shifted the wrong way: each token is looked up in the logits after it",
                "Drop the last position of the logits and the first id.",
                lambda x, ids: _pick(x[:, 1:].log_softmax(-1), ids[:, :-1])),
        Mistake("you dropped the first position of the logits",
                "Drop the last position, which predicts nothing.",
                lambda x, ids: _pick(x[:, 1:].log_softmax(-1), ids[:, 1:]), "logits[:, :-1]"),
        Mistake("neither logits nor ids were cut: T columns, and each token is looked up in the "
                "logits at its own position",
                "Drop the last position of the logits and the first id.",
                lambda x, ids: _pick(x.log_softmax(-1), ids)),
        Mistake("these are logits, not log-probs", "Apply log_softmax.",
                lambda x, ids: _pick(x[:, :-1], ids[:, 1:]), "log_softmax"),
        Mistake("these are probabilities, not their logarithms", "Use log_softmax.",
                lambda x, ids: _pick(x[:, :-1].softmax(-1), ids[:, 1:]), "log_softmax"),
        Mistake("log_softmax went over the wrong axis", "The vocabulary is the last axis: -1.",
                lambda x, ids: _pick(x[:, :-1].log_softmax(1), ids[:, 1:]), "log_softmax",
                (lambda x, ids: _pick(x[:, :-1].log_softmax(0), ids[:, 1:]),
                 lambda x, ids: _pick(x.log_softmax(1)[:, :-1], ids[:, 1:]))),
        Mistake("log of softmax: a probability below 1e-45 is rounded to 0, whose log is -infinity",
                "log_softmax computes both in one step, without rounding to 0.",
                lambda x, ids: _pick(x[:, :-1].softmax(-1).log(), ids[:, 1:]), "log_softmax"),
        Mistake("a small number was added to the probabilities, or they were clamped, before the "
                "logarithm: every smaller probability gets the same log-prob",
                "log_softmax computes both in one step, and needs no such number.",
                lambda x, ids: _pick((x[:, :-1].softmax(-1) + 1e-8).log(), ids[:, 1:]),
                "log_softmax",
                tuple(partial(lambda small, x, ids: _pick(
                    (x[:, :-1].softmax(-1) + small).log(), ids[:, 1:]), small)
                    for small in (torch.finfo().eps, *(10.0**-n for n in range(2, 38))))),
        Mistake("softmax was applied twice", "log_softmax takes the logits themselves.",
                lambda x, ids: _pick(x[:, :-1].softmax(-1).log_softmax(-1), ids[:, 1:]),
                "log_softmax"),
        Mistake("exp overflows: exp(200) is infinity in float32",
                "log_softmax and logsumexp subtract the largest logit first.",
                lambda x, ids: _pick(x[:, :-1] - x[:, :-1].exp().sum(-1, True).log(), ids[:, 1:]),
                "log_softmax",
                (lambda x, ids: _pick(
                    (x[:, :-1].exp() / x[:, :-1].exp().sum(-1, True)).log(), ids[:, 1:]),)),
        Mistake("this logarithm is to base 2 (log2)", "Use the natural logarithm: log_softmax.",
                lambda x, ids: _pick(x[:, :-1].softmax(-1).log2(), ids[:, 1:]), "log_softmax",
                (lambda x, ids: _pick(x[:, :-1].log_softmax(-1) / 0.6931472, ids[:, 1:]),)),
        Mistake("wrong sign: these are minus the log-probs, as cross_entropy returns them",
                "A log-prob is at most 0.",
                lambda x, ids: -_pick(x[:, :-1].log_softmax(-1), ids[:, 1:])),
        Mistake("squeeze was forgotten: the result has an extra axis of size 1",
                "gather keeps the axis that it picks from: drop it with squeeze(-1).",
                lambda x, ids: _pick(x[:, :-1].log_softmax(-1), ids[:, 1:])[..., None]),
        Mistake("gather needs ids with as many axes as the log-probs",
                "ids[:, :, None] has shape [B, T-1, 1].",
                lambda x, ids: x[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:])),
        Mistake("this is the log-prob of the likeliest token, not of the one that follows",
                "Pick with gather and the ids.",
                lambda x, ids: x[:, :-1].log_softmax(-1).amax(-1)),
        Mistake("this is the sum over the tokens of a text",
                "Return one log-prob for each token.",
                lambda x, ids: right.token_logprobs(x, ids).sum(1),
                variants=(lambda x, ids: right.token_logprobs(x, ids).sum(),)),
        Mistake("this is one number for all tokens, as cross_entropy returns it without "
                "reduction='none'",
                "Return one log-prob for each token: log_softmax, then gather.",
                lambda x, ids: -right.token_logprobs(x, ids).mean(),
                variants=(lambda x, ids: right.token_logprobs(x, ids).mean(),)),
        Mistake("no gradient reaches the logits: the result was detached",
                "Remove detach and no_grad.",
                lambda x, ids: _pick(x[:, :-1].log_softmax(-1), ids[:, 1:]).detach()),
    ),
    "completion_mask": (
        Mistake("not shifted, or filled up to T entries in front: this marks the sampled tokens, "
                "not the positions before them",
                "Drop the entry of the first id, which no logits predict.", _flags),
        Mistake("you dropped the last id instead of the first",
                "Drop the first entry: no logits predict the first id.",
                lambda turns: _flags(turns)[:-1]),
        Mistake("T entries remain: shifted by roll, or filled up at the end, though the last "
                "position predicts nothing",
                "Drop the first entry, and add none.",
                lambda turns: _flags(turns).roll(-1),
                variants=(lambda turns: torch.cat([_flags(turns)[1:], torch.tensor([True])]),)),
        Mistake("shifted the wrong way: the flags moved one token later, not earlier",
                "Drop the first entry.",
                lambda turns: _flags([([0, *turns[0][0]], turns[0][1]), *turns[1:]])[:-1],
                variants=tuple(partial(lambda less, turns: _flags(
                    [([0, *turns[0][0]], turns[0][1]), *turns[1:]])[:less], less)
                    for less in (-2, None))),
        Mistake("context and completion are exchanged", "Each turn is (context, completion).",
                lambda turns: _flags([(done, c) for c, done in turns])[1:], "sampled +="),
        Mistake("shifted within each turn: every turn lost an entry, but the chat is one text",
                "Join the turns first, and drop the first entry of the whole chat.",
                lambda turns: torch.cat([_flags([turn])[1:] for turn in turns])),
        Mistake("inverted: the positions before context tokens are True",
                "True marks the tokens that the policy sampled.",
                lambda turns: ~_flags(turns)[1:], "sampled +="),
        Mistake("only the last turn counts", "The policy sampled the completions of all turns.",
                lambda turns: torch.cat([torch.zeros_like(_flags(turns[:-1])),
                                         _flags(turns[-1:])])[1:], "sampled +="),
        Mistake("only the first turn counts: does the loop return too early?",
                "Go through all turns, then return.",
                lambda turns: torch.cat([_flags(turns[:1]),
                                         torch.zeros_like(_flags(turns[1:]))])[1:], "return",
                (lambda turns: _flags(turns[:1])[1:],)),
        Mistake("the <end> of each completion is missing",
                "The policy samples <end> too, and must learn to stop.",
                lambda turns: _flags([(c, [*done[:-1]]) for c, done in turns], gap=1)[1:],
                "sampled +="),
        Mistake("the first token of each completion is missing",
                "The last token of the context predicts it.",
                lambda turns: _flags([([*c, 0], done[1:]) for c, done in turns])[1:],
                "sampled +="),
        Mistake("all contexts come first, then all completions",
                "Add the context and the completion of a turn before those of the next turn.",
                lambda turns: _flags([([i for c, _ in turns for i in c],
                                       [i for _, done in turns for i in done])])[1:],
                "sampled +="),
    ),
    "group_advantages": (
        Mistake("compared with the whole batch: the groups are not used",
                "Use the mean and the standard deviation of each group.",
                lambda r, g: (r - r.mean()) / (r.std() + 1e-4)),
        Mistake("the baseline is the median of the group",
                "Subtract the mean: with the median, advantages do not add up to 0.",
                lambda r, g: _by_group(r, g, lambda x: (x - x.median()) / (x.std() + 1e-4))),
        Mistake("the baseline is the mean of the other rollouts (leave-one-out, as in RLOO)",
                "Subtract the mean of the whole group, which includes the rollout itself.",
                lambda r, g: _by_group(
                    r, g, lambda x: (x - (x.sum() - x) / (len(x) - 1)) / (x.std() + 1e-4))),
        Mistake("the results are in the order of the groups, not of the rollouts",
                "Write each group's advantages to the places of its members.",
                _in_order_of_groups, "members] = "),
        Mistake("neighbors were taken as groups of equal size (view or reshape)",
                "Rollouts of a group may be anywhere, and groups differ in size: use group_ids.",
                lambda r, g: _neighbors(r, 2), "members = ",
                (lambda r, g: _neighbors(r, int((g == g[0]).sum())),
                 lambda r, g: _neighbors(r, len(r) // len(g.unique())),
                 *(partial(lambda size, r, g: _neighbors(r, size), size) for size in range(3, 17)),
                 lambda r, g: _neighbors(r[g.argsort(stable=True)], len(r) // len(g.unique()))[
                     g.argsort(stable=True).argsort()])),
        Mistake("group_ids were taken as 0, 1, 2 ..: a group with another number was left out",
                "Go through group_ids.unique(): the ids are names, not a count.",
                lambda r, g: torch.where(g < len(g.unique()), right.group_advantages(r, g), 0.0),
                "unique()",
                question="Which number does the group have here, and which does your loop visit?"),
        Mistake("the last group was left out: range ends before its argument",
                "Go through group_ids.unique().",
                lambda r, g: torch.where(g < g.max(), right.group_advantages(r, g), 0.0),
                "unique()",
                question="Which numbers do the groups have here, and which does your loop visit?"),
        Mistake("this is the population standard deviation, which divides by n",
                "Divide by n - 1, as Tensor.std() does.",
                lambda r, g: _by_group(
                    r, g, lambda x: (x - x.mean()) / (x.std(correction=0) + 1e-4)), "members] = ",
                (lambda r, g: _by_group(r, g, lambda x: (x - x.mean()) / (
                    x.var(correction=0) + 1e-4).sqrt()),
                 lambda r, g: _by_group(r, g, lambda x: layer_norm(x, x.shape)))),
        Mistake("not divided by the standard deviation",
                "Divide by the standard deviation of the group, plus 1e-4.",
                lambda r, g: _by_group(r, g, lambda x: x - x.mean()), "members] = "),
        Mistake("divided by the variance", "Take its square root: the standard deviation.",
                lambda r, g: _by_group(r, g, lambda x: (x - x.mean()) / (x.var() + 1e-4)),
                "members] = "),
        Mistake("multiplied by the standard deviation", "Divide by it.",
                lambda r, g: _by_group(r, g, lambda x: (x - x.mean()) * (x.std() + 1e-4)),
                "members] = "),
        Mistake("divided by the standard deviation of the whole batch",
                "Use the standard deviation of each group.",
                lambda r, g: _by_group(r, g, lambda x: x - x.mean()) / (r.std() + 1e-4),
                "members] = "),
        Mistake("divided by the range, largest minus smallest",
                "Divide by the standard deviation.",
                lambda r, g: _by_group(
                    r, g, lambda x: (x - x.mean()) / (x.max() - x.min() + 1e-4)), "members] = "),
        Mistake("wrong sign: a return above the mean has a negative advantage",
                "Return minus mean, not mean minus return.",
                lambda r, g: -right.group_advantages(r, g)),
        Mistake("only the mean is divided: a - b / c is a - (b / c)",
                "Put the difference in parentheses: (return - mean) / (std + 1e-4).",
                lambda r, g: _by_group(r, g, lambda x: x - x.mean() / (x.std() + 1e-4)),
                "members] = ",
                (lambda r, g: _by_group(r, g, lambda x: x - x.mean() / x.std() + 1e-4),
                 lambda r, g: _by_group(r, g, lambda x: x - x.mean() / (x.var() + 1e-4).sqrt()))),
        Mistake("1e-4 was added to the variance, under the square root, where it counts as 0.01",
                "Add it to the standard deviation, after the root.",
                lambda r, g: _by_group(
                    r, g, lambda x: (x - x.mean()) / (x.var() + 1e-4).sqrt()), "members] = "),
        Mistake("the number added to the standard deviation is larger than 1e-4", "Add 1e-4.",
                lambda r, g: _by_group(r, g, lambda x: (x - x.mean()) / (x.std() + 1e-3)),
                "members] = ",
                tuple(partial(lambda small, r, g: _by_group(
                    r, g, lambda x: (x - x.mean()) / (x.std() + small)), small)
                    for small in (0.01, 0.1, 1.0))),
        Mistake("divided by the root of the sum of squares: the division by n - 1 is missing",
                "Use Tensor.std().",
                lambda r, g: _by_group(
                    r, g, lambda x: (x - x.mean()) / ((x - x.mean()).norm() + 1e-4)),
                "members] = "),
        Mistake("the baseline is the mean of the whole batch",
                "Subtract the mean of the group.",
                lambda r, g: _by_group(r, g, lambda x: (x - r.mean()) / (x.std() + 1e-4))),
        Mistake("the baseline is the sum of the group", "Subtract the mean.",
                lambda r, g: _by_group(r, g, lambda x: (x - x.sum()) / (x.std() + 1e-4))),
        Mistake("only the first group has advantages: does the loop return too early?",
                "Go through all groups, then return.",
                lambda r, g: torch.where(g == g.min(), right.group_advantages(r, g), 0.0),
                "return"),
        Mistake("only the last group has advantages: is the result made anew in every round?",
                "Make the tensor of the results before the loop.",
                lambda r, g: torch.where(g == g.max(), right.group_advantages(r, g), 0.0),
                "zeros_like"),
        Mistake("0 divided by 0: a group of equal returns has a standard deviation of 0",
                "Add 1e-4 to the standard deviation before dividing: / (std + 1e-4).",
                lambda r, g: _by_group(r, g, lambda x: (x - x.mean()) / x.std()), "members] = "),
        Mistake("no baseline: the mean of the group is not subtracted",
                "Subtract the mean of the group.",
                lambda r, g: _by_group(r, g, lambda x: x / (x.std() + 1e-4))),
        Mistake("the advantages are written to an integer tensor: one that is made like group_ids "
                "holds integers", "Use zeros_like(returns).", _in_integers, "zeros_like",
                question="Which dtype does the tensor have that you write to?"),
        Mistake("the result has an extra axis of size 1: shape [B, 1]",
                "Return shape [B]: squeeze(-1), or leave out keepdim.",
                lambda r, g: right.group_advantages(r, g)[:, None], "members] = ",
                question="Which shape does the docstring ask for, and which has your result?"),
    ),
    "reinforce_loss": (
        Mistake("wrong sign, or abs of the log-probs, which are negative: a step against the "
                "gradient makes good tokens less likely",
                "The optimizer makes the loss smaller, so negate what should grow.",
                lambda x, a, m: (a[m] * x[m]).sum() / m.sum()),
        Mistake("abs took the sign of the advantages, or of each token's term: bad tokens become "
                "likelier too", "Leave out abs: the sign of A says in which direction to push.",
                lambda x, a, m: -(a[m].abs() * x[m]).sum() / m.sum(),
                question="What should happen to a token whose advantage is negative?"),
        Mistake("abs took the sign of the loss", "Negate instead: a loss may have either sign.",
                lambda x, a, m: (a[m] * x[m]).mean().abs(),
                question="May a loss be negative?"),
        Mistake("this is a sum, not a mean", "Divide by the number of sampled tokens.",
                partial(_loss, tokens=lambda m: 1)),
        Mistake("the mask is not used: every position counts", "Only sampled tokens count.",
                lambda x, a, m: -(a * x).mean()),
        Mistake("the mask is inverted", "True marks the sampled tokens.",
                lambda x, a, m: -(a[~m] * x[~m]).sum() / m.sum(),
                variants=(lambda x, a, m: -(a[~m] * x[~m]).mean(),)),
        Mistake("divided by the number of positions", "Divide by mask.sum().",
                partial(_loss, tokens=torch.numel),
                variants=(partial(_loss, tokens=lambda m: m.shape[1]),)),
        Mistake("divided by the number of rollouts: a sum over tokens, then a mean over rollouts",
                "Divide by mask.sum().", partial(_loss, tokens=len)),
        Mistake("divided by the number of tokens twice: a mean, and then a division",
                "Use sum, or leave out the division.",
                partial(_loss, tokens=lambda m: m.sum() ** 2)),
        Mistake("this is the mean of each rollout's mean",
                "Sum over all sampled tokens, then divide once: every token has the same weight.",
                lambda x, a, m: -_rows_mean(a * x, m).mean()),
        Mistake("the means, or the sums, of advantages and log-probs were multiplied",
                "Multiply token by token, then sum.",
                lambda x, a, m: -a[m].mean() * x[m].mean(),
                variants=(lambda x, a, m: -a[m].sum() * x[m].sum() / m.sum(),
                          lambda x, a, m: -a[m].sum() * x[m].sum())),
        Mistake("one advantage is used for all tokens of a rollout",
                "Each position has its own advantage.",
                lambda x, a, m: -(a[:, :1] * x)[m].mean(),
                variants=tuple(partial(lambda of, x, a, m: -(of(a, m) * x)[m].mean(), of)
                               for of in OF_A_ROLLOUT)),
        Mistake("one advantage is used for all tokens of a rollout, and the sum is divided by the "
                "number of rollouts", "Multiply token by token, then divide by mask.sum().",
                lambda x, a, m: -(a[:, :1] * x)[m].sum() / len(m),
                variants=tuple(partial(lambda of, x, a, m: -(of(a, m) * x)[m].sum() / len(m), of)
                               for of in OF_A_ROLLOUT)),
        Mistake("multiplied by the mask: 0 · infinity is nan", "Select with [mask].",
                lambda x, a, m: -(a * x * m).sum() / m.sum()),
        Mistake("the product was formed before selecting: off the mask the gradient is "
                "0 · infinity, which is nan",
                "Select before you multiply: logprobs[mask] and advantages[mask].",
                lambda x, a, m: -(a * x)[m].sum() / m.sum()),
        Mistake("this uses the probability instead of its logarithm", "Leave out exp.",
                lambda x, a, m: -(a[m] * x[m].exp()).sum() / m.sum()),
        Mistake("the advantages are missing: this makes every sampled token likelier",
                "Multiply each log-prob by its advantage.",
                lambda x, a, m: -x[m].sum() / m.sum()),
        Mistake("the log-probs are missing: this is the mean of -A",
                "Multiply each advantage by its log-prob.",
                lambda x, a, m: -a[m].sum() / m.sum()),
        Mistake("no gradient reaches the log-probs: they were detached", "Remove detach.",
                lambda x, a, m: -(a[m] * x[m].detach()).sum() / m.sum()),
    ),
    "clipped_loss": (
        Mistake("wrong sign: a step against the gradient makes good tokens less likely",
                "The optimizer makes the loss smaller, so negate what should grow.",
                partial(_surrogate, tokens=lambda m: -m.sum()), "return"),
        Mistake("abs took the sign of the loss, or of each token's term",
                "Negate instead: a loss may have either sign.",
                lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, m, clip).abs(), "return",
                (partial(_surrogate, objective=lambda r, c, a: -torch.minimum(r * a, c * a).abs()),
                 ), "May a loss be negative?"),
        Mistake("abs took the sign of the advantages", "The sign of A says in which direction to "
                "push, and which product is smaller.",
                partial(_surrogate, objective=lambda r, c, a: torch.minimum(r, c) * a.abs()),
                "torch.minimum"),
        Mistake("abs took the sign of log ρ: a ratio below 1 became one above 1",
                "ρ = exp(log π - log π_old).",
                partial(_surrogate, ratio=lambda x, old: (x - old).abs().exp()), "ratio = "),
        Mistake("you took the larger of the two products", "Take the smaller one.",
                partial(_surrogate, objective=lambda r, c, a: torch.maximum(r * a, c * a))),
        Mistake("only the clipped product is used",
                "A ratio that moved the wrong way then has no gradient back: take the smaller of "
                "both products.", partial(_surrogate, objective=lambda r, c, a: c * a)),
        Mistake("not clipped: this is -ρ A", "Clamp the ratio to 1-clip..1+clip.",
                partial(_surrogate, objective=lambda r, c, a: r * a), "clamp"),
        Mistake("clipped only from above", "Clamp the ratio from below too, at 1-clip.",
                partial(_surrogate, bounds=lambda clip: (0.0, 1 + clip)), "clamp",
                (partial(_surrogate, bounds=lambda clip: (0.0, 1.2)),)),
        Mistake("clipped only from below", "Clamp the ratio from above too, at 1+clip.",
                partial(_surrogate, bounds=lambda clip: (1 - clip, 1e9)), "clamp"),
        Mistake("the bounds are -clip and +clip", "Clamp the ratio to 1-clip..1+clip.",
                partial(_surrogate, bounds=lambda clip: (-clip, clip)), "clamp"),
        Mistake("the lower bound is clip, not 1 - clip", "Clamp the ratio to 1-clip..1+clip.",
                partial(_surrogate, bounds=lambda clip: (clip, 1 + clip)), "clamp"),
        Mistake("the two bounds are exchanged", "clamp takes the lower bound first.",
                partial(_surrogate, bounds=lambda clip: (1 + clip, 1 - clip)), "clamp"),
        Mistake("you clamped log ρ to -clip..+clip, not ρ", "Take exp first, then clamp.",
                lambda x, old, a, m, clip=0.2: _surrogate(
                    x, old, a, m, clip, objective=lambda r, c, a: torch.minimum(
                        r * a, r.log().clamp(-clip, clip).exp() * a)), "clamp",
                question="Which quantity has the bounds 1-clip and 1+clip?"),
        Mistake("the ratio is inverted: π_old over π", "ρ = exp(log π - log π_old).",
                partial(_surrogate, ratio=lambda x, old: (old - x).exp()), "ratio = ",
                question="Which of the two policies is in the numerator of ρ?"),
        Mistake("you divided log-probs", "A ratio of probabilities is exp(log π - log π_old).",
                partial(_surrogate, ratio=torch.div), "ratio = "),
        Mistake("this is the logarithm of the ratio", "Take exp of the difference.",
                partial(_surrogate, ratio=torch.sub), "ratio = "),
        Mistake("this is the difference of the probabilities, not their ratio",
                "ρ = exp(log π - log π_old).",
                partial(_surrogate, ratio=lambda x, old: x.exp() - old.exp()), "ratio = "),
        Mistake("the ratio is always 1: old_logprobs is not used", "ρ = exp(log π - log π_old).",
                partial(_surrogate, ratio=lambda x, old: (x - x.detach()).exp()), "ratio = ",
                (partial(_surrogate, ratio=lambda x, old: (x - x).exp()),)),
        Mistake("the ratio is that of a whole rollout (its sum or mean of log-probs, as in GSPO)",
                "Compute a ratio for each token.", _sequence_ratio, "ratio = ",
                (*(partial(_sequence_ratio, of=of, per_row=per_row, tokens=tokens)
                   for of in (_rows_mean, _rows_sum, _columns_mean)
                   for per_row in (None, *OF_A_ROLLOUT) for tokens in (torch.sum, len)),
                 partial(_surrogate, ratio=lambda x, old: (x - old).sum().exp().expand_as(x)),
                 partial(_surrogate, ratio=lambda x, old: (x - old).mean().exp().expand_as(x))),
                question="How many ratios does a rollout of three tokens have?"),
        Mistake("the ratio is a power of 2 (exp2)", "Use exp: log-probs are natural logarithms.",
                partial(_surrogate, ratio=lambda x, old: (x - old).exp2()), "ratio = ",
                question="If a log-prob rises by 1, by which factor does the probability grow?"),
        Mistake("you took the smaller ratio before multiplying by A",
                "For A < 0 the smaller ratio gives the larger product: multiply first.",
                partial(_surrogate, objective=lambda r, c, a: torch.minimum(r, c) * a)),
        Mistake("this is the loss of exercise 4, -A log π: the ratio is missing",
                "Use ρ in place of log π, and clip it.",
                lambda x, old, a, m, clip=0.2: right.reinforce_loss(x, a, m), "ratio = "),
        Mistake("the advantages are missing", "Multiply both ratios by A.",
                partial(_surrogate, objective=lambda r, c, a: torch.minimum(r, c)),
                "torch.minimum"),
        Mistake("the mask is not used: every position counts", "Only sampled tokens count.",
                lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, torch.ones_like(m), clip),
                "[mask]"),
        Mistake("the mask is inverted", "True marks the sampled tokens.",
                lambda x, old, a, m, clip=0.2: _surrogate(
                    x, old, a, ~m, clip, tokens=lambda off: m.sum()), "[mask]",
                (lambda x, old, a, m, clip=0.2: _surrogate(x, old, a, ~m, clip),)),
        Mistake("this is a sum, not a mean", "Divide by the number of sampled tokens.",
                partial(_surrogate, tokens=lambda m: 1), "return"),
        Mistake("divided by the number of positions", "Divide by mask.sum().",
                partial(_surrogate, tokens=torch.numel), "return",
                (partial(_surrogate, tokens=lambda m: m.shape[1]),)),
        Mistake("divided by the number of rollouts", "Divide by mask.sum().",
                partial(_surrogate, tokens=len), "return"),
        Mistake("divided by the number of tokens twice: a mean, and then a division",
                "Use sum, or leave out the division.",
                partial(_surrogate, tokens=lambda m: m.sum() ** 2), "return"),
        Mistake("this is the mean of each rollout's mean",
                "Sum over all sampled tokens, then divide once: every token has the same weight.",
                lambda x, old, a, m, clip=0.2: -_rows_mean(
                    _surrogate_tokens(x, old, a, clip), m).mean(), "return"),
        Mistake("the clip is always 0.2, in one bound or in both",
                "Use the argument `clip` in both bounds.",
                partial(_surrogate, bounds=lambda clip: (0.8, 1.2)), "clamp",
                (partial(_surrogate, bounds=lambda clip: (1 - clip, 1.2)),
                 partial(_surrogate, bounds=lambda clip: (0.8, 1 + clip)))),
        Mistake("multiplied by the mask: 0 · infinity is nan", "Select with [mask].",
                lambda x, old, a, m, clip=0.2: -(
                    _surrogate_tokens(x, old, a, clip) * m).sum() / m.sum(), "[mask]"),
        Mistake("the mask was applied last: off the mask the gradient is 0 · infinity, which is "
                "nan",
                "Select before you compute: apply [mask] to all three tensors first.",
                lambda x, old, a, m, clip=0.2: -(
                    _surrogate_tokens(x, old, a, clip)[m]).sum() / m.sum(), "[mask]"),
        Mistake("no gradient reaches the log-probs: they were detached",
                "Only the old log-probs are constants.",
                lambda x, old, a, m, clip=0.2: _surrogate(x.detach(), old, a, m, clip), "ratio = "),
        Mistake("one of the two products was detached: of two equal products each passes half of "
                "the gradient", "Remove detach.",
                partial(_surrogate, objective=lambda r, c, a: torch.minimum(r * a, c.detach() * a)),
                "torch.minimum",
                (partial(_surrogate, objective=lambda r, c, a: torch.minimum(
                    r.detach() * a, c * a)),)),
    ),
    "kl_k3": (
        Mistake("this is k1, log π - log π_ref, which can be negative for a token",
                "Add r - 1: k3 = r - 1 - log r.", lambda x, ref: x - ref),
        Mistake("this is k2, half the square of the difference", "k3 = r - 1 - log r.",
                lambda x, ref: (x - ref) ** 2 / 2),
        Mistake("this is the absolute difference of the log-probs", "k3 = r - 1 - log r.",
                lambda x, ref: (x - ref).abs()),
        Mistake("r is inverted: π over π_ref", "r = π_ref / π: log r = log π_ref - log π.",
                lambda x, ref: (x - ref).exp() - 1 - (x - ref), "log_r = ",
                question="Which of the two policies is in the numerator of r?"),
        Mistake("r is right, but the sign of log r is wrong: r - 1 + log r",
                "Subtract log r, and compute it as log π_ref - log π.",
                lambda x, ref: (ref - x).exp() - 1 + (ref - x)),
        Mistake("wrong sign: the estimate is negative", "r - 1 - log r is never negative.",
                lambda x, ref: -((ref - x).exp() - 1 - (ref - x))),
        Mistake("log r is missing", "Subtract it.", lambda x, ref: (ref - x).exp() - 1),
        Mistake("the 1 is missing", "Where both policies agree, r is 1 and the estimate must be 0.",
                lambda x, ref: (ref - x).exp() - (ref - x)),
        Mistake("log r is to base 2 (log2)", "Use the natural logarithm.",
                lambda x, ref: (ref - x).exp() - 1 - (ref - x) / 0.6931472,
                question="Which base do the log-probs have?"),
        Mistake("r is a power of 2 (exp2)", "Use exp: log-probs are natural logarithms.",
                lambda x, ref: (ref - x).exp2() - 1 - (ref - x),
                question="If a log-prob rises by 1, by which factor does the probability grow?"),
        Mistake("you divided log-probs", "r = exp(log π_ref - log π).",
                lambda x, ref: ref / x - 1 - (ref / x).log(), "log_r = "),
        Mistake("exp is missing: the difference of the log-probs is log r, not r",
                "r is the exponential of log r.",
                lambda x, ref: (ref - x) - 1 - (ref - x).log()),
        Mistake("this is an average or a sum over tokens", "Return one estimate for each token.",
                lambda x, ref: right.kl_k3(x, ref).mean(),
                variants=(lambda x, ref: right.kl_k3(x, ref).sum(),
                          lambda x, ref: right.kl_k3(x, ref).mean(-1),
                          lambda x, ref: right.kl_k3(x, ref).sum(-1)),
                question="Which shape does the docstring ask for, and which has your result?"),
        Mistake("multiplied by the probability of the token",
                "The tokens were sampled from π, so a plain mean is already weighted by π.",
                lambda x, ref: x.exp() * right.kl_k3(x, ref),
                variants=(lambda x, ref: x.exp() * (x - ref),)),
        Mistake("this is r log r - r + 1, the estimate for tokens sampled from the reference",
                "The tokens were sampled from π: r - 1 - log r.",
                lambda x, ref: (ref - x).exp() * (ref - x - 1) + 1),
        Mistake("1 was added, not subtracted", "r - 1 - log r.",
                lambda x, ref: (ref - x).exp() + 1 - (ref - x)),
        Mistake("no gradient reaches the log-probs: they were detached", "Remove detach.",
                lambda x, ref: right.kl_k3(x.detach(), ref), "log_r = "),
        Mistake("only one of r and log r passes a gradient: the other was detached",
                "Remove detach.", lambda x, ref: (ref - x).exp().detach() - 1 - (ref - x),
                "log_r = ", (lambda x, ref: (ref - x).exp() - 1 - (ref - x).detach(),)),
    ),
    "gae": (
        Mistake("the next value is missing, or is 0 in every round of the loop",
                "δ_t = r_t + γ V_t+1 - V_t, and V_t is the next value of the round after.",
                lambda r, v, g=1.0, lam=0.95: _gae(r, torch.zeros_like(v), g, g * lam) - v,
                variants=(lambda r, v, g=1.0, lam=0.95: _gae(r - v, 0 * v, g, g * lam),)),
        Mistake("the next value was overwritten before δ used it, so V_t+1 is V_t",
                "Compute δ first; then keep values[t] for the next round.",
                lambda r, v, g=1.0, lam=0.95: _gae(r - v + g * v, 0 * v, g, g * lam),
                "next_value, next_advantage"),
        Mistake("the value is not subtracted", "δ_t = r_t + γ V_t+1 - V_t.",
                lambda r, v, g=1.0, lam=0.95: _gae(r + v, v, g, g * lam)),
        Mistake("the signs of the two values are exchanged", "δ_t = r_t + γ V_t+1 - V_t.",
                lambda r, v, g=1.0, lam=0.95: _gae(r, -v, g, g * lam)),
        Mistake("these are returns, A_t + V_t", "Return the advantages without adding the values.",
                lambda r, v, g=1.0, lam=0.95: right.gae(r, v, g, lam) + v, "return"),
        Mistake("the list was filled from the last token to the first and never reversed",
                "Write to advantages[t], or reverse the list at the end.",
                lambda r, v, g=1.0, lam=0.95: right.gae(r, v, g, lam).flip(0), "advantages[t] = ",
                question="To which token does the first entry of the result belong?"),
        Mistake("γ is missing before the next advantage", "γ λ A_t+1.",
                lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, lam), "advantages[t] = "),
        Mistake("γ is missing before the next value", "γ V_t+1.",
                lambda r, v, g=1.0, lam=0.95: _gae(r, v, 1.0, g * lam)),
        Mistake("γ is not used", "γ V_t+1, and γ λ A_t+1.",
                lambda r, v, g=1.0, lam=0.95: _gae(r, v, 1.0, lam)),
        Mistake("λ stands in place of γ before the next value", "γ V_t+1.",
                lambda r, v, g=1.0, lam=0.95: _gae(r, v, lam, g * lam)),
        Mistake("λ is missing before the next advantage", "γ λ A_t+1.",
                lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, g), "advantages[t] = "),
        Mistake("γ multiplies the value of t too: γ (V_t+1 - V_t)",
                "γ belongs to the next value only: r_t + γ V_t+1 - V_t.",
                lambda r, v, g=1.0, lam=0.95: _gae(r + v - g * v, v, g, g * lam)),
        Mistake("γ multiplies the reward too: γ (r_t + V_t+1)",
                "γ belongs to the next value only: r_t + γ V_t+1 - V_t.",
                lambda r, v, g=1.0, lam=0.95: _gae(g * r, v, g, g * lam)),
        Mistake("this is the reward of the next token, r_t+1", "δ_t has r_t.",
                lambda r, v, g=1.0, lam=0.95: _gae(
                    torch.cat([r[1:], torch.zeros(1)]), v, g, g * lam),
                variants=(lambda r, v, g=1.0, lam=0.95: _gae(
                    torch.cat([r[1:], r[-1:]]), v, g, g * lam),)),
        Mistake("the values are not used: these are sums of later rewards",
                "δ_t = r_t + γ V_t+1 - V_t.",
                lambda r, v, g=1.0, lam=0.95: _gae(r, 0 * v, g, g),
                variants=(lambda r, v, g=1.0, lam=0.95: _gae(r, 0 * v, g, g * lam),)),
        Mistake("only the δ of the next token is added, not its advantage",
                "A_t = δ_t + γ λ A_t+1: keep A_t for the next round, not δ_t.",
                lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, 0.0) + g * lam * torch.cat(
                    [_gae(r, v, g, 0.0)[1:], torch.zeros(1)]), "next_value, next_advantage"),
        Mistake("the token t = 0 was left out: range ends before its second argument",
                "Go down to 0: reversed(range(N)), or range(N - 1, -1, -1).",
                lambda r, v, g=1.0, lam=0.95: torch.cat(
                    [torch.zeros(1), right.gae(r, v, g, lam)[1:]]), "reversed",
                question="At which t does the loop end?"),
        Mistake("γ λ is missing before the next advantage", "γ λ A_t+1.",
                lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, 1.0), "advantages[t] = "),
        Mistake("after the last token the first value is used again, as roll does",
                "After the last token the value is 0.",
                lambda r, v, g=1.0, lam=0.95: _gae(
                    r + g * torch.cat([0 * v[1:], v[:1]]), v, g, g * lam), "next_value = "),
        Mistake("the last value is used again after the end of the episode",
                "After the last token the value is 0.",
                lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, g * lam, bootstrap=1.0),
                "next_value = "),
        Mistake("you went from left to right", "Go from the last token to the first.",
                lambda r, v, g=1.0, lam=0.95: _forward_gae(r, v, g, g * lam), "reversed",
                (lambda r, v, g=1.0, lam=0.95: right.gae(
                    r.flip(0), v.flip(0), g, lam).flip(0),)),
        Mistake("this is only δ_t: γ λ A_t+1 is missing, or A_t+1 is 0 in every round of the loop",
                "Add γ λ A_t+1, and keep A_t for the round after.",
                lambda r, v, g=1.0, lam=0.95: _gae(r, v, g, 0.0), "advantages[t] = "),
        Mistake("the last token was left out: the loop starts one token too early",
                "Start at N-1: reversed(range(N)).",
                lambda r, v, g=1.0, lam=0.95: _gae_without_last(r, v, g, lam), "reversed",
                (lambda r, v, g=1.0, lam=0.95: torch.cat(
                    [right.gae(r[:-1], v[:-1], g, lam), torch.zeros(1)]),)),
        Mistake("values[t + 1] does not exist at the last token",
                "Keep the next value in a variable that starts at 0.",
                lambda r, v, g=1.0, lam=0.95: v[len(v)], "next_value = "),
    ),
    "sample": (
        Mistake("this always takes the most likely token", "Sample with torch.multinomial.",
                lambda x, t, g: _with_logprobs(x.argmax(-1), x / (t or 1)),
                variants=(lambda x, t, g: _with_logprobs(x.argmax(-1), x / _nonzero(t)),)),
        Mistake("every token is equally likely", "Sample with torch.multinomial.",
                lambda x, t, g: _with_logprobs(
                    _draw(0 * x, g) if t else x.argmax(-1), x / (t or 1))),
        Mistake("multinomial got logits or log-probs instead of probabilities",
                "Take softmax, or the exponential of the log-probs.",
                lambda x, t, g: _with_logprobs(
                    torch.multinomial(x / t, 1, generator=g).squeeze(-1) if t else x.argmax(-1),
                    x / (t or 1)),
                variants=(lambda x, t, g: _with_logprobs(
                    torch.multinomial((x / t).log_softmax(-1), 1, generator=g).squeeze(-1)
                    if t else x.argmax(-1), x / (t or 1)),)),
        Mistake("softmax, or exp, was applied twice: multinomial takes the probabilities as they "
                "are",
                "log_softmax once, then exp once.",
                lambda x, t, g: _with_logprobs(
                    _draw((x / t).softmax(-1), g) if t else x.argmax(-1), x / (t or 1)),
                variants=(lambda x, t, g: _with_logprobs(
                    _draw((x / t).softmax(-1), g) if t else x.argmax(-1),
                    (x / t).softmax(-1) if t else x),)),
        Mistake("the probabilities were divided by the temperature, not the logits",
                "Divide the logits, then take log_softmax.",
                lambda x, t, g: _with_logprobs(
                    _draw(x, g) if t else x.argmax(-1), x, lambda y: y - math.log(t or 1)),
                "/ temperature"),
        Mistake("the log-probs were divided by the temperature after log_softmax: they no longer "
                "add up to probability 1", "Divide the logits, then take log_softmax.",
                lambda x, t, g: _with_logprobs(
                    _draw(x / t, g) if t else x.argmax(-1), x, lambda y: y / (t or 1)),
                "/ temperature"),
        Mistake("wrong sign: these are minus the log-probs", "A log-prob is at most 0.",
                lambda x, t, g: _with_logprobs(
                    _draw(x / t, g) if t else x.argmax(-1), x / (t or 1), torch.neg), "return"),
        Mistake("the temperature is not used", "Divide the logits by it.",
                lambda x, t, g: _with_logprobs(_draw(x if t else x * 1e6, g), x), "/ temperature"),
        Mistake("multiplied by the temperature", "Divide, so that a low temperature sharpens.",
                lambda x, t, g: _with_logprobs(
                    _draw(x * t, g) if t else x.argmax(-1), x * (t or 1)), "/ temperature",
                (lambda x, t, g: _with_logprobs(_draw(x * t, g), x * t),)),
        Mistake("the log-prob is that of another distribution: without the temperature",
                "Gather from the log-probs of logits / temperature.",
                lambda x, t, g: _with_logprobs(
                    _draw(x / t, g) if t else x.argmax(-1), x), "/ temperature",
                (lambda x, t, g: _with_logprobs(_draw(x / _nonzero(t), g), x),)),
        Mistake("these are probabilities, not their logarithms", "Use log_softmax.",
                lambda x, t, g: _with_logprobs(
                    _draw(x / t, g) if t else x.argmax(-1), x / (t or 1), torch.exp),
                "/ temperature",
                (lambda x, t, g: _with_logprobs(
                    _draw(x / _nonzero(t), g), x / _nonzero(t), torch.exp),)),
        Mistake("the logarithm is to base 2 (log2)", "Use the natural logarithm: log_softmax.",
                lambda x, t, g: _with_logprobs(
                    _draw(x / t, g) if t else x.argmax(-1), x / (t or 1), lambda y: y / 0.6931472),
                "/ temperature"),
        Mistake("these are logits, not log-probs", "Apply log_softmax before gather.",
                lambda x, t, g: _with_logits(
                    _draw(x / t, g) if t else x.argmax(-1), x / (t or 1)), "/ temperature"),
        Mistake("the log-prob is that of the most likely token, not of the drawn one",
                "Gather with the drawn ids.",
                lambda x, t, g: (_draw(x / t, g) if t else x.argmax(-1),
                                 (x / (t or 1)).log_softmax(-1).amax(-1)), "return"),
        Mistake("ids and log-probs come from two different draws, or from different rows",
                "Draw once, and gather the log-probs of these ids.",
                _two_draws, "return",
                (_sorted_draw,)),
        Mistake("division by temperature 0", "Use argmax there, and the log-prob under the logits.",
                lambda x, t, g: _with_logprobs(_draw(x / t, g), x / t), "argmax"),
        Mistake("at temperature 0 the id is right, but the log-prob is 0, as with a small "
                "number in place of the temperature",
                "Return the log-prob under the undivided logits.",
                lambda x, t, g: _with_logprobs(_draw(x / _nonzero(t), g), x / _nonzero(t)),
                "argmax"),
        Mistake("temperature 0 samples, as temperature 1 does", "Take argmax there.",
                lambda x, t, g: _with_logprobs(_draw(x / (t or 1), g), x / (t or 1)), "argmax"),
        Mistake("squeeze was forgotten: the results have an extra axis of size 1",
                "Drop the last axis with squeeze(-1).",
                lambda x, t, g: tuple(y[:, None] for y in right.sample(x, t, g)), "return",
                (lambda x, t, g: (right.sample(x, t, g)[0], right.sample(x, t, g)[1][:, None]),
                 lambda x, t, g: (right.sample(x, t, g)[0][:, None], right.sample(x, t, g)[1]))),
        Mistake("this returns all V log-probs of a row", "Pick that of the drawn id with gather.",
                lambda x, t, g: (right.sample(x, t, g)[0], (x / (t or 1)).log_softmax(-1)),
                "return"),
        Mistake("the generator is not used", "Pass generator=generator to multinomial.",
                lambda x, t, g: right.sample(x, t, None)),  # type: ignore[arg-type]
        Mistake("the draws are the same in every call: a generator is seeded inside the function",
                "Pass generator=generator to multinomial, and seed nothing.",
                lambda x, t, g: right.sample(x, t, torch.Generator().manual_seed(0)),
                "torch.multinomial"),
    ),
    "training_step": (
        Mistake("the weights did not change: the old log-probs carry a gradient, which cancels "
                "that of the new ones",
                "Detach the old log-probs.", partial(_step, detach=False), "loss = ",
                question="What is the derivative of log π - log π_old if both carry a gradient?"),
        Mistake("the weights did not change: optimizer.step() was not called",
                "Call it after the gradient was clipped.", partial(_step, step="never"),
                "optimizer.step",
                question="Which call moves the weights?"),
        Mistake("the weights did not change: the gradient was set to zero before the step",
                "Call zero_grad after the step.", partial(_step, zero="early"), "zero_grad",
                question="What does the optimizer find in the gradient when it steps?"),
        Mistake("the weights did not change: backward was not called",
                "loss.backward() computes the gradient.", partial(_step, backwards=0),
                "backward"),
        Mistake("the optimizer's step comes before backward, with the gradient of nothing",
                "backward, clip, step, zero_grad.", partial(_step, step="early"),
                "optimizer.step", (partial(_step, step="early", zero="never"),)),
        Mistake("the advantages are one number for each rollout; exercise 5 needs one for each "
                "token, [B, T-1]",
                "advantages[:, None].expand_as(logprobs) repeats each of them along its row.",
                partial(_step, repeated=lambda a, x: a), "advantages = ",
                tuple(partial(_step, repeated=repeated) for repeated in (
                    lambda a, x: a[:, None], lambda a, x: a[None],
                    lambda a, x: a.expand_as(x), lambda a, x: a[None].expand_as(x))),
                question="Which shape have the advantages of exercise 3, and which does exercise 5 "
                "ask for?"),
        Mistake("the advantages were repeated in the wrong order: rows mix those of rollouts",
                "advantages[:, None].expand_as(logprobs) repeats each of them along its row.",
                partial(_step, repeated=lambda a, x: a.repeat(x.shape[1]).view(x.shape)),
                "advantages = "),
        Mistake("the norm of the gradient was clipped to another number than 1",
                "clip_grad_norm_(model.parameters(), 1.0).", partial(_step, norm=0.1),
                "clip_grad_norm_",
                tuple(partial(_step, norm=norm) for norm in (
                    0.01, 0.05, 0.2, 0.25, 0.3, 0.5, 0.9, 1.5, 2.0, 3.0, 5.0, 10.0)),
                "To which norm does the exercise ask you to scale the gradient?"),
        Mistake("the gradient is always scaled to norm 1, also a shorter one",
                "Shorten only: clip_grad_norm_ leaves a gradient below the norm as it is.",
                partial(_step, clip="always"), "clip_grad_norm_"),
        Mistake("the advantages were repeated T times; there are T - 1 log-probs",
                "advantages[:, None].expand_as(logprobs) has their shape.",
                partial(_step, repeated=lambda a, x: a[:, None].repeat(1, x.shape[1] + 1)),
                "advantages = "),
        Mistake("the whole step is taken twice", "Go through it once, without a loop.",
                lambda *inputs: (_step(*inputs), _step(*inputs))[1], "optimizer.step"),
        Mistake("the optimizer takes two steps with the same gradient",
                "Call optimizer.step() once.", partial(_step, steps=2), "optimizer.step",
                question="How often is optimizer.step() called?"),
        Mistake("backward was called twice, and the gradients add up", "Call it once.",
                partial(_step, backwards=2), "backward"),
        Mistake("the step goes in the wrong direction: (-loss).backward(), or old and new "
                "log-probs are exchanged",
                "loss.backward(): the optimizer moves against the gradient.",
                partial(_step, direction=-1), "backward",
                question="The optimizer makes something smaller. What?"),
        Mistake("the loss was computed again after the step",
                "Return the loss of the step, which was computed before it.",
                partial(_step, returned=lambda loss, again: again), "return"),
        Mistake("the sign of the returned loss is wrong", "Return loss.item().",
                partial(_step, returned=lambda loss, again: -loss), "return",
                (partial(_step, returned=lambda loss, again: loss.abs()),)),
        Mistake("the norm of the gradient was not clipped to 1",
                "Clip between backward and the step.", partial(_step, clip="never"),
                "clip_grad_norm_"),
        Mistake("each entry of the gradient was clipped (clip_grad_value_), not its norm",
                "Use clip_grad_norm_.", partial(_step, clip="value"), "clip_grad_norm_"),
        Mistake("the gradient remains and adds up over the steps: zero_grad was not called",
                "Call zero_grad after the step.", partial(_step, zero="never"), "zero_grad"),
        Mistake("the gradient remains after the step: zero_grad comes only before backward",
                "Call it after the step.", partial(_step, zero="before"), "zero_grad"),
        Mistake("wrong direction: the loss, or the advantages, were negated once more",
                "The loss of exercise 5 is negated already.", partial(_step, sign=-1),
                question="Which sign does the loss of exercise 5 already have?"),
        Mistake("the returns were used as advantages", "Compute advantages with exercise 3.",
                partial(_step, baseline=False), "advantages = "),
        Mistake("the advantages are not those of exercise 3: they are not divided by the standard "
                "deviation", "Compute advantages with exercise 3.",
                partial(_step, scaled=lambda r, g: _by_group(r, g, lambda x: x - x.mean())),
                "advantages = "),
        Mistake("the advantages compare with the whole batch, not with the group",
                "Pass group_ids to exercise 3.",
                partial(_step, scaled=lambda r, g: right.group_advantages(r, 0 * g)),
                "advantages = ", (partial(_step, scaled=lambda r, g: r - r.mean()),)),
        Mistake("this is reinforce_loss, exercise 4", "Use clipped_loss, exercise 5.",
                partial(_step, loss_of=lambda x, old, a, m: right.reinforce_loss(x, a, m))),
        Mistake("the mask is not used", "Only tokens that the policy sampled are trained.",
                partial(_step, masked=False),
                question="Which of the tokens did the policy sample?"),
    ),
    "advantages_of_tokens": (
        Mistake(REWARD_PER_TOKEN, "Do not divide the rewards by the number of tokens: a return is "
                "their sum.", _per_token(right.advantages_of_tokens)),
        Mistake("the division by the number of tokens moved to the last line",
                "Remove it: the number of tokens has no influence.",
                lambda r, m, g: (_token_advantages((r * m).sum(1), m, g) / m.sum(1, True)),
                "baseline)",
                question="Does a long answer get the same advantage at each token as a short one?"),
        Mistake("the baseline is divided by len(same), the number of all rollouts",
                "Divide by the number of rollouts of the group: same.sum(1).",
                lambda r, m, g: _token_advantages(
                    (r * m).sum(1), m, g, lambda same, r: same @ r / len(r)), "baseline =",
                question="How many returns enter the sum of a group, and by what is it divided?"),
        Mistake("the baseline is the mean of all rollouts: groups mix",
                "Use `same`, which is 1 within a group.",
                lambda r, m, g: _token_advantages((r * m).sum(1), m, 0 * g), "baseline =",
                question="With which other rollouts is a rollout compared?"),
        Mistake("the baseline is the mean of the other rollouts (leave-one-out, as in RLOO)",
                "Divide the sum of the whole group, with the rollout itself, by its size.",
                lambda r, m, g: _token_advantages((r * m).sum(1), m, g, _mean_of_others),
                "baseline =", (lambda r, m, g: _token_advantages(
                    (r * m).sum(1), m, g, partial(_mean_of_others, least=1.0)),),
                "Does the mean of a group include the rollout itself?"),
        Mistake("the baseline divides the sum of n returns by n - 1", "Divide by same.sum(1).",
                lambda r, m, g: _token_advantages(
                    (r * m).sum(1), m, g, lambda same, r: same @ r / (same.sum(1) - 1)),
                "baseline ="),
        Mistake("the baseline is the sum of the group, not its mean", "Divide by same.sum(1).",
                lambda r, m, g: _token_advantages((r * m).sum(1), m, g, torch.mv), "baseline ="),
        Mistake("wrong sign: a return above the mean has a negative advantage",
                "Return minus mean, not mean minus return.",
                lambda r, m, g: -right.advantages_of_tokens(r, m, g), "baseline)"),
        Mistake("divided by the number of columns, which depends on the longest rollout, and "
                "rewards in the padding were counted", "Use the sum, under the mask.",
                lambda r, m, g: _token_advantages(r.mean(1), m, g)),
        Mistake("divided by the number of columns: the width of the batch depends on the longest "
                "rollout",
                "Use the sum.", lambda r, m, g: _token_advantages((r * m).mean(1), m, g)),
        Mistake("divided by the number of all sampled tokens", "Use the sum.",
                lambda r, m, g: _token_advantages((r * m).sum(1) / m.sum(), m, g)),
        Mistake("only the reward in the last column counts",
                "A reward can be at any token: sum over all.",
                lambda r, m, g: _token_advantages((r * m)[:, -1], m, g)),
        Mistake("this is the largest reward of each rollout", "A return is the sum of all rewards.",
                lambda r, m, g: _token_advantages((r * m).amax(1), m, g)),
        Mistake("divided by the standard deviation, as exercise 3 does",
                "Here the advantage is return minus mean, undivided.",
                lambda r, m, g: right.group_advantages((r * m).sum(1), g)[:, None] * m,
                "baseline)", (lambda r, m, g: _token_advantages(
                    (r * m).sum(1) / ((r * m).sum(1).std() + 1e-4), m, g),)),
        Mistake("no baseline: the mean of the group is not subtracted", "Subtract it.",
                lambda r, m, g: (r * m).sum(1, keepdim=True) * m, "baseline)",
                question="Which number is subtracted from each return?"),
        Mistake("each token counts only the rewards from it on",
                "The bug is elsewhere: every token gets the return of its rollout.",
                _rewards_to_go),
        Mistake("rewards in the padding were counted", "Multiply by the mask before the sum.",
                lambda r, m, g: _token_advantages(r.sum(1), m, g)),
        Mistake("padding got an advantage", "Multiply by the mask at the end.",
                lambda r, m, g: _token_advantages((r * m).sum(1), torch.ones_like(m), g),
                "baseline)",
                question="What advantage should a padding token have?"),
    ),
}  # fmt: skip
MISTAKES["advantages_of_tokens"] += tuple(  # beside the bug
    replace(
        mistake,
        cause=f"{REWARD_PER_TOKEN}; and {mistake.cause}",
        wrong=_per_token(mistake.wrong),
        variants=tuple(map(_per_token, mistake.variants)),
    )
    for mistake in MISTAKES["advantages_of_tokens"][1:]
)
