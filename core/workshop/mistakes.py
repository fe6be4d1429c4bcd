"""Forty mistakes in the exercises of scratch.py, each with its cause, and the bug of exercise 10.

A mistake is against a step or a remark of its exercise, and the function still runs and returns
numbers that look right. A mistake that the failing fact, a shape or an error explains has no entry.

It is described as a change of the solution: of its code, or of its result. If the changed solution
gives the same answers as the participant's function, the checker prints the cause.
"""

import inspect
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

from core.workshop import solutions

Change = tuple[str, ...] | Callable[[Any], Any]  # (old code, new code, ..); or of the result


def mistakes_in(name: str) -> dict[str, list[Change]]:
    """The causes of mistakes in the exercise whose function is `name`, and the changes, each of
    which makes the mistake."""
    tables = [mistakes for names, mistakes in MISTAKES.items() if name in names.split()]
    return dict(itertools.chain.from_iterable(table.items() for table in tables))


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


NOT_REPAIRED = "a long answer still gets less: exercise 10 answers as it was given"
BUG = ("mask).sum(1)", "mask).sum(1) / mask.sum(1)")
EACH_ROW = "[:, None].expand_as(logprobs)"
LAST = "return (returns - baseline)[:, None] * mask"

MISTAKES: dict[str, dict[str, list[Change]]] = {  # by the names of exercises
    "token_logprobs group_advantages reinforce_loss clipped_loss kl_k3 gae advantages_of_tokens": {
        "wrong sign: this is minus the right answer": [lambda y: -y],
    },
    "token_logprobs reinforce_loss clipped_loss kl_k3": {
        "no gradient reaches the input: something was detached, computed under no_grad, or made a "
        "plain number": [lambda y: y.detach()],
    },
    "completion_mask group_advantages gae": {
        "only the first round of the loop counts: does the function return inside it?":
            [("\n    return", "\n        return")],
    },
    "token_logprobs sample": {
        "these are probabilities, not their logarithms: use log_softmax":
            [(".gather(", ".exp().gather(")],
    },
    "token_logprobs": {
        "not shifted: each token is looked up in the logits at its own position":
            [("input_ids[:, 1:", "input_ids[:, :-1"), ("logits[:, :-1]", "logits[:, 1:]"),
             ("[:, :-1]", "", "[:, 1:,", "[:, :,")],
        "these are logits, not log-probs": [(".log_softmax(-1)", "")],
        "softmax went over another axis than the vocabulary":
            [(".log_softmax(-1)", ".log_softmax(1)"), (".log_softmax(-1)", ".log_softmax(0)")],
        "log of softmax: a small probability is rounded to 0, whose log is -infinity, or raised to "
        "some number like 1e-8":
            [(".log_softmax(-1)", ".softmax(-1).log()"),
             *((".log_softmax(-1)", f".softmax(-1).add(1e-{n}).log()") for n in (8, 10, 12))],
    },
    "completion_mask": {
        "not shifted: this marks the sampled tokens, not the positions before them":
            [("sampled[1:]", "sampled")],
        "you dropped the last id instead of the first": [("sampled[1:]", "sampled[:-1]")],
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
        "this is the population standard deviation, which divides by n":
            [(".std()", ".std(correction=0)")],
        "not divided by the standard deviation": [(" / (returns[members].std() + 1e-4)", "")],
    },
    "reinforce_loss clipped_loss": {
        "divided by the number of positions, not of sampled tokens":
            [("mask.sum()", "mask.numel()")],
        "this is the mean of each rollout's mean: tokens of a short rollout count more":
            [("[mask]", "", ".sum() / mask.sum()",
              ".where(mask, torch.tensor(0.0)).sum(1).div(mask.sum(1)).mean()")],
        "0 · infinity is nan, in the loss or in its gradient: use the mask before you multiply":
            [("[mask]", "", ".sum() /", ".mul(mask).sum() /"),
             ("[mask]", "", ".sum() /", "[mask].sum() /")],
    },
    "clipped_loss": {
        "the ratio is inverted: π_old over π":
            [("logprobs - old_logprobs", "old_logprobs - logprobs")],
        "this is the logarithm of the ratio: exp is missing": [(".exp()", "")],
        "you took the larger of the two products": [("torch.minimum", "torch.maximum")],
        "you took the smaller ratio before multiplying by A":
            [("(ratio * advantages, clipped * advantages)", "(ratio, clipped) * advantages")],
    },
    "kl_k3": {
        "this is k1, log π - log π_ref, which can be negative for a token":
            [("log_r.exp() - 1 - log_r", "-log_r")],
        "r is inverted: π over π_ref; r = π_ref / π, so log r = log π_ref - log π":
            [("ref_logprobs - logprobs", "logprobs - ref_logprobs")],
    },
    "gae": {
        "γ or λ is missing before the next value or before the next advantage":
            [("gamma * next", "next"), ("gamma * lam", "lam"), ("gamma * lam", "gamma"),
             ("gamma * next", "next", "gamma * lam", "lam")],
        "this is only δ_t: γ λ A_t+1 is missing, or A_t+1 is 0 in every round of the loop":
            [(" + gamma * lam * next_advantage", "")],
        "the next value is missing, or is 0 in every round of the loop":
            [("gamma * next_value ", "0 ")],
        "you went from left to right":
            [("reversed(range(len(rewards)))", "range(len(rewards))"),
             ("reversed(range(len(rewards)))", "range(len(rewards))", "gamma * next_value",
              "gamma * (values[t + 1] if t + 1 < len(values) else 0)")],
        "the list was filled from the last token to the first and never reversed":
            [lambda y: y.flip(0)],
    },
    "sample": {
        "multinomial got logits or log-probs instead of probabilities":
            [("all_logprobs.exp(), 1", f"{wrong}, 1")
             for wrong in ("logits", "(logits / temperature)", "all_logprobs")],
        "the log-prob is that of another distribution: without the temperature":
            [("return ids, all_logprobs", "return ids, logits.log_softmax(-1)")],
        "at temperature 0 the log-prob is 0, as with a small number in its place":
            [("temperature == 0", "False", "/ temperature", "/ max(temperature, 1e-6)")],
    },
    "training_step": {
        "the old log-probs carry a gradient, which cancels that of the new ones":
            [(".detach()", "")],
        "the weights stay as they are: is the order backward, clip, optimizer.step(), zero_grad?":
            [("    optimizer.step()\n", "")],
        "the step goes in the wrong direction: the loss, the advantages or the ratio is inverted":
            [("loss = clipped", "loss = -clipped"),
             ("logprobs, logprobs.detach()", "logprobs.detach(), logprobs")],
        "the norm of the gradient was not clipped to 1":
            [("    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""),
             *(("1.0)", f"{norm})") for norm in (0.5, 10.0))],
        "the advantages are one number for each rollout; exercise 5 needs one for each token, "
        "[B, T-1]": [(EACH_ROW, ""), (EACH_ROW, "[:, None]"), (EACH_ROW, "[None]")],
    },
    "advantages_of_tokens": {
        NOT_REPAIRED: [BUG],
        "the division by the number of tokens moved to the last line":
            [(LAST, f"{LAST} / mask.sum(1, True)")],
        "divided by the standard deviation, as exercise 3 does":
            [(LAST, "return group_advantages(returns, group_ids)[:, None] * mask"),
             (LAST, f"{LAST} / (returns.std() + 1e-4)")],
    },
}  # fmt: skip
