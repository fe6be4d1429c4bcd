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

from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from algorithms.token_logprobs import token_logprobs
from core.batching import OBSERVED, MicroBatch, RolloutBatch
from core.chat_template import ANSWER, QUESTION, ids_after_completion
from core.faults import UsageError
from core.policy import Policy
from core.prefix_sharing import num_shared

NOTHING = ("--algo echo: there is nothing to predict, so this is GRPO: no environment has said "
           "anything between two completions of one context")  # fmt: skip


def mark_observations(
    tokenizer: Tokenizer, batch: RolloutBatch, say: Callable[[str], None] | None = None
) -> None:
    """Sets the `places` of the tokens of a message between two completions to OBSERVED.

    Several messages, such as those of an agent program, are left out: one may be the policy's own.
    `say` prints NOTHING where there are no such tokens: that is no error, as all episodes of an
    update may end in their first turn.
    """
    for sequence in batch.sequences:
        sampled = [i for i, place in enumerate(sequence.places) if place >= 0]
        gaps = [(i, j) for i, j in pairwise(sampled) if j > i + 1]  # between two completions
        for last, following in gaps:
            between = sequence.token_ids[last + 1 : following]
            for closing, before, after in _frames(tokenizer):
                start, end = len(before), len(between) - len(after)
                framed = between[:start] == before and between[end:] == after
                if framed and start < end and closing not in between[start:end]:
                    places = [OBSERVED] * (end - start)
                    sequence.places[last + 1 + start : last + 1 + end] = places
                    break
    if say and not any(OBSERVED in sequence.places for sequence in batch.sequences):
        say(NOTHING)


def predict_observations(policy: Policy, hidden: Tensor, micro: MicroBatch) -> Tensor:
    """[b, T-1] float32 nats: the log-prob of each observed token, 0 elsewhere; with gradient.

    At temperature 1: the policy samples at another one, the environment does not. `hidden` [L, D]
    are the states that the sampled tokens were predicted from; only the logits are new.
    """
    mask, chunk = micro.observation_weights > 0, policy.logits_chunk
    logprobs, _ = token_logprobs(
        hidden, micro.nodes, micro.input_ids, mask, policy.to_logits, 1.0, chunk, None, False
    )
    return logprobs


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
