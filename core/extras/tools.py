"""The tool format of a chat template: how it writes schemas, calls and results.

    Qwen, Hermes   <tool_call>{"name": .., "arguments": {..}}</tool_call>
    Llama 3        {"name": .., "parameters": {..}}
    Mistral        [TOOL_CALLS] [{"name": .., "arguments": {..}}]
    DeepSeek       <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{..}
    Qwen 3.5       <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

`call_format` renders a call with the template and finds in the text how calls begin. Where it finds
nothing, transformers' `parse_response` reads the calls, if the tokenizer has a `response_template`
that reads this one (LFM 2.5). For any other template the schemas become part of the system message,
calls have Qwen's format, and results are messages of the user: <tool_response>..</tool_response>.
Nothing here touches the ids of a sampled completion.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    end_of_turn_id,
    ids_after_completion,
    opened_thought,
    render,
    render_calls,
    with_system,
)
from core.context import Renderer
from core.types import Completion, Message, UsageError
from environments import tools
from environments.base import Env
from environments.tools import (
    END_OF_THOUGHT,
    MAX_CALLS,
    UNREADABLE,
    Call,
    ToolEnv,
    make_call,
    name_of,
)

PYTHON_TAG = "<|python_tag|>"  # Llama 3 may write it before a call; its template does not
MAX_NAME = 200  # characters of a function's name
PROBE = (name_of(TOOL), {"word": "a word"})
OTHER = ("seek", {"phrase": "two words"})
SHOWN = ("name", "description", "parameters")  # of a schema
INSTRUCTIONS = (
    'You can call functions: <tool_call>{{"name": .., "arguments": {{..}}}}</tool_call>\n'
    "<tools>\n{}\n</tools>"
)


@dataclass(frozen=True)
class CallFormat:
    """How a template writes a call.

    `opening` comes before it. Without a `separator` the call is a JSON object with the two keys,
    otherwise its name, the separator and its arguments as JSON. `tags` are regular expressions of
    what comes before a key, between key and value, after a value, and after the last one.
    """

    opening: str
    name_key: str = "name"
    arguments_key: str = "arguments"
    separator: str = ""
    tags: tuple[str, ...] = ()
    has_parser: bool = False  # the tokenizer has a response_template


@lru_cache(maxsize=8)
def call_format(tokenizer: Tokenizer) -> CallFormat | None:
    """The format of the tokenizer's chat template; None if it has none that picoRL can read."""
    try:
        reads_tools = PROBE[0] in render(tokenizer, [QUESTION], tools=[TOOL])
        result: Message = {"role": "tool", "content": MARKER}
        reads_results = all(
            word in render(tokenizer, [QUESTION, ANSWER, result], tools=[TOOL])
            for word in ("at least", COMPLETION)
        )
        if not reads_tools or not reads_results:
            return None
        text = tools.spoken(calls_as_text(tokenizer, "", [PROBE]))
        found = _object_format(text) or _named_format(tokenizer, text) or _tagged_format(tokenizer)
    except (TypeError, UsageError):
        return None
    if found and _read(found, text) == [Call(*PROBE)]:
        return found
    has_parser = bool(getattr(tokenizer, "response_template", None))
    if has_parser and _parsed(tokenizer, text) == [Call(*PROBE)]:
        return CallFormat("", has_parser=True)
    return None


def read_calls(tokenizer: Tokenizer, text: str) -> list[Call]:
    """The calls of a completion, as `environments.tools.read_calls`; none inside a thought."""
    opened = opened_thought(tokenizer)
    if opened and END_OF_THOUGHT not in opened + text:
        return []
    found = call_format(tokenizer)
    if found is None:
        return tools.read_calls(text)
    if found.has_parser:
        return _parsed(tokenizer, text)
    return _read(found, tools.spoken(text))


def in_format_of(tokenizer: Tokenizer, text: str) -> str:
    """A demonstration with the calls of `environments.tools.call_text` in the template's format."""
    calls = tools.read_calls(text)
    if not calls:
        return text
    if call_format(tokenizer) is None:  # a call counts only after the thought of the prompt
        return text if read_calls(tokenizer, text) else f"{END_OF_THOUGHT}\n\n{text}"
    content = text.partition(tools.OPENING)[0].strip()
    return calls_as_text(tokenizer, content, [(call.name, call.arguments) for call in calls])


def calls_as_text(
    tokenizer: Tokenizer, content: str, calls: Sequence[tuple[str, dict[str, Any]]]
) -> str:
    """What the template writes for an answer with calls, without the token that closes the turn."""
    text = render_calls(tokenizer, content, calls)
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
        return ids_after_completion(
            self.policy.tokenizer, without_calls(chat), turn_closed, max(1, num_results(chat)),
            schemas,
        )  # fmt: skip

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
        if message["role"] != "tool":
            adapted.append(message)
            continue
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        if before and before["role"] == "tool":  # the results of one response: one message
            text = f"{adapted.pop()['content']}\n{text}"
        adapted.append({"role": "user", "content": text})
    return adapted, ()


def num_results(messages: list[Message]) -> int:
    """The number of results at the end of a conversation."""
    count = 0
    while count < len(messages) and messages[-1 - count]["role"] == "tool":
        count += 1
    return count


def without_calls(messages: list[Message]) -> list[Message]:
    """The conversation without earlier answers that are calls, and their results.

    Mistral's template wants user and assistant to alternate, and its record of calls apart from the
    text. What it writes after the last answer does not depend on them.
    """
    end = len(messages) - num_results(messages) - 1  # the last answer
    kept: list[Message] = []
    for message, after in itertools.pairwise(messages[: end + 1]):
        is_call = message["role"] == "assistant" and after["role"] == "tool"
        if message["role"] != "tool" and not is_call:
            kept.append(message)
    return kept + messages[end:]


def _object_format(text: str) -> CallFormat | None:
    """The format if the call is a JSON object, wherever it begins."""
    name, arguments = PROBE
    for start in (i for i, character in enumerate(text) if character == "{"):
        try:
            value, _ = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        keys = {key: item for key, item in value.items() if isinstance(item, str | dict)}
        names = [key for key, item in keys.items() if item == name]
        found = [key for key, item in keys.items() if item in (arguments, json.dumps(arguments))]
        if names and found:
            return CallFormat(text[:start].rstrip(" \r\n\t[").lstrip(), names[0], found[0])
    return None


def _named_format(tokenizer: Tokenizer, text: str) -> CallFormat | None:
    """The format if the call is its name, a separator and its arguments as JSON."""
    before, found, rest = text.partition(PROBE[0])
    start = rest.find("{")
    if not found or start < 0 or not rest[start:].startswith(json.dumps(PROBE[1])):
        return None
    opening, separator = before.strip(), rest[:start].strip()
    try:  # DeepSeek opens the list of calls, too; only what comes before each call counts
        second = calls_as_text(tokenizer, "", [PROBE, OTHER]).partition(OTHER[0])[0].strip()
        opening = _common_prefix(opening[::-1], second[::-1])[::-1].strip()
    except UsageError:  # one call at a time
        pass
    return CallFormat(opening, separator=separator) if opening and separator else None


def _tagged_format(tokenizer: Tokenizer) -> CallFormat | None:
    """The format if the name, the keys and the values stand between tags."""
    (name, ((key, value),)), (_, ((key2, value2),)) = ((n, a.items()) for n, a in (PROBE, OTHER))
    text = tools.spoken(calls_as_text(tokenizer, "", [(name, {key: value, key2: value2})]))
    words = [re.escape(word) for word in (name, key, value, key2, value2)]
    match = re.fullmatch("(.+?)" + "(.+?)".join(words) + "(.+)", text, re.DOTALL)
    if match is None:
        return None
    opening, before_key, before_value, between, _, end = match.groups()
    before_key = _common_prefix(before_key[::-1], between[::-1])[::-1]
    after_value = between.removesuffix(before_key)
    tags = before_key, before_value, after_value, end.removeprefix(after_value)
    if not opening.strip() or not all(tag.strip() for tag in tags):
        return None
    return CallFormat(opening.strip(), tags=tuple(map(_lax, tags)))


def _lax(tag: str) -> str:
    """A regular expression for a tag, with any white space inside it."""
    return r"\s*".join(map(re.escape, tag.split()))


def _read(found: CallFormat, text: str) -> list[Call]:
    if found.tags:
        return list(_tagged_calls(text, found.opening, [re.compile(tag) for tag in found.tags]))
    if found.separator:
        return list(_named_calls(text, found.opening, found.separator))
    if not found.opening:
        text = text.strip().removeprefix(PYTHON_TAG).strip()
        keys = (f'"{found.name_key}"', f'"{found.arguments_key}"')
        if not text.startswith("{") or not all(key in text for key in keys):
            return []
    return list(tools.json_calls(text, found.opening, found.name_key, found.arguments_key))


def _named_calls(text: str, opening: str, separator: str) -> Iterator[Call]:
    """As `environments.tools.json_calls`, for names that are followed by their arguments."""
    position = text.find(opening)
    for _ in range(MAX_CALLS + 1):
        if position < 0:
            return
        start = position + len(opening)
        end = text.find(separator, start, start + MAX_NAME)
        values = end + len(separator)
        while values < len(text) and text[values].isspace():
            values += 1
        try:
            if end < 0:
                raise ValueError
            arguments, position = json.JSONDecoder().raw_decode(text, values)
        except (ValueError, RecursionError):
            yield Call("", {}, UNREADABLE)
            return
        call = make_call(text[start:end].strip(), arguments)
        yield call
        if call.error:
            return
        position = text.find(opening, position)


def _tagged_calls(text: str, opening: str, tags: list[re.Pattern[str]]) -> Iterator[Call]:
    """The same for keys and values between tags; a value stays a text."""
    before_key, before_value, after_value, end = tags
    opened = re.compile(_lax(opening))
    start = opened.search(text)
    for _ in range(MAX_CALLS + 1):
        if start is None:
            return
        last, match = end.search(text, start.end()), before_key.search(text, start.end())
        if match is None or (last and last.start() < match.start()):  # a call without arguments
            match = None
        name_end = match or last
        if name_end is None or name_end.start() - start.end() > MAX_NAME:
            yield Call("", {}, UNREADABLE)
            return
        name, arguments, position = text[start.end() : name_end.start()].strip(), {}, name_end.end()
        while match is not None:
            middle = before_value.search(text, match.end(), match.end() + MAX_NAME)
            closing = after_value.search(text, middle.end()) if middle else None
            if middle is None or closing is None:
                yield Call("", {}, UNREADABLE)
                return
            arguments[text[match.end() : middle.start()].strip()] = text[
                middle.end() : closing.start()
            ].strip("\n")
            position = closing.end()
            start_of_next = re.compile(r"\s*").match(text, position)
            assert start_of_next
            match = before_key.match(text, start_of_next.end())
        call = make_call(name, arguments)
        yield call
        if call.error:
            return
        start = opened.search(text, position)


def _parsed(tokenizer: Tokenizer, text: str) -> list[Call]:
    """The calls that transformers finds with the tokenizer's response_template."""
    try:
        prompt = render(tokenizer, [QUESTION], tools=[TOOL])
        end = str(tokenizer.decode([end_of_turn_id(tokenizer)]))
        message: Any = tokenizer.parse_response(text + end, prefix=prompt)
        found = [call.get("function", call) for call in message.get("tool_calls") or []]
        calls = [make_call(call.get("name"), call.get("arguments")) for call in found]
    except Exception:  # of a text that does not have the format
        return [Call("", {}, UNREADABLE)]
    return calls[: MAX_CALLS + 1]


def _common_prefix(a: str, b: str) -> str:
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return "".join(character for character, _ in equal)
