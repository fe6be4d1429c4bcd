"""Chat messages to token ids, with the tokenizer's chat template; a chat grows only by appending.

    ids = prompt_ids(tokenizer, messages)          # the opening prompt, ready to sample from
    ids += completion                              # token ids, sampled by the policy
    ids = next_prompt_ids(tokenizer, ids, new_messages, stop_ids)

A completion is never rendered or tokenized again, so the policy trains on the ids that it sampled.
Only the template can write the tokens that its turns are made of. A message that quotes such a
token, like "<|im_end|>", is encoded as the plain characters: an environment cannot forge a turn.
`tools` are JSON schemas. A template that writes calls as Hermes and Qwen do (plumbing/tools.py)
writes them itself, and so does one whose tokenizer has a `response_template` (LFM 2.5, Gemma 4):
its calls are read with transformers' `parse_response`. A model with any other template is told to
write them as Hermes does: `without_tools` puts schemas, calls and results into messages.
"""

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, cast

from jinja2 import Environment, TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from core.faults import UsageError
from core.types import Message
from environments.plumbing import tools as hermes
from environments.plumbing.text import one_line
from environments.plumbing.tools import END_OF_THOUGHT, OPENING, Call, call_text

Schema = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool", "raw")
RAW = "raw"  # the role of a text that is a whole prompt, without a chat template
# The template of a model that has none, so that all prompts are raw: it only ends each answer
PLAIN = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
# Two code points that Unicode reserves as noncharacters (Unicode 23.7): no text contains them.
COMPLETION = "\ufdd1"  # takes the place of a completion while the template is rendered
SPLIT = "\ufdd0"  # text on either side of it is tokenized separately
NONCHARACTERS = {ord(COMPLETION): "\ufffd", ord(SPLIT): "\ufffd"}
QUESTION: Message = {"role": "user", "content": "?"}
ANSWER: Message = {"role": "assistant", "content": COMPLETION}
LOOKUP = Call("lookup", {"word": "a word"})
TOOL: Schema = {  # of a function that is never called
    "type": "function",
    "function": {
        "name": LOOKUP.name,
        "description": "Look up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
RESULT: Message = {"role": "tool", "content": "found"}
# some templates want an id in a call and in its result
CALL_ID: dict[str, Any] = {"name": "tool", "tool_call_id": "call00001"}
TOOL_CALL: dict[str, Any] = {"type": "function", "id": CALL_ID["tool_call_id"]}
INSTRUCTIONS = (
    'You can call functions: <tool_call>{{"name": .., "arguments": {{..}}}}</tool_call>\n'
    "<tools>\n{}\n</tools>"
)
MARKER = 'Is 1 < 2 & "b"\n\n  at least \\é?'  # text that a template may not change
TODAY = "today"
NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")  # a call in a template
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "strftime_now"}


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
    return _encode(tokenizer, render(tokenizer, _quoted(tokenizer, messages, tools), tools=tools))


def with_prefill(tokenizer: Tokenizer, prompt: list[int], text: str) -> list[int]:
    """The ids of a prompt, and after them those of `text`, with which its answer begins."""
    return prompt + _encode(tokenizer, _split(tokenizer, text))


def next_prompt_ids(
    tokenizer: Tokenizer,
    ids: list[int],
    messages: list[Message],
    stop_ids: Collection[int],
    tools: Sequence[Schema] = (),
) -> list[int]:
    """`ids`, which end with a sampled answer, and those of the `messages` after it, up to the point
    where the assistant writes again. Raises as `prompt_ids` does.

    Where the answer ends with one of `stop_ids` that is not the template's, such as <|return|> for
    the <|end|> of gpt-oss, the template's takes its place.
    """
    chat = [QUESTION, ANSWER, *_quoted(tokenizer, messages, tools)]
    text = render(tokenizer, chat, tools=tools).rpartition(COMPLETION)[2]
    closing, *after_closing = _encode(tokenizer, text.lstrip())
    if ids[-1] == closing:
        return ids + after_closing
    if ids[-1] in stop_ids:
        ids = ids[:-1]
    return ids + _encode(tokenizer, text)


def set_template_options(tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
    """Passes `options` to the chat template from now on. The option `today`, YYYY-MM-DD, sets the
    current date of the template. The template that the tokenizer saves is unchanged.

    Raises UsageError for an option that the template does not read, and for an invalid date.
    """
    variables = {name: value for name, value in options.items() if name != TODAY}
    source: Any = tokenizer.chat_template or ""  # or several, by name
    source = "".join(source.values()) if isinstance(source, dict) else source
    names = {text for _, kind, text in Environment().lex(source) if kind == "name"}
    for name in variables:
        if name not in names - RESERVED:
            raise UsageError(f"--template-options {name}: the chat template has no such option")
    date = str(options.get(TODAY, ""))
    try:
        today = datetime.fromisoformat(date) if date else None
    except ValueError:
        raise UsageError(f"--template-options today={date}: write a date as 2026-01-31") from None
    tokenizer.template_options, tokenizer.today = variables, today  # type: ignore[attr-defined]


def check_template(tokenizer: Tokenizer, num_embeddings: int = sys.maxsize) -> int:
    """Returns the id of the token with which the assistant ends its turn: the one after the last
    answer, or, if the template writes none there, the one that opens the user's next message
    (GLM-4). From now on, messages have added tokens beyond the `num_embeddings` of the model
    encoded as plain characters.

    Raises UsageError if the template changes what messages say, cannot open or end a turn, or
    writes a token beyond the embeddings, and if the vocabulary itself is larger.
    """
    tokenizer.num_embeddings = num_embeddings  # type: ignore[attr-defined]
    roles = ("user", "assistant", "user")
    text = render(tokenizer, [{"role": role, "content": MARKER} for role in roles])
    if text.count(MARKER) < len(roles):
        raise UsageError("the chat template leaves out or rewrites parts of the messages")
    if max(tokenizer.vocab_size, 1 + max(_encode(tokenizer, text))) > num_embeddings:
        raise UsageError(
            f"the model has {num_embeddings} embeddings, and its tokenizer or chat template more "
            "tokens: take its own tokenizer, or call resize_token_embeddings(len(tokenizer))"
        )
    prompt = render(tokenizer, [QUESTION], open_turn=False)
    answered = render(tokenizer, [QUESTION, ANSWER], open_turn=False)
    with_question = render(tokenizer, [QUESTION, ANSWER, QUESTION], open_turn=False)
    header, _, after = answered.partition(COMPLETION)
    after = after.strip() or with_question.partition(COMPLETION)[2].strip()
    closing_id = next(iter(_encode(tokenizer, after)), None)
    if closing_id not in tokenizer.added_tokens_decoder:
        raise UsageError("the chat template does not close the assistant's turn with a token")
    header = header.removeprefix(prompt.rstrip())
    if prompt == render(tokenizer, [QUESTION]) and header.strip():
        raise UsageError(f"the chat template ignores add_generation_prompt: no {header[-60:]!r}")
    return cast(int, closing_id)


def num_embeddings(tokenizer: Tokenizer) -> int:
    """How many embeddings the model of a tokenizer has; sys.maxsize before `check_template`."""
    return getattr(tokenizer, "num_embeddings", sys.maxsize)


def clean_message(message: Message) -> Message:
    """Keeps role, content and calls of tools; replaces invalid characters by U+FFFD.

    Raises TypeError if the role is not one of ROLES, or the content no text (nor None, with calls).

    >>> clean_message({"role": "user", "content": "\\ud83d\\ude00 \\ud83d", "name": "Ann"})
    {'role': 'user', 'content': '😀 �'}
    """
    calls: list[dict[str, Any]] = []
    try:
        for function in (call["function"] for call in message.get("tool_calls") or ()):
            values = function.get("arguments") or {}
            values = json.loads(values) if isinstance(values, str) else values
            named = {"name": f"{function['name']}", "arguments": {**values}}
            named = json.loads(_clean(json.dumps(named, ensure_ascii=False)))
            calls.append(TOOL_CALL | {"function": named})
        content = _clean("" if calls and message.get("content") is None else message["content"])
        role = message["role"]
    except (TypeError, KeyError, AttributeError, ValueError):
        raise TypeError(f"a message needs a role and a text, not {message!r:.200}") from None
    if role not in ROLES:
        raise TypeError(f"a message has one of the roles {', '.join(ROLES)}, not {role!r:.80}")
    cleaned: Message = {"role": role, "content": content}
    return cleaned | {"tool_calls": calls} if calls else cleaned


def with_system(
    tokenizer: Tokenizer, messages: list[Message], text: str, last: bool = False
) -> list[Message]:
    """The conversation with a text at the start of its system message, or, if `last`, at the end.

    With a template without system messages the text starts the first message.
    """
    has_system = bool(messages) and messages[0]["role"] == "system"
    if not has_system and accepts_system(tokenizer):
        return [{"role": "system", "content": text}, *messages]
    first, *later = messages
    texts = [first["content"], text] if last and has_system else [text, first["content"]]
    return [{"role": first["role"], "content": "\n\n".join(texts)}, *later]


@lru_cache(maxsize=8)
def accepts_system(tokenizer: Tokenizer) -> bool:
    """Whether the template renders a system message."""
    with suppress(UsageError):
        return MARKER in render(tokenizer, [{"role": "system", "content": MARKER}, QUESTION])
    return False


def render(
    tokenizer: Tokenizer, chat: list[Message], open_turn: bool = True, tools: Sequence[Schema] = ()
) -> str:
    """The chat as text. With `open_turn` it ends where the assistant begins to write.

    Raises UsageError if there is no template, and if it refuses the messages or fails.
    """
    has_tools = bool(tools) or any(m["role"] == "tool" or "tool_calls" in m for m in chat)
    if has_tools and not tool_format(tokenizer):
        chat, tools = without_tools(tokenizer, chat, tools), ()
    return _apply(tokenizer, chat, open_turn, tools)


@lru_cache(maxsize=8)
def tool_format(tokenizer: Tokenizer) -> Literal["own", "hermes", ""]:
    """How the template writes schemas, calls and results: "own", for `parse_response`; "hermes";
    "" if it does not, or in a format that picoRL cannot read."""
    with suppress(UsageError):
        chat = [QUESTION, _answer_with_calls(COMPLETION, [LOOKUP]), RESULT]
        text = _apply(tokenizer, chat, False, [TOOL])
        parts = (TOOL["function"]["description"], COMPLETION, RESULT["content"])
        if all(part in text for part in parts):
            if "tool_calls" in str(getattr(tokenizer, "response_template", "")):
                return "own"
            if hermes.read_calls(OPENING + text.rpartition(OPENING)[2]) == [LOOKUP]:
                return "hermes"
    return ""


def as_hermes(tokenizer: Tokenizer, text: str) -> str:
    """A completion with its calls written as Hermes writes them, not in the template's format."""
    if tool_format(tokenizer) != "own":
        return text
    prompt, end = render(tokenizer, [QUESTION], tools=[TOOL]), _end_of_turn(tokenizer)
    try:
        message: Any = tokenizer.parse_response(text + end, prefix=prompt)
        functions = [call.get("function", call) for call in message.get("tool_calls") or []]
        calls = [hermes.make_call(**function) for function in functions]
    except Exception:  # of a text that does not have the format
        return OPENING + text  # a call that cannot be read
    if not calls:
        return text
    thought = message.get("reasoning_content") or message.get("thinking") or ""
    written = [call_text(call.name, **call.arguments) for call in calls]
    return "\n".join([f"{thought}{END_OF_THOUGHT}", message.get("content") or "", *written])


def read_calls(tokenizer: Tokenizer, text: str) -> list[Call]:
    """The calls of a completion `as_hermes`, up to the first unreadable one; none inside a thought,
    which the prompt may have opened."""
    prompt = render(tokenizer, [QUESTION], tools=[TOOL])
    return hermes.read_calls(prompt.rpartition(QUESTION["content"])[2] + text)


def in_format_of(tokenizer: Tokenizer, text: str) -> str:
    """A demonstration with the calls of `call_text`, as the template writes them."""
    calls = hermes.read_calls(text)
    if calls and tool_format(tokenizer):
        chat = [QUESTION, _answer_with_calls(text.partition(OPENING)[0].strip(), calls)]
        prompt = render(tokenizer, [QUESTION], tools=[TOOL])
        whole = render(tokenizer, chat, open_turn=False, tools=[TOOL])
        pairs = enumerate(zip(whole, prompt, strict=False))
        answer = whole[next((i for i, (a, b) in pairs if a != b), len(prompt)) :]
        return answer.rpartition(_end_of_turn(tokenizer))[0].strip()
    # a call counts only after the thought of the prompt
    is_thought = calls and not read_calls(tokenizer, text)
    return f"{END_OF_THOUGHT}\n\n{text}" if is_thought else text


def without_tools(
    tokenizer: Tokenizer, chat: list[Message], tools: Sequence[Schema] = ()
) -> list[Message]:
    """The chat in messages that any template and any server accepts: schemas in the system message,
    calls in the text of an answer (`call_text`), and results as messages of the user.

    The results of one answer and the next message of the user are one message.
    """
    if tools:
        lines = []
        for function in (tool["function"] for tool in tools):
            schema = {name: function[name] for name in ("name", "description", "parameters")}
            lines.append(json.dumps(schema, ensure_ascii=False))
        chat = with_system(tokenizer, chat, INSTRUCTIONS.format("\n".join(lines)), last=True)
    plain: list[Message] = []
    after_result = False
    for message in chat:
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [call_text(f["name"], **f["arguments"]) for f in functions]
        role, text = message["role"], "\n".join(filter(None, [message["content"], *calls]))
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        if after_result and role == "user":
            text = f"{plain.pop()['content']}\n{text}"
        plain.append({"role": role, "content": text})
        after_result = message["role"] == "tool"
    return plain


def _end_of_turn(tokenizer: Tokenizer) -> str:
    """The text that the template writes after an answer."""
    return render(tokenizer, [QUESTION, ANSWER], False).rpartition(COMPLETION)[2].strip()


def _answer_with_calls(content: str, calls: Sequence[Call]) -> Message:
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    tool_calls = [TOOL_CALL | {"function": function} for function in functions]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def _quoted(
    tokenizer: Tokenizer, messages: list[Message], tools: Sequence[Schema]
) -> list[Message]:
    """Clean messages with a SPLIT inside every turn token that they quote."""
    chat = [clean_message(message) for message in messages]
    with_tools = bool(tools) or any(message["role"] == "tool" for message in chat)
    for message in chat:
        message["content"] = _split(tokenizer, message["content"], with_tools)
        if "tool_calls" in message:
            text = json.dumps(message["tool_calls"], ensure_ascii=False)
            message["tool_calls"] = json.loads(_split(tokenizer, text, with_tools=True))
    return chat


def _split(tokenizer: Tokenizer, text: str, with_tools: bool = False) -> str:
    """`text` with a SPLIT inside every turn token."""
    for token in _turn_tokens(tokenizer, with_tools):
        while token in text:  # repeated, because matches overlap: "aXaXa" contains "aXa" twice
            text = text.replace(token, token[0] + SPLIT + token[1:])
    return text


@lru_cache(maxsize=8)
def _turn_tokens(tokenizer: Tokenizer, with_tools: bool = False) -> list[str]:
    """Tokens that no message may contain: the added tokens that the template writes, and the
    special ones in its source; those that begin, end and pad a text; those without an embedding.

    `with_tools`: also the tokens that the template writes around calls and results.
    """
    chat: list[Message] = [QUESTION, {"role": "assistant", "content": "?"}, QUESTION]
    text = render(tokenizer, chat, open_turn=False)
    if with_tools:
        chat = [QUESTION, _answer_with_calls("", [Call("?", {})]), RESULT]
        text += render(tokenizer, chat, open_turn=False, tools=[TOOL])
    turn_ids = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    turn_ids |= {*_encode(tokenizer, text)}
    turn_tokens = []
    for token_id, token in tokenizer.added_tokens_decoder.items():
        may_be_written = token.special and token.content in str(tokenizer.chat_template)
        has_embedding = token_id < num_embeddings(tokenizer)
        is_turn_token = token_id in turn_ids or may_be_written or not has_embedding
        if is_turn_token and len(token.content.strip()) > 1:
            turn_tokens.append(token.content)
    return turn_tokens


def _clean(text: str) -> str:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.translate(NONCHARACTERS)


def _apply(
    tokenizer: Tokenizer, chat: list[Message], open_turn: bool, tools: Sequence[Schema]
) -> str:
    """The chat as the template itself writes it. Raises as `render` does."""
    if not tokenizer.chat_template:
        raise UsageError("the tokenizer has no chat template; use an instruct model")
    template = cast(str, tokenizer.get_chat_template(tools=list(tools) or None))
    if today := getattr(tokenizer, "today", None):
        template = NOW.sub(lambda call: repr(today.strftime(call[2])), template)
    options: dict[str, Any] = getattr(tokenizer, "template_options", {})
    options = {**options, "add_generation_prompt": open_turn, "tools": list(tools) or None}
    messages: Any = [m | CALL_ID if m["role"] == "tool" else m for m in chat]
    apply: Any = tokenizer.apply_chat_template
    try:
        text = apply(messages, chat_template=template, tokenize=False, **options)
    except Exception as error:
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        reason = one_line(error)[:200]
        raise UsageError(f"the chat template refuses these messages: {kind}{reason}") from None
    return cast(str, text)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # add_special_tokens=False: the template writes the special tokens, including BOS
    return [i for s in text.split(SPLIT) for i in tokenizer.encode(s, add_special_tokens=False)]
