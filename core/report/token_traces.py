"""What an update did to each sampled token, for report.html.

Each token is traced with its log-prob under the sampler, under the trainer before and after the
update, and its advantage. Where the advantage and the change of the log-prob have the same sign,
the update moved the token in the intended direction.
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from algorithms.common import group_sum, minus
from core import distributed
from core.batching import MicroBatch, RolloutBatch, cut, kept_in
from core.policy import Policy
from core.types import Rollout

DIGITS = 4  # of each number in rollouts.jsonl
MICRO_BATCH = 4096  # tokens, padding included
Forward = Callable[[Policy, MicroBatch, float], tuple[Tensor, Tensor, Tensor | None]]


@torch.no_grad()
def trace_tokens(
    policy: Policy,
    rollouts: list[Rollout],
    batch: RolloutBatch,
    budget: int,
    forward: Forward,
    temperature: float,
) -> dict[str, float]:
    """Fills `token_traces` of some groups of rollouts, those with different returns first.

    Returns metrics of these rollouts: how far the update moved their tokens, and whether it made
    those likelier that earned more than their group.

    As many whole groups as have at most `budget` sampled tokens together, at least one; none if
    `budget` is 0. `policy` already has the weights after the update.
    """
    if budget == 0 or not rollouts or batch.old_logprobs is None or distributed.rank() != 0:
        return {}
    rows = choose_groups(rollouts, budget)
    new_logprobs = torch.zeros_like(batch.old_logprobs)
    sequences = [sequence for sequence in batch.sequences if sequence.rollout in rows]
    max_tokens = min(MICRO_BATCH, policy.micro_batch_tokens)
    for micro in cut(sequences, max_tokens, policy.device, policy.shares_prefixes):
        micro.kept_ids = kept_in(batch, micro)
        logprobs, _, _ = forward(policy, micro, temperature)
        micro.scatter(logprobs, into=new_logprobs)
    columns: dict[str, Tensor | None] = {
        "sampler": batch.sampler_logprobs,
        "trainer": batch.old_logprobs,
        "after": new_logprobs,
        "advantage": batch.advantages,
    }
    for row in rows:
        rollouts[row].token_traces, start = [], 0
        for turn in rollouts[row].turns:
            end = start + len(turn.completion_ids)
            trace: dict[str, list] = {"text": pieces(policy.tokenizer, turn.completion_ids)}
            for name, tensor in columns.items():
                trace[name] = [round(x, DIGITS) for x in tensor[row, start:end].tolist()]
            rollouts[row].token_traces.append(trace)
            start = end
    traced = sorted(rows)
    return _movement([rollouts[row] for row in traced], traced, batch, new_logprobs)


def _movement(
    rollouts: list[Rollout], rows: list[int], batch: RolloutBatch, new_logprobs: Tensor
) -> dict[str, float]:
    """How far the update moved the tokens of `rows` of the batch, and in which direction.

    The direction is the correlation, within groups, of a rollout's return and the change of its
    log-prob. Missing if there is no such change, or if the returns of each group are equal.
    """
    mask, ids = batch.completion_mask[rows], batch.group_ids[rows]
    change = torch.where(mask, (new_logprobs - batch.old_logprobs)[rows], 0.0).double()
    metrics = {"update/moved": (change.abs().sum() / mask.sum()).item()}
    returns = torch.tensor([rollout.episode_return for rollout in rollouts])
    both = torch.stack([returns.double(), change.sum(1)], dim=1)
    size = group_sum(torch.ones_like(both), ids)
    better, likelier = minus(both, group_sum(both, ids) / size).T
    scale = (better.square().sum() * likelier.square().sum()).sqrt().item()
    return metrics | ({"update/direction": (better @ likelier).item() / scale} if scale else {})


def choose_groups(rollouts: list[Rollout], budget: int) -> set[int]:
    """Indices of the rollouts of whole groups within `budget` tokens; at least one group.

    Groups of equal returns, which teach nothing, come last.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for i, rollout in enumerate(rollouts):
        groups[rollout.group_id].append(i)
    rows: set[int] = set()
    tokens = 0
    for group in sorted(
        groups.values(), key=lambda group: len({rollouts[i].episode_return for i in group}) == 1
    ):
        tokens += sum(rollouts[i].num_tokens for i in group)
        if rows and tokens > budget:
            break
        rows.update(group)
    return rows


def pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text of each token; joined, they are the text of all tokens.

    A character that spans several tokens appears at the token that completes it. Bytes that are not
    valid UTF-8 appear as \ufffd.
    """
    texts: list[str] = []
    pending: list[int] = []  # tokens whose text is not complete yet
    emitted = 0  # characters of the pending text that already belong to a token
    text = ""
    for id_ in ids:
        pending.append(id_)
        text = str(tokenizer.decode(pending))
        complete = len(text.rstrip("\ufffd"))  # the next token may still change the end
        texts.append(text[emitted:complete])
        emitted = max(emitted, complete)
        if complete == len(text):
            pending, emitted, text = [], 0, ""
    if texts:
        texts[-1] += text[emitted:]
    return texts
