"""Typical mistakes in the exercises of scratch.py, each with its cause.

A mistake is a change of the solution: of its code, or of what it returns. The checker runs the
changed solution too. If it gives the same answers as the participant's function, the cause says
what the participant did. Where two mistakes give the same answers, one cause names both.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from core.workshop import solutions

Change = tuple[str, ...] | Callable[[Any], Any]  # (old code, new code, ..), or of the right answer


def advantages_as_given(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """Exercise 10 with its bug, as scratch.py gives it."""
    returns = (rewards * mask).sum(1) / mask.sum(1)  # [B]
    same = (group_ids[:, None] == group_ids[None, :]).float()  # [B, B]: 1 within a group
    baseline = (same @ returns) / same.sum(1)  # [B]
    return (returns - baseline)[:, None] * mask


@dataclass(frozen=True)
class Mistake:
    """A mistake, with its first two hints; "": those of the fact that fails."""

    cause: str
    changes: tuple[Change, ...]  # each makes the mistake; the third hint is the line of the first
    idea: str
    question: str


def mistakes_in(name: str) -> list[Mistake]:
    """Returns the typical mistakes in the exercise whose function is `name`."""
    return [mistake for names in TYPICAL if name in names.split() for mistake in TYPICAL[names]]


@cache
def changed_solution(name: str, change: Change) -> Callable[..., Any]:
    """Returns the solution of the exercise whose function is `name`, with a change."""
    right = getattr(solutions, name)
    if callable(change):
        return lambda *args, **kwargs: change(right(*args, **kwargs))
    source = inspect.getsource(right)
    for old, new in zip(change[::2], change[1::2], strict=True):
        source = source.replace(old, new)
    functions = dict(vars(solutions))
    exec(source, functions)  # noqa: S102  our own code
    return functions[name]  # type: ignore[no-any-return]


def _mistake(cause: str, *changes: Change, idea: str = "", question: str = "") -> Mistake:
    return Mistake(cause, changes, idea, question)


EXTRA_AXIS = "squeeze was forgotten, or keepdim used: the result has an extra axis of size 1"
CENTERED = "(returns[members].std() + 1e-4)"
MINIMUM = "torch.minimum(ratio * advantages, clipped * advantages)"
EACH_ROW = "[:, None].expand_as(logprobs)"
CLIP = "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
LAST = "return (returns - baseline)[:, None] * mask"

TYPICAL: dict[str, tuple[Mistake, ...]] = {  # by the names of the exercises
    "token_logprobs group_advantages reinforce_loss clipped_loss kl_k3 gae advantages_of_tokens": (
        _mistake("wrong sign: this is minus the right answer", lambda y: -y,
                 idea="Compare each sign with the formula in the docstring."),
    ),
    "token_logprobs reinforce_loss clipped_loss kl_k3": (
        _mistake("no gradient reaches the input: something was detached, computed under no_grad, "
                 "or made a plain number", lambda y: y.detach(),
                 idea="Remove detach, no_grad and item."),
    ),
    "token_logprobs kl_k3": (
        _mistake("this is a sum or a mean over tokens",
                 lambda y: y.sum(), lambda y: y.mean(), lambda y: -y.mean(),
                 lambda y: y.sum(-1), lambda y: y.mean(-1),
                 idea="Return one number for each token."),
    ),
    "token_logprobs group_advantages": (
        _mistake(EXTRA_AXIS, lambda y: y[..., None], idea="squeeze(-1) drops the last axis."),
    ),
    "completion_mask group_advantages gae": (
        _mistake("only the first round of the loop counts: does the function return inside it?",
                 ("\n    return", "\n        return"), idea="Finish the loop, then return."),
    ),
    "token_logprobs": (
        _mistake("not shifted: each token is looked up in the logits at its own position",
                 ("input_ids[:, 1:", "input_ids[:, :-1"), ("logits[:, :-1]", "logits[:, 1:]")),
        _mistake("shifted the wrong way: each token is looked up in the logits after it",
                 ("logits[:, :-1]", "logits[:, 1:]", "input_ids[:, 1:", "input_ids[:, :-1")),
        _mistake("neither logits nor ids were cut: T columns, and each token is looked up in the "
                 "logits at its own position", ("[:, :-1]", "", "[:, 1:,", "[:, :,")),
        _mistake("these are logits, not log-probs", (".log_softmax(-1)", "")),
        _mistake("these are probabilities, not their logarithms",
                 (".log_softmax(-1)", ".softmax(-1)"), idea="Use log_softmax."),
        _mistake("softmax went over another axis than the vocabulary",
                 (".log_softmax(-1)", ".log_softmax(1)"), (".log_softmax(-1)", ".log_softmax(0)"),
                 ("[:, :-1].log_softmax(-1)", ".log_softmax(1)[:, :-1]")),
        _mistake("log of softmax: a small probability is rounded to 0, whose log is -infinity, or "
                 "raised to some number like 1e-8",
                 (".log_softmax(-1)", ".softmax(-1).log()"),
                 *((".log_softmax(-1)", f".softmax(-1).add(1e-{n}).log()") for n in range(6, 21))),
        _mistake("gather needs ids with as many axes as the log-probs",
                 (", None]).squeeze(-1)", "])"), idea="ids[:, :, None] has shape [B, T-1, 1]."),
        _mistake("this is the log-prob of the likeliest token, not of the one that follows",
                 (".gather(-1, input_ids[:, 1:, None]).squeeze(-1)", ".amax(-1)")),
    ),
    "completion_mask": (
        _mistake("not shifted, or filled up to T entries in front: this marks the sampled tokens, "
                 "not the positions before them", ("sampled[1:]", "sampled")),
        _mistake("you dropped the last id instead of the first", ("sampled[1:]", "sampled[:-1]")),
        _mistake("T entries remain: shifted by roll, or filled up at the end",
                 ("sampled[1:]", "sampled[1:] + [False]"), ("sampled[1:]", "sampled[1:] + [True]"),
                 idea="Drop the first entry, and add none."),
        _mistake("shifted within each turn: every turn lost an entry, but the chat is one text",
                 ("len(context)", "(len(context) - 1)", "sampled[1:]", "sampled")),
        _mistake("inverted: the positions before context tokens are True",
                 ("sampled[1:]", "[not x for x in sampled[1:]]")),
        _mistake("the contexts are missing", ("[False] * len(context) + ", "")),
        _mistake("only the last turn counts", ("sampled +=", "sampled = [False] * len(sampled) +")),
        _mistake("the first token of each completion is missing",
                 ("[True] * len(completion)", "[False] + [True] * (len(completion) - 1)")),
        _mistake("the last token of each completion, <end>, is missing",
                 ("[True] * len(completion)", "[True] * (len(completion) - 1) + [False]"),
                 idea="The policy samples <end> too, and must learn to stop."),
    ),
    "group_advantages": (
        _mistake("compared with the whole batch: the groups are not used",
                 ("group_ids == group", "group_ids == group_ids")),
        _mistake("the mean or the standard deviation is that of the whole batch",
                 ("returns[members].std()", "returns.std()"),
                 ("returns[members].mean()", "returns.mean()")),
        _mistake("the results are in the order of the groups, not of the rollouts",
                 ("advantages[members]",
                  "advantages[(group_ids < group).sum() + torch.arange(members.sum().item())]")),
        _mistake("neighbors were taken as groups of equal size (view or reshape)",
                 *(("group_ids.unique()", "range(len(returns))", "group_ids == group",
                    f"torch.arange(len(returns)) // ({size}) == group")
                   for size in ("2", "len(returns) // len(group_ids.unique())")),
                 idea="Rollouts of a group may be anywhere, and groups differ in size."),
        _mistake("the last group was left out: range ends before its argument",
                 ("group_ids.unique()", "range(int(group_ids.max()))"),
                 idea="Go through group_ids.unique()."),
        _mistake("this is the population standard deviation, which divides by n",
                 (".std()", ".std(correction=0)")),
        _mistake("not divided by the standard deviation", (f" / {CENTERED}", "")),
        _mistake("divided by the variance", (".std()", ".var()")),
        _mistake("0 divided by 0: a group of equal returns has a standard deviation of 0",
                 (" + 1e-4", ""), (CENTERED, CENTERED[1:-1])),
        _mistake("only the mean is divided: a - b / c is a - (b / c)",
                 ("= centered /", "= returns[members] - returns[members].mean() /"),
                 idea="Put the difference in parentheses: (return - mean) / (std + 1e-4)."),
        _mistake("the mean of the group is not subtracted", (" - returns[members].mean()", "")),
    ),
    "reinforce_loss clipped_loss": (
        _mistake("this is a sum, not a mean", (" / mask.sum()", "")),
        _mistake("one number for each token: the sum over the tokens is missing",
                 (".sum() / mask.sum()", ""), (".sum() / mask.sum()", " / mask.sum()"),
                 idea="Sum over the sampled tokens, then divide by mask.sum()."),
        _mistake("divided by the number of positions, not of sampled tokens",
                 ("mask.sum()", "mask.numel()")),
        _mistake("divided by the number of rollouts, not of sampled tokens",
                 ("mask.sum()", "len(mask)")),
        _mistake("this is the mean of each rollout's mean: tokens of a short rollout count more",
                 ("[mask]", "", ".sum() / mask.sum()",
                  ".where(mask, torch.tensor(0.0)).sum(1).div(mask.sum(1)).mean()")),
        _mistake("the mask is not used: every position counts",
                 ("[mask]", "", "mask.sum()", "mask.numel()")),
        _mistake("multiplied by the mask: 0 · infinity is nan",
                 ("[mask]", "", ".sum() /", ".mul(mask).sum() /")),
        _mistake("the mask was applied last: off the mask the gradient is 0 · infinity, which is "
                 "nan", ("[mask]", "", ".sum() /", "[mask].sum() /")),
    ),
    "reinforce_loss": (
        _mistake("this uses the probability instead of its logarithm",
                 ("logprobs[mask]", "logprobs[mask].exp()"), idea="Leave out exp."),
        _mistake("the advantages are missing: this makes every sampled token likelier",
                 ("advantages[mask] * ", "")),
        _mistake("the mean of the advantages was multiplied by that of the log-probs",
                 ("advantages[mask]", "advantages[mask].mean()"),
                 idea="Multiply token by token, then sum."),
    ),
    "clipped_loss": (
        _mistake("the ratio is inverted: π_old over π",
                 ("logprobs - old_logprobs", "old_logprobs - logprobs"),
                 idea="ρ = exp(log π - log π_old).",
                 question="Which of the two policies is in the numerator of ρ?"),
        _mistake("you divided log-probs", (" - old_logprobs).exp()", " / old_logprobs)")),
        _mistake("this is the logarithm of the ratio: exp is missing", (".exp()", "")),
        _mistake("you took the larger of the two products", ("torch.minimum", "torch.maximum")),
        _mistake("min, max or `if` was given a tensor of several numbers: it decides only for one",
                 ("torch.minimum", "min"),
                 idea="torch.minimum takes the smaller number at each position."),
        _mistake("A is missing in one of the two products, or in both",
                 ("clipped * advantages", "clipped"), ("(ratio * advantages", "(ratio"),
                 (MINIMUM, "torch.minimum(ratio, clipped)")),
        _mistake("only the clipped product is used", (MINIMUM, "clipped * advantages")),
        _mistake("not clipped: this is -ρ A", (MINIMUM, "ratio * advantages")),
        _mistake("clipped on one side only", ("1 - clip, 1 + clip", "max=1 + clip"),
                 ("1 - clip, 1 + clip", "min=1 - clip")),
        _mistake("the bounds are -clip and +clip", ("1 - clip, 1 + clip", "-clip, clip"),
                 idea="Clamp the ratio to 1-clip..1+clip."),
        _mistake("you took the smaller ratio before multiplying by A",
                 (MINIMUM, "torch.minimum(ratio, clipped) * advantages")),
        _mistake("the clip is always 0.2, in one bound or in both",
                 ("1 - clip, 1 + clip", "0.8, 1.2"), ("1 + clip", "1.2"), ("1 - clip", "0.8")),
    ),
    "kl_k3": (
        _mistake("this is k1, log π - log π_ref, which can be negative for a token",
                 ("log_r.exp() - 1 - log_r", "-log_r"), idea="Add r - 1: k3 = r - 1 - log r."),
        _mistake("this is k2, half the square of the difference",
                 ("log_r.exp() - 1 - log_r", "log_r**2 / 2"), idea="k3 = r - 1 - log r."),
        _mistake("r is inverted: π over π_ref",
                 ("ref_logprobs - logprobs", "logprobs - ref_logprobs"),
                 idea="r = π_ref / π: log r = log π_ref - log π.",
                 question="Which of the two policies is in the numerator of r?"),
        _mistake("the sign of log r is wrong: r - 1 + log r", ("- log_r", "+ log_r"),
                 idea="Subtract log r, and compute it as log π_ref - log π."),
        _mistake("the 1 is missing", (" - 1", "")),
        _mistake("log r is missing", (" - log_r", ""), idea="r - 1 - log r."),
        _mistake("exp is missing: the difference of the log-probs is log r, not r",
                 ("log_r.exp() - 1 - log_r", "log_r - 1 - log_r.log()"),
                 idea="r is the exponential of log r."),
        _mistake("you divided log-probs",
                 ("ref_logprobs - logprobs", "(ref_logprobs / logprobs).log()")),
    ),
    "gae": (
        _mistake("γ is missing before the next value, before the next advantage, or before both",
                 ("gamma * next", "next"), ("gamma * lam", "lam"),
                 ("gamma * next", "next", "gamma * lam", "lam")),
        _mistake("λ is missing before the next advantage", ("gamma * lam", "gamma"),
                 idea="γ λ A_t+1."),
        _mistake("this is only δ_t: γ λ A_t+1 is missing, or A_t+1 is 0 in every round of the loop",
                 (" + gamma * lam * next_advantage", "")),
        _mistake("the next value is missing, or is 0 in every round of the loop",
                 ("gamma * next_value ", "0 "),
                 idea="δ_t = r_t + γ V_t+1 - V_t, and V_t is the next value of the round after."),
        _mistake("the next value was overwritten before δ used it, so V_t+1 is V_t",
                 ("next_value - ", "values[t] - "),
                 idea="Compute δ first; then keep values[t] for the next round."),
        _mistake("the value is not subtracted", (" - values[t]", ""),
                 idea="δ_t = r_t + γ V_t+1 - V_t."),
        _mistake("these are returns, A_t + V_t", ("return adv", "return values + adv"),
                 idea="Return the advantages without adding the values."),
        _mistake("you went from left to right",
                 ("reversed(range(len(rewards)))", "range(len(rewards))"),
                 ("reversed(range(len(rewards)))", "range(len(rewards))", "gamma * next_value",
                  "gamma * (values[t + 1] if t + 1 < len(values) else 0)"),
                 idea="Go from the last token to the first."),
        _mistake("the token t = 0 was left out: range ends before its second argument",
                 ("reversed(range(len(rewards)))", "range(len(rewards) - 1, 0, -1)"),
                 idea="Go down to 0: reversed(range(N)), or range(N - 1, -1, -1)."),
        _mistake("the list was filled from the last token to the first and never reversed",
                 lambda y: y.flip(0), idea="Write to advantages[t], or reverse the list."),
        _mistake("the last value is used again after the end of the episode",
                 ("= next_advantage = torch.tensor(0.0)", ", next_advantage = values[-1], 0.0"),
                 idea="After the last token the value is 0."),
        _mistake("an index goes past the last token, as values[t + 1] does there",
                 ("next_value -", "values[t + 1] -"),
                 idea="Keep the next value in a variable that starts at 0."),
    ),
    "sample": (
        _mistake("multinomial got logits or log-probs instead of probabilities",
                 *(("all_logprobs.exp(), 1", f"{given}, 1")
                   for given in ("logits", "(logits / temperature)", "all_logprobs"))),
        _mistake("this always takes the most likely token",
                 ("torch.multinomial(all_logprobs.exp(), 1, generator=generator).squeeze(-1)",
                  "logits.argmax(-1)"), idea="Sample with torch.multinomial."),
        _mistake("the temperature is not used", ("(logits / temperature)", "logits")),
        _mistake("multiplied by the temperature", ("/ temperature", "* temperature")),
        _mistake("the probabilities were divided by the temperature, not the logits",
                 ("(logits / temperature).log_softmax(-1)",
                  "(logits.softmax(-1) / temperature).log()")),
        _mistake("the log-prob is that of another distribution: without the temperature",
                 ("return ids, all_logprobs", "return ids, logits.log_softmax(-1)")),
        _mistake("these are probabilities, not their logarithms",
                 ("ids, all_logprobs", "ids, all_logprobs.exp()"), idea="Use log_softmax."),
        _mistake("division by temperature 0", ("temperature == 0", "False")),
        _mistake("at temperature 0 the log-prob is 0, as with a small number in its place",
                 ("temperature == 0", "False", "/ temperature", "/ max(temperature, 1e-6)")),
        _mistake("the generator is not used", (", generator=generator", "")),
        _mistake(EXTRA_AXIS, lambda y: (y[0][:, None], y[1][:, None]),
                 lambda y: (y[0][:, None], y[1]), lambda y: (y[0], y[1][:, None])),
        _mistake("the log-prob is that of the most likely token, not of the drawn one",
                 (".gather(-1, ids[:, None]).squeeze(-1)", ".amax(-1)")),
        _mistake("this returns all V log-probs of a row",
                 (".gather(-1, ids[:, None]).squeeze(-1)", ""),
                 idea="Pick that of the drawn id with gather."),
    ),
    "training_step": (
        _mistake("the old log-probs carry a gradient, which cancels that of the new ones",
                 (".detach()", ""), idea="Detach the old log-probs.",
                 question="What is the derivative of log π - log π_old if both carry a gradient?"),
        _mistake("old and new log-probs are exchanged, or the gradient is negated: the step goes "
                 "in the wrong direction",
                 ("logprobs, logprobs.detach()", "logprobs.detach(), logprobs"),
                 idea="Only the old log-probs, the second argument, are detached.",
                 question="The optimizer makes something smaller. What?"),
        _mistake("optimizer.step() was not called", ("    optimizer.step()\n", "")),
        _mistake("the gradient was set to zero before the step",
                 ("step()\n    optimizer.zero_grad()", "zero_grad()\n    optimizer.step()"),
                 idea="Call zero_grad after the step."),
        _mistake("backward was not called", ("    loss.backward()\n", "")),
        _mistake("the optimizer's step comes before backward, with the gradient of nothing",
                 ("    optimizer.step()\n", "", "    loss.", "    optimizer.step()\n    loss.")),
        _mistake("the optimizer takes two steps",
                 ("optimizer.step()", "optimizer.step()\n    optimizer.step()")),
        _mistake("the norm of the gradient was not clipped to 1",
                 (CLIP, ""), *(("1.0)", f"{norm})") for norm in (0.1, 0.5, 5.0, 10.0)),
                 idea="Clip between backward and the step."),
        _mistake("the gradient remains and adds up over the steps: zero_grad was not called",
                 ("    optimizer.zero_grad()\n", "")),
        _mistake("the gradient remains after the step: zero_grad comes only before backward",
                 ("    optimizer.zero_grad()\n", "", "    loss.backward()",
                  "    optimizer.zero_grad()\n    loss.backward()")),
        _mistake("the advantages are one number for each rollout; exercise 5 needs one for each "
                 "token, [B, T-1]", (EACH_ROW, ""), (EACH_ROW, "[:, None]"), (EACH_ROW, "[None]"),
                 (EACH_ROW, ".expand_as(logprobs)"),
                 idea="advantages[:, None].expand_as(logprobs) repeats each of them along its row.",
                 question="Which shape have the advantages of exercise 3?"),
        _mistake("the returns were used as advantages",
                 ("group_advantages(returns, group_ids)", "returns"),
                 idea="Compute advantages with exercise 3."),
        _mistake("wrong sign: the loss, or the advantages, were negated once more",
                 ("loss = clipped", "loss = -clipped"),
                 idea="The loss of exercise 5 is negated already."),
        _mistake("this is reinforce_loss, exercise 4",
                 ("clipped_loss(logprobs, logprobs.detach()", "reinforce_loss(logprobs"),
                 idea="Use clipped_loss, exercise 5."),
    ),
    "advantages_of_tokens": (
        _mistake("still the reward per token, so a long answer gets less",
                 ("mask).sum(1)", "mask).sum(1) / mask.sum(1).clamp(min=1)")),
        _mistake("the division by the number of tokens moved to the last line",
                 (LAST, f"{LAST} / mask.sum(1, True)"),
                 idea="Remove it: the number of tokens has no influence."),
        _mistake("divided by the number of columns, or by the length of the longest rollout",
                 ("mask).sum(1)", "mask).mean(1)")),
        _mistake("rewards in the padding were counted", ("(rewards * mask)", "rewards")),
        _mistake("the baseline is the mean of all rollouts: groups mix",
                 ("(same @ returns) / same.sum(1)", "returns.mean()"),
                 idea="Use `same`, which is 1 within a group."),
        _mistake("the mean of the group is not subtracted", (" - baseline", "")),
        _mistake("the baseline is the sum of the group, not its mean", (" / same.sum(1)", "")),
        _mistake("divided by the standard deviation, as exercise 3 does",
                 (LAST, "return group_advantages(returns, group_ids)[:, None] * mask"),
                 (LAST, f"{LAST} / (returns.std() + 1e-4)"),
                 idea="Here the advantage is return minus mean, undivided."),
        _mistake("padding got an advantage", (" * mask\n", " * torch.ones_like(mask)\n")),
    ),
}  # fmt: skip
