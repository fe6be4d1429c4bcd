"""Environments with tools: reads the calls of a completion, and writes those of demonstrations.

A tokenizer with a `response_template` (LFM 2.5, Gemma 4) reads its calls itself, with transformers'
`parse_response`. The calls of all others are those of Hermes and Qwen (plumbing/tools.py): a model
whose chat template has no such format is told to write them so (`without_tools` of
core/chat_template.py). Nothing here touches the ids of a sampled completion.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from core.chat_template import (
    QUESTION,
    TOOL,
    TOOL_CALL,
    end_of_turn_id,
    has_tool_format,
    opened_thought,
    parses_calls,
    render,
)
from core.context import Renderer
from core.types import Completion, Message
from environments.base import Env
from environments.plumbing import tools
from environments.plumbing.tools import (
    END_OF_THOUGHT,
    MAX_CALLS,
    OPENING,
    UNREADABLE_CALL,
    Call,
    ToolEnv,
    make_call,
    name_of,
)


class ToolRenderer(Renderer):
    """Plays also environments that have tools."""

    def prepare(self, env: Env) -> Env:
        return ToolEnv(env, partial(read_calls, self.policy.tokenizer)) if env.tools else env

    def demonstration(self, text: str) -> Completion:
        return super().demonstration(in_format_of(self.policy.tokenizer, text))


def read_calls(tokenizer: Tokenizer, text: str) -> list[Call]:
    """The calls of a completion, as `tools.read_calls`; none inside a thought."""
    opened = opened_thought(tokenizer)
    if opened and END_OF_THOUGHT not in opened + text:
        return []
    if not _reads_itself(tokenizer):
        return tools.read_calls(text)
    prompt = render(tokenizer, [QUESTION], tools=[TOOL])
    end = str(tokenizer.decode([end_of_turn_id(tokenizer)]))
    try:
        message: Any = tokenizer.parse_response(text + end, prefix=prompt)
        found = [call.get("function", call) for call in message.get("tool_calls") or []]
        calls = [make_call(call.get("name"), call.get("arguments")) for call in found]
    except Exception:  # of a text that does not have the format
        return [UNREADABLE_CALL]
    return calls[: MAX_CALLS + 1]


def in_format_of(tokenizer: Tokenizer, text: str) -> str:
    """A demonstration with the calls of `tools.call_text`, in the template's format."""
    calls = tools.read_calls(text)
    if not calls:
        return text
    if not has_tool_format(tokenizer):  # a call counts only after the thought of the prompt
        return text if read_calls(tokenizer, text) else f"{END_OF_THOUGHT}\n\n{text}"
    return calls_as_text(tokenizer, text.partition(OPENING)[0].strip(), calls)


def calls_as_text(tokenizer: Tokenizer, content: str, calls: Sequence[Call]) -> str:
    """What the template writes for an answer with calls, without the token that closes the turn."""
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    asked = [TOOL_CALL | {"function": function} for function in functions]
    answer: Message = {"role": "assistant", "content": content, "tool_calls": asked}
    text = render(tokenizer, [QUESTION, answer], open_turn=False, tools=[TOOL])
    prompt = render(tokenizer, [QUESTION], tools=[TOOL])
    end = str(tokenizer.decode([end_of_turn_id(tokenizer)]))
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt, strict=False))
    return text[len([*equal]) :].partition(end)[0].strip()


@lru_cache(maxsize=8)
def opening_of_calls(tokenizer: Tokenizer) -> str:
    """The text with which a call begins."""
    if not _reads_itself(tokenizer):
        return OPENING
    name = name_of(TOOL)
    return calls_as_text(tokenizer, "", [Call(name, {})]).partition(name)[0].split()[0]


def _reads_itself(tokenizer: Tokenizer) -> bool:
    return parses_calls(tokenizer) and has_tool_format(tokenizer)
