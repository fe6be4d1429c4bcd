"""The teacher of --algo sdpo: the policy itself, which has seen what would have been right.

    the policy's context    task | sampled tokens
    its teacher's           task | a right answer | the task once more | the same sampled tokens

`Agent.show` (context.py) makes the second prompt, from `Step.feedback` or the environment's
demonstration. The teacher says what it would sample in place of each token. It has the weights of
the policy as they are now, and no gradient. No token of the right answer is in a loss.
"""

from typing import Any

import torch
from torch import Tensor

from algorithms.token_logprobs import Compare, only_kept
from core.batching import MicroBatch, RolloutBatch, cut
from core.config import Config
from core.policy import Policy


@torch.no_grad()
def make_teacher(
    cfg: Config, algorithm: Any, policy: Policy, batch: RolloutBatch, micro: MicroBatch
) -> Compare | None:
    """What `token_logprobs` is to compute of each sampled token of `micro`: `algorithm.divergence`.

    It is 0 for tokens of turns without feedback; None if `micro` has no other. Keeps the teacher's
    hidden states of the micro-batch; its logits exist in the chunks of `token_logprobs` only.
    """
    numbers = {place: i for i, place in enumerate(micro.index[micro.completion_mask].tolist())}
    taught = [batch.feedback[place] for place in numbers if place in batch.feedback]
    if not taught:
        return None
    states: list[Tensor] = []
    row_of = torch.full((len(numbers),), -1, device=policy.device)  # among the states, of a token
    for part in cut(taught, policy.micro_batch_tokens, policy.device, policy.shares_prefixes):
        places, mask = part.index[part.completion_mask].tolist(), part.completion_mask
        start = sum(map(len, states))
        tokens = torch.tensor([numbers[place] for place in places], device=policy.device)
        row_of[tokens] = torch.arange(start, start + len(places), device=policy.device)
        hidden = policy.hidden_states(part.input_ids, part.tree).flatten(0, 1)
        states.append(hidden.index_select(0, part.nodes[:, :-1][mask]))
    all_states = torch.cat(states)

    def compare(logprobs: Tensor, tokens: Tensor) -> Tensor:
        known = row_of[tokens] >= 0
        with torch.no_grad():
            logits = policy.to_logits(all_states[row_of[tokens[known]]]) / cfg.temperature
            if micro.kept_ids is not None:
                logits = only_kept(logits, [micro.kept_ids[i] for i in tokens[known].tolist()])
            teacher = logits.log_softmax(-1)
        found = algorithm.divergence(logprobs[known], teacher, cfg.options)
        return torch.zeros(len(tokens), device=found.device).masked_scatter(known, found)

    return compare
