"""The afternoon, 7 of 9. How likely is each sampled token? Its log-prob, and a value before it.

    hidden states [U, D]  ── read_out ──▶  logprobs, entropy, values [n], by name

core/feedback.py reads more out of the hidden states.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from algorithms.token_logprobs import Compare, token_logprobs
from core import distributed
from core.batching import Batch, MicroBatch, micro_batches
from core.policy import Policy


def read_out(
    policy: Policy,
    micro: MicroBatch,
    hidden: Tensor,
    temperature: float,
    entropy_grad: bool = False,
    compare: Compare | None = None,
) -> dict[str, Tensor]:
    """`logprobs`, `entropy`, `varentropy` and, with a value head, `values` of the n tokens: [n].

    `hidden` [U, D]: what the last layer turns into logits. Tokens with the same beginning may share
    one of these states; `micro.predictors` [n] says which one predicts which token. Log-probs
    and values have gradients, the entropy only with `entropy_grad`. `compare` (`token_logprobs`)
    adds `compared` [n].
    """
    found = token_logprobs(
        hidden, micro.predictors, micro.targets, policy.to_logits, temperature,
        policy.logits_chunk, micro.kept_ids, entropy_grad, compare,
    )  # fmt: skip
    outputs = dict(zip(("logprobs", "entropy", "varentropy", "compared"), found, strict=False))
    if policy.value_head is not None:
        values = policy.value_head(hidden.float()).squeeze(-1)  # [U]
        outputs["values"] = values[micro.predictors]
    return outputs


def predict(
    policy: Policy,
    micro: MicroBatch,
    temperature: float,
    entropy_grad: bool = False,
    read: Callable[..., dict[str, Tensor]] = read_out,
) -> dict[str, Tensor]:
    """What `read` makes of the hidden states of a micro-batch; by default see `read_out`."""
    hidden = policy.hidden_states(micro.input_ids, micro.tree).flatten(0, 1)  # [U, D]
    return read(policy, micro, hidden, temperature, entropy_grad)


@torch.no_grad()
def score_tokens(policy: Policy, batch: Batch, temperature: float) -> dict[str, Tensor]:
    """`logprobs` and, with a value head, `values` of all sampled tokens; [S], on the CPU."""
    names = ["logprobs"] + ["values"] * (policy.value_head is not None)
    found = {name: torch.zeros(len(batch)) for name in names}
    for micro in micro_batches(policy, batch):
        outputs = predict(policy, micro, temperature)
        for name in names:
            found[name][micro.numbers] = outputs[name].cpu()
    distributed.all_reduce_sum([*found.values()])  # each rank has scored its own sequences
    return found
