"""The tokens that --algo echo predicts: what the environment says between two completions.

    sampled | <|im_end|> \\n <|im_start|> user \\n | head 2,8 fruit 2,3 | <|im_end|> .. | sampled
              the chat template's                   observed             the template's

The template's tokens are the same after every completion; a policy that learned to write a role's
header would play the environment's part.
"""

from contextlib import suppress
from functools import lru_cache
from itertools import pairwise

from transformers import PreTrainedTokenizerBase as Tokenizer

from core.batching import OBSERVED, RolloutBatch
from core.chat_template import ANSWER, QUESTION, ids_after_completion
from core.faults import UsageError
from core.prefix_sharing import num_shared

NO_OBSERVATIONS = """--algo echo: there is nothing to predict in the first update, so it is GRPO. No
rollout has a message between two completions of one context: each has a single turn, or a fresh
context for each turn.""".replace("\n", " ")


def mark_observations(tokenizer: Tokenizer, batch: RolloutBatch) -> int:
    """Sets the `places` of the tokens of a message between two completions to OBSERVED.

    Returns their number. Several messages, such as those of an agent program, are left out: one may
    be the policy's own.
    """
    for sequence in batch.sequences:
        sampled = [i for i, place in enumerate(sequence.places) if place >= 0]
        for last, following in pairwise(sampled):
            between = sequence.token_ids[last + 1 : following]
            for closing, before, after in _frames(tokenizer):
                start, end = len(before), len(between) - len(after)
                framed = between[:start] == before and between[end:] == after
                if framed and start < end and closing not in between[start:end]:
                    places = [OBSERVED] * (end - start)
                    sequence.places[last + 1 + start : last + 1 + end] = places
                    break
    return sum(sequence.places.count(OBSERVED) for sequence in batch.sequences)


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
