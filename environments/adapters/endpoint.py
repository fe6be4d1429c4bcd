"""An OpenAI-compatible endpoint on this machine: HTTP on one side, `Ask`s to answer on the other.

    POST /v1/chat/completions      with tools, n, stop, max_tokens, logprobs, stream
    POST /v1/responses             what the OpenAI Agents SDK asks by default
    GET  /v1/models

The API key names the session of a request: `Endpoint.open` makes a session with a key of its own,
and `Session.receive` returns what programs with that key wait for. The server's thread only reads
and writes HTTP; who answers is not its business. An answer is complete before any of it is sent, so
a stream is one chunk. Errors have OpenAI's form and status.

Messages are normalized: dicts with a role, a content of text, `calls` [(id, name, arguments as JSON
text)] of an answer, the `call_id` that a result belongs to, and the `thought` of an answer. The
Responses API is translated to chat completions, and their answers to its own.
"""

import asyncio
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import Response

HOST = "127.0.0.1"
Json = dict[str, Any]
OpenAICall = tuple[str, str, str]  # id, name, arguments as JSON text
MAX_CHOICES = 128  # `n` of a request
FILES = 4096  # for programs: each has two sockets for a connection, and what it opens
LIMITS = "max_completion_tokens", "max_tokens", "max_output_tokens"
# What the policy cannot do
UNSUPPORTED = {"functions", "function_call", "audio", "conversation", "prompt", "background"}
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant",
         "tool": "tool"}  # fmt: skip


class Refused(Exception):
    """A request that gets an error in place of an answer."""

    def __init__(self, status: int, message: str, code: str = "invalid_request"):
        super().__init__(message)
        self.status, self.code = status, code


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
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    outcome: Future[Json] = field(default_factory=Future)  # a chat completion, or Refused

    def __post_init__(self) -> None:
        stop, body = self.body.get("stop") or [], self.body
        self.n = int(body.get("n") or 1)
        self.stop = [f"{text}" for text in ([stop] if isinstance(stop, str) else stop) if text]
        # the smallest limit that the request names
        limits = [int(body[name]) for name in LIMITS if body.get(name) is not None]
        self.max_tokens: int | None = min(limits, default=None)
        text = body.get("text") or {}
        wanted: Json = body.get("response_format") or text.get("format") or {}
        # the JSON schema that the answer is to have
        self.schema: Json | None = wanted.get("json_schema", wanted).get("schema")
        if not 1 <= self.n <= MAX_CHOICES or min(limits, default=1) < 1:
            raise ValueError(f"n is from 1 to {MAX_CHOICES}, and a limit of tokens at least 1")
        if not isinstance(self.schema or {}, dict):
            raise TypeError("a JSON schema must be an object")

    def reply(self, choices: list[Choice], num_prompt_tokens: int) -> None:
        """Sends the answer."""
        self.session.has_answer = True
        with suppress(InvalidStateError):  # the episode has ended
            self.outcome.set_result(chat_completion(self, choices, num_prompt_tokens))

    def refuse(self, status: int, message: str, code: str = "invalid_request") -> None:
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
        self.has_answer = False  # whether a request was answered
        self.code = 0  # with which the program ended
        self.refusals: list[str] = []  # why requests were refused

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

    def end(self, code: int) -> None:
        """Lets `receive` return None: the program has ended."""
        self.code = code
        self.inbox.put(None)

    def close(self) -> None:
        """Makes the key invalid, and refuses what is still waiting."""
        self.endpoint.sessions.pop(self.key, None)
        for ask in [*self.waiting]:
            ask.refuse(401, "the episode of this API key has ended", "episode_ended")


class Endpoint:
    """The server, in a thread. `host`: the address of this machine on which it listens."""

    def __init__(self, host: str = HOST):
        """Raises OSError if the address is none of this machine."""
        self.sessions: dict[str, Session] = {}
        listener = socket.create_server((host, 0))
        # its connections inherit it; else the body of each answer waits for 40 ms
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host, self.url = host, f"http://{host}:{listener.getsockname()[1]}/v1"

        async def app(scope: Any, receive: Any, send: Any) -> None:
            response = await self.respond(Request(scope, receive))
            await response(scope, receive, send)

        # Mistakes of ours alone are shown: the terminal belongs to the run
        self.server = uvicorn.Server(uvicorn.Config(
            app, loop="asyncio", ws="none", lifespan="off", interface="asgi3", log_config=None,
            log_level="error", access_log=False, timeout_keep_alive=600,
        ))  # fmt: skip
        threading.Thread(target=self.server.run, args=([listener],), daemon=True).start()

    def open(self) -> Session:
        """A session with a key of its own."""
        session = Session(self, f"sk-{secrets.token_hex(16)}")
        self.sessions[session.key] = session
        return session

    async def respond(self, request: Request) -> Response:
        """Answers a request."""
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        session = self.sessions.get(key)
        try:
            if session is None:
                raise Refused(401, "this API key is that of no running episode", "invalid_api_key")
            return await response_to(session, request)
        except Refused as error:
            if session is not None:
                session.refusals.append(str(error))
            body = {"message": str(error), "type": "invalid_request_error", "code": error.code}
            return json_response({"error": body}, error.status)


@cache
def shared(host: str = HOST) -> Endpoint:
    """The endpoint of this process on a host, whose sessions are episodes. Raises OSError."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < FILES:  # macOS begins with 256
            resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    return Endpoint(host)


async def response_to(session: Session, request: Request) -> Response:
    """The response to a request of a session. Raises Refused."""
    path = request.scope["path"].rstrip("/")
    if path == "/v1/models":
        model = {"id": "picorl", "object": "model", "created": 0, "owned_by": "picorl"}
        return json_response({"object": "list", "data": [model]})
    if request.method != "POST" or path not in ("/v1/chat/completions", "/v1/responses"):
        raise Refused(404, f"{path:.60}: there is no such address", "not_found")
    is_response = path == "/v1/responses"
    try:
        body = json.loads(await request.body())
        ask = read_ask(session, messages_of_response(session, body) if is_response else body)
    except (TypeError, LookupError, AttributeError, ValueError) as error:
        kind = "" if type(error) is TypeError else f"{type(error).__name__}: "
        raise Refused(400, f"{kind}{error}"[:300]) from None
    answer = await answered(ask)
    if is_response:
        session.responses[answer["id"]] = [*ask.body["kept"], answer["choices"][0]["message"]]
        answer = response_object(body, answer)
    if not body.get("stream"):
        return json_response(answer)
    if is_response:
        events = [{"type": f"response.{kind}", "sequence_number": i} | fields
                  for i, (kind, fields) in enumerate(response_events(answer))]  # fmt: skip
        texts = [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events]
    else:
        texts = [f"data: {json.dumps(chat_chunk(answer))}\n\n", "data: [DONE]\n\n"]
    return Response("".join(texts), headers={"content-type": "text/event-stream"})


def json_response(value: Json, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")


async def answered(ask: Ask) -> Json:
    """The chat completion, once it is there. Raises Refused if there will be none."""
    session = ask.session
    session.waiting.add(ask)
    try:
        if session.key not in session.endpoint.sessions:
            raise Refused(401, "the episode of this API key has ended", "episode_ended")
        session.inbox.put(ask)
        return await asyncio.wrap_future(ask.outcome)
    finally:
        session.waiting.discard(ask)


# Chat completions


def read_ask(session: Session, body: Json) -> Ask:
    """A request of chat completions in normal form. Raises what Python raises if it has none."""
    if wrong := [name for name in UNSUPPORTED if body.get(name)]:
        raise TypeError(f"{min(wrong)} is not supported")
    tools: list[Json] = [*(body.get("tools") or [])]
    for tool in tools:
        if tool["type"] != "function":
            raise TypeError(f"a tool of the type {tool['type']!r:.40}: the policy can call "
                            "functions only")  # fmt: skip
        tool["function"].setdefault("description", "")
        tool["function"].setdefault("parameters", {"type": "object", "properties": {}})
    messages = [message_of(message) for message in body.get("messages") or []]
    if not messages:
        raise TypeError("there are no messages")
    return Ask(session, body, in_order_of_calls(messages), tools)


def message_of(message: Json) -> Json:
    """A message in normal form. Raises TypeError if it is none of text."""
    role = ROLES.get(message.get("role", ""))
    if role is None or message.get("function_call"):
        raise TypeError(f"a message with the role {message.get('role')!r:.40}, or a function_call")
    calls = [call_of(c.get("id"), **c["function"]) for c in message.get("tool_calls") or []]
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [content]
    texts: list[Any] = [
        p.get("text", p.get("refusal")) if isinstance(p, dict) else p for p in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("only contents of text are supported")
    return {"role": role, "content": "".join(texts), "calls": calls,
            "call_id": f"{message.get('tool_call_id') or ''}",
            "thought": message.get("reasoning_content") or ""}  # fmt: skip


def call_of(call_id: Any, name: str, arguments: Any = None, **others: Any) -> OpenAICall:
    """A call, whose arguments may be an object in place of its text."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return f"{call_id or ''}", name, text or "{}"


def in_order_of_calls(messages: list[Json]) -> list[Json]:
    """The messages, with the results of an answer's calls in the order of these calls."""
    ordered: list[Json] = []
    place = {call_id: i for m in messages for i, (call_id, _, _) in enumerate(m["calls"])}
    for is_result, group in groupby(messages, lambda m: m["role"] == "tool"):
        found = [*group]
        ordered += sorted(found, key=lambda m: place.get(m["call_id"], 0)) if is_result else found
    return ordered


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
            "model": f"{ask.body.get('model') or 'picorl'}", "choices": found,
            "usage": usage}  # fmt: skip


def chat_chunk(answer: Json) -> Json:
    """A complete answer as the one chunk of a stream."""
    choices = []
    for choice in answer["choices"]:
        delta = dict(choice["message"])
        calls = [{"index": i} | call for i, call in enumerate(delta.pop("tool_calls", []))]
        delta |= {"tool_calls": calls} if calls else {}
        rest = {key: choice[key] for key in ("index", "logprobs", "finish_reason")}
        choices.append(rest | {"delta": delta})
    return answer | {"object": "chat.completion.chunk", "choices": choices}


# The Responses API


def messages_of_response(session: Session, body: Json) -> Json:
    """A request of the Responses API as one of chat completions. `kept`: the messages without the
    instructions, which are of this request alone."""
    previous = body.get("previous_response_id") or ""
    messages = [dict(m) for m in session.responses.get(previous, [])]
    if previous and not messages:
        raise TypeError(f"there is no response {previous!r:.60}")
    items = body.get("input") or []
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":  # of the answer before it, which may have no text
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            function = {"name": item["name"], "arguments": item.get("arguments")}
            call = {"id": item["call_id"], "function": function}
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", []), call]
        elif kind == "function_call_output":
            output, call_id = item.get("output"), item["call_id"]
            messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
        elif kind != "reasoning":
            raise TypeError(f"an item of the type {kind!r:.40} is not supported")
    tools = [{"type": tool["type"], "function": {k: v for k, v in tool.items() if k != "type"}}
             for tool in body.get("tools") or []]  # fmt: skip
    told = body.get("instructions")
    system = [{"role": "system", "content": told}] if told else []
    return body | {"messages": system + messages, "kept": messages, "tools": tools, "n": 1}


def response_object(body: Json, answer: Json) -> Json:
    """An answer in the form of the Responses API."""
    [choice], output = answer["choices"], list[Json]()
    text, calls = choice["message"]["content"], choice["message"].get("tool_calls", [])
    status = "incomplete" if choice["finish_reason"] == "length" else "completed"
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        output.append({"type": "message", "id": f"msg_{answer['id']}", "role": "assistant",
                       "status": status, "content": [part]})  # fmt: skip
    for call in calls:
        output.append({"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"],
                       "status": "completed"} | call["function"])  # fmt: skip
    counts = answer["usage"]
    usage = {"input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"],
             "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
             "output_tokens_details": {"reasoning_tokens": 0},
             "total_tokens": counts["total_tokens"]}  # fmt: skip
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {"id": answer["id"], "object": "response", "created_at": answer["created"],
            "status": status, "incomplete_details": incomplete, "model": answer["model"],
            "output": output, "usage": usage, "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "parallel_tool_calls": True}  # fmt: skip


def response_events(answer: Json) -> Iterator[tuple[str, Json]]:
    """A complete answer as the events of a stream of the Responses API: their types and fields."""
    yield "created", {"response": answer | {"status": "in_progress", "output": []}}
    for index, item in enumerate(answer["output"]):
        place = {"output_index": index, "item_id": item["id"], "content_index": 0}
        if item["type"] == "message":
            [part] = item["content"]
            kind, text = "output_text", part["text"]
            begun = item | {"content": [part | {"text": ""}]}
        else:
            kind, text = "function_call_arguments", item["arguments"]
            begun = item | {"arguments": ""}
        yield "output_item.added", place | {"item": begun | {"status": "in_progress"}}
        yield f"{kind}.delta", place | {"delta": text, "logprobs": []}
        yield "output_item.done", place | {"item": item}
    yield answer["status"], {"response": answer}
