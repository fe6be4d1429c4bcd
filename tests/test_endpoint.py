"""The OpenAI-compatible endpoint: what the official client sends and reads, and what is refused."""

import asyncio
import http.client
import json
import socket
import threading

import openai
import pytest

from environments.adapters.endpoint import MAX_BODY, Choice, Endpoint

TOOL = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
TOKENS = [("Hel", -0.25), ("lo", -0.5)]
HELLO = Choice("Hello", "stop", TOKENS)
TWO = [("a", "look", '{"at": 1}'), ("b", "look", "{}")]
CALLS = Choice("First", "tool_calls", TOKENS, TWO, "hm")
CHAT = [{"role": "user", "content": "Hi"}]


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
    answer = client.chat.completions.create(model="x", messages=CHAT, n=2, logprobs=True)
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


def test_many_asynchronous_clients(session):
    async def ask(client, i):
        answer = await client.chat.completions.create(
            model="x", messages=[{"role": "user", "content": f"{i}"}]
        )
        return answer.choices[0].message.content

    async def ask_all():
        async with client_of(session, openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(32)))

    assert asyncio.run(ask_all()) == ["Hello"] * 32
    assert sorted(int(a.messages[0]["content"]) for a in session.asked) == [*range(32)]


@pytest.mark.parametrize("change", [
    {"messages": []}, {"messages": 3}, {"messages": [3]}, {"messages": [{"role": "king"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": [{"role": "user", "content": 3}]}, {"n": 0}, {"n": 9999}, {"n": "2"},
    {"max_tokens": 0}, {"max_tokens": "9"}, {"stop": [3]}, {"tools": [{"type": "function"}]},
    {"text": "x"}, {"response_format": "json"}, {"stream_options": 3, "stream": True},
    {"tools": [3]}, {"tools": [{"type": "function", "function": {"name": None}}]},
    {"max_tokens": True}, {"max_completion_tokens": 1.5}, {"max_tokens": [9]}, {"n": True},
    {"max_tokens": 5, "max_completion_tokens": True}, {"temperature": True}, {"temperature": "1"},
    {"tools": [{"type": "custom", "custom": {"name": "look"}}]}, {"audio": {"voice": "x"}},
    {"tools": [{"type": "web_search"}]},
    {"functions": [TOOL]}, {"function_call": {"name": "look"}}, {"web_search_options": {"a": 1}},
    {"messages": [*CHAT, {"role": "assistant", "function_call": {"name": "look"}}]},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
    {"response_format": {"type": "json_schema", "json_schema": 3}},
    {"top_p": {}}, {"seed": "x"}, {"seed": False}, {"presence_penalty": [0]}, {"top_k": "all"},
])  # fmt: skip
def test_rubbish_is_refused_in_openais_form(session, change):
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(session).post(
            "/chat/completions", body={"model": "x", "messages": CHAT} | change, cast_to=object
        )
    assert caught.value.body["type"] == "invalid_request_error" and not session.asked


@pytest.mark.parametrize("change, reason", [
    ({"previous_response_id": "resp_x"}, "there is no response"),
    ({"input": [{"type": "web_search_call"}]}, "an item of the type 'web_search_call'"),
    ({"input": []}, "there are no messages"),
    ({"tools": [{"type": "web_search"}]}, "'web_search': the policy can call functions only"),
    ({"tools": [{"type": "custom", "name": "look"}]}, "of the type 'custom'"),
    ({"background": True}, "background is not supported: wait for the answer"),
])  # fmt: skip
def test_rubbish_is_refused_by_the_responses_api_too(session, change, reason):
    with pytest.raises(openai.BadRequestError, match=reason):
        client_of(session).responses.create(**{"model": "x", "input": "Hi"} | change)
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


def test_text_after_a_call_belongs_to_its_answer_unless_the_user_says_it(session):
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    items = [{"role": "user", "content": "Hi"}, call, {"role": "assistant", "content": "Wait."},
             call | {"call_id": "b"}, {"role": "user", "content": "No."}]  # fmt: skip
    client_of(session).responses.create(model="x", input=items)
    [ask] = session.asked
    found = [(m["role"], m["content"], [c[0] for c in m["calls"]]) for m in ask.messages]
    assert found == [("user", "Hi", []), ("assistant", "Wait.", ["a", "b"]), ("user", "No.", [])]


def test_a_client_that_waits_for_100_continue_is_answered(session):
    host, port = session.endpoint.url.split("/")[2].split(":")
    body = json.dumps({"messages": CHAT}).encode()
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {session.key}\r\n"
            f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("request_, status", [
    (("POST", "/v1/chat/completions", "{", {}), 400), (("POST", "/v1/nothing", "{}", {}), 404),
    (("POST", "/v1/chat/completions", "[]", {}), 400), (("GET", "/nothing", "", {}), 404),
    (("POST", "/v1/chat/completions", "[" * 99999, {}), 400),
    (("GET", "/v1/models", "", {"Authorization": "Bearer no"}), 401),
    (("GET", "/v1/models", "", {"Origin": "http://a.page"}), 403),
    (("POST", "/v1/chat/completions", "", {"Content-Length": str(MAX_BODY + 1)}), 413),
    (("POST", "/v1/chat/completions", "", {"Content-Length": "x"}), 411),
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
    session, errors = endpoint.open(), []

    def ask():
        try:
            client_of(session).chat.completions.create(model="x", messages=CHAT)
        except openai.AuthenticationError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not (asks := session.receive(0.05)):
        pass
    assert asks[0].is_waited_for()
    session.close()
    thread.join()
    ask()
    assert len(errors) == 2 and not endpoint.sessions and not session.waiting


def test_who_hangs_up_is_not_waited_for(endpoint):
    session = endpoint.open()
    host, port = endpoint.server.server_address
    body = json.dumps({"messages": CHAT})
    with socket.create_connection((host, port)) as connection:
        head = f"Authorization: Bearer {session.key}\r\nContent-Length: {len(body)}"
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
        while not (asks := session.receive(0.05)):
            pass
        assert asks[0].is_waited_for()
    while asks[0].is_waited_for():
        pass
    asks[0].reply([HELLO], 1)


def test_it_listens_on_loopback_alone(endpoint):
    assert endpoint.server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("key", ["", "x", "{key}x", "{half}", "{ended}", "é"])
def test_on_another_address_too_nobody_gets_in_without_a_key(key):
    try:
        endpoint = Endpoint(host="127.0.0.2")
    except OSError:  # macOS and Windows may have 127.0.0.1 alone
        pytest.skip("there is no address 127.0.0.2")
    session, ended = endpoint.open(), endpoint.open()
    ended.close()
    key = key.format(key=session.key, half=session.key[:-1], ended=ended.key)
    place = endpoint.url.removeprefix("http://").removesuffix("/v1")
    assert place.startswith("127.0.0.2:")
    for method, path in [("GET", "/v1/models"), ("GET", "/"), ("POST", "/v1/chat/completions")]:
        connection = http.client.HTTPConnection(place)
        headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
        connection.request(method, path, json.dumps({"messages": CHAT}), headers)
        response = connection.getresponse()
        assert response.status == 401 and session.key not in response.read().decode()
        connection.close()
    assert session.receive(0) == [] and not session.has_asked
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(place.split(":")[1])))
    endpoint.close()


def test_the_key_comes_before_the_body(session):
    """An unknown key is refused before the body is parsed; who sent a broken one is known."""
    connection = http.client.HTTPConnection(*session.endpoint.server.server_address)
    for key, status in (("unknown", 401), (session.key, 400), (session.key, 200)):
        body = json.dumps({"messages": CHAT}) if status == 200 else "{" * MAX_BODY
        headers = {"authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        assert answer.status == status and answer.read()
    assert session.has_asked and session.refusals == ["the request is not JSON"]
