"""The tool format of a chat template: how it writes schemas, calls and results.

    Qwen, Hermes   <tool_call>{"name": .., "arguments": {..}}</tool_call>
    Llama 3        {"name": .., "parameters": {..}}
    Mistral        [TOOL_CALLS] [{"name": .., "arguments": {..}}]
    DeepSeek       <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{..}
    Qwen 3.5       <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

A tokenizer with a `response_template` (LFM 2.5, Gemma 4) reads calls itself, with transformers'
`parse_response`. For the others `call_format` renders a call with the chat template and finds in
the text how calls begin. Where it finds nothing, the schemas become part of the system message,
calls have Qwen's format, and results are messages of the user: <tool_response>..</tool_response>.
Nothing here touches the ids of a sampled completion.
"""

import itertools
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from core.chat_template import (
    ANSWER,
    COMPLETION,
    MARKER,
    QUESTION,
    TOOL,
    Schema,
    alternates,
    as_result,
    end_of_turn_id,
    ids_after_completion,
    opened_thought,
    render,
    render_calls,
    with_system,
)
from core.context import Renderer
from core.faults import UsageError
from core.types import Completion, Message
from environments.base import Env
from environments.plumbing import tools
from environments.plumbing.tools import (
    END_OF_THOUGHT,
    MAX_CALLS,
    UNREADABLE_CALL,
    Call,
    ReadCalls,
    ToolEnv,
    make_call,
    name_of,
)

PYTHON_TAG = "<|python_tag|>"  # Llama 3 may write it before a call; its template does not
MAX_NAME = 200  # characters of a function's name
PROBE = Call(name_of(TOOL), {"word": "a word"})
OTHER = Call("seek", {"phrase": "two words"})
SHOWN = ("name", "description", "parameters")  # of a schema
INSTRUCTIONS = (
    'You can call functions: <tool_call>{{"name": .., "arguments": {{..}}}}</tool_call>\n'
    "<tools>\n{}\n</tools>"
)


@lru_cache(maxsize=8)
def call_format(tokenizer: Tokenizer) -> ReadCalls | None:
    """Reads calls in the format of the chat template; None if it has none that picoRL can read."""
    try:
        reads_tools = PROBE.name in render(tokenizer, [QUESTION], tools=[TOOL])
        result: Message = {"role": "tool", "content": MARKER}
        reads_results = all(
            word in render(tokenizer, [QUESTION, ANSWER, result], tools=[TOOL])
            for word in ("at least", COMPLETION)
        )
        if not reads_tools or not reads_results:
            return None
        text = calls_as_text(tokenizer, "", [PROBE])
        for find in (_own_format, _object_format, _named_format, _tagged_format):
            if (found := find(tokenizer, text)) and found(text) == [PROBE]:
                return found
    except (TypeError, UsageError):
        pass
    return None


def read_calls(tokenizer: Tokenizer, text: str) -> list[Call]:
    """The calls of a completion, as `tools.read_calls`; none inside a thought."""
    opened = opened_thought(tokenizer)
    if opened and END_OF_THOUGHT not in opened + text:
        return []
    return (call_format(tokenizer) or tools.read_calls)(text)


def in_format_of(tokenizer: Tokenizer, text: str) -> str:
    """A demonstration with the calls of `tools.call_text`, in the template's format."""
    calls = tools.read_calls(text)
    if not calls:
        return text
    if call_format(tokenizer) is None:  # a call counts only after the thought of the prompt
        return text if read_calls(tokenizer, text) else f"{END_OF_THOUGHT}\n\n{text}"
    content = text.partition(tools.OPENING)[0].strip()
    return calls_as_text(tokenizer, content, calls)


def calls_as_text(tokenizer: Tokenizer, content: str, calls: Sequence[Call]) -> str:
    """What the template writes for an answer with calls, without the token that closes the turn."""
    text = render_calls(tokenizer, content, [(call.name, call.arguments) for call in calls])
    prompt = render(tokenizer, [QUESTION], tools=[TOOL])
    text = text[len(_common_prefix(text, prompt)) :]
    end = str(tokenizer.decode([end_of_turn_id(tokenizer)]))
    return text.partition(end)[0].strip()


class ToolRenderer(Renderer):
    """Renders also the tools of an environment: their schemas, calls and results."""

    def prepare(self, env: Env) -> Env:
        return ToolEnv(env, partial(read_calls, self.policy.tokenizer)) if env.tools else env

    def for_template(
        self, chat: list[Message], schemas: Sequence[Schema]
    ) -> tuple[list[Message], Sequence[Schema]]:
        return for_template(self.policy.tokenizer, chat, schemas)

    def next_ids(
        self, chat: list[Message], schemas: Sequence[Schema], turn_closed: bool
    ) -> list[int]:
        results = itertools.takewhile(lambda message: message["role"] == "tool", reversed(chat))
        num_new = max(1, len([*results]))
        chat = without_calls(chat, num_new)
        return ids_after_completion(self.policy.tokenizer, chat, turn_closed, num_new, schemas)

    def demonstration(self, text: str) -> Completion:
        return super().demonstration(in_format_of(self.policy.tokenizer, text))


def for_template(
    tokenizer: Tokenizer, messages: list[Message], schemas: Sequence[Schema]
) -> tuple[list[Message], Sequence[Schema]]:
    """The messages and the schemas to render: those given if the template has a tool format.

    Otherwise all of it as messages that any template renders, and no schemas.
    """
    if not schemas or call_format(tokenizer):
        return messages, schemas
    functions = [{k: schema["function"][k] for k in SHOWN} for schema in schemas]
    lines = [json.dumps(function, ensure_ascii=False) for function in functions]
    chat = with_system(tokenizer, messages, INSTRUCTIONS.format("\n".join(lines)), last=True)
    adapted: list[Message] = []
    for before, message in zip([None, *chat[:-1]], chat, strict=True):
        role, text = message["role"], message["content"]
        if role == "tool":
            role, text = "user", as_result(text)
        # the results of one response are one message, with what the user says after them if roles
        # have to alternate
        if before and before["role"] == "tool" and role == "user" and (
            message["role"] == "tool" or alternates(tokenizer)
        ):  # fmt: skip
            text = f"{adapted.pop()['content']}\n{text}"
        adapted.append(message | {"role": role, "content": text})
    return adapted, ()


def without_calls(messages: list[Message], num_new: int) -> list[Message]:
    """The conversation without calls and results before its last answer, which `num_new` messages
    follow.

    Mistral's template wants user and assistant to alternate, and its record of calls apart from the
    text. What it writes after the last answer does not depend on them.
    """
    end = len(messages) - num_new - 1  # the last answer
    kept: list[Message] = []
    for message, after in itertools.pairwise(messages[: end + 1]):
        is_call = message["role"] == "assistant" and after["role"] == "tool"
        if message["role"] != "tool" and not is_call:
            if kept and kept[-1]["role"] == message["role"] == "user":  # between them was a call
                kept.pop()
            kept.append(message)
    return kept + messages[end:]


def _own_format(tokenizer: Tokenizer, text: str) -> ReadCalls | None:
    """transformers' reader, if the tokenizer has a response_template."""
    if not getattr(tokenizer, "response_template", None):
        return None
    prompt = render(tokenizer, [QUESTION], tools=[TOOL])
    end = str(tokenizer.decode([end_of_turn_id(tokenizer)]))

    def read(text: str) -> list[Call]:
        try:
            message: Any = tokenizer.parse_response(text + end, prefix=prompt)
            found = [call.get("function", call) for call in message.get("tool_calls") or []]
            calls = [make_call(call.get("name"), call.get("arguments")) for call in found]
        except Exception:  # of a text that does not have the format
            return [UNREADABLE_CALL]
        return calls[: MAX_CALLS + 1]

    return read


def _object_format(tokenizer: Tokenizer, text: str) -> ReadCalls | None:
    """The reader of calls that are JSON objects, wherever they begin."""
    text = tools.spoken(text)
    for start in (i for i, character in enumerate(text) if character == "{"):
        try:
            value, _ = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        # DeepSeek's template wants the arguments as text
        keys = {v if isinstance(v, str) else json.dumps(v): key for key, v in value.items()}
        name_key, arguments_key = keys.get(PROBE.name), keys.get(json.dumps(PROBE.arguments))
        if name_key and arguments_key:
            opening = text[:start].rstrip(" \r\n\t[").lstrip()
            return partial(_object_calls, opening, name_key, arguments_key)
    return None


def _named_format(tokenizer: Tokenizer, text: str) -> ReadCalls | None:
    """The reader of calls that are a name, a separator and the arguments as JSON."""
    before, found, rest = tools.spoken(text).partition(PROBE.name)
    separator = rest.partition("{")[0]
    if not found or not rest.startswith(json.dumps(PROBE.arguments), len(separator)):
        return None
    with suppress(UsageError):  # of a template that writes one call at a time
        # DeepSeek opens the list of calls, too; only what comes before each call counts
        second = calls_as_text(tokenizer, "", [PROBE, OTHER]).partition(OTHER.name)[0]
        before = _common_prefix(before.rstrip()[::-1], second.rstrip()[::-1])[::-1]
    if not before.strip() or not separator.strip():
        return None
    return partial(_named_calls, _start(before, _lax(separator)), None)


def _tagged_format(tokenizer: Tokenizer, text: str) -> ReadCalls | None:
    """The reader of calls whose name, keys and values stand between tags."""
    call = Call(PROBE.name, PROBE.arguments | OTHER.arguments)
    words = [call.name, *(word for pair in call.arguments.items() for word in pair)]
    pattern = "(.+?)" + "(.+?)".join(map(re.escape, words)) + "(.+)"
    match = re.fullmatch(pattern, tools.spoken(calls_as_text(tokenizer, "", [call])), re.DOTALL)
    if match is None:
        return None
    opening, before_key, before_value, between, _, end = match.groups()
    before_key = _common_prefix(before_key[::-1], between[::-1])[::-1]
    after_value = between.removesuffix(before_key)
    tags = before_key, before_value, after_value, end.removeprefix(after_value)
    if not opening.strip() or not all(tag.strip() for tag in tags):
        return None
    key, value, closing, end = map(_lax, tags)
    pair = rf"\s*{key}(?:(?>(.{{0,{MAX_NAME}}}?){value})(.*?){closing})?"
    return partial(_named_calls, _start(opening, f"(?={key}|{end})"), re.compile(pair, re.DOTALL))


def _start(opening: str, after_name: str) -> re.Pattern[str]:
    """A regular expression for the beginning of a call; its group is None if that is unreadable."""
    return re.compile(rf"{_lax(opening)}(?:(.{{0,{MAX_NAME}}}?){after_name}\s*)?", re.DOTALL)


def _lax(tag: str) -> str:
    """A regular expression for a tag, with any white space inside it."""
    return r"\s*".join(map(re.escape, tag.split()))


def _object_calls(opening: str, name_key: str, arguments_key: str, text: str) -> list[Call]:
    text = tools.spoken(text)
    if not opening:
        text = text.strip().removeprefix(PYTHON_TAG).strip()
        if not text.startswith("{") or not all(f'"{k}"' in text for k in (name_key, arguments_key)):
            return []
    return tools.json_calls(text, opening, name_key, arguments_key)


def _named_calls(start: re.Pattern[str], pair: re.Pattern[str] | None, text: str) -> list[Call]:
    """The calls that begin with `start`, whose group is the name. Arguments: pairs of key and
    value, which stays a text, or without `pair` JSON. As `tools.json_calls`."""
    text, position, calls = tools.spoken(text), 0, list[Call]()
    while len(calls) <= MAX_CALLS and (match := start.search(text, position)):
        position, arguments = match.end(), dict[str, str]()
        try:
            while pair and (found := pair.match(text, position)):
                arguments[found[1].strip()], position = found[2].strip("\n"), found.end()
            if not pair:
                arguments, position = json.JSONDecoder().raw_decode(text, position)
            calls.append(make_call(match[1].strip(), arguments))
        except (AttributeError, ValueError, RecursionError):  # the name, a pair or JSON is broken
            calls.append(UNREADABLE_CALL)
        if calls[-1].error:
            break
    return calls


def _common_prefix(a: str, b: str) -> str:
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return "".join(character for character, _ in equal)
