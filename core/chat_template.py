"""Chat messages to token ids, with the tokenizer's chat template; a chat grows only by appending.

    ids = prompt_ids(tokenizer, messages)                   # opening prompt, ready to sample from
    completion = ...                                        # token ids, sampled by the policy
    ids += completion + ids_after_completion(tokenizer, messages, turn_closed=True)

A completion is never rendered or tokenized again, so the policy trains on the ids that it sampled.
Only the template can write the tokens that mark turns. A message that quotes such a token, like
"<|im_end|>", is encoded as the plain characters: an environment cannot forge a turn. `tools` are
JSON schemas for a template with a tool format; core/extras/tools.py says which it has.
"""

import json
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, cast

from jinja2 import Environment, TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from core.faults import UsageError
from core.patches import render_with
from core.types import Message
from environments.plumbing.text import one_line
from environments.plumbing.tools import END_OF_THOUGHT, THOUGHT, call_text

ROLES = ("system", "user", "assistant", "tool", "raw")
RAW = "raw"  # the role of a text that is a whole prompt, with what a template would write
# For a model without a chat template, of which all prompts are raw: nothing around an answer but
# its end
PLAIN = ("{% for m in messages %}{{ m['content'] }}"
         "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}")  # fmt: skip
# Two code points that Unicode reserves as noncharacters (Unicode 23.7): no text contains them.
COMPLETION = "\ufdd1"  # stands for a completion while the template is rendered
QUESTION: Message = {"role": "user", "content": "?"}
ANSWER: Message = {"role": "assistant", "content": COMPLETION}
RESULT: Message = {"role": "tool", "content": "?"}
TOOL: dict[str, Any] = {  # schema of a function that is never called
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
MARKER = 'Is 1 < 2 & "b"\n\n  at least \\é?'  # text that a template may not change
NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")  # a call in a template
TODAY = "today"
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "strftime_now"}
# Mistral's template wants an id of nine characters in the result of a call
CALL_ID: dict[str, Any] = {"name": "tool", "tool_call_id": "call00001"}
TOOL_CALL: dict[str, Any] = {"type": "function", "id": CALL_ID["tool_call_id"]}
# of the arguments of a call, as templates want them: an object, or text (DeepSeek)
ENCODINGS = dict, partial(json.dumps, ensure_ascii=False)
# What begins a turn in the templates of many models, and what follows it
MARKS = [("<|im_start|>", "<|im_end|>"), ("<|start_header_id|>", "<|end_header_id|>"),
         ("<start_of_turn>", "<end_of_turn>"), ("[INST]", "[/INST]")]  # fmt: skip
SPLIT = "\ufdd0"  # text on either side of it is tokenized separately
Schema = dict[str, Any]
NONCHARACTERS = {ord(COMPLETION): "\ufffd", ord(SPLIT): "\ufffd"}


def prompt_ids(
    tokenizer: Tokenizer, messages: list[Message], tools: Sequence[Schema] = ()
) -> list[int]:
    """Token ids of an opening prompt, up to the point where the assistant begins to write.

    A raw prompt is tokenized as it is, with the token that begins a text for this tokenizer. Raises
    UsageError if the chat template rejects the messages, TypeError as `clean_message` does.
    """
    if messages[0]["role"] == RAW:
        if len(messages) > 1 or tools:
            raise UsageError("a raw prompt is one text: it takes no other messages and no tools")
        text, begin = messages[0]["content"], str(tokenizer.bos_token or "")
        has_begin = bool(begin) and text.startswith(begin)
        return [*tokenizer(text, add_special_tokens=not has_begin).input_ids]
    chat, tools = _split_turn_tokens(tokenizer, messages, tools), _split_schemas(tokenizer, tools)
    return _encode(tokenizer, _render_results(tokenizer, chat, True, tools))


def with_prefill(tokenizer: Tokenizer, prompt: list[int], text: str) -> list[int]:
    """The ids of a prompt and of the beginning of its answer, which is given."""
    if text.lstrip().startswith(THOUGHT):
        prompt = without_opened_thought(tokenizer, prompt)
    return prompt + _encode(tokenizer, _split(tokenizer, text, with_tools=False))


def ids_after_completion(
    tokenizer: Tokenizer,
    messages: list[Message],
    turn_closed: bool,
    num_new: int = 1,
    tools: Sequence[Schema] = (),
) -> list[int]:
    """Token ids between a completion and the next one. Raises as `prompt_ids` does.

    `messages` ends with the assistant's message and `num_new` new ones. `turn_closed`: the
    completion ends with the token that closes the turn.
    """
    split = _split_turn_tokens(tokenizer, messages, tools)
    chat = [*split[: -num_new - 1], ANSWER, *split[-num_new:]]
    text = _text_after_answer(tokenizer, chat, tools=_split_schemas(tokenizer, tools))
    return _encode(tokenizer, text.lstrip())[1:] if turn_closed else _encode(tokenizer, text)


@lru_cache(maxsize=32)
def closing_ids(tokenizer: Tokenizer, next_role: str) -> list[int]:
    """The first id that the template writes after an answer, before a message of `next_role`.

    It closes the turn. GLM-4 has no closing token: there it opens the next message.
    """
    chat: list[Message] = [QUESTION, ANSWER, {"role": next_role, "content": "?"}]
    return _encode(tokenizer, _text_after_answer(tokenizer, chat).lstrip())[:1]


def without_thinking(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The sampled ids that follow the last </think>; all of them without a </think>."""

    def num_thoughts(end: int) -> int:
        return cast(str, tokenizer.decode(ids[:end])).count(END_OF_THOUGHT)

    return ids[bisect_left(range(len(ids)), num_thoughts(len(ids)), key=num_thoughts) :]


def without_opened_thought(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The ids of a prompt without the <think> at its end that the template leaves out of the
    history, as DeepSeek-R1's does; all of them for other templates."""
    opened = opened_thought(tokenizer)
    for start in range(len(ids) - 1, max(0, len(ids) - len(opened)) - 1, -1):
        if cast(str, tokenizer.decode(ids[start:])).strip() == opened.strip():
            return ids[:start]
    return ids


def set_template_options(tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
    """Passes `options` to the chat template from now on. Of these `today`, YYYY-MM-DD, is what it
    takes for the current date. The template that the tokenizer saves is unchanged.

    Raises UsageError for an option that the template does not read, and for what is no date.
    """
    date = str(options.get(TODAY, ""))
    options = {name: value for name, value in options.items() if name != TODAY}
    if not tokenizer.chat_template or not (options or date):
        return
    found: Any = tokenizer.chat_template  # or several, by name
    templates = list(found.values()) if isinstance(found, dict) else [found]
    lexed = (token for template in templates for token in Environment().lex(template))
    names = {text for _, kind, text in lexed if kind == "name"}
    for name in options:
        if name not in names - RESERVED:
            raise UsageError(f"--template-options {name}: the chat template has no such option")

    try:
        now = datetime.fromisoformat(date or "2000-01-01")
    except ValueError:
        raise UsageError(f"--template-options today={date}: write a date as 2026-01-31") from None

    def with_date(template: str) -> str:
        if not date:
            return template
        return NOW.sub(lambda call: repr(now.strftime(call[2])), template)

    render_with(tokenizer, with_date, options)


def is_rendered(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text seems to have a chat template around it: it begins with one of the tokens of
    the template, and has another one, or with a mark of MARKS, and has its second. As a message it
    would get the template once more."""
    tokens = [token for token in _turn_tokens(tokenizer) if token in text]
    starts = tuple(tokens) if len(tokens) > 1 else ()
    starts += tuple(first for first, second in MARKS if second in text)
    return text.lstrip().startswith(starts)


def end_of_turn_id(tokenizer: Tokenizer) -> int:
    """Id of the token with which the assistant ends its turn: the one after the last answer, or, if
    the template writes none there, the one that opens the user's next message (GLM-4).

    Raises UsageError if plain text ends the turn.
    """
    text = _text_after_answer(tokenizer, [QUESTION, ANSWER], open_turn=False)
    ids = _encode(tokenizer, text.lstrip()) or closing_ids(tokenizer, "user")
    if not ids or ids[0] not in tokenizer.added_tokens_decoder:
        raise UsageError("the chat template does not close the assistant's turn with a token")
    return ids[0]


def without_embedding(tokenizer: Tokenizer, count: int) -> list[str]:
    """The added tokens beyond the `count` embeddings of the model; a message that has one in it is
    encoded as the plain characters from now on.

    Raises UsageError if the template writes one, or if the vocabulary itself is larger.
    """
    tokenizer.num_embeddings = count  # type: ignore[attr-defined]
    decoder = tokenizer.added_tokens_decoder
    unknown = [decoder[i].content for i in sorted(decoder) if i >= count]
    written = _encode(tokenizer, render(tokenizer, [QUESTION, ANSWER, QUESTION]))
    hint = "resize_token_embeddings(len(tokenizer)) makes the missing ones, to be trained"
    if tokenizer.vocab_size > count:
        raise UsageError(f"the tokenizer has {tokenizer.vocab_size} tokens and the model {count} "
                         f"embeddings: it may be of another model; {hint}")  # fmt: skip
    if max(written) >= count:
        raise UsageError(f"the chat template writes {tokenizer.decode([max(written)])!r}, a token "
                         f"that was added and has no embedding: {hint}")  # fmt: skip
    return unknown


def num_embeddings(tokenizer: Tokenizer) -> int:
    """How many tokens the model of a tokenizer has embeddings of, as far as this is known."""
    return getattr(tokenizer, "num_embeddings", sys.maxsize)


def check_template(tokenizer: Tokenizer) -> None:
    """Raises UsageError if the template changes what messages say, or cannot open a turn."""
    roles = ("user", "assistant", "user")
    chat = render(tokenizer, [{"role": role, "content": MARKER} for role in roles])
    if chat.count(MARKER) < len(roles):
        raise UsageError("the chat template leaves out or rewrites parts of the messages")
    prompt = render(tokenizer, [QUESTION])
    header = _text_before_answer(tokenizer, [QUESTION, ANSWER]).removeprefix(prompt.rstrip())
    if prompt == render(tokenizer, [QUESTION], open_turn=False) and header.strip():
        raise UsageError("the chat template ignores add_generation_prompt: a prompt would end "
                         f"without {header[-60:]!r}, which opens the assistant's turn")  # fmt: skip


def clean_message(message: Message) -> Message:
    """Keeps role, content and calls of tools; replaces invalid characters by U+FFFD.

    Raises TypeError if the role is not one of ROLES, or the content no text. Beside calls it may
    be None.

    >>> clean_message({"role": "user", "content": "\\ud83d\\ude00 \\ud83d", "name": "Ann"})
    {'role': 'user', 'content': '😀 �'}
    """
    calls: list[dict[str, Any]] = []
    try:
        for function in (call["function"] for call in message.get("tool_calls") or ()):
            values = function.get("arguments") or {}
            values = json.loads(values if isinstance(values, str) else json.dumps(values))
            named = {"name": f"{function['name']}", "arguments": {**values}}
            calls.append(TOOL_CALL | {"function": named})
        found = "" if calls and message.get("content") is None else message["content"]
        texts = [text.encode("utf-16", "surrogatepass") for text in (message["role"], found)]
    except (TypeError, KeyError, AttributeError, ValueError):
        raise TypeError(
            f"a message needs a role and a content of text, not {message!r:.200}"
        ) from None
    if message["role"] not in ROLES:
        raise TypeError(f"a message has one of the roles {', '.join(ROLES)}, not "
                        f"{message['role']!r:.80}")  # fmt: skip
    role, content = (t.decode("utf-16", "replace").translate(NONCHARACTERS) for t in texts)
    cleaned: Message = {"role": role, "content": content}
    return cleaned | {"tool_calls": calls} if calls else cleaned


def with_system(
    tokenizer: Tokenizer, messages: list[Message], text: str, last: bool = False
) -> list[Message]:
    """The conversation with a text in its system message, before what is there, or `last`.

    A template without system messages gets it at the start of the first message.
    """
    has_system = bool(messages) and messages[0]["role"] == "system"
    if not has_system and accepts_system(tokenizer):
        return [{"role": "system", "content": text}, *messages]
    first, *others = messages
    texts = [first["content"], text] if last and has_system else [text, first["content"]]
    return [{"role": first["role"], "content": "\n\n".join(texts)}, *others]


@lru_cache(maxsize=8)
def accepts_system(tokenizer: Tokenizer) -> bool:
    """Whether the template renders a system message."""
    try:
        return MARKER in render(tokenizer, [{"role": "system", "content": MARKER}, QUESTION])
    except UsageError:
        return False


@lru_cache(maxsize=8)
def alternates(tokenizer: Tokenizer) -> bool:
    """Whether the template refuses two messages of the user in a row."""
    try:
        return not render(tokenizer, [QUESTION, QUESTION])
    except UsageError:
        return True


def _split_turn_tokens(
    tokenizer: Tokenizer, messages: list[Message], tools: Sequence[Schema] = ()
) -> list[Message]:
    """Clean messages with a SPLIT inside every turn token that they quote."""
    chat, with_tools = [clean_message(message) for message in messages], bool(tools)
    for m in chat:
        m["content"] = _split(tokenizer, m["content"], with_tools)
        if "tool_calls" in m:
            m["tool_calls"] = _split_schemas(tokenizer, m["tool_calls"])
    return _with_calls(tokenizer, chat, tools)


def _with_calls(
    tokenizer: Tokenizer, chat: list[Message], tools: Sequence[Schema]
) -> list[Message]:
    """The chat with its calls as the template writes them, or else as a part of the content."""
    if not any("tool_calls" in m for m in chat):
        return chat

    def written(chat: list[Message]) -> str:
        try:
            return render(tokenizer, chat, open_turn=False, tools=tools)
        except UsageError:
            return ""

    without = written([{"role": m["role"], "content": m["content"]} for m in chat])
    for encode in ENCODINGS:
        found = [_with_arguments(m, encode) for m in chat]
        if written(found) not in ("", without):
            return found
    return [{"role": m["role"], "content": content_and_calls(m)} for m in chat]


def _with_arguments(message: Message, encode: Callable[[Any], Any]) -> Message:
    """The message with the arguments of its calls in another form."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    encoded = [f | {"arguments": encode(f["arguments"])} for f in functions]
    calls = [TOOL_CALL | {"function": f} for f in encoded]
    return message | {"tool_calls": calls} if calls else message


def as_result(content: str) -> str:
    """The result of a tool in a message of the user, for a template without them."""
    return f"<tool_response>\n{content}\n</tool_response>"


def content_and_calls(message: Message) -> str:
    """The text of a message that has calls, for a template or a server without them."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [call_text(f["name"], **f["arguments"]) for f in functions]
    return "\n".join(filter(None, [message["content"], *calls]))


def _split_schemas(tokenizer: Tokenizer, tools: Sequence[Schema]) -> list[Schema]:
    """The schemas, whose texts an environment wrote, in the same way."""

    def split(value: Any) -> Any:
        if isinstance(value, dict):
            return {split(key): split(item) for key, item in value.items()}
        if isinstance(value, list):
            return [split(item) for item in value]
        if not isinstance(value, str):
            return value
        cleaned = clean_message({"role": "tool", "content": value})["content"]
        return _split(tokenizer, cleaned, with_tools=True)

    return [split(schema) for schema in tools]


@lru_cache(maxsize=4096)  # a chat comes back with each turn
def _split(tokenizer: Tokenizer, text: str, with_tools: bool) -> str:
    """`text` with a SPLIT inside every turn token, also one that the normalizer makes of it."""
    tokens = _turn_tokens(tokenizer, with_tools)
    for token in tokens:
        while token in text:  # repeated, because matches overlap: "aXaXa" contains "aXa" twice
            text = text.replace(token, token[0] + SPLIT + token[1:])
    ids = {*tokens.values()}
    if ids & {*_encode(tokenizer, text)}:  # of fullwidth or capital letters: character by character
        characters = text.replace(SPLIT, "")
        alone = ("\ufffd" if ids & {*_encode(tokenizer, c)} else c for c in characters)
        text = SPLIT.join(alone)
    return text


@lru_cache(maxsize=8)
def _turn_tokens(tokenizer: Tokenizer, with_tools: bool = False) -> dict[str, int]:
    """The special tokens, and other added tokens that the template writes, as DeepSeek's does, or
    that the model has no embeddings for.

    `with_tools`: those that it writes around schemas, calls and results, too, as Qwen's does.
    """
    chat: list[Message] = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
    written = _encode(tokenizer, render(tokenizer, chat, open_turn=False))
    if with_tools:
        with suppress(UsageError):  # of a template without calls, which writes nothing more
            text = render_calls(tokenizer, "", [("?", {"?": "?"})], [RESULT])
            written += _encode(tokenizer, text)
    added = tokenizer.added_tokens_decoder.items()
    end = num_embeddings(tokenizer)
    tokens = {t.content: i for i, t in added if t.special or i in written or i >= end}
    # <unk> stands for characters that the tokenizer lacks
    unknown = {tokenizer.unk_token_id} - {*written}
    return {
        token: -1 if i in unknown else i for token, i in tokens.items() if len(token.strip()) > 1
    }


@lru_cache(maxsize=8)
def opened_thought(tokenizer: Tokenizer) -> str:
    """What the end of a prompt has in addition to the history, if that is a <think>."""
    history = _text_before_answer(tokenizer, [QUESTION, ANSWER, QUESTION])
    opened = render(tokenizer, [QUESTION]).removeprefix(history)
    return opened if opened.lstrip().startswith(THOUGHT) else ""


def _text_before_answer(tokenizer: Tokenizer, chat: list[Message]) -> str:
    return render(tokenizer, chat, open_turn=False).partition(COMPLETION)[0]


def _text_after_answer(
    tokenizer: Tokenizer,
    chat: list[Message],
    open_turn: bool = True,
    tools: Sequence[Schema] = (),
) -> str:
    text = _render_results(tokenizer, chat, open_turn, tools)
    _, found, text = text.rpartition(COMPLETION)
    if not found:
        raise UsageError("the chat template leaves out or rewrites the assistant's messages")
    return text


def _render_results(
    tokenizer: Tokenizer, chat: list[Message], open_turn: bool, tools: Sequence[Schema]
) -> str:
    """As `render`, but a template that refuses results of tools gets what stands between two
    answers as one message of the user: it may have no other roles, and want both to alternate."""
    try:
        return render(tokenizer, chat, open_turn, tools)
    except UsageError:
        merged: list[Message] = []
        for message in chat:
            if message["role"] == "tool":
                content = _split(tokenizer, as_result(message["content"]), with_tools=True)
                message = {"role": "user", "content": content}
            if merged and message["role"] == merged[-1]["role"] == "user":
                content = f"{merged.pop()['content']}\n{message['content']}"
                message = {"role": "user", "content": content}
            merged.append(message)
        if any(message["role"] == "tool" for message in chat):
            with suppress(UsageError):
                return render(tokenizer, merged, open_turn, tools)
        raise


def render_calls(
    tokenizer: Tokenizer,
    content: str,
    calls: Sequence[tuple[str, dict[str, Any]]],
    after: Sequence[Message] = (),
) -> str:
    """The text of a question, an answer with calls (name, arguments), and the messages after it.

    Raises UsageError if the template refuses them.
    """
    tool_calls = [{"function": {"name": name, "arguments": values}} for name, values in calls]
    answer: Message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    for encode in ENCODINGS:
        chat = [QUESTION, _with_arguments(answer, encode), *after]
        try:
            return render(tokenizer, chat, open_turn=False, tools=[TOOL])
        except UsageError as error:
            reason = str(error)
    raise UsageError(f"the chat template refuses calls of tools: {reason}")


def render(
    tokenizer: Tokenizer,
    chat: list[Message],
    open_turn: bool = True,
    tools: Sequence[Schema] = (),
) -> str:
    """The chat as text; `open_turn`: ending where the assistant begins to write.

    Raises UsageError if there is no template, and if it refuses the messages or fails.
    """
    if not tokenizer.chat_template:
        raise UsageError("the tokenizer has no chat template; use an instruct model")
    options: dict[str, Any] = {"tools": list(tools)} if tools else {}
    dicts = cast(list[dict[str, str]], [m | CALL_ID if m["role"] == "tool" else m for m in chat])
    try:
        text = tokenizer.apply_chat_template(
            dicts, tokenize=False, add_generation_prompt=open_turn, **options
        )
    except Exception as error:
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        reason = one_line(error)[:200]
        raise UsageError(f"the chat template refuses these messages: {kind}{reason}") from None
    return cast(str, text)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # add_special_tokens=False: the template writes the special tokens, including BOS
    return [i for s in text.split(SPLIT) for i in tokenizer.encode(s, add_special_tokens=False)]
