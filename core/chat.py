"""Messages to token ids, each token once.

A chat grows by appending: after a completion come only the ids that close the turn, hold the new
message and open the next turn. What the policy sampled is never rendered or tokenised again.
"""

from typing import Any

from core.types import Message, UsageError

END_OF_THOUGHT = "</think>"
SENTINEL = "\u2042picorl\u2042"  # stands where a completion would; no template strips or splits it


def prompt_ids(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Token ids of an opening prompt, up to where the assistant begins to write."""
    return _encode(tokenizer, _render(tokenizer, messages))


def following_ids(tokenizer: Any, messages: list[Message], ended: bool) -> list[int]:
    """Token ids between a completion and the next one.

    `messages`: all so far; the last is the new one, the one before it the assistant's. `ended`: the
    completion closed its own turn, so the closing token is already there.
    """
    shown: list[Message] = [
        *messages[:-2],
        {"role": "assistant", "content": SENTINEL},
        messages[-1],
    ]
    ids = _encode(tokenizer, _render(tokenizer, shown).rpartition(SENTINEL)[2])
    return ids[1:] if ended else ids


def without_thinking(tokenizer: Any, ids: list[int]) -> list[int]:
    """The ids of a completion behind its last </think>; all of them, if it closed no thought.

    Ids are only left out, never made anew, so what stays is what was sampled.
    """
    thoughts = tokenizer.decode(ids).count(END_OF_THOUGHT)
    if thoughts == 0:
        return ids
    shortest, longest = 0, len(ids)  # the beginning that holds them all is in between
    while shortest < longest:
        middle = (shortest + longest) // 2
        if tokenizer.decode(ids[:middle]).count(END_OF_THOUGHT) == thoughts:
            longest = middle
        else:
            shortest = middle + 1
    return ids[longest:]


def end_of_turn_id(tokenizer: Any) -> int:
    """The id of the token by which the chat template closes the assistant's turn."""
    chat: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": SENTINEL},
    ]
    closing = _encode(tokenizer, _render(tokenizer, chat, opening=False).rpartition(SENTINEL)[2])
    if not closing:
        raise UsageError("the chat template does not close the assistant's turn; picoRL needs it")
    return closing[0]


def _render(tokenizer: Any, messages: list[Message], opening: bool = True) -> str:
    if not tokenizer.chat_template:
        raise UsageError("the tokenizer has no chat template; use an instruct model")
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening)


def _encode(tokenizer: Any, text: str) -> list[int]:
    # the template writes the special tokens itself, the BOS among them
    return tokenizer.encode(text, add_special_tokens=False)
