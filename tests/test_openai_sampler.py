"""OpenAISampler against a real HTTP server on loopback."""

import gzip
import json
import re
import signal
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from conftest import loopback

from core.chat_template import clean_message
from core.config import Config
from core.extras import openai_sampler
from core.extras.openai_sampler import OpenAISampler
from core.faults import UsageError
from core.files.run_log import read_records
from core.loading import load_policy
from core.sampler import Request, SamplingParams
from core.seeds import derive_seed
from environments.base import EVAL_SEEDS
from environments.plumbing.registry import make

PARAMS = SamplingParams(max_tokens=32, temperature=0.5, top_p=0.9, seed=7)


def chat(word):
    return [{"role": "user", "content": f'How many r in "{word}"?'}]


JSON = {"Content-Type": "application/json"}


def says(content, finish="stop", choices=1, **others):
    """An answer of the server: headers and body."""
    choice = {"index": 0, "message": {"content": content, **others}, "finish_reason": finish}
    return JSON, json.dumps({"choices": [choice] * choices}).encode()


class Server(BaseHTTPRequestHandler):
    """Answers with the number of a letter in the quoted word.

    Answers with the status codes in `server.failures` first. A chat with a word in `server.broken`
    gets that answer instead: (headers, body), or "hang" for none before the test ends.
    """

    def do_POST(self):
        size = int(self.headers["Content-Length"])
        sent = self.rfile.read(size)
        if len(sent) < size:  # Ctrl-C ended the client while it was sending
            return
        body = json.loads(sent)
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        if self.server.failures:
            headers = {"retry-after-ms": "1", "Location": "http://127.0.0.1:9/v1"}
            self.answer(self.server.failures.pop(0), headers, b"not\nnow")
            return
        text = body["messages"][-1]["content"]
        word = text.split('"')[1]
        broken = self.server.broken.get(word)
        if broken == "hang":
            self.server.ended.wait(120)
        elif broken:
            self.answer(200, *broken)
        else:
            text = f"<answer>{word.count(text.split()[2])}</answer>"
            self.answer(200, *says(text, self.server.finish))

    def answer(self, status, headers, body):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with loopback(Server) as server:
        server.url += "/v1"
        server.failures, server.finish = [], "stop"
        server.broken, server.ended = {}, threading.Event()
        yield server
        server.ended.set()


@pytest.fixture(scope="module")
def policy(qwen3_folder):
    return load_policy(Config(device="cpu"), str(qwen3_folder))


def complete(sampler, requests):
    """The completions of requests that are added together, in their order."""
    for request in requests:
        sampler.add(request)
    ended = {}
    while len(ended) < len(requests):
        ended |= sampler.step()
    return [ended[request] for request in requests]


def sample(server, policy, chats):
    requests = [Request([], PARAMS, PARAMS.seed, i, chat) for i, chat in enumerate(chats)]
    return complete(OpenAISampler(policy, server.url, "some-model"), requests)


def test_completions_arrive_in_order_with_the_requested_params(server, policy):
    words = ["cherry", "pear", "r" * 30, "apple"] * 5
    completions = sample(server, policy, [chat(w) for w in words])
    assert [c.text for c in completions] == [f"<answer>{w.count('r')}</answer>" for w in words]
    assert all(c.finish_reason == "stop" for c in completions)
    assert all(c.logprobs == [0.0] * len(c.token_ids) for c in completions)
    assert policy.tokenizer.decode(completions[0].token_ids[:-1]) == "<answer>2</answer>"
    path, body, _ = server.asked[0]
    assert path == "/v1/chat/completions"
    assert {name: value for name, value in body.items() if name != "messages"} == {
        "model": "some-model", "max_tokens": 32, "temperature": 0.5, "top_p": 0.9,
        "seed": body["seed"],
    }  # fmt: skip
    seeds = sorted(body["seed"] for _, body, _ in server.asked)
    assert seeds == sorted(derive_seed(7, i) for i in range(20))
    limits = [5, 500]  # of a single request: at most that of the run
    requests = [Request([], PARAMS, chat=chat("pear"), max_tokens=limit) for limit in limits]
    complete(OpenAISampler(policy, server.url, "some-model"), requests)
    assert sorted(body["max_tokens"] for _, body, _ in server.asked[-2:]) == [5, 32]


def test_calls_in_the_history_and_their_results_are_text(server, policy):
    calls = [{"function": {"name": name, "arguments": {"é": 1}}} for name in ("look", "see")]
    called = clean_message({"role": "assistant", "content": "Hm", "tool_calls": calls})
    history = [called, {"role": "tool", "content": "5"}, *chat("cherry")]
    [completion] = sample(server, policy, [history])
    assert (completion.finish_reason, completion.text) == ("stop", "<answer>2</answer>")
    texts = [
        'Hm\n<tool_call>{"name": "look", "arguments": {"é": 1}}</tool_call>\n'
        '<tool_call>{"name": "see", "arguments": {"é": 1}}</tool_call>',
        "<tool_response>\n5\n</tool_response>",
    ]
    asked, result, _ = server.asked[0][1]["messages"]
    assert asked == {"role": "assistant", "content": texts[0]}
    assert result == {"role": "user", "content": texts[1]}


def test_api_key_appears_in_no_message(server, policy, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-7\n")  # as `$(cat file)` in a .env may leave it
    server.finish = "secret-7"
    with pytest.raises(UsageError, match=r"finish reason '\[key\]'$"):
        sample(server, policy, [chat("pear")])
    assert server.asked[0][2] == "Bearer secret-7"
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "x-team: a\napi-key: Token secret-8")
    server.broken["bad"] = says("a secret-7 b secret-8")
    [completion] = sample(server, policy, [chat("bad")])
    assert completion.text == "a [key] b [key]"
    monkeypatch.setenv("OPENAI_API_KEY", "s")  # any text, for a server that needs no key
    server.broken["bad"] = says("as it is")
    assert sample(server, policy, [chat("bad")])[0].text == "as it is"
    monkeypatch.setenv("OPENAI_API_KEY", "secret-7\x1b")
    with pytest.raises(UsageError, match="OPENAI_API_KEY has characters") as error:
        sample(server, policy, [chat("pear")])
    assert "secret" not in str(error.value)


def test_busy_server_is_asked_again(server, policy):
    server.failures = [503, 429, 500]
    [completion] = sample(server, policy, [chat("pear")])
    assert completion.text == "<answer>1</answer>" and len(server.asked) == 4


@pytest.mark.parametrize("status", [404, 307])  # a redirect could lead to another host
def test_refusal_is_one_line_without_retries(server, policy, status):
    server.failures = [status] * 3
    with pytest.raises(UsageError, match=f"{server.url}: status {status}: not now"):
        sample(server, policy, [chat("pear")] * 3)
    assert len(server.asked) <= 3


def test_unreachable_server_is_one_line(policy, monkeypatch):
    monkeypatch.setattr(openai_sampler, "MAX_RETRIES", 0)
    sampler = OpenAISampler(policy, "http://127.0.0.1:9/v1", "m")
    with pytest.raises(UsageError, match=r"--base-url http://127\.0\.0\.1:9/v1: (?i:.*connect)"):
        complete(sampler, [Request([], PARAMS, chat=chat("pear"))])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (({"Content-Type": "text/html"}, b"<h1>Sign in</h1>"), "no JSON: <h1>Sign in"),
        ((JSON, b'{"choices": [{"mess'), "Expecting|Unterminated"),
        (says("<answer>3</ans", None), "finish reason 'None'"),
        (says("", "content_filter"), "finish reason 'content_filter'"),
        ((JSON | {"Content-Encoding": "gzip"}, gzip.compress(bytes(10**6))), "is compressed"),
        (says("a" * 60_000), "has over 50,000 bytes"),
        (says("a", choices=2), "not the one choice"),
    ],
)
def test_broken_answer_fails_its_own_request(server, policy, answer, reason, monkeypatch):
    monkeypatch.setattr(openai_sampler, "MAX_BYTES", 50_000)
    monkeypatch.setattr(openai_sampler, "MAX_RETRIES", 0)
    server.broken = {"bad": answer}
    first, broken, last = sample(server, policy, [chat("pear"), chat("bad"), chat("cherry")])
    assert (first.text, last.text) == ("<answer>1</answer>", "<answer>2</answer>")
    assert first.finish_reason == last.finish_reason == "stop"
    assert broken.finish_reason == "error" and re.search(reason, broken.text), broken.text


def test_a_request_that_comes_later_does_not_wait_for_an_open_one(server, policy, monkeypatch):
    server.broken = {"slow": "hang"}
    monkeypatch.setattr(openai_sampler, "TIMEOUT_S", 1.0)
    sampler = OpenAISampler(policy, server.url, "m")
    slow, quick = Request([], PARAMS, chat=chat("slow")), Request([], PARAMS, 7, 1, chat("pear"))
    sampler.add(slow)
    assert sampler.step() == []
    sampler.add(quick)
    ended = []
    while len(ended) < 2:
        ended += sampler.step()
    assert [request for request, _ in ended] == [quick, slow]
    assert ended[0][1].text == "<answer>1</answer>" and "not complete in 1 s" in ended[1][1].text
    assert {body["seed"] for _, body, _ in server.asked} >= {derive_seed(7, 1), derive_seed(0, 0)}


def test_after_eight_failures_in_a_row_no_request_is_sent(server, policy, monkeypatch):
    server.broken = {"bad": (JSON, b"{")}
    monkeypatch.setattr(openai_sampler, "CONCURRENCY", 1)
    sampler = OpenAISampler(policy, server.url, "m")
    words = ["pear", *["bad"] * 8, *["pear"] * 400]  # some are sent before the eighth is counted
    completions = complete(sampler, [Request([], PARAMS, chat=chat(word)) for word in words])
    assert completions[0].finish_reason == "stop" and "Expecting" in completions[8].text
    assert "8 requests in a row failed" in completions[-1].text
    [later] = complete(sampler, [Request([], PARAMS, chat=chat("pear"))])
    assert later.text == completions[-1].text and len(server.asked) < len(words)


def eval_words(number):
    """The words of the first held-out tasks of letter_counting."""
    env = make("letter_counting")
    return [env.reset(EVAL_SEEDS[i])[0]["content"].split('"')[1] for i in range(number)]


EVALUATE = "--sampler openai --num-updates 0 --run-name a --model-id m --eval-num-tasks 12".split()


@pytest.mark.parametrize(
    ("empty", "said"),
    [
        (says(" \n"), ["are empty"]),
        (says(None, "length", reasoning="Hm."), ["are empty: it only thinks"]),
        (says(None, refusal="I cannot."), ["are empty: it refuses: 'I cannot.'"]),
        (says("4", reasoning_content="Hm."), []),
    ],
)
def test_a_server_whose_answers_are_all_empty_is_remarked_once(server, policy, empty, said):
    server.broken = dict.fromkeys(["a", "b"], empty)
    for words, wanted in (("aaa", said), ("abr", [])):  # one answer with a text is enough
        sampler, lines = OpenAISampler(policy, server.url, "m"), []
        sampler.say = lines.append
        for _ in range(2):
            with sampler:
                requests = [Request([], PARAMS, 1, i, chat(word)) for i, word in enumerate(words)]
                complete(sampler, requests)
        assert [line.partition("answers of ")[0] for line in lines] == ["all 3 "] * len(wanted)
        assert all(end in line for line, end in zip(lines, wanted, strict=True))


def test_ctrl_c_ends_an_evaluation_and_keeps_what_ended(server, command, monkeypatch):
    server.broken = dict.fromkeys(eval_words(12)[3:], "hang")
    ended, step = [], OpenAISampler.step

    def step_and_interrupt(sampler):
        found = step(sampler)
        ended.extend(found)
        if found and len(ended) == 3:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(OpenAISampler, "step", step_and_interrupt)
    code, out, err = command(*EVALUATE, "--base-url", server.url)
    assert (code, err) == (130, "")
    assert "held-out accuracy at update 0: 1.00 [0.44, 1.00]  letter_counting" in out  # 3 of 3
    rollouts = read_records(Path("runs/a/rollouts.jsonl"))
    assert [bool(r["error"]) for r in rollouts] == [i >= 3 for i in range(12)]
