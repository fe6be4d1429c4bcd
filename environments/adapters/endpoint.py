"""An OpenAI-compatible endpoint on this machine: HTTP on one side, `Ask`s to answer on the other.

    POST /v1/chat/completions      with tools, n, stop, max_tokens, logprobs, stream
    POST /v1/responses             what the OpenAI Agents SDK asks by default
    GET  /v1/models

The API key names the session of a request: `Endpoint.open` makes a session with a key of its own,
and `Session.receive` returns what programs with that key wait for. The server's thread only reads
and writes HTTP; who answers is not its business. An answer is complete before any of it is sent, so
a stream has all its events at once. Errors have OpenAI's form and status.

Messages are normalized: dicts with a role, a content of text, `calls` [(id, name, arguments as JSON
text)] of an answer, the `call_id` that a result belongs to, and the `thought` of an answer.
"""

import asyncio
import json
import os
import queue
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any
from urllib.request import getproxies_environment

from jsonschema import Draft4Validator
from starlette.requests import Request
from starlette.responses import Response

from environments.plumbing.http_server import HOST, Server, TooLarge, read_body

Json = dict[str, Any]
OpenAICall = tuple[str, str, str]  # id, name, arguments as JSON text
MAX_BODY = 16_000_000  # bytes of a request
MAX_CHOICES = 128  # `n` of a request
LIMITS = "max_completion_tokens", "max_tokens", "max_output_tokens"
NUMBERS = "temperature top_p top_k min_p presence_penalty frequency_penalty".split()
OBJECTS = "response_format", "text", "stream_options"
WHOLE: dict[str, Any] = {"type": ["integer", "null"]}
REQUEST = Draft4Validator({"properties": {  # all but messages and tools; draft 4: 3.0 is no integer
    "n": WHOLE | {"minimum": 1, "maximum": MAX_CHOICES},
    "stop": {"type": ["string", "array", "null"], "items": {"type": "string"}},
    "seed": WHOLE, "top_logprobs": WHOLE,
    **{name: WHOLE | {"minimum": 1} for name in LIMITS},
    **{name: {"type": ["number", "null"], "minimum": -1e9, "maximum": 1e9} for name in NUMBERS},
    **{name: {"type": ["object", "null"]} for name in OBJECTS},
}})  # fmt: skip
# What the policy cannot do, and what to do instead
UNSUPPORTED = {
    "functions": "offer them as tools", "function_call": "use tools",
    "web_search_options": "offer a function that searches", "audio": "ask for text",
    "conversation": "send all messages", "prompt": "send the messages",
    "background": "wait for the answer",
}  # fmt: skip
PAUSE = 0.5  # seconds until an unknown key is refused: a program may ask on and on
FILES = 4096  # for programs: each has two sockets for a connection, and what it opens
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant",
         "tool": "tool"}  # fmt: skip


class Refused(Exception):
    """A request that gets an error in place of an answer."""

    def __init__(self, status: int, message: str, code: str = "invalid_request"):
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> Json:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return {"error": error}


@dataclass
class Choice:
    """One answer to a request. `tokens`: the log-prob of each sampled token, and its text, which is
    "" unless the request wants log-probs."""

    content: str
    finish_reason: str  # stop, length or tool_calls
    tokens: list[tuple[str, float]]
    calls: list[OpenAICall] = field(default_factory=list)
    thought: str = ""


@dataclass(eq=False)
class Ask:
    """A request while it is answered: `reply` or `refuse` ends it."""

    session: "Session"
    body: Json
    messages: list[Json]
    tools: list[Json]  # JSON schemas, in the form of chat completions
    is_response: bool = False  # of /v1/responses
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    outcome: Future[Json] = field(default_factory=Future)  # or Refused; cancelled: nobody waits

    @property
    def n(self) -> int:
        return 1 if self.is_response or self.body.get("n") is None else self.body["n"]

    @property
    def stop(self) -> list[str]:
        stop = self.body.get("stop") or []
        return [stop] if isinstance(stop, str) else stop

    @property
    def max_tokens(self) -> int | None:
        """The smallest limit that the request names."""
        limits = [self.body[name] for name in LIMITS if self.body.get(name) is not None]
        return min(limits, default=None)

    @property
    def schema(self) -> Json | None:
        """The JSON schema that the answer is to have."""
        text = self.body.get("text") or {}
        wanted: Json = self.body.get("response_format") or text.get("format") or {}
        return wanted.get("json_schema", wanted).get("schema")

    def is_waited_for(self) -> bool:
        """Whether the client still holds the connection."""
        return not self.outcome.cancelled()

    def reply(self, choices: list[Choice], num_prompt_tokens: int) -> None:
        """Sends the answer."""
        self.session.has_answer = True
        make = response_object if self.is_response else chat_completion
        answer = make(self, choices, num_prompt_tokens)
        if self.is_response:  # for `previous_response_id`
            message = {"role": "assistant", "content": choices[0].content, "call_id": "",
                       "calls": choices[0].calls, "thought": choices[0].thought}  # fmt: skip
            first = 1 if self.body.get("instructions") else 0  # they are of this request alone
            self.session.responses[answer["id"]] = [*self.messages[first:], message]
        with suppress(InvalidStateError):  # the client has hung up, or the episode has ended
            self.outcome.set_result(answer)

    def refuse(self, status: int, message: str, code: str) -> None:
        """Sends an error."""
        with suppress(InvalidStateError):
            self.outcome.set_exception(Refused(status, message, code))


class Session:
    """The requests with one API key. It ends with `close`; then the key is unknown."""

    def __init__(self, endpoint: "Endpoint", key: str):
        self.endpoint, self.key = endpoint, key
        self.inbox = queue.SimpleQueue[Ask | None]()
        self.waiting = set[Ask]()  # for their answer
        self.responses: dict[str, list[Json]] = {}  # conversations, by the id of their last answer
        self.has_asked = self.has_answer = False  # whether a request came, and was answered
        self.refusals: list[str] = []  # why requests were refused

    @property
    def is_open(self) -> bool:
        return self.key in self.endpoint.sessions

    def receive(self, timeout: float) -> list[Ask] | None:
        """What has been asked, after at most `timeout` seconds; None after `end`."""
        found: list[Ask] = []
        with suppress(queue.Empty):
            while True:
                ask = self.inbox.get(timeout=0 if found else timeout)
                if ask is None:
                    return None
                found.append(ask)
        return found

    def end(self) -> None:
        """Lets `receive` return None: nobody will ask any more."""
        self.inbox.put(None)

    def close(self) -> None:
        """Makes the key invalid, and refuses what is still waiting."""
        self.endpoint.sessions.pop(self.key, None)
        for ask in [*self.waiting]:
            if not ask.outcome.done():
                ask.refuse(401, "the episode of this API key has ended", "episode_ended")


class Endpoint:
    """The server. `any_key`: all requests are of one session, whatever their key; `host`: the
    address of this machine on which it listens."""

    def __init__(self, port: int = 0, any_key: bool = False, host: str = HOST):
        """Raises OSError if the port is taken, or the address is none of this machine."""
        self.sessions: dict[str, Session] = {}
        self.only = self.open() if any_key else None
        self.server = Server(self.respond, host, port)
        self.url = f"http://{host}:{self.server.address[1]}/v1"

    def open(self) -> Session:
        """A session with a key of its own."""
        session = Session(self, f"sk-{secrets.token_hex(16)}")
        self.sessions[session.key] = session
        return session

    async def respond(self, request: Request) -> Response:
        """Answers a request."""
        session = None
        try:
            session = await self.session_of(request)
            return await response_to(session, request)
        except Refused as error:
            refused = error
        except RecursionError:
            refused = Refused(400, "the request is nested too deeply")
        if session is not None:
            session.refusals.append(str(refused))
        return json_response(refused.body(), refused.status)

    async def session_of(self, request: Request) -> Session:
        """The session of a request. Raises Refused for an unknown key, such as that of an episode
        that has ended, and for a page in a browser."""
        if request.headers.get("origin"):
            raise Refused(403, "web pages may not ask", "forbidden")
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        session = self.only or self.sessions.get(key or request.headers.get("api-key", ""))
        if session is None:
            await asyncio.sleep(PAUSE)
            raise Refused(401, "this API key is that of no running episode", "invalid_api_key")
        return session

    def close(self) -> None:
        """Stops listening, and refuses what is still waiting."""
        self.server.close()


@cache
def shared(host: str = HOST) -> Endpoint:
    """The endpoint of this process on a host, whose sessions are episodes. Raises OSError."""
    raise_limit_of_files()
    endpoint = Endpoint(host=host)
    if getproxies_environment():  # no proxy reaches it, that of a command or subprocess neither
        lower, upper = (os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY"))
        for name, hosts in (("no_proxy", lower or upper), ("NO_PROXY", upper or lower)):
            is_listed = {"*", host} & set(hosts.replace(" ", "").split(","))
            os.environ[name] = hosts if is_listed else f"{hosts},{host}".lstrip(",")
    return endpoint


def raise_limit_of_files() -> None:
    """Lets this process open `FILES` files and sockets, or what it may: macOS begins with 256."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


# Requests


def read_ask(session: Session, path: str, body: Json) -> Ask:
    """The request in normal form. Raises Refused if it has none."""
    try:
        if path.endswith("/chat/completions"):
            messages = [message_of_chat(m) for m in body.get("messages") or []]
            tools = [*(body.get("tools") or [])]
        else:
            messages, tools = conversation_of_responses(session, body), tools_of_responses(body)
        ask = Ask(session, body, in_order_of_calls(messages), tools, path.endswith("/responses"))
        for name, instead in UNSUPPORTED.items():
            if body.get(name):
                raise TypeError(f"{name} is not supported: {instead}")
        for tool in tools:
            if tool["type"] != "function":
                raise TypeError(f"a tool of the type {tool['type']!r:.40}: the policy can call "
                                "functions only")  # fmt: skip
            if not isinstance(tool["function"]["name"], str):
                raise TypeError("a tool needs a name")
            tool["function"].setdefault("description", "")
            tool["function"].setdefault("parameters", {"type": "object", "properties": {}})
        if not messages:
            raise TypeError("there are no messages")
        for wrong in REQUEST.iter_errors(body):
            raise TypeError(f"{'.'.join(map(str, wrong.path))}: {wrong.message}")
        if not isinstance(ask.schema or {}, dict):
            raise TypeError("a JSON schema must be an object")
    except (TypeError, LookupError, AttributeError, ValueError, RecursionError) as error:
        kind = "" if type(error) is TypeError else f"{type(error).__name__}: "
        raise Refused(400, f"{kind}{error}"[:300]) from None
    return ask


def float_of_json(text: str) -> float:
    """Raises ValueError for NaN and Infinity, which are not JSON."""
    raise ValueError(f"{text} is not JSON")


def message_of_chat(message: Json) -> Json:
    """A message of chat completions. Raises TypeError if it is none of text."""
    role = ROLES.get(message.get("role", ""))
    if role is None:
        raise TypeError(f"a message with the role {message.get('role')!r:.40}")
    if message.get("function_call"):
        raise TypeError(f"function_call is not supported: {UNSUPPORTED['function_call']}")
    calls = [call_of(c.get("id"), **c["function"]) for c in message.get("tool_calls") or []]
    thought = message.get("reasoning_content") or ""
    return {"role": role, "content": text_of(message.get("content")), "calls": calls,
            "call_id": id_of(message.get("tool_call_id")), "thought": thought}  # fmt: skip


def call_of(call_id: Any, name: str, arguments: Any = None, **others: Any) -> OpenAICall:
    """A call, whose arguments may be an object in place of its text."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return id_of(call_id), name, text or "{}"


def id_of(value: Any) -> str:
    """As text: numbers can be chosen so that a dict of them takes quadratic time."""
    return "" if value is None else f"{value}"


def text_of(content: Any) -> str:
    """The text of a content, which may be a list of parts."""
    if isinstance(content, list):
        parts = [{"text": part} if isinstance(part, str) else part for part in content]
        if not all("text" in part or "refusal" in part for part in parts):
            raise TypeError("only contents of text are supported")
        content = "".join(part.get("text") or part.get("refusal") or "" for part in parts)
    if not isinstance(content or "", str):
        raise TypeError("only contents of text are supported")
    return content or ""


def conversation_of_responses(session: Session, body: Json) -> list[Json]:
    """The messages of a request of the Responses API."""
    messages: list[Json] = []
    if previous := body.get("previous_response_id"):
        if previous not in session.responses:
            raise TypeError(f"there is no response {previous!r:.60}")
        messages = [*session.responses[previous]]
    if body.get("instructions"):
        messages.insert(0, message_of_chat({"role": "system", "content": body["instructions"]}))
    items = body.get("input") or []
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    for item in items:
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        answer = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "message" and item.get("role") == "assistant" and answer and answer["calls"]:
            answer["content"] += text_of(item.get("content"))
        elif kind == "message":
            messages.append(
                message_of_chat({"role": item.get("role"), "content": item.get("content")})
            )
        elif kind == "function_call":  # of the answer before it, which may have no text
            if answer is None:
                messages.append(answer := message_of_chat({"role": "assistant"}))
            answer["calls"].append(call_of(item["call_id"], item["name"], item.get("arguments")))
        elif kind == "function_call_output":
            result = message_of_chat({"role": "tool", "content": item.get("output")})
            messages.append(result | {"call_id": id_of(item["call_id"])})
        elif kind == "item_reference":
            raise TypeError("an item_reference is not supported: send the item itself, or continue "
                            "a response by previous_response_id")  # fmt: skip
        elif kind != "reasoning":
            raise TypeError(f"an item of the type {kind!r:.40}")
    return messages


def tools_of_responses(body: Json) -> list[Json]:
    """The tools of a request of the Responses API, in the form of chat completions."""
    return [{"type": tool["type"], "function": {k: v for k, v in tool.items() if k != "type"}}
            for tool in body.get("tools") or []]  # fmt: skip


def in_order_of_calls(messages: list[Json]) -> list[Json]:
    """The messages, with the results of an answer's calls in the order of these calls."""
    ordered: list[Json] = []
    place: dict[str, int] = {}
    for is_result, group in groupby(messages, lambda m: m["role"] == "tool"):
        found = [*group]
        if is_result:
            found.sort(key=lambda m: place.get(m["call_id"], len(place)))
        for answer in (m for m in found if m["role"] == "assistant"):
            place = {call_id: i for i, (call_id, _, _) in enumerate(answer["calls"])}
        ordered += found
    return ordered


# Answers


def chat_completion(ask: Ask, choices: list[Choice], num_prompt_tokens: int) -> Json:
    """The answer in the form of chat completions."""
    found = []
    for index, choice in enumerate(choices):
        message: Json = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.thought:
            message["reasoning_content"] = choice.thought
        if choice.calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, name, arguments in choice.calls
            ]
        logprobs = None
        if ask.body.get("logprobs"):
            logprobs = {"refusal": None, "content": [
                {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
                for text, logprob in choice.tokens]}  # fmt: skip
        found.append({"index": index, "message": message, "logprobs": logprobs,
                      "finish_reason": choice.finish_reason})  # fmt: skip
    count = sum(len(choice.tokens) for choice in choices)
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": count,
             "total_tokens": num_prompt_tokens + count}  # fmt: skip
    return {"id": f"chatcmpl-{ask.id}", "object": "chat.completion", "created": int(time.time()),
            "model": model_of(ask), "choices": found, "usage": usage}  # fmt: skip


def response_object(ask: Ask, choices: list[Choice], num_prompt_tokens: int) -> Json:
    """The answer in the form of the Responses API."""
    [choice], output = choices, list[Json]()
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    if choice.content or not choice.calls:
        part = {"type": "output_text", "text": choice.content, "annotations": [], "logprobs": []}
        output.append({"type": "message", "id": f"msg_{ask.id}", "role": "assistant",
                       "status": status, "content": [part]})  # fmt: skip
    for i, (call_id, name, arguments) in enumerate(choice.calls):
        output.append({"type": "function_call", "id": f"fc_{ask.id}{i}", "call_id": call_id,
                       "name": name, "arguments": arguments, "status": "completed"})  # fmt: skip
    count, body = len(choice.tokens), ask.body
    usage = {"input_tokens": num_prompt_tokens, "output_tokens": count,
             "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
             "output_tokens_details": {"reasoning_tokens": 0},
             "total_tokens": num_prompt_tokens + count}  # fmt: skip
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {"id": f"resp_{ask.id}", "object": "response", "created_at": int(time.time()),
            "status": status, "model": model_of(ask), "output": output, "usage": usage,
            "error": None, "incomplete_details": incomplete, "metadata": {},
            "instructions": body.get("instructions"), "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto", "parallel_tool_calls": True,
            "temperature": body.get("temperature"), "top_p": body.get("top_p"),
            "previous_response_id": body.get("previous_response_id")}  # fmt: skip


def model_of(ask: Ask) -> str:
    return f"{ask.body.get('model') or 'picorl'}"


def chat_chunks(answer: Json, with_usage: bool) -> Iterator[Json]:
    """A complete answer as the chunks of a stream."""
    base = {key: answer[key] for key in ("id", "created", "model")}
    base["object"] = "chat.completion.chunk"
    for choice in answer["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i} | c for i, c in enumerate(delta["tool_calls"])]
        for part, logprobs, reason in ((delta, choice["logprobs"], None),
                                       ({}, None, choice["finish_reason"])):  # fmt: skip
            made = {"index": choice["index"], "delta": part, "logprobs": logprobs}
            yield base | {"choices": [made | {"finish_reason": reason}]}
    if with_usage:
        yield base | {"choices": [], "usage": answer["usage"]}


def response_events(answer: Json) -> Iterator[Json]:
    """A complete answer as the events of a stream of the Responses API."""
    begun = answer | {"status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(answer["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        opened: Json = {"content": []} if item["type"] == "message" else {"arguments": ""}
        opened["status"] = "in_progress"
        yield {"type": "response.output_item.added", "output_index": index, "item": item | opened}
        if item["type"] == "message":
            [part] = item["content"]
            kind, place = "response.output_text", place | {"content_index": 0}
            yield {"type": "response.content_part.added", "part": part | {"text": ""}} | place
            yield {"type": f"{kind}.delta", "delta": part["text"], "logprobs": []} | place
            yield {"type": f"{kind}.done", "text": part["text"], "logprobs": []} | place
            yield {"type": "response.content_part.done", "part": part} | place
        else:
            kind, text = "response.function_call_arguments", item["arguments"]
            yield {"type": f"{kind}.delta", "delta": text} | place
            yield {"type": f"{kind}.done", "arguments": text, "name": item["name"]} | place
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{answer['status']}", "response": answer}


# HTTP


async def response_to(session: Session, request: Request) -> Response:
    """The response to a request of a session. Raises Refused."""
    path, method = request.scope["path"].rstrip("/"), request.method
    if path.startswith("/v1/deployments/") and path.endswith("/chat/completions"):
        path = "/v1/chat/completions"  # Azure's client names the model there
    if method == "GET" and path.startswith("/v1/models"):
        model = {"id": "picorl", "object": "model", "created": 0, "owned_by": "picorl"}
        is_list = path == "/v1/models"
        return json_response({"object": "list", "data": [model]} if is_list else model)
    if method not in ("GET", "POST"):
        raise Refused(405, f"{method:.10} is not supported: use GET or POST", "method_not_allowed")
    session.has_asked |= method == "POST"
    if method == "GET" or path not in ("/v1/chat/completions", "/v1/responses"):
        raise Refused(404, f"{path:.60}: there is no such address", "not_found")
    try:
        body = json.loads(await read_body(request, MAX_BODY), parse_constant=float_of_json)
    except TooLarge as error:
        raise Refused(413, str(error)) from None
    except ValueError:
        raise Refused(400, "the request is not JSON") from None
    if not isinstance(body, dict):
        raise Refused(400, "the request is not a JSON object")
    answer = await answered(read_ask(session, path, body))
    if not body.get("stream"):
        return json_response(answer)
    if path == "/v1/responses":
        events = [e | {"sequence_number": i} for i, e in enumerate(response_events(answer))]
        texts = [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events]
    else:
        options = body.get("stream_options") or {}
        chunks = chat_chunks(answer, bool(options.get("include_usage")))
        texts = [*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]
    return Response("".join(texts), headers={"content-type": "text/event-stream"})


async def answered(ask: Ask) -> Json:
    """The answer, once it is there. Raises Refused if there will be none, and CancelledError, which
    cancels the request, if the client hangs up."""
    session = ask.session
    session.waiting.add(ask)
    try:
        if not session.is_open:
            raise Refused(401, "the episode of this API key has ended", "episode_ended")
        session.inbox.put(ask)
        return await asyncio.wrap_future(ask.outcome)
    except asyncio.CancelledError:
        session.refusals.append("the client hung up")
        raise
    finally:
        session.waiting.discard(ask)


def json_response(value: Json, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")
