"""An OpenAI-compatible endpoint on this machine: HTTP on one side, `Ask`s to answer on the other.

    POST /v1/chat/completions      with tools, n, stop, max_tokens, logprobs, stream
    POST /v1/responses             what the OpenAI Agents SDK asks by default
    GET  /v1/models

The API key names the session of a request: `Endpoint.open` makes a session with a key of its own,
and `Session.receive` returns the requests with that key that wait for an answer. The server's
thread only reads and writes HTTP; another thread answers. An answer is complete before any of it is
sent, so a stream is one chunk. Errors have OpenAI's form and status.

Messages have the form of chat completions, with a content of text. The Responses API is translated
to chat completions, and their answers to its own.
"""

import asyncio
import json
import queue
import secrets
import socket
import threading
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
FILES = 4096  # open files that this process needs at most: each program has two sockets and more
MAX_REFUSED = 100  # requests of a session; after more the episode ends
LIMITS = "max_completion_tokens", "max_tokens"
ROLES = "system", "user", "assistant", "tool"
UNSUPPORTED = {"functions", "conversation", "prompt", "background"}  # fields of a request


class Refused(Exception):
    """A request that gets an error in place of an answer."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400):
        super().__init__(message)
        self.code, self.status = code, status


@dataclass
class Choice:
    """One answer to a request. `tokens`: text and log-prob of each sampled token; the text is ""
    unless the request wants log-probs."""

    message: Json
    finish_reason: str  # stop, length or tool_calls
    tokens: list[tuple[str, float]]


@dataclass(eq=False)
class Ask:
    """A request that waits for its answer; `reply` or `refuse` sends it."""

    session: "Session"
    body: Json
    messages: list[Json]
    tools: list[Json]
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    outcome: Future[Json] = field(default_factory=Future)  # a chat completion, or Refused

    def __post_init__(self) -> None:
        body = self.body
        self.n = int(body.get("n") or 1)
        stop = body.get("stop") or []
        texts = [stop] if isinstance(stop, str) else stop
        self.stop = [str(text) for text in texts if text]
        limits = [int(body[name]) for name in LIMITS if body.get(name) is not None]
        self.max_tokens: int | None = min(limits, default=None)
        if min([self.n, *limits]) < 1:
            raise ValueError("n and a limit of tokens are at least 1")
        # the JSON schema of the answer
        self.schema = (body.get("response_format") or {}).get("json_schema", {}).get("schema")
        if not isinstance(self.schema or {}, dict):
            raise TypeError("a JSON schema must be an object")

    def reply(self, choices: list[Choice], num_prompt_tokens: int) -> None:
        self.session.has_answer = True
        with suppress(InvalidStateError):  # the episode has ended
            self.outcome.set_result(chat_completion(self, choices, num_prompt_tokens))

    def refuse(self, error: Exception) -> None:
        with suppress(InvalidStateError):
            refused = error if isinstance(error, Refused) else Refused(str(error))
            self.outcome.set_exception(refused)


class Session:
    """The requests with one API key. It ends with `close`; then the key is unknown."""

    def __init__(self, endpoint: "Endpoint"):
        self.endpoint, self.key = endpoint, f"sk-{secrets.token_hex(16)}"
        self.inbox = queue.SimpleQueue[Ask | None]()
        self.waiting = set[Ask]()  # without an answer
        self.responses: dict[str, list[Json]] = {}  # conversations, by the id of their last answer
        self.has_answer = False  # whether a request was answered
        self.code = 0  # exit code of the program
        self.refusals: list[str] = []  # reasons for which requests were refused

    def receive(self, timeout: float) -> list[Ask] | None:
        """The new requests, [] if none comes in `timeout` seconds; None after `end`."""
        asks: list[Ask] = []
        with suppress(queue.Empty):
            while ask := self.inbox.get(timeout=0 if asks else timeout):
                asks.append(ask)
            return None
        return asks

    def end(self, code: int) -> None:
        """Lets `receive` return None: the program has ended."""
        self.code = code
        self.inbox.put(None)

    async def answer(self, ask: Ask) -> Json:
        """Waits for the chat completion. Raises Refused if the request gets none."""
        self.waiting.add(ask)
        try:
            if self.key not in self.endpoint.sessions:
                self.close()
            self.inbox.put(ask)
            return await asyncio.wrap_future(ask.outcome)
        finally:
            self.waiting.discard(ask)

    def close(self) -> None:
        """Makes the key invalid, and refuses the requests that still wait."""
        self.endpoint.sessions.pop(self.key, None)
        for ask in [*self.waiting]:
            ask.refuse(Refused("the episode of this API key has ended", "episode_ended", 401))


class Endpoint:
    """The server, in a thread. `host`: the address of this machine on which it listens."""

    def __init__(self, host: str = HOST):
        """Raises OSError if the address is not one of this machine."""
        if host == "0.0.0.0":  # no program can send a request there
            raise OSError("that is no single address")
        self.sessions: dict[str, Session] = {}
        listener = socket.create_server((host, 0))
        # connections inherit the option; without it the body of each answer waits for 40 ms
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host, self.url = host, f"http://{host}:{listener.getsockname()[1]}/v1"
        config = uvicorn.Config(
            self,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # of the server, not of programs: the terminal belongs to the run
            timeout_keep_alive=600,
        )
        self.server = uvicorn.Server(config)
        threading.Thread(target=self.server.run, args=([listener],), daemon=True).start()

    def open(self) -> Session:
        session = Session(self)
        self.sessions[session.key] = session
        return session

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request, as an ASGI application."""
        request = Request(scope, receive)
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        session = self.sessions.get(key)
        try:
            if session is None:
                text = "this API key is that of no running episode"
                raise Refused(text, "invalid_api_key", 401)
            response = await response_to(session, request)
        except Refused as error:
            if session is not None:
                session.refusals.append(str(error))
                if len(session.refusals) > MAX_REFUSED:
                    session.inbox.put(None)
            body = {"message": str(error), "type": "invalid_request_error", "code": error.code}
            response = json_response({"error": body}, error.status)
        await response(scope, receive, send)


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
    if path not in ("/v1/chat/completions", "/v1/responses"):
        raise Refused(f"{path:.60}: there is no such address", "not_found", 404)
    is_response = path == "/v1/responses"
    try:
        body = json.loads(await request.body())
        ask = read_ask(session, chat_of_response(session, body) if is_response else body)
    except (TypeError, LookupError, AttributeError, ValueError) as error:
        text = str(error) if type(error) is TypeError else f"{type(error).__name__}: {error}"
        raise Refused(text[:300]) from None
    answer = await session.answer(ask)
    if is_response:
        session.responses[answer["id"]] = [*ask.body["history"], answer["choices"][0]["message"]]
        answer = response_object(answer)
    if not body.get("stream"):
        return json_response(answer)
    if is_response:
        stream = ""
        for number, (event, fields) in enumerate(response_events(answer)):
            data = {"type": f"response.{event}", "sequence_number": number} | fields
            stream += f"event: {data['type']}\ndata: {json.dumps(data)}\n\n"
    else:
        stream = f"data: {json.dumps(chat_chunk(answer))}\n\ndata: [DONE]\n\n"
    return Response(stream, headers={"content-type": "text/event-stream"})


def json_response(value: Json, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")


# Chat completions


def read_ask(session: Session, body: Json) -> Ask:
    """Reads a request of chat completions. Raises what Python raises for any other body."""
    unsupported = [name for name in UNSUPPORTED if body.get(name)]
    if unsupported:
        raise TypeError(f"{min(unsupported)} is not supported")
    tools: list[Json] = [*(body.get("tools") or [])]
    for tool in tools:
        if tool["type"] != "function":
            raise TypeError(f"a tool must be a function, not a {tool['type']!r:.40}")
        tool["function"].setdefault("description", "")
        tool["function"].setdefault("parameters", {"type": "object", "properties": {}})
    messages = [message_of(message) for message in body.get("messages") or []]
    if not messages:
        raise TypeError("there are no messages")
    return Ask(session, body, in_order_of_calls(messages), tools)


def message_of(message: Json) -> Json:
    """A message with one text as its content. Raises TypeError for pictures and other roles."""
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise TypeError(f"a message with the role {role!r:.40}")
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [content]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("only contents of text are supported")
    return message | {"role": role, "content": "".join(texts)}


def in_order_of_calls(messages: list[Json]) -> list[Json]:
    """The messages, with the results of an answer's calls in the order of these calls."""
    ordered: list[Json] = []
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    place = {call.get("id"): i for i, call in enumerate(calls)}
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        run = [*group]
        if is_result:
            run.sort(key=lambda result: place.get(result.get("tool_call_id"), 0))
        ordered += run
    return ordered


def chat_completion(ask: Ask, choices: list[Choice], num_prompt_tokens: int) -> Json:
    """The answer in the form of chat completions."""
    entries = []
    for index, choice in enumerate(choices):
        entry = {"index": index, "message": choice.message, "finish_reason": choice.finish_reason}
        if ask.body.get("logprobs"):
            content = [
                {"token": text, "logprob": logprob, "top_logprobs": []}
                for text, logprob in choice.tokens
            ]
            entry["logprobs"] = {"content": content}
        entries.append(entry)
    count = sum(len(choice.tokens) for choice in choices)
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": count}
    usage["total_tokens"] = num_prompt_tokens + count
    completion: Json = {"id": f"chatcmpl-{ask.id}", "object": "chat.completion", "created": 0}
    model = str(ask.body.get("model") or "picorl")
    return completion | {"model": model, "choices": entries, "usage": usage}


def chat_chunk(answer: Json) -> Json:
    """Makes the one chunk of a stream of a complete answer, which it changes."""
    for choice in answer["choices"]:
        choice["delta"] = choice.pop("message")
        for index, call in enumerate(choice["delta"].get("tool_calls", ())):
            call["index"] = index
    return answer | {"object": "chat.completion.chunk"}


# The Responses API


def chat_of_response(session: Session, body: Json) -> Json:
    """Translates a request of the Responses API to one of chat completions. `history`: its messages
    without the instructions, which hold for this request alone."""
    previous = body.get("previous_response_id") or ""
    messages = [dict(message) for message in session.responses.get(previous, [])]
    if previous and not messages:
        raise TypeError(f"there is no response {previous!r:.60}")
    items = body.get("input") or []
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        item_type = item.get("type", "message")
        if item_type == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif item_type == "function_call":  # of the answer before it, which may have no text
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            function = {"name": item["name"], "arguments": item.get("arguments")}
            call = {"id": item["call_id"], "function": function}
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", []), call]
        elif item_type == "function_call_output":
            output, call_id = item.get("output"), item["call_id"]
            messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
        elif item_type != "reasoning":
            raise TypeError(f"an item of the type {item_type!r:.40} is not supported")
    chat = body | {"messages": messages, "history": messages, "tools": [], "n": 1}
    for tool in body.get("tools") or []:
        function = {key: value for key, value in tool.items() if key != "type"}
        chat["tools"].append({"type": tool["type"], "function": function})
    if body.get("instructions"):
        chat["messages"] = [{"role": "system", "content": body["instructions"]}, *messages]
    chat["max_tokens"] = body.get("max_output_tokens")
    schema = (body.get("text") or {}).get("format") or {}
    return chat | {"response_format": {"json_schema": schema}}


def response_object(answer: Json) -> Json:
    """An answer in the form of the Responses API."""
    [choice] = answer["choices"]
    text, calls = choice["message"]["content"], choice["message"].get("tool_calls", [])
    is_cut = choice["finish_reason"] == "length"
    status = "incomplete" if is_cut else "completed"
    output: list[Json] = []
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": []}
        item: Json = {"type": "message", "id": f"msg_{answer['id']}", "role": "assistant"}
        output.append(item | {"status": status, "content": [part]})
    for call in calls:
        item = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"]}
        output.append(item | {"status": "completed"} | call["function"])
    counts = answer["usage"]
    usage = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
    response = {"id": answer["id"], "object": "response", "created_at": 0, "status": status}
    response |= {"model": answer["model"], "output": output, "usage": usage}
    response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
    return response | {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}


def response_events(answer: Json) -> Iterator[tuple[str, Json]]:
    """Yields the events of a stream of the Responses API for a complete answer: type and fields."""
    yield "created", {"response": answer | {"status": "in_progress", "output": []}}
    for index, item in enumerate(answer["output"]):
        place = {"output_index": index, "item_id": item["id"], "content_index": 0}
        if item["type"] == "message":
            [part] = item["content"]
            event, text = "output_text.delta", part["text"]
            empty: dict[str, Any] = {"content": [part | {"text": ""}]}
        else:
            event, text = "function_call_arguments.delta", item["arguments"]
            empty = {"arguments": ""}
        yield "output_item.added", place | {"item": item | empty | {"status": "in_progress"}}
        yield event, place | {"delta": text, "logprobs": []}
        yield "output_item.done", place | {"item": item}
    yield answer["status"], {"response": answer}
