"""Traces of sampled tokens, for report.html: how an update changed the probability of each.

A trace has the token's log-prob under the sampler, under the trainer before and after the update,
and its advantage. Where the advantage and the change of the log-prob have the same sign, the update
moved the token in the intended direction.

It also has values of the last gradient step with that token: its log-prob, its weights, and the
gradient of the whole loss by its log-prob, which says whether the step made the token likelier.
"""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from algorithms.tokens import group_mean, minus
from core import distributed
from core.batching import Batch
from core.config import Config
from core.metrics import UpdateStats
from core.policy import Policy
from core.scoring import score_tokens
from core.types import Rollout

MAX_TOKENS = 1024  # sampled tokens of an update that the report shows one by one


@torch.no_grad()
def trace_tokens(policy: Policy, cfg: Config, batch: Batch, stats: UpdateStats) -> dict[str, float]:
    """Logs `token_traces` of some groups of rollouts, those with different returns first.

    These are as many whole groups as have at most MAX_TOKENS sampled tokens together, at least one.
    Returns metrics of their rollouts: how far the update moved their tokens, and whether it made
    rollouts likelier that earned more than their group. `policy` has the weights after the update.
    All ranks must call this together.
    """
    if not batch.rollouts:
        return {}
    chosen = choose_groups(batch.rollouts, MAX_TOKENS)
    traced = torch.isin(batch.rollout, torch.tensor([*chosen]))
    step_vectors = last_step_vectors(cfg, traced, stats)
    if distributed.rank() != 0:
        return {}
    sequences = [sequence for sequence in batch.sequences if sequence.rollout in chosen]
    after = score_tokens(policy, batch, cfg.temperature, sequences)["logprobs"]
    vectors = {
        "sampler": batch.sampler_logprobs,
        "trainer": batch.old_logprobs,
        "after": after,
        "advantage": batch.advantages,
        **step_vectors,
    }
    for index in chosen:
        rollout = batch.rollouts[index]
        first = int((batch.rollout < index).sum())  # index of the rollout's first token
        traces: list[dict[str, Any]] = []
        for turn in rollout.turns:
            tokens = slice(first, first + len(turn.completion_ids))
            text = {"text": token_texts(policy.tokenizer, turn.completion_ids)}
            traces.append(text | {name: rounded(x[tokens]) for name, x in vectors.items()})
            first = tokens.stop
        rollout.for_log["token_traces"] = traces
    return _movement(batch, sorted(chosen), after)


def rounded(values: Tensor) -> list[float | None]:
    """The values to seven digits; None for NaN and infinity, which JSON does not have."""
    return [float(f"{x:.7g}") if math.isfinite(x) else None for x in values.tolist()]


def last_step_vectors(cfg: Config, traced: Tensor, stats: UpdateStats) -> dict[str, Tensor]:
    """Values of the last gradient step with each of the `traced` [S] tokens: vectors [S].

        now                     log π, before the step
        token_weight, weight    token weight and importance weight, factors of its term of the loss
        share                   -d loss / d log π as a fraction of the sum of its absolute values
                                over all tokens of the step; above 0: the step makes it likelier

    NaN for tokens without a step. A step that --ppo.target-kl has dropped does not count.
    """
    num_steps = len(stats.pushes) - (0 < cfg.options.target_kl < stats.approx_kl)
    parts = [(step, x[:, traced[x[0].long()]]) for step, x in stats.traces if step < num_steps]
    vectors = torch.full((4, len(traced)), torch.nan, dtype=torch.float64)
    for step, values in sorted(distributed.all_gather(parts), key=lambda part: part[0]):
        values[-1] /= -(stats.pushes[step] or 1.0)
        vectors[:, values[0].long()] = values[1:]  # row 0 has the indices of the tokens
    return dict(zip(("now", "token_weight", "weight", "share"), vectors, strict=True))


def _movement(batch: Batch, chosen: list[int], after: Tensor) -> dict[str, float]:
    """How far the update moved the tokens of the `chosen` rollouts, and in which direction.

    The direction is the correlation, within groups, of a rollout's return and the change of its
    log-prob. It is missing if there is no change, or if the returns of each group are equal.
    """
    traced = torch.isin(batch.rollout, torch.tensor(chosen))  # [S]
    change = (after - batch.old_logprobs).double() * traced
    metrics = {"update/moved": (change.abs().sum() / traced.sum()).item()}
    rollout_changes = change.new_zeros(len(batch.rollouts)).index_add(0, batch.rollout, change)
    rollouts = [batch.rollouts[index] for index in chosen]
    returns = torch.tensor([rollout.episode_return for rollout in rollouts])
    groups = torch.tensor([rollout.group_id for rollout in rollouts])
    pairs = torch.stack([returns.double(), rollout_changes[chosen]], dim=1)
    better, likelier = minus(pairs, group_mean(pairs, groups)).T
    scale = (better.square().sum() * likelier.square().sum()).sqrt().item()
    return metrics | ({"update/direction": (better @ likelier).item() / scale} if scale else {})


def choose_groups(rollouts: list[Rollout], budget: int) -> set[int]:
    """Indices of the rollouts of whole groups within `budget` tokens; at least one group.

    Groups of equal returns, which teach nothing, come last.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index, rollout in enumerate(rollouts):
        groups[rollout.group_id].append(index)

    def has_equal_returns(group: list[int]) -> bool:
        return len({rollouts[index].episode_return for index in group}) == 1

    chosen, num_tokens = set[int](), 0
    for group in sorted(groups.values(), key=has_equal_returns):
        num_tokens += sum(rollouts[index].num_tokens for index in group)
        if chosen and num_tokens > budget:
            break
        chosen.update(group)
    return chosen


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text of each token; joined, they are the text of all tokens.

    A character that spans several tokens appears at the token that completes it. Bytes that are not
    valid UTF-8 appear as \ufffd.
    """
    texts: list[str] = []
    pending: list[int] = []  # tokens whose last character is not complete yet
    for id_ in ids:
        text = str(tokenizer.decode([*pending, id_]))
        is_complete = not text.endswith("\ufffd") or len(texts) == len(ids) - 1
        texts.append(text if is_complete else "")
        pending = [] if is_complete else [*pending, id_]
    return texts
