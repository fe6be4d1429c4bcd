"""What became of each sampled token in an update, for report.html.

Its log-prob under the sampler, under the trainer before the update and after it, and its advantage:
where advantage and change have one sign, the update did with the token what it was meant to.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core import batching
from core.batching import MicroBatch, RolloutBatch
from core.model import Policy
from core.types import Rollout

DIGITS = 4  # of a number in the journal
SHOWN = {"sampler": "sampler_logprobs", "trainer": "old_logprobs", "after": "new_logprobs",
         "advantage": "advantages"}  # fmt: skip
MICRO_BATCH = 4096  # padded tokens


def trace_tokens(
    policy: Policy,
    rollouts: list[Rollout],
    update: RolloutBatch,
    known: dict[str, Tensor],
    budget: int,
    forward: Callable[[MicroBatch], tuple[Tensor, Any, Any]],
) -> None:
    """Fill `looks` of the first groups, as many as have `budget` sampled tokens, one at least.

    `known` are the [B, N] of the update's tokens before it; `forward` gives a micro-batch's
    log-probs [b, T-1] (and more) under the weights after it.
    """
    rows = first_groups(rollouts, budget)
    known = known | {"new_logprobs": torch.zeros_like(update.rewards)}
    chosen = [sequence for sequence in update.sequences if sequence.rollout in rows]
    at_once = min(MICRO_BATCH, policy.micro_batch_tokens)
    for batch in batching.micro_batches(chosen, at_once, policy.device):
        with torch.no_grad():
            batching.put(forward(batch)[0], batch, into=known["new_logprobs"])
    for row in rows:
        rollouts[row].token_traces, column = [], 0
        for turn in rollouts[row].turns:
            end = column + len(turn.completion_ids)
            numbers = {k: known[name][row, column:end].tolist() for k, name in SHOWN.items()}
            look: dict[str, Any] = {k: [round(x, DIGITS) for x in v] for k, v in numbers.items()}
            text = pieces(policy.tokenizer, turn.completion_ids)
            rollouts[row].token_traces.append({"text": text, **look})
            column = end


def first_groups(rollouts: list[Rollout], budget: int) -> set[int]:
    """Places in the list of the first groups' rollouts: whole groups within the budget, or one."""
    rows: set[int] = set()
    tokens = 0
    for group_id in dict.fromkeys(rollout.group_id for rollout in rollouts):
        group = [i for i, rollout in enumerate(rollouts) if rollout.group_id == group_id]
        tokens += sum(rollouts[i].num_tokens for i in group)
        if rows and tokens > budget:
            break
        rows.update(group)
    return rows


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token; together they are the text of all. A character made of several, and
    what is none (shown as \ufffd), stands at the token that settles it."""
    texts: list[str] = []
    pending: list[int] = []
    told = 0  # characters of the pending text that stand at a token already
    text = ""
    for id_ in ids:
        pending.append(id_)
        text = tokenizer.decode(pending)
        settled = len(text.rstrip("\ufffd"))  # what comes next may still change the end
        texts.append(text[told:settled])
        told = max(told, settled)
        if settled == len(text):
            pending, told, text = [], 0, ""
    if texts:
        texts[-1] += text[told:]
    return texts
