"""Typical mistakes in the exercises of scratch.py, each with its cause.

A mistake is a change of the solution: of its code, or of what it returns. The checker runs the
changed solution too. If it gives the same answers as the participant's function, the cause says
what the participant did. Where two mistakes give the same answers, one cause names both.
"""

import inspect
from collections.abc import Callable
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


def mistakes_in(name: str) -> dict[str, list[Change]]:
    """The causes of typical mistakes in the exercise whose function is `name`, and the changes,
    each of which makes the mistake."""
    found: dict[str, list[Change]] = {}
    for names, mistakes in TYPICAL.items():
        found |= mistakes if name in names.split() else {}
    return found


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


EXTRA_AXIS = "squeeze was forgotten, or keepdim used: the result has an extra axis of size 1"
PROBABILITIES = "these are probabilities, not their logarithms: use log_softmax"
DIVIDED = "(returns[members].std() + 1e-4)"
MINIMUM = "torch.minimum(ratio * advantages, clipped * advantages)"
EACH_ROW = "[:, None].expand_as(logprobs)"
CLIP = "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
LAST = "return (returns - baseline)[:, None] * mask"

TYPICAL: dict[str, dict[str, list[Change]]] = {  # by the names of the exercises
    "token_logprobs group_advantages reinforce_loss clipped_loss kl_k3 gae advantages_of_tokens": {
        "wrong sign: this is minus the right answer": [lambda y: -y],
    },
    "token_logprobs reinforce_loss clipped_loss kl_k3": {
        "no gradient reaches the input: something was detached, computed under no_grad, or made a "
        "plain number": [lambda y: y.detach()],
    },
    "token_logprobs kl_k3": {
        "this is a sum or a mean over tokens, not one number for each token":
            [lambda y: y.sum(), lambda y: y.mean(), lambda y: -y.mean(),
             lambda y: y.sum(-1), lambda y: y.mean(-1)],
    },
    "token_logprobs group_advantages": {EXTRA_AXIS: [lambda y: y[..., None]]},
    "completion_mask group_advantages gae": {
        "only the first round of the loop counts: does the function return inside it?":
            [("\n    return", "\n        return")],
    },
    "token_logprobs": {
        "not shifted: each token is looked up in the logits at its own position":
            [("input_ids[:, 1:", "input_ids[:, :-1"), ("logits[:, :-1]", "logits[:, 1:]")],
        "shifted the wrong way: each token is looked up in the logits after it":
            [("logits[:, :-1]", "logits[:, 1:]", "input_ids[:, 1:", "input_ids[:, :-1")],
        "neither logits nor ids were cut: T columns, and each token is looked up in the logits at "
        "its own position": [("[:, :-1]", "", "[:, 1:,", "[:, :,")],
        "these are logits, not log-probs": [(".log_softmax(-1)", "")],
        PROBABILITIES: [(".log_softmax(-1)", ".softmax(-1)")],
        "softmax went over another axis than the vocabulary":
            [(".log_softmax(-1)", ".log_softmax(1)"), (".log_softmax(-1)", ".log_softmax(0)")],
        "log of softmax: a small probability is rounded to 0, whose log is -infinity, or raised to "
        "some number like 1e-8":
            [(".log_softmax(-1)", ".softmax(-1).log()"),
             *((".log_softmax(-1)", f".softmax(-1).add(1e-{n}).log()") for n in range(6, 13))],
    },
    "completion_mask": {
        "not shifted, or filled up to T entries in front: this marks the sampled tokens, not the "
        "positions before them": [("sampled[1:]", "sampled")],
        "you dropped the last id instead of the first": [("sampled[1:]", "sampled[:-1]")],
        "T entries remain: shifted by roll, or filled up at the end":
            [("sampled[1:]", "sampled[1:] + [False]"), ("sampled[1:]", "sampled[1:] + [True]")],
        "shifted within each turn: every turn lost an entry, but the chat is one text":
            [("len(context)", "(len(context) - 1)", "sampled[1:]", "sampled")],
        "the last token of each completion, <end>, is missing; the policy samples it too, and must "
        "learn to stop": [("[True] * len(completion)",
                           "[True] * (len(completion) - 1) + [False]")],
    },
    "group_advantages": {
        "the mean, the standard deviation or both are those of the whole batch":
            [("group_ids == group", "group_ids == group_ids"),
             ("returns[members].std()", "returns.std()"),
             ("returns[members].mean()", "returns.mean()")],
        "the results are in the order of the groups, not of the rollouts":
            [("advantages[members]",
              "advantages[(group_ids < group).sum() + torch.arange(members.sum().item())]")],
        "neighbors were taken as groups of equal size (view or reshape)":
            [("group_ids.unique()", "range(len(returns))", "group_ids == group",
              f"torch.arange(len(returns)) // ({size}) == group")
             for size in ("2", "len(returns) // len(group_ids.unique())")],
        "this is the population standard deviation, which divides by n":
            [(".std()", ".std(correction=0)")],
        "not divided by the standard deviation": [(f" / {DIVIDED}", "")],
        "0 divided by 0: a group of equal returns has a standard deviation of 0": [(" + 1e-4", "")],
    },
    "reinforce_loss clipped_loss": {
        "this is a sum, not a mean": [(" / mask.sum()", "")],
        "one number for each token: the sum over the tokens is missing":
            [(".sum() / mask.sum()", ""), (".sum() / mask.sum()", " / mask.sum()")],
        "divided by the number of positions, not of sampled tokens":
            [("mask.sum()", "mask.numel()")],
        "this is the mean of each rollout's mean: tokens of a short rollout count more":
            [("[mask]", "", ".sum() / mask.sum()",
              ".where(mask, torch.tensor(0.0)).sum(1).div(mask.sum(1)).mean()")],
        "the mask is not used: every position counts":
            [("[mask]", "", "mask.sum()", "mask.numel()")],
        "multiplied by the mask: 0 · infinity is nan":
            [("[mask]", "", ".sum() /", ".mul(mask).sum() /")],
        "the mask was applied last: off the mask the gradient is 0 · infinity, which is nan":
            [("[mask]", "", ".sum() /", "[mask].sum() /")],
    },
    "reinforce_loss": {
        "this uses the probability instead of its logarithm: leave out exp":
            [("logprobs[mask]", "logprobs[mask].exp()")],
    },
    "clipped_loss": {
        "the ratio is inverted: π_old over π":
            [("logprobs - old_logprobs", "old_logprobs - logprobs")],
        "this is the logarithm of the ratio: exp is missing": [(".exp()", "")],
        "you took the larger of the two products": [("torch.minimum", "torch.maximum")],
        "min, max or `if` was given a tensor of several numbers: it decides only for one":
            [("torch.minimum", "min")],
        "only the clipped product is used": [(MINIMUM, "clipped * advantages")],
        "not clipped: this is -ρ A": [(MINIMUM, "ratio * advantages")],
        "clipped on one side only": [("1 - clip, 1 + clip", "max=1 + clip"),
                                     ("1 - clip, 1 + clip", "min=1 - clip")],
        "you took the smaller ratio before multiplying by A":
            [(MINIMUM, "torch.minimum(ratio, clipped) * advantages")],
        "the clip is always 0.2": [("1 - clip, 1 + clip", "0.8, 1.2")],
    },
    "kl_k3": {
        "this is k1, log π - log π_ref, which can be negative for a token":
            [("log_r.exp() - 1 - log_r", "-log_r")],
        "r is inverted: π over π_ref; r = π_ref / π, so log r = log π_ref - log π":
            [("ref_logprobs - logprobs", "logprobs - ref_logprobs")],
        "the sign of log r is wrong: r - 1 + log r": [("- log_r", "+ log_r")],
    },
    "gae": {
        "γ is missing before the next value, before the next advantage, or before both":
            [("gamma * next", "next"), ("gamma * lam", "lam"),
             ("gamma * next", "next", "gamma * lam", "lam")],
        "λ is missing before the next advantage": [("gamma * lam", "gamma")],
        "this is only δ_t: γ λ A_t+1 is missing, or A_t+1 is 0 in every round of the loop":
            [(" + gamma * lam * next_advantage", "")],
        "the next value is missing, or is 0 in every round of the loop":
            [("gamma * next_value ", "0 ")],
        "the next value was overwritten before δ used it, so V_t+1 is V_t":
            [("next_value - ", "values[t] - ")],
        "you went from left to right":
            [("reversed(range(len(rewards)))", "range(len(rewards))"),
             ("reversed(range(len(rewards)))", "range(len(rewards))", "gamma * next_value",
              "gamma * (values[t + 1] if t + 1 < len(values) else 0)")],
        "the token t = 0 was left out: range ends before its second argument":
            [("reversed(range(len(rewards)))", "range(len(rewards) - 1, 0, -1)")],
        "the list was filled from the last token to the first and never reversed":
            [lambda y: y.flip(0)],
    },
    "sample": {
        "multinomial got logits or log-probs instead of probabilities":
            [("all_logprobs.exp(), 1", f"{given}, 1")
             for given in ("logits", "(logits / temperature)", "all_logprobs")],
        "the temperature is not used": [("(logits / temperature)", "logits")],
        "the log-prob is that of another distribution: without the temperature":
            [("return ids, all_logprobs", "return ids, logits.log_softmax(-1)")],
        PROBABILITIES: [("ids, all_logprobs", "ids, all_logprobs.exp()")],
        "division by temperature 0": [("temperature == 0", "False")],
        "at temperature 0 the log-prob is 0, as with a small number in its place":
            [("temperature == 0", "False", "/ temperature", "/ max(temperature, 1e-6)")],
        "the generator is not used": [(", generator=generator", "")],
        EXTRA_AXIS: [lambda y: (y[0][:, None], y[1][:, None]),
                     lambda y: (y[0][:, None], y[1]), lambda y: (y[0], y[1][:, None])],
    },
    "training_step": {
        "the old log-probs carry a gradient, which cancels that of the new ones":
            [(".detach()", "")],
        "old and new log-probs are exchanged, or the gradient is negated: the step goes in the "
        "wrong direction": [("logprobs, logprobs.detach()", "logprobs.detach(), logprobs")],
        "optimizer.step() was not called": [("    optimizer.step()\n", "")],
        "the gradient was set to zero before the step":
            [("step()\n    optimizer.zero_grad()", "zero_grad()\n    optimizer.step()")],
        "backward was not called": [("    loss.backward()\n", "")],
        "the optimizer's step comes before backward, with the gradient of nothing":
            [("    optimizer.step()\n", "", "    loss.", "    optimizer.step()\n    loss.")],
        "the norm of the gradient was not clipped to 1":
            [(CLIP, ""), *(("1.0)", f"{norm})") for norm in (0.5, 10.0))],
        "the gradient remains and adds up over the steps: zero_grad was not called":
            [("    optimizer.zero_grad()\n", "")],
        "the gradient remains after the step: zero_grad comes only before backward":
            [("    optimizer.zero_grad()\n", "", "    loss.backward()",
              "    optimizer.zero_grad()\n    loss.backward()")],
        "the advantages are one number for each rollout; exercise 5 needs one for each token, "
        "[B, T-1]": [(EACH_ROW, ""), (EACH_ROW, "[:, None]"), (EACH_ROW, "[None]")],
        "wrong sign: the loss, or the advantages, were negated once more":
            [("loss = clipped", "loss = -clipped")],
    },
    "advantages_of_tokens": {
        "still the reward per token, so a long answer gets less":
            [("mask).sum(1)", "mask).sum(1) / mask.sum(1).clamp(min=1)")],
        "the division by the number of tokens moved to the last line":
            [(LAST, f"{LAST} / mask.sum(1, True)")],
        "rewards in the padding were counted": [("(rewards * mask)", "rewards")],
        "the baseline is the mean of all rollouts: groups mix":
            [("(same @ returns) / same.sum(1)", "returns.mean()")],
        "divided by the standard deviation, as exercise 3 does":
            [(LAST, "return group_advantages(returns, group_ids)[:, None] * mask"),
             (LAST, f"{LAST} / (returns.std() + 1e-4)")],
    },
}  # fmt: skip
