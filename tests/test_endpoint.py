"""The OpenAI-compatible endpoint: what the official client sends and reads, and what is refused."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from environments.adapters.endpoint import Ask, Choice, Endpoint, Refused

TOOL = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
TOKENS = [("Hel", -0.25), ("lo", -0.5)]
TEXT = "Hello\ud800"  # half a pair
HELLO = Choice({"role": "assistant", "content": TEXT}, "stop", TOKENS)
TWO = [("a", "look", '{"at": "é"}'), ("b", "look", "{}")]
CALLED = [{"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
          for i, name, arguments in TWO]  # fmt: skip
CALLS = Choice({"role": "assistant", "content": "First", "reasoning_content": "hm",
                "tool_calls": CALLED}, "tool_calls", TOKENS)  # fmt: skip
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def session():
    """Its requests are answered in turn by `answers`, the last one again and again; `asked`."""
    made = Endpoint().open()
    made.asked, made.answers = [], [HELLO]

    def answer():
        while (asks := made.receive(60)) is not None:
            for ask in asks:
                made.asked.append(ask)
                choice = made.answers.pop(0) if len(made.answers) > 1 else made.answers[0]
                ask.reply([choice] * ask.n, 7)

    thread = threading.Thread(target=answer)
    thread.start()
    yield made
    made.end(0)
    thread.join()


def client_of(session):
    return openai.OpenAI(base_url=session.endpoint.url, api_key=session.key, max_retries=0)


def told(ask):
    """Role, text and number of calls of each message of a request."""
    return [(m["role"], m["content"], len(m.get("tool_calls") or ())) for m in ask.messages]


def test_a_chat_completion_has_all_that_the_client_reads(session):
    client = client_of(session)
    asked = {"role": "developer", "content": [{"type": "text", "text": text} for text in "Hi"]}
    answer = client.chat.completions.create(
        model="x", messages=[asked], n=2, logprobs=True, max_tokens=9, max_completion_tokens=5
    )
    assert session.asked[0].max_tokens == 5 and told(session.asked[0]) == [("system", "Hi", 0)]
    assert answer.model == "x" and {c.message.content for c in answer.choices} == {TEXT}
    assert [(t.token, t.logprob) for t in answer.choices[1].logprobs.content] == TOKENS
    assert answer.usage.total_tokens == 7 + 4 and answer.choices[0].finish_reason == "stop"
    assert [model.id for model in client.models.list()] == ["picorl"]
    [connection] = session.endpoint.server.server_state.connections
    accepted = connection.transport.get_extra_info("socket")  # answers are not held back
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


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
    sent = [*CHAT, {"role": "assistant", "tool_calls": CALLED}, *CHAT, *results, *CHAT]
    client.chat.completions.create(model="x", messages=sent)
    hi = ("user", "Hi", 0)
    assert told(session.asked[-1]) == [
        hi, ("assistant", "", 2), hi, ("tool", "a", 0), ("tool", "b", 0), hi
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api(session, stream):
    session.answers, client = [CALLS, HELLO], client_of(session)
    schema = {"type": "object"}
    given = {"model": "x", "instructions": "Be brief.", "input": "Hi", "max_output_tokens": 9,
             "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
             "tools": [{"type": "function", "strict": True} | TOOL]}  # fmt: skip
    if stream:
        with client.responses.stream(**given) as events:
            seen = [*events]
            answer = events.get_final_response()
        assert seen[0].type == "response.created" and seen[-1].type == "response.completed"
        assert [e.delta for e in seen if e.type == "response.output_text.delta"] == ["First"]
    else:
        answer = client.responses.create(**given)
    assert session.asked[0].schema == schema and session.asked[0].max_tokens == 9
    text, *calls = answer.output
    assert text.content[0].text == answer.output_text == "First"
    assert [(c.call_id, c.name, c.arguments) for c in calls] == TWO
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 2)
    results = [{"type": "function_call_output", "call_id": i, "output": i} for i in "ba"]
    again = {"model": "x", "instructions": "Be long."}
    client.responses.create(**again, input=[*CHAT, *answer.output, *results])
    last = client.responses.create(**again, input=results, previous_response_id=answer.id)
    chat = [("user", "Hi", 0), ("assistant", "First", 2), ("tool", "a", 0), ("tool", "b", 0)]
    for ask in session.asked[1:]:
        assert told(ask) == [("system", "Be long.", 0), *chat]
    client.responses.create(model="x", input="And?", previous_response_id=last.id)
    assert told(session.asked[-1]) == [*chat, ("assistant", TEXT, 0), ("user", "And?", 0)]


CHAT_PATH, RESPONSES_PATH = "/chat/completions", "/responses"
RUBBISH = [  # path, what is wrong, a word of the reason
    (CHAT_PATH, {"messages": []}, "no messages"), (CHAT_PATH, {"messages": 3}, "not iterable"),
    (CHAT_PATH, {"messages": [3]}, "AttributeError"), (CHAT_PATH, {"n": -1}, "n and"),
    (CHAT_PATH, {"messages": [{"role": "king"}]}, "'king'"),
    (CHAT_PATH, {"messages": [{"role": "user", "content": 3}]}, "of text"),
    (CHAT_PATH, {"max_tokens": -1}, "at least 1"), (CHAT_PATH, {"functions": [3]}, "func"),
    (CHAT_PATH, {"tools": [{"type": "web_search"}]}, "web_search"),
    (CHAT_PATH, {"response_format": {"json_schema": {"schema": "x"}}}, "schema"),
    (RESPONSES_PATH, {"previous_response_id": "resp_x"}, "there is no response"),
    (RESPONSES_PATH, {"input": [{"type": "item_reference"}]}, "item_reference"),
]  # fmt: skip


def test_rubbish_is_refused_in_openais_form_and_who_has_no_key_of_a_running_episode(session):
    for path, change, word in RUBBISH:
        body = {"model": "x", "messages": CHAT, "input": "Hi"} | change
        with pytest.raises(openai.BadRequestError) as caught:
            client_of(session).post(path, body=body, cast_to=object)
        assert caught.value.body["type"] == "invalid_request_error"
        assert word in caught.value.body["message"] == session.refusals[-1]
    ended = session.endpoint.open()
    ended.close()
    key, url = session.key.encode(), session.endpoint.url
    rows = [(key, "/nothing", "{}", 404), (key, CHAT_PATH, "{", 400)]
    for wrong in (None, "é".encode(), ended.key.encode(), key[:-1]):
        rows += [(wrong, path, "{}", 401) for path in ("/models", "/nothing", CHAT_PATH)]
    for sent, path, content, status in rows:
        headers = {"Authorization": b"Bearer " + sent} if sent else {}
        answer = httpx.post(url + path, content=content, headers=headers)
        assert answer.status_code == status and "message" in answer.json()["error"]
    assert not session.asked and ended.receive(0) == []


def test_a_session_that_ends_answers_what_waits_and_nothing_more():
    session = Endpoint().open()

    def ask():
        with pytest.raises(openai.AuthenticationError):
            client_of(session).chat.completions.create(model="x", messages=CHAT)

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask)
        assert session.receive(60)
        session.close()
        waiting.result()
    ask()
    assert not session.endpoint.sessions and not session.waiting
    with pytest.raises(Refused, match="the episode of this API key has ended"):
        asyncio.run(session.answer(Ask(session, {}, CHAT, [])))  # was read before the key ended
