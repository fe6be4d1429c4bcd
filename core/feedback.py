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
from core import scoring
from core.batching import MicroBatch, Sequence, cut
from core.policy import Policy

Divergence = Callable[[Tensor, Tensor], Tensor]  # of log-probs [l, V] from the teacher's, [l]


def read_out(
    divergence: Divergence,
    policy: Policy,
    micro: MicroBatch,
    hidden: Tensor,
    temperature: float,
    entropy_grad: bool,
) -> dict[str, Tensor]:
    """What `scoring.read_out` says of the n sampled tokens, and their `divergence` [n].

    It is 0 for tokens of turns without feedback; there is none if `micro` has no other.
    """
    taught = _with_feedback(micro)
    compare = _teacher(divergence, policy, micro, taught, temperature) if taught else None
    outputs = scoring.read_out(policy, micro, hidden, temperature, entropy_grad, compare)
    if taught:
        outputs["divergence"] = outputs.pop("compared")
    return outputs


def _with_feedback(micro: MicroBatch) -> list[Sequence]:
    """The turns of `micro` that have feedback, in the teacher's context.

    Their `numbers` are places among the n tokens of `micro`.
    """
    found, first = list[Sequence](), 0
    for turn in (turn for sequence in micro.sequences for turn in sequence.turns):
        if turn.feedback_ids:
            found.append(Sequence(-1))
            found[-1].extend(turn.feedback_ids, turn, first)
        first += len(turn.completion_ids)
    return found


@torch.no_grad()
def _teacher(
    divergence: Divergence,
    policy: Policy,
    micro: MicroBatch,
    taught: list[Sequence],
    temperature: float,
) -> Compare:
    """Compares the policy with the teacher, whose logits exist in chunks of the tokens only."""
    states: list[Tensor] = []
    row_of = torch.full((len(micro.numbers),), -1, device=policy.device)  # of a token: its state
    for part in cut(taught, policy.micro_batch_tokens, policy.device, policy.shares_prefixes):
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
            teacher = logits.log_softmax(-1)
        found = divergence(logprobs[known], teacher)
        return torch.zeros(len(tokens), device=found.device).masked_scatter(known, found)

    return compare
