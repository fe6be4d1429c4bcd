"""The tokens that --algo echo predicts: what the environment says between two completions.

    sampled | <|im_end|> \\n <|im_start|> user \\n | head 2,8 fruit 2,3 | <|im_end|> .. | sampled
              the chat template's                   observed             the template's

The template's tokens are the same after every completion; a policy that learned to write a role's
header would play the environment's part.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from algorithms.token_logprobs import token_logprobs
from core import scoring
from core.batching import MicroBatch, Sequence, to_tokens
from core.chat_template import ANSWER, QUESTION, ids_after_completion
from core.config import Config, needs
from core.faults import UsageError
from core.policy import Policy
from core.prefix_sharing import num_shared
from core.types import Rollout

NOTHING = ("--algo echo: there is nothing to predict, so this is GRPO: no environment has said "
           "anything between two completions of one context")  # fmt: skip
_OBSERVED = WeakKeyDictionary[Sequence, list[int]]()  # of the sequences of this update


def read_out(
    policy: Policy, micro: MicroBatch, hidden: Tensor, temperature: float, entropy_grad: bool
) -> dict[str, Tensor]:
    """What `scoring.read_out` says of the n sampled tokens, and `cross_entropy` [].

    That is this micro-batch's part of the mean over the observed tokens of the gradient step, at
    temperature 1: the policy samples at another one, the environment does not. There is none if no
    environment has said anything between two completions of this step.
    """
    outputs = scoring.read_out(policy, micro, hidden, temperature, entropy_grad)
    total = sum(len(observed_in(policy.tokenizer, sequence)) for sequence in micro.step)
    if total == 0:
        return outputs
    pairs = [(row, t) for row, sequence in enumerate(micro.sequences)
             for t in observed_in(policy.tokenizer, sequence)]  # fmt: skip
    rows, at = torch.tensor(pairs, dtype=torch.int64, device=policy.device).view(-1, 2).T
    predictors, targets = micro.nodes[rows, at - 1], micro.input_ids[rows, at]
    logprobs, *_ = token_logprobs(
        hidden, predictors, targets, policy.to_logits, 1.0, policy.logits_chunk, None, False
    )
    return outputs | {"cross_entropy": -(logprobs * (1 / total)).sum()}


def check(
    cfg: Config, tokenizer: Tokenizer, rollouts: list[Rollout], say: Callable[[str], None]
) -> None:
    """`say` prints NOTHING if the algorithm predicts observations and these rollouts have none.

    That is no error, as all episodes of an update may end in their first turn.
    """
    if "observations" not in needs(cfg):
        return
    if not any(observed_in(tokenizer, sequence) for sequence in to_tokens(rollouts).sequences):
        say(NOTHING)


def observed_in(tokenizer: Tokenizer, sequence: Sequence) -> list[int]:
    """The places of the tokens of each message between two completions.

    Several messages, such as those of an agent program, are left out: one may be the policy's own.
    """
    if sequence not in _OBSERVED:
        _OBSERVED[sequence] = _find_observed(tokenizer, sequence)
    return _OBSERVED[sequence]


def _find_observed(tokenizer: Tokenizer, sequence: Sequence) -> list[int]:
    found = list[int]()
    sampled = [i for i, number in enumerate(sequence.numbers) if number >= 0]
    for last, following in [(i, j) for i, j in pairwise(sampled) if j > i + 1]:
        between = sequence.token_ids[last + 1 : following]
        for closing, before, after in _frames(tokenizer):
            start, end = len(before), len(between) - len(after)
            framed = between[:start] == before and between[end:] == after
            if framed and start < end and closing not in between[start:end]:
                found += range(last + 1 + start, last + 1 + end)
                break
    return found


@lru_cache(maxsize=8)
def _frames(tokenizer: Tokenizer) -> list[tuple[int, list[int], list[int]]]:
    """The token that closes a turn, and what the template writes before and after a message.

    That is what two messages share; a completion has closed its turn itself, or was cut.
    """
    found = []
    for role in ("user", "tool"):
        with suppress(UsageError):  # the template has no such messages
            one, other = (
                ids_after_completion(
                    tokenizer, [QUESTION, ANSWER, {"role": role, "content": text}], False
                )
                for text in "?!"
            )
            before = one[: num_shared(one, other)]
            after = one[len(one) - num_shared(one[::-1], other[::-1]) :]
            found += [(one[0], before, after), (one[0], before[1:], after)]
    return found
