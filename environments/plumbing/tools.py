"""Tools: functions of an environment that a policy may call before it answers.

An environment lists them in `Env.tools`. Their type hints and Google-style docstrings become the
JSON schemas that the policy reads in its prompt (transformers' `get_json_schema`). A response with
calls is not passed to `Env.step`: the functions run, and their results are the next messages, with
the role "tool" and the reward 0. They run within the time limit of a step, all calls of a response
together; `async` functions are awaited. Text after the last </think> counts; a call that the policy
only thinks about does not.

>>> read_calls('First <tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>')
[Call(name='add', arguments={'a': 2, 'b': 3})]
>>> call_text("add", a=2, b=3)
'<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'

This is the format of Hermes and Qwen. core/chat_template.py rewrites the calls of models with a
format of their own, and tells all others to use this one.
"""

import copy
import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, get_args, get_type_hints

from jsonschema import Draft4Validator  # of this draft, as 3.0 is no integer in it

from environments.base import (
    PLAYER,
    Env,
    EnvFailure,
    Message,
    MultiAgentEnv,
    Response,
    SingleAgentEnv,
    Step,
    UsageError,
    as_multi,
    checked_step,
)
from environments.plumbing import event_loop
from environments.plumbing.options import read_literal

OPENING, CLOSING = "<tool_call>", "</tool_call>"
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
MAX_RESULT = 10_000  # characters; the rest is cut off


class Call(NamedTuple):
    """One call of a response."""

    name: str
    arguments: dict[str, Any]


UNREADABLE = Call("", {})
ReadCalls = Callable[[str], list[Call]]  # the calls of a response, in their order


@dataclass(frozen=True)
class ToolStep(Step):
    """The results of a response's calls: `message` is the last one, `earlier` the others."""

    earlier: tuple[Message, ...] = ()

    @property
    def messages(self) -> list[Message]:
        return [*self.earlier, *super().messages]


def schemas(env: Any) -> list[dict[str, Any]]:
    """The JSON schemas of the tools of an environment. Raises UsageError for an unusable tool."""
    tools = getattr(env, "tools", ())
    if not tools:
        return []
    if not isinstance(tools, list | tuple):
        raise UsageError(f"tools must be a list of functions, not {tools!r:.100}")
    from transformers.utils import get_json_schema  # takes a second

    tool_schemas: list[dict[str, Any]] = []
    for tool in tools:
        name = getattr(tool, "__name__", repr(tool))
        try:
            schema = get_json_schema(tool)
            signature = inspect.signature(tool)
            signature.bind(**parameters_of(schema))  # as a call does, by name
            if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
                raise TypeError("name each argument in place of **")
            hints = get_type_hints(tool)
            if any(_is_enum(hint) for key, hint in hints.items() if key != "return"):
                raise TypeError("an argument with an Enum would get a text: write Literal")
        except Exception as error:
            reason = " ".join(str(error).split())
            needs = "type hints, a docstring with Args:, and arguments with names"
            raise UsageError(f"the tool {name} needs {needs}: {reason}"[:500]) from error
        if name_of(schema) in map(name_of, tool_schemas):
            raise UsageError(f"two tools have the name {name}")
        tool_schemas.append(schema)
    return tool_schemas


def name_of(schema: dict[str, Any]) -> str:
    """The name of the function that a schema describes."""
    return schema["function"]["name"]


def parameters_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The schemas of the parameters, by name."""
    return schema["function"]["parameters"].get("properties", {})


def lines_about(env: Any) -> list[str]:
    """One line for each tool: how a person calls it, and what it does."""
    lines = []
    for schema in schemas(env):
        call = call_text(name_of(schema), **dict.fromkeys(parameters_of(schema), ".."))
        lines.append(f"{call}: {' '.join(schema['function'].get('description', '').split())}")
    return lines


def call_text(name: str, /, **arguments: Any) -> str:
    """A call as text, for demonstrations; picoRL rewrites it in the format of the chat template."""
    call = {"name": name, "arguments": arguments}
    return f"{OPENING}{json.dumps(call, ensure_ascii=False)}{CLOSING}"


def read_calls(text: str) -> list[Call]:
    """The calls of a response in the format of this module, up to the first unreadable one."""
    calls, rest = list[Call](), after_thoughts(text)
    while OPENING in rest:
        rest = rest.partition(OPENING)[2].lstrip()
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
            calls.append(make_call(**value))
        except (TypeError, ValueError, RecursionError):
            return [*calls, UNREADABLE]
        rest = rest[end:]
    return calls


def after_thoughts(text: str) -> str:
    """The text after the last thought; empty if a thought is not closed.

    >>> [after_thoughts(text) for text in ("<think>a</think>b", "a</think>b", "a<think>b")]
    ['b', 'b', 'a']
    """
    return text.rpartition(END_OF_THOUGHT)[2].partition(THOUGHT)[0]


def make_call(name: Any, arguments: Any = None, **_: Any) -> Call:
    """Makes a call of values read from JSON; arguments may also be a text of JSON. Raises TypeError
    or ValueError for other values."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    elif not arguments:
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise TypeError("a call has a name and arguments")
    return Call(name, arguments)


def as_message(response: str, calls: list[Call]) -> Message:
    """A response in OpenAI's form, without its thought: the text before the calls, and these."""
    thought, _, content = response.rpartition(END_OF_THOUGHT)
    message: Any = {"role": "assistant", "content": content.partition(OPENING)[0].strip()}
    if thought:
        message["reasoning_content"] = thought.rpartition(THOUGHT)[2].strip()
    if calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        message["tool_calls"] = [{"type": "function", "function": f} for f in functions]
    return message


def convert_arguments(call: Call, schemas: list[dict[str, Any]]) -> Call:
    """The call with a text read as JSON, where its tool takes a number or a list: "3" as 3."""
    by_tool = {name_of(schema): parameters_of(schema) for schema in schemas}
    parameters = by_tool.get(call.name, {})
    arguments = dict(call.arguments)
    for key in arguments.keys() & parameters.keys():
        is_valid, text = Draft4Validator(parameters[key]).is_valid, arguments[key]
        if isinstance(text, str) and not is_valid(text):
            with suppress(RecursionError):
                value = read_literal(text)
                arguments[key] = value if is_valid(value) else text
    return Call(call.name, arguments)


def call_tool(tools: Any, schemas: list[dict[str, Any]], call: Call) -> str:
    """Calls a tool and returns its result as text; "error: .." for an invalid call or an exception.

    EnvFailure passes through and fails the episode, as does a result whose text has an address.
    """
    names = [*map(name_of, schemas)]
    if call == UNREADABLE:
        return "error: the call cannot be read; it needs a name and arguments"
    if call.name not in names:
        return f"error: there is no tool {call.name[:100]!r}; there are {', '.join(names)}"
    index = names.index(call.name)
    parameters = schemas[index]["function"]["parameters"] | {"additionalProperties": False}
    try:
        for problem in Draft4Validator(parameters).iter_errors(call.arguments):
            if problem.instance is not None or not problem.schema.get("nullable"):  # `| None`
                path = ".".join(map(str, [call.name, *problem.path]))
                return f"error: {path}: {problem.message}"[:MAX_RESULT]
        result = tools[index](**copy.deepcopy(call.arguments))  # it may change them
        if inspect.isawaitable(result):
            result = event_loop.wait_for(result)
        text = str(result)
    except EnvFailure:
        raise
    except (Exception, SystemExit) as error:
        return f"error: {type(error).__name__}: {error}"[:MAX_RESULT]
    if not isinstance(result, str) and " at 0x" in text:  # no policy can learn from an address
        raise EnvFailure(f"a tool returned {text[:80]}, which has no text: return one")
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]}.. (cut)"


class ToolEnv(SingleAgentEnv):
    """Runs the calls of a response, or passes a response without calls to the environment.

    The info of each step has the number of calls so far, `tool_calls`, and of those that were
    refused or raised, `tool_errors`.
    """

    def __init__(self, env: Env, read_calls: ReadCalls = read_calls):
        """`read_calls`: finds the calls in a response. Raises UsageError as `schemas` does."""
        super().__init__(env)
        self.read_calls, self.schemas = read_calls, schemas(env)
        self.waits |= any(map(inspect.iscoroutinefunction, env.tools))

    def reset(self, seed: int) -> dict[str, list[Message]]:
        self.counts = {"tool_calls": 0, "tool_errors": 0}
        self.earlier: list[Any] = []  # responses with calls, and their results
        self.response = Response()  # the last one
        self.info: dict[str, Any] = {"correct": False}
        return super().reset(seed)

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        """Runs the calls of the response; passes one without a call to the environment."""
        response = responses[PLAYER]
        calls = [convert_arguments(call, self.schemas) for call in self.read_calls(response)]
        self.response = Response(response)
        self.response.token_ids = getattr(response, "token_ids", ())
        self.response.earlier = [*self.earlier]
        self.response.message = as_message(response, calls)
        if not calls:
            step = checked_step(self.env.step(self.response), PLAYER, is_single=True)
            self.info = step.info or self.info
            return {PLAYER: replace(step, info=self.info | self.counts)}
        last_step = self.step_when_cut() if getattr(response, "is_last", False) else {}
        if last_step:
            return last_step
        results, named_results = list[Message](), list[Any]()
        for call in calls:
            text = call_tool(self.tools, self.schemas, call)
            self.counts["tool_calls"] += 1
            self.counts["tool_errors"] += text.startswith("error: ")
            results.append({"role": "tool", "content": text})
            named_results.append({**results[-1], "name": call.name})
        self.earlier += [self.response.message, *named_results]
        info = self.info | self.counts
        return {PLAYER: ToolStep(results[-1], 0.0, False, info, earlier=tuple(results[:-1]))}

    def step_when_cut(self) -> dict[str, Step]:
        """The last step of an episode that is cut off after calls, which then do not run; {} unless
        the environment `judges_calls`."""
        if not getattr(self.env, "judges_calls", False):
            return {}
        step = self.env.step(self.response)
        return {PLAYER: replace(step, info=step.info | self.counts, truncated=True)}


def with_tools(env: Env | MultiAgentEnv, read_calls: ReadCalls = read_calls) -> MultiAgentEnv:
    """As `as_multi`, and runs the calls of the environment's tools."""
    if isinstance(env, Env) and env.tools:
        return ToolEnv(env, read_calls)
    return as_multi(env)


def _is_enum(hint: Any) -> bool:
    is_enum = isinstance(hint, type) and issubclass(hint, Enum)
    return is_enum or any(map(_is_enum, get_args(hint)))
