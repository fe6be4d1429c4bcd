"""The teacher of --algo sdpo: the policy itself, with a right answer in its context.

    the policy's context    task | sampled tokens
    its teacher's           task | a right answer | the task once more | the same sampled tokens

`Agent.add_feedback` (context.py) makes the second prompt, from `Step.feedback` or the environment's
demonstration. The teacher's distribution in place of each token is computed with the current
weights of the policy, without gradient. No token of the right answer is in a loss.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from algorithms.token_logprobs import Compare, only_kept
from core.batching import MicroBatch, Sequence, cut
from core.policy import Policy

Divergence = Callable[[Tensor, Tensor], Tensor]  # of log-probs [l, V] from the teacher's, [l]


@torch.no_grad()
def teacher(
    divergence: Divergence, policy: Policy, micro: MicroBatch, temperature: float
) -> Compare | None:
    """A function that returns the divergence from the teacher: 0 for turns without feedback.

    None if no turn of `micro` has feedback. The teacher's logits exist in chunks of tokens only.
    """
    # in the teacher's context; a token's index here is its place among the n of `micro`
    sequences: list[Sequence] = []
    first = 0
    for turn in (turn for sequence in micro.sequences for turn in sequence.turns):
        if turn.feedback_ids:
            sequence = Sequence(-1)
            sequence.extend(turn.feedback_ids, turn, first)
            sequences.append(sequence)
        first += len(turn.completion_ids)
    if not sequences:
        return None
    states: list[Tensor] = []
    row_of = torch.full((first,), -1, device=policy.device)  # of each token: the row of its state
    for part in cut(sequences, policy):
        start, tokens = sum(map(len, states)), part.indices.to(policy.device)
        row_of[tokens] = torch.arange(start, start + len(tokens), device=policy.device)
        hidden = policy.hidden_states(part.input_ids, part.tree).flatten(0, 1)
        states.append(hidden.index_select(0, part.predictors))
    all_states = torch.cat(states)

    def compare(logprobs: Tensor, tokens: Tensor) -> Tensor:
        taught = row_of[tokens] >= 0  # the tokens of turns with feedback
        with torch.no_grad():
            logits = policy.to_logits(all_states[row_of[tokens[taught]]]) / temperature
            if micro.kept_ids is not None:
                logits = only_kept(logits, [micro.kept_ids[i] for i in tokens[taught].tolist()])
            teacher_logprobs = logits.log_softmax(-1)
        values = divergence(logprobs[taught], teacher_logprobs)
        return torch.zeros(len(tokens), device=values.device).masked_scatter(taught, values)

    return compare
