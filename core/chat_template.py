"""Messages to token ids, each token once.

A chat grows by appending: after a completion come only the ids that close the turn, hold the new
message and open the next turn. What the policy sampled is never rendered or tokenised again.

Only the template marks turns. A token that does so, such as "<|im_end|>", is mere characters where
a message quotes it: no page, player or server can forge a turn. Other text has its usual ids.
"""

from bisect import bisect_left
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from core.types import Message, UsageError

END_OF_THOUGHT = "</think>"
SENTINEL = "\ufdd1"  # stands where a completion would; no template strips or splits it
CUT = "\ufdd0"  # what is before and behind it is tokenised apart
NO_TEXT = {ord(SENTINEL): "\ufffd", ord(CUT): "\ufffd"}  # never characters: Unicode, 23.7


def prompt_ids(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Token ids of an opening prompt, up to where the assistant begins to write.

    Raises UsageError if the chat template refuses the messages, TypeError as `clean` does.
    """
    return _encode(tokenizer, _render(tokenizer, _quoted(tokenizer, messages)))


def following_ids(tokenizer: Any, messages: list[Message], ended: bool) -> list[int]:
    """Token ids between a completion and the next one. Raises as `prompt_ids` does.

    `messages`: all so far; the last is the new one, the one before it the assistant's. `ended`: the
    completion closed its own turn, so the closing token is already there.
    """
    *before, _, last = _quoted(tokenizer, messages)
    text = _behind(tokenizer, before, [last])
    return _encode(tokenizer, text.lstrip())[1:] if ended else _encode(tokenizer, text)


def without_thinking(tokenizer: Any, ids: list[int]) -> list[int]:
    """The ids, as sampled, behind a completion's last </think>; all, if it closed no thought."""

    def thoughts(end: int) -> int:
        return tokenizer.decode(ids[:end]).count(END_OF_THOUGHT)

    return ids[bisect_left(range(len(ids)), thoughts(len(ids)), key=thoughts) :]


def end_of_turn_id(tokenizer: Any) -> int:
    """The id of the token by which the chat template closes the assistant's turn."""
    text = _behind(tokenizer, [{"role": "user", "content": "?"}], [], opening=False)
    ids = _encode(tokenizer, text.lstrip())
    if not ids or ids[0] not in tokenizer.added_tokens_decoder:  # others end no turn in mid-text
        raise UsageError("the chat template does not close the assistant's turn with a token")
    return ids[0]


def clean(message: Any) -> Message:
    """Role and text alone, U+FFFD for what is no character; TypeError for what is no message.

    >>> clean({"role": "user", "content": "\\ud83d\\ude00 \\ud83d", "name": "Ann"})
    {'role': 'user', 'content': '😀 �'}
    """
    try:
        texts = [message[key].encode("utf-16", "surrogatepass") for key in ("role", "content")]
    except (TypeError, KeyError, AttributeError):
        raise TypeError(f"a message has a role and a text, not {message!r:.200}") from None
    role, content = (t.decode("utf-16", "replace").translate(NO_TEXT) for t in texts)
    return {"role": role, "content": content}


def _quoted(tokenizer: Any, messages: list[Message]) -> list[Message]:
    """The messages, clean, with a CUT in what they quote of the tokens that mark turns."""

    def cut(text: str) -> str:
        for mark in _marks(tokenizer):
            while mark in text:  # again: "aXaXa" is "aXa" twice
                text = text.replace(mark, mark[0] + CUT + mark[1:])
        return text

    cleaned = map(clean, messages)
    return [{"role": cut(m["role"]), "content": cut(m["content"])} for m in cleaned]


@lru_cache(maxsize=8)
def _marks(tokenizer: Any) -> list[str]:
    """The special tokens, and what else the template writes (DeepSeek's roles aren't special)."""
    chat = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
    written = _encode(tokenizer, _render(tokenizer, chat, opening=False))
    added = tokenizer.added_tokens_decoder.items()
    marks = (token.content for i, token in added if token.special or i in written)
    return [mark for mark in marks if len(mark.strip()) > 1]


def _behind(tokenizer: Any, before: list, after: list, opening: bool = True) -> str:
    """What the template writes behind the assistant's text."""
    chat = [*before, {"role": "assistant", "content": SENTINEL}, *after]
    _, found, text = _render(tokenizer, chat, opening).rpartition(SENTINEL)
    if not found:
        raise UsageError("the chat template leaves out or rewrites what the assistant wrote")
    return text


def _render(tokenizer: Any, chat: list, opening: bool = True) -> str:
    if not tokenizer.chat_template:
        raise UsageError("the tokenizer has no chat template; use an instruct model")
    try:
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=opening)
    except TemplateError as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"the chat template refuses these messages: {reason}") from None


def _encode(tokenizer: Any, text: str) -> list[int]:
    # the template writes the special tokens itself, the BOS among them
    return [i for s in text.split(CUT) for i in tokenizer.encode(s, add_special_tokens=False)]
