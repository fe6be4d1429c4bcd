"""The OpenAI-compatible endpoint: what the official client sends and reads, and what is refused."""

import asyncio
import http.client
import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from environments.adapters import endpoint as module
from environments.adapters.endpoint import MAX_BODY, Choice, Endpoint

TOOL = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
TOKENS = [("Hel", -0.25), ("lo", -0.5)]
HELLO = Choice("Hello", "stop", TOKENS)
TWO = [("a", "look", '{"at": 1}'), ("b", "look", "{}")]
CALLS = Choice("First", "tool_calls", TOKENS, TWO, "hm")
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """An unknown key is refused without a pause."""
    monkeypatch.setattr(module, "PAUSE", 0.0)


@pytest.fixture
def endpoint():
    made = Endpoint()
    yield made
    made.close()


@pytest.fixture
def session(endpoint):
    """Its requests are answered in turn by `answers`, the last one again and again; `asked`."""
    made = endpoint.open()
    made.asked, made.answers = [], [HELLO]

    def answer():
        while (asks := made.receive(0.05)) is not None:
            for ask in asks:
                made.asked.append(ask)
                choice = made.answers.pop(0) if len(made.answers) > 1 else made.answers[0]
                ask.reply([choice] * ask.n, 7)

    thread = threading.Thread(target=answer)
    thread.start()
    yield made
    made.end()
    thread.join()


def client_of(session, kind=openai.OpenAI, key=None):
    return kind(base_url=session.endpoint.url, api_key=key or session.key, max_retries=0)


def test_a_chat_completion_has_all_that_the_client_reads(session):
    client = client_of(session)
    limits = {"max_tokens": 9, "max_completion_tokens": 5}
    answer = client.chat.completions.create(model="x", messages=CHAT, n=2, logprobs=True, **limits)
    assert session.asked[0].max_tokens == 5
    assert [c.message.content for c in answer.choices] == ["Hello"] * 2 and answer.model == "x"
    assert [(t.token, t.logprob) for t in answer.choices[1].logprobs.content] == TOKENS
    assert answer.usage.total_tokens == 7 + 4 and answer.choices[0].finish_reason == "stop"
    assert [model.id for model in client.models.list()] == ["picorl"]
    assert client.models.retrieve("picorl").id == "picorl"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_back_as_tool_calls(session, stream):
    session.answers, client = [CALLS], client_of(session)
    tools = [{"type": "function", "function": TOOL}]
    given = {"model": "x", "messages": CHAT, "tools": tools}
    if stream:
        with client.chat.completions.stream(**given, stream_options={"include_usage": True}) as s:
            s.until_done()
            answer = s.get_final_completion()
    else:
        answer = client.chat.completions.create(**given)
    message = answer.choices[0].message
    assert message.content == "First" and answer.choices[0].finish_reason == "tool_calls"
    assert [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls] == TWO
    assert message.model_extra["reasoning_content"] == "hm" and answer.usage.completion_tokens == 2
    assert session.asked[0].tools == tools
    # sent back, with the results in another order
    results = [{"role": "tool", "tool_call_id": i, "content": i} for i in "ba"]
    client.chat.completions.create(model="x", messages=[*CHAT, message, *results])
    told = session.asked[1].messages
    assert told[1]["calls"] == TWO and [m["content"] for m in told[2:]] == ["a", "b"]
    apart = [*CHAT, message, *CHAT, *results, *CHAT, *results]
    client.chat.completions.create(model="x", messages=apart)
    told = session.asked[2].messages
    assert [m["content"] for m in told[2:]] == ["Hi", "a", "b", "Hi", "a", "b"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api(session, stream):
    session.answers, client = [CALLS, HELLO], client_of(session)
    given = {"model": "x", "instructions": "Be brief.", "input": "Hi",
             "tools": [{"type": "function", "strict": True} | TOOL]}  # fmt: skip
    if stream:
        with client.responses.stream(**given) as events:
            kinds = [event.type for event in events]
            answer = events.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    else:
        answer = client.responses.create(**given)
    text, *calls = answer.output
    assert text.content[0].text == answer.output_text == "First"
    assert [(c.call_id, c.name, c.arguments) for c in calls] == TWO
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 2)
    results = [{"type": "function_call_output", "call_id": i, "output": i} for i in "ba"]
    echoed = [{"role": "user", "content": "Hi"}, *answer.output, *results]
    client.responses.create(model="x", instructions="Be brief.", input=echoed)
    client.responses.create(model="x", instructions="Be brief.", input=results,
                            previous_response_id=answer.id)  # fmt: skip
    for ask in session.asked[1:]:
        roles = [(m["role"], m["content"], len(m["calls"])) for m in ask.messages]
        assert roles == [("system", "Be brief.", 0), ("user", "Hi", 0), ("assistant", "First", 2),
                         ("tool", "a", 0), ("tool", "b", 0)]  # fmt: skip


RUBBISH = [
    {"messages": []}, {"messages": 3}, {"messages": [3]}, {"messages": [{"role": "king"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": [{"role": "user", "content": 3}]}, {"n": 0}, {"n": 9999}, {"max_tokens": "9"},
    {"max_tokens": True}, {"stop": [3]}, {"tools": [3]}, {"tools": [{"type": "web_search"}]},
    {"tools": [{"type": "function"}]}, {"response_format": "json"}, {"functions": [TOOL]},
    {"messages": [*CHAT, {"role": "assistant", "function_call": {"name": "look"}}]},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
    {"temperature": "1"}, {"seed": False}, {"stream_options": 3, "stream": True},
]  # fmt: skip


def test_rubbish_is_refused_in_openais_form(session):
    client = client_of(session)
    for change in RUBBISH:
        body = {"model": "x", "messages": CHAT} | change
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/chat/completions", body=body, cast_to=object)
        assert caught.value.body["type"] == "invalid_request_error" and not session.asked, change


def test_rubbish_is_refused_by_the_responses_api_too(session):
    client = client_of(session)
    for change, reason in (
        ({"previous_response_id": "resp_x"}, "there is no response"),
        ({"input": [{"type": "web_search_call"}]}, "an item of the type 'web_search_call'"),
        ({"tools": [{"type": "web_search"}]}, "'web_search': the policy can call functions only"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference is not supported"),
        ({"input": [{"id": "msg_1"}]}, "send the item itself"),
        ({"background": True}, "background is not supported: wait for the answer"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason):
            client.responses.create(**{"model": "x", "input": "Hi"} | change)
    assert not session.asked


def test_the_next_response_keeps_all_but_the_instructions(session):
    client = client_of(session)
    begun = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    answer = client.responses.create(model="x", instructions="Be brief.", input=begun)
    client.responses.create(model="x", input="And?", previous_response_id=answer.id)
    client.responses.create(model="x", input="And?", instructions="Be long.",
                            previous_response_id=answer.id)  # fmt: skip
    found = [[(m["role"], m["content"]) for m in ask.messages] for ask in session.asked]
    kept = [("system", "Be kind."), ("user", "Hi")]
    later = [*kept, ("assistant", "Hello"), ("user", "And?")]
    assert found == [[("system", "Be brief."), *kept], later, [("system", "Be long."), *later]]


ASK = json.dumps({"model": "x", "messages": CHAT})


@pytest.mark.parametrize("request_, status", [
    (("POST", "/v1/nothing", "{}", {}), 404),
    (("POST", "/v1/chat/completions", "[" * 99999, {}), 400),
    (("POST", "/v1/chat/completions", ASK[:-1] + ', "temperature": NaN}', {}), 400),
    (("POST", "/v1/chat/completions", ASK[:-1] + ', "temperature": 1e999}', {}), 400),
    (("GET", "/v1/models", "", {"Authorization": "Bearer no"}), 401),
    (("PUT", "/v1/models", "", {}), 405),
    (("GET", "/v1/models", "", {"Origin": "http://a.page"}), 403),
    (("POST", "/v1/chat/completions", "", {"Content-Length": str(MAX_BODY + 1)}), 413),
])  # fmt: skip
def test_wrong_requests_get_their_status(session, request_, status):
    method, path, body, headers = request_
    place = session.endpoint.url.removeprefix("http://").partition("/")[0]
    connection = http.client.HTTPConnection(place)
    headers = {"Authorization": f"Bearer {session.key}"} | headers
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    assert response.status == status and "message" in json.loads(response.read())["error"]
    connection.close()


def test_a_session_that_ends_answers_what_waits_and_nothing_more(endpoint):
    session = endpoint.open()

    def ask():
        with pytest.raises(openai.AuthenticationError):
            client_of(session).chat.completions.create(model="x", messages=CHAT)

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask)
        while not session.receive(0.05):
            pass
        session.close()
        waiting.result()
    ask()
    assert not endpoint.sessions and not session.waiting


def test_who_hangs_up_is_not_waited_for(endpoint):
    session = endpoint.open()
    host, port = endpoint.server.address
    body = json.dumps({"messages": CHAT})
    with socket.create_connection((host, port)) as connection:
        head = f"Host: {host}\r\nAuthorization: Bearer {session.key}\r\nContent-Length: {len(body)}"
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
        while not (asks := session.receive(0.05)):
            pass
        assert asks[0].is_waited_for()
    while asks[0].is_waited_for() or not session.refusals:
        pass
    asks[0].reply([HELLO], 1)
    asks[0].refuse(400, "nobody reads this either", "invalid_request")
    assert session.refusals == ["the client hung up"]  # too many end the episode


def test_a_key_that_is_none_of_ours_is_nobodys(session):
    """Probes and defaults of other servers; the key may be where Azure's client writes it."""
    for key in (b"EMPTY", b"sk-1234", "é".encode()):
        for headers in ({}, {"Authorization": b"Bearer " + key}, {"api-key": key}):
            assert httpx.get(f"{session.endpoint.url}/models", headers=headers).status_code == 401
    assert not session.has_asked
    headers = {"api-key": session.key}
    assert httpx.get(f"{session.endpoint.url}/models", headers=headers).status_code == 200


def test_the_client_of_azure_asks_as_it_does(session):
    client = openai.AzureOpenAI(
        base_url=session.endpoint.url, api_key=session.key, api_version="2024-10-21"
    )
    assert client.chat.completions.create(model="m/1", messages=CHAT).choices[0].message.content
    assert client.responses.create(model="m", input="Hi").output_text == "Hello"
    slash = f"{session.endpoint.url}/chat/completions/?api-version=1"
    answer = httpx.post(slash, json={"messages": CHAT}, headers={"api-key": session.key})
    assert answer.status_code == 200 and len(session.asked) == 3


def test_no_proxy_reaches_the_endpoint(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for proxy, before, after in (
        ("", "", ""), ("http://127.0.0.1:9", "", "127.0.0.1"), ("http://127.0.0.1:9", "*", "*"),
        ("http://127.0.0.1:9", "a.b, c.d", "a.b, c.d,127.0.0.1"),
        ("http://127.0.0.1:9", "a.b,127.0.0.1", "a.b,127.0.0.1"),
    ):  # fmt: skip
        monkeypatch.setenv("HTTP_PROXY", proxy)
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("NO_PROXY", before)
        monkeypatch.delenv("no_proxy", raising=False)
        endpoint = module.shared.__wrapped__()
        assert (os.environ["NO_PROXY"], os.environ.get("no_proxy", "")) == (after, after)
        assert httpx.get(f"{endpoint.url}/models").status_code == 401  # and not ConnectError
        endpoint.close()


def test_ids_are_texts_and_arguments_may_be_objects(session):
    """Numbers can be chosen so that they collide in a dict, which takes quadratic time."""
    collide = [str(i * (2**61 - 1)) for i in range(3)]
    calls = [{"id": int(i), "function": {"name": "look", "arguments": {"é": [1]}}} for i in collide]
    results = [{"role": "tool", "tool_call_id": int(i), "content": i} for i in reversed(collide)]
    chat = [*CHAT, {"role": "assistant", "tool_calls": calls}, *results]
    client_of(session).post("/chat/completions", body={"messages": chat}, cast_to=object)
    items = [{"type": "function_call", "call_id": 5, "name": "look", "arguments": {"é": [1]}},
             {"type": "function_call_output", "call_id": 5, "output": "5"}]  # fmt: skip
    client_of(session).post("/responses", body={"input": items}, cast_to=object)
    for ask, wanted in zip(session.asked, (collide, ["5"]), strict=True):
        found = [call for message in ask.messages for call in message["calls"]]
        assert [(i, name, json.loads(text)) for i, name, text in found] == [
            (i, "look", {"é": [1]}) for i in wanted
        ]
        assert [m["call_id"] for m in ask.messages if m["role"] == "tool"] == wanted


def test_on_another_address_too_nobody_gets_in_without_a_key():
    try:
        endpoint = Endpoint(host="127.0.0.2")
    except OSError:  # macOS and Windows may have 127.0.0.1 alone
        pytest.skip("there is no address 127.0.0.2")
    session, ended = endpoint.open(), endpoint.open()
    ended.close()
    for key in ("", f"{session.key}x", session.key[:-1], ended.key, "é"):
        for path in ("/v1/models", "/", "/v1/chat/completions"):
            connection = http.client.HTTPConnection(*endpoint.server.address)
            headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
            connection.request("POST" if "chat" in path else "GET", path, "{}", headers)
            assert connection.getresponse().status == 401
            connection.close()
    assert session.receive(0) == [] and not session.has_asked
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", endpoint.server.address[1]))
    endpoint.close()


def test_a_request_that_comes_while_its_episode_ends_is_refused(endpoint):
    session = endpoint.open()
    ask = module.Ask(session, {}, CHAT, [])
    ask.outcome.set_result({})  # else it would wait for ever
    session.close()
    with pytest.raises(module.Refused, match="the episode of this API key has ended"):
        asyncio.run(module.answered(ask))
