"""What an update did to each sampled token, for report.html.

Each token is traced with its log-prob under the sampler, under the trainer before and after the
update, and its advantage. Where the advantage and the change of the log-prob have the same sign,
the update moved the token in the intended direction.

What the last gradient step with a token had is traced, too: its log-prob, its weights, and the
gradient of the whole loss by its log-prob, which says whether the step pushed it.
"""

import math
from collections import defaultdict

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

    Returns metrics of these rollouts: how far the update moved their tokens, and whether it made
    those likelier that earned more than their group.

    As many whole groups as have at most MAX_TOKENS sampled tokens together, at least one. The
    policy already has the weights after the update; `stats` has what the gradient steps have seen.
    To be called on all ranks.
    """
    if not batch.rollouts:
        return {}
    chosen = choose_groups(batch.rollouts, MAX_TOKENS)
    traced = torch.isin(batch.rollout, torch.tensor([*chosen]))
    of_steps = of_last_steps(cfg, traced, stats)
    if distributed.rank() != 0:
        return {}
    sequences = [sequence for sequence in batch.sequences if sequence.rollout in chosen]
    after = score_tokens(policy, batch, cfg.temperature, sequences)["logprobs"]
    vectors = {
        "sampler": batch.sampler_logprobs,
        "trainer": batch.old_logprobs,
        "after": after,
        "advantage": batch.advantages,
        **of_steps,
    }
    for r in chosen:
        rollout, numbers = batch.rollouts[r], (batch.rollout == r).nonzero()[:, 0]
        lengths = [len(turn.completion_ids) for turn in rollout.turns]
        columns = {name: vector[numbers].split(lengths) for name, vector in vectors.items()}
        rollout.for_log["token_traces"] = [
            {"text": pieces(policy.tokenizer, turn.completion_ids)}
            | {name: rounded(column[k]) for name, column in columns.items()}
            for k, turn in enumerate(rollout.turns)
        ]
    return _movement(batch, sorted(chosen), after)


def rounded(numbers: Tensor) -> list[float | None]:
    """To seven digits; None for what is not finite, which JSON does not have."""
    return [float(f"{x:.7g}") if math.isfinite(x) else None for x in numbers.tolist()]


def of_last_steps(cfg: Config, traced: Tensor, stats: UpdateStats) -> dict[str, Tensor]:
    """What the last step with each of the `traced` [S] tokens had: vectors [S], NaN where unknown.

        now                     log π, before the step
        token_weight, weight    token weight and importance weight, factors of its term of the loss
        share                   -d loss / d log π as a fraction of the sum of its absolute values
                                over all tokens of the step; above 0: the step makes it likelier

    A step that --ppo.target-kl has dropped does not count.
    """
    taken = len(stats.pushes) - (0 < cfg.options.target_kl < stats.approx_kl)
    mine = [(step, seen[:, traced[seen[0].long()]]) for step, seen in stats.seen if step < taken]
    found = torch.full((4, len(traced)), torch.nan, dtype=torch.float64)
    for step, seen in sorted(distributed.all_gather(mine), key=lambda part: part[0]):
        seen[-1] /= -(stats.pushes[step] or 1.0)
        found[:, seen[0].long()] = seen[1:]
    return dict(zip(("now", "token_weight", "weight", "share"), found, strict=True))


def _movement(batch: Batch, chosen: list[int], after: Tensor) -> dict[str, float]:
    """How far the update moved the tokens of the `chosen` rollouts, and in which direction.

    The direction is the correlation, within groups, of a rollout's return and the change of its
    log-prob. Missing if there is no such change, or if the returns of each group are equal.
    """
    traced = torch.isin(batch.rollout, torch.tensor(chosen))  # [S]
    change = (after - batch.old_logprobs).double() * traced
    metrics = {"update/moved": (change.abs().sum() / traced.sum()).item()}
    of_rollouts = change.new_zeros(len(batch.rollouts)).index_add(0, batch.rollout, change)
    rollouts = [batch.rollouts[r] for r in chosen]
    returns = torch.tensor([rollout.episode_return for rollout in rollouts])
    groups = torch.tensor([rollout.group_id for rollout in rollouts])
    both = torch.stack([returns.double(), of_rollouts[chosen]], dim=1)
    better, likelier = minus(both, group_mean(both, groups)).T
    scale = (better.square().sum() * likelier.square().sum()).sqrt().item()
    return metrics | ({"update/direction": (better @ likelier).item() / scale} if scale else {})


def choose_groups(rollouts: list[Rollout], budget: int) -> set[int]:
    """Indices of the rollouts of whole groups within `budget` tokens; at least one group.

    Groups of equal returns, which teach nothing, come last.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for i, rollout in enumerate(rollouts):
        groups[rollout.group_id].append(i)
    rows, tokens = set[int](), 0
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
    texts, pending = list[str](), list[int]()  # tokens whose last character is not complete yet
    for id_ in ids:
        text = str(tokenizer.decode([*pending, id_]))
        is_complete = not text.endswith("\ufffd") or len(texts) == len(ids) - 1
        texts.append(text if is_complete else "")
        pending = [] if is_complete else [*pending, id_]
    return texts
