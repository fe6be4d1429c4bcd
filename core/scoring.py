"""The afternoon, 7 of 9. How likely is each sampled token? Its log-prob, and a value before it.

token ids [Q, T]  ──▶  hidden states [U, D]  ──▶  logprobs, entropy, values [n], by name
"""

import torch
from torch import Tensor

from algorithms.token_logprobs import token_logprobs
from core import distributed, feedback
from core.batching import Batch, MicroBatch, Sequence, cut, micro_batches
from core.policy import Policy


def predict(
    policy: Policy,
    micro: MicroBatch,
    temperature: float,
    entropy_grad: bool = False,
    divergence: feedback.Divergence | None = None,
) -> dict[str, Tensor]:
    """`logprobs`, `entropy`, `varentropy` and, with a value head, `values` of the n tokens: [n].

    Tokens with the same beginning may share one of the U hidden states, which the last layer turns
    into logits; `micro.predictors` [n] says which one predicts which token. Log-probs and values
    have gradients, the entropy only with `entropy_grad`. With `divergence`, that of an algorithm
    that learns from feedback, adds the divergence [n] from the teacher, if a turn has feedback.
    """
    hidden = policy.hidden_states(micro.input_ids, micro.tree).flatten(0, 1)  # [U, D]
    compare = divergence and feedback.teacher(divergence, policy, micro, temperature)
    vectors = token_logprobs(
        hidden, micro.predictors, micro.targets, policy.to_logits, temperature,
        policy.logits_chunk, micro.kept_ids, entropy_grad, compare,
    )  # fmt: skip
    outputs = dict(zip(("logprobs", "entropy", "varentropy", "divergence"), vectors, strict=False))
    if policy.value_head is not None:
        values = policy.value_head(hidden.float()).squeeze(-1)  # [U]
        outputs["values"] = values[micro.predictors]
    return outputs


@torch.no_grad()
def score_tokens(
    policy: Policy, batch: Batch, temperature: float, sequences: list[Sequence] | None = None
) -> dict[str, Tensor]:
    """`logprobs` and, with a value head, `values` of all sampled tokens; [S], on the CPU.

    `sequences`: computes only the tokens of these, on this rank alone; others are 0.
    """
    names = ["logprobs"] if policy.value_head is None else ["logprobs", "values"]
    vectors = {name: torch.zeros(len(batch)) for name in names}
    micros = micro_batches(policy, batch) if sequences is None else cut(sequences, policy)
    for micro in micros:
        outputs = predict(policy, micro, temperature)
        for name in names:
            vectors[name][micro.indices] = outputs[name].cpu()
    if sequences is None:
        distributed.all_reduce_sum([*vectors.values()])  # each rank has scored its own sequences
    return vectors
