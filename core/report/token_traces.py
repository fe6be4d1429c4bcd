"""What an update did to each sampled token, for report.html.

Each token is traced with its log-prob under the sampler, under the trainer before and after the
update, and its advantage. Where the advantage and the change of the log-prob have the same sign,
the update moved the token in the intended direction.

Its term of the loss is traced as the algorithm computes it. `compute_loss` is called once more on
what the last gradient step with the token has seen, and its derivatives are what the term is made
of: with respect to the token's importance weight the surrogate, to its log-prob the push. So
there is no second formula here that could differ from the loss.
"""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from algorithms.tokens import group_mean, group_std, minus, turns_of
from core import distributed
from core.algorithm import FOLDER, Algorithm
from core.batching import Batch, cut
from core.config import Config
from core.metrics import UpdateStats
from core.policy import Policy
from core.scoring import predict
from core.types import Rollout

DIGITS = 6  # of each number in rollouts.jsonl
MICRO_BATCH = 4096  # tokens, padding included


@torch.no_grad()
def trace_tokens(
    policy: Policy,
    cfg: Config,
    batch: Batch,
    algo: Algorithm | None = None,
    stats: UpdateStats | None = None,
) -> dict[str, float]:
    """Logs `token_traces` of some groups of rollouts, those with different returns first.

    Returns metrics of these rollouts: how far the update moved their tokens, and whether it made
    those likelier that earned more than their group.

    As many whole groups as have at most --microscope sampled tokens together, at least one; none
    if that is 0. The policy already has the weights after the update. The terms of the loss are
    those of an algorithm in algorithms/; `stats` has what the gradient steps have seen.
    """
    if cfg.microscope == 0 or not batch.rollouts:
        return {}
    chosen = choose_groups(batch.rollouts, cfg.microscope)
    terms: dict[str, Tensor] = {}
    if algo and stats and algo.file.is_relative_to(FOLDER):
        traced = torch.isin(batch.rollout, torch.tensor([*chosen]))
        terms = loss_terms(cfg, batch, traced, algo, stats)
    if distributed.rank() != 0:
        return {}
    after = torch.zeros(len(batch))
    sequences = [sequence for sequence in batch.sequences if sequence.rollout in chosen]
    max_tokens = min(MICRO_BATCH, policy.micro_batch_tokens)
    for micro in cut(sequences, max_tokens, policy.device, policy.shares_prefixes):
        after[micro.numbers] = predict(policy, micro, cfg.temperature)["logprobs"].cpu()
    vectors = {
        "sampler": batch.sampler_logprobs,
        "trainer": batch.old_logprobs,
        "after": after,
        "advantage": batch.advantages,
    }
    start = 0
    for r, rollout in enumerate(batch.rollouts):
        for turn in rollout.turns:
            end = start + len(turn.completion_ids)
            if r in chosen:
                trace: dict[str, list] = {"text": pieces(policy.tokenizer, turn.completion_ids)}
                for name, vector in vectors.items():
                    trace[name] = [round(x, DIGITS) for x in vector[start:end].tolist()]
                trace |= _numbers({name: x[start:end] for name, x in terms.items()})
                rollout.for_log.setdefault("token_traces", []).append(trace)
            start = end
    return _movement(batch, sorted(chosen), after)


def loss_terms(
    cfg: Config, batch: Batch, traced: Tensor, algo: Algorithm, stats: UpdateStats
) -> dict[str, Tensor]:
    """What the terms of the `traced` [S] tokens are made of, by name: vectors [S], else NaN.

        step                        the last gradient step of the update that had the token
        now                         log π in it, before the weights change
        ratio, clipped_ratio        ρ; clip(ρ), where it differs
        token_weight, weight        u and w
        surrogate                   the term is -u w surrogate
        push                        -d loss / d log π is u push; above 0: a likelier token is asked
                                    for; known where it is not w surrogate
        value, old_value, target    v, v° and the target, with a value head
        value_term                  the term of the value is u value_term
        return, mean, std           of the returns that A is made of, if it is

    A step that --ppo.target-kl has dropped does not count. The terms of --kl-coef and of
    --entropy-coef, and what `sdpo` and `echo` add, are not in it. To be called on all ranks.
    """
    dropped = stats.step - 1 if 0 < cfg.options.target_kl < stats.approx_kl else 0
    mine = [(step, {name: x[traced[seen["number"]]] for name, x in seen.items()})
            for step, seen in stats.passes if step != dropped]  # fmt: skip
    unknown = torch.full((len(batch),), torch.nan, dtype=torch.float64)
    found: dict[str, Tensor] = defaultdict(unknown.clone)
    for step, seen in sorted(distributed.all_gather(mine), key=lambda part: part[0]):
        numbers = seen.pop("number")
        for name, x in seen.items():
            found[name][numbers] = x.double()
        found["step"][numbers] = step
    numbers = found["step"].isfinite().nonzero().squeeze(1)  # [n], all tokens of some rollouts
    if not len(numbers):
        return {}
    tokens = batch[numbers]
    leaves = {name: x[numbers].requires_grad_() for name, x in found.items() if name != "step"}
    tokens.add(leaves)
    with torch.enable_grad():
        loss, _ = algo.compute_loss(tokens, cfg.options)
    gradients = torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True)
    by = dict(zip(leaves, gradients, strict=True))
    u, w = leaves["token_weights"], leaves["importance_weights"]
    surrogate = -by["importance_weights"] / u
    computed = {
        "step": found["step"][numbers], "now": leaves["logprobs"],
        "ratio": tokens.ratio, "clipped_ratio": _unlike(tokens.clipped_ratio, tokens.ratio),
        "token_weight": u, "weight": w, "surrogate": surrogate,
        "push": _unlike(-by["logprobs"] / u, w * surrogate),
    }  # fmt: skip
    if "values" in leaves:
        computed |= {
            "value": leaves["values"], "old_value": tokens.old_values,
            "target": tokens.value_targets,
            "value_term": by["token_weights"] + w * surrogate,
        }  # fmt: skip
    else:
        turns, options = turns_of(batch), cfg.options
        compared = turns.number if getattr(options, "baseline", "") == "batch" else turns.peers
        scaled = turns.number if getattr(options, "scale_rewards", "") == "batch" else turns.peers
        for name, x in {
            "return": turns.returns, "mean": group_mean(turns.returns, compared),
            "std": group_std(turns.returns, scaled),
        }.items():  # fmt: skip
            computed[name] = x[turns.of_token][numbers]
    return {n: unknown.index_copy(0, numbers, x.detach().double()) for n, x in computed.items()}


def _unlike(x: Tensor, other: Tensor) -> Tensor:
    """NaN where `x` is `other` up to rounding."""
    return x.masked_fill(x.isclose(other, rtol=1e-6, atol=0), torch.nan)


def _numbers(vectors: dict[str, Tensor]) -> dict[str, Any]:
    """Of each vector its numbers, one if all are equal; without those of which none is known."""
    lists = {name: [float(f"{x:.6g}") if math.isfinite(x) else None for x in vector.tolist()]
             for name, vector in vectors.items()}  # fmt: skip
    found = {name: x if len({*x}) > 1 else x[0] for name, x in lists.items() if x}
    return {name: x for name, x in found.items() if x is not None}


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
