"""The teacher of --algo sdpo: the policy itself, which has seen what would have been right.

    the policy's context    task | sampled tokens
    its teacher's           task | a right answer | the task once more | the same sampled tokens

`Agent.show` (context.py) makes the second prompt, from `Step.feedback` or the environment's
demonstration. The teacher says what it would sample in place of each token. It has the weights of
the policy as they are now, and no gradient. No token of the right answer is in a loss.
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
    """Compares the policy with its teacher: 0 for tokens of turns without feedback.

    None if no turn of `micro` has feedback. The teacher's logits exist in chunks of tokens only.
    """
    taught, first = list[Sequence](), 0  # in the teacher's context; numbers: places among the n
    for turn in (turn for sequence in micro.sequences for turn in sequence.turns):
        if turn.feedback_ids:
            taught.append(Sequence(-1))
            taught[-1].extend(turn.feedback_ids, turn, first)
        first += len(turn.completion_ids)
    if not taught:
        return None
    states: list[Tensor] = []
    row_of = torch.full((first,), -1, device=policy.device)  # of a token: its state
    for part in cut(taught, policy):
        start, tokens = sum(map(len, states)), part.numbers.to(policy.device)
        row_of[tokens] = torch.arange(start, start + len(tokens), device=policy.device)
        hidden = policy.hidden_states(part.input_ids, part.tree).flatten(0, 1)
        states.append(hidden.index_select(0, part.predictors))
    all_states = torch.cat(states)

    def compare(logprobs: Tensor, tokens: Tensor) -> Tensor:
        known = row_of[tokens] >= 0
        with torch.no_grad():
            logits = policy.to_logits(all_states[row_of[tokens[known]]]) / temperature
            if micro.kept_ids is not None:
                logits = only_kept(logits, [micro.kept_ids[i] for i in tokens[known].tolist()])
            right = logits.log_softmax(-1)
        distances = divergence(logprobs[known], right)
        return torch.zeros(len(tokens), device=distances.device).masked_scatter(known, distances)

    return compare
