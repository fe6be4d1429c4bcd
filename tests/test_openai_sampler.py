"""OpenAISampler against a real HTTP server on loopback."""

import importlib.util
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from core import openai_sampler
from core.model import load_policy
from core.openai_sampler import OpenAISampler
from core.sampler import SamplingParams
from core.seeds import derive_seed
from core.types import UsageError

PARAMS = SamplingParams(max_tokens=32, temperature=0.5, top_p=0.9, seed=7)


def chat(word):
    return [{"role": "user", "content": f'How many r in "{word}"?'}]


class Server(BaseHTTPRequestHandler):
    """Counts the letters of the quoted word and streams the answer five characters at a time.

    Answers with the status codes in `server.failures` first.
    """

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        if self.server.failures:
            self.send_response(self.server.failures.pop(0))
            self.send_header("retry-after-ms", "1")
            self.send_header("Location", "http://127.0.0.1:9/v1")
            self.end_headers()
            self.wfile.write(b"not\nnow")
            return
        text = body["messages"][-1]["content"]
        answer = f"<answer>{text.split(chr(34))[1].count(text.split()[2])}</answer>"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for i in range(0, len(answer), 5):
            self.send_event(choices=[{"delta": {"content": answer[i : i + 5]}}])
        self.wfile.write(b": comment\n\n")
        self.send_event(choices=[])
        self.send_event(usage={"total_tokens": 1})
        self.send_event(choices=[{"delta": {}, "finish_reason": self.server.finish}])
        self.wfile.write(b"data: [DONE]\n\n")

    def send_event(self, **data):
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.asked, server.failures, server.finish = [], [], "stop"
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def policy(qwen3_folder):
    return load_policy(str(qwen3_folder), device="cpu")


def sample(server, policy, chats, on_progress=lambda: None):
    return OpenAISampler(policy, server.url, "some-model").sample([], PARAMS, on_progress, chats)


def test_completions_arrive_in_order_with_the_requested_params(server, policy):
    words = ["cherry", "pear", "r" * 30, "apple"] * 5
    ticks = []
    completions = sample(server, policy, [chat(w) for w in words], lambda: ticks.append(1))
    assert [c.text for c in completions] == [f"<answer>{w.count('r')}</answer>" for w in words]
    assert all(c.finish_reason == "stop" for c in completions)
    assert all(c.logprobs == [0.0] * len(c.token_ids) for c in completions)
    assert policy.tokenizer.decode(completions[0].token_ids[:-1]) == "<answer>2</answer>"
    assert ticks
    path, body, _ = server.asked[0]
    assert path == "/v1/chat/completions"
    assert {name: value for name, value in body.items() if name != "messages"} == {
        "model": "some-model", "stream": True, "max_tokens": 32, "temperature": 0.5, "top_p": 0.9,
        "seed": body["seed"],
    }  # fmt: skip
    seeds = sorted(body["seed"] for _, body, _ in server.asked)
    assert seeds == sorted(derive_seed(7, i) for i in range(20))


def test_each_stream_has_a_seed_of_its_own(server, policy):
    params = replace(PARAMS, streams=(3000, 4000))
    OpenAISampler(policy, server.url, "m").sample([], params, chats=[chat("a"), chat("b")])
    seeds = {body["messages"][0]["content"]: body["seed"] for _, body, _ in server.asked}
    assert seeds == {
        chat("a")[0]["content"]: derive_seed(7, 3000),
        chat("b")[0]["content"]: derive_seed(7, 4000),
    }


def test_completion_at_a_limit_finishes_with_length(server, policy, monkeypatch):
    server.finish = "length"
    [completion] = sample(server, policy, [chat("pear")])
    assert (completion.text, completion.finish_reason) == ("<answer>1</answer>", "length")
    server.finish = "stop"
    monkeypatch.setattr(openai_sampler, "MAX_CHARACTERS", 8)
    [completion] = sample(server, policy, [chat("pear")])
    assert (completion.text, completion.finish_reason) == ("<answer>", "length")


def test_api_key_is_sent_from_the_environment(server, policy, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-7")
    sample(server, policy, [chat("pear")])
    assert server.asked[0][2] == "Bearer secret-7"


def test_busy_server_is_asked_again(server, policy):
    server.failures = [503, 429, 500]
    [completion] = sample(server, policy, [chat("pear")])
    assert completion.text == "<answer>1</answer>"
    assert len(server.asked) == 4


@pytest.mark.parametrize("status", [404, 307])  # a redirect could lead to another host
def test_refusal_is_one_line_without_retries(server, policy, status):
    server.failures = [status] * 3
    with pytest.raises(UsageError, match=f"{server.url}: status {status}: not now"):
        sample(server, policy, [chat("pear")] * 3)
    assert len(server.asked) <= 3


def test_unreachable_server_is_one_line(policy, monkeypatch):
    monkeypatch.setattr(openai_sampler, "MAX_RETRIES", 0)
    sampler = OpenAISampler(policy, "http://127.0.0.1:9/v1", "m")
    with pytest.raises(UsageError, match=r"--base-url http://127\.0\.0\.1:9/v1: .*connect.*"):
        sampler.sample([], PARAMS, chats=[chat("pear")])


def test_answer_outside_the_protocol_is_one_line(server, policy, monkeypatch):
    monkeypatch.setattr(Server, "send_event", lambda s, **_: s.wfile.write(b"data: {broken\n\n"))
    with pytest.raises(UsageError, match=f"--base-url {server.url}: Expecting"):
        sample(server, policy, [chat("pear")])


def test_exception_in_on_progress_cancels_the_requests(server, policy):
    server.failures = [503] * 1000

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(server, policy, [chat("pear")] * 100, interrupt)
    assert len(server.asked) < 50


def test_missing_package_is_one_line(policy, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'pip install -e "\.\[openai\]"'):
        OpenAISampler(policy, "http://127.0.0.1:9/v1", "m")


def test_command_evaluates_a_server(server, command):
    flags = "--sampler openai --num-updates 0 --eval-num-tasks 12 --run-name a".split()
    code, out, err = command(*flags, "--base-url", server.url, "--model-id", "qwen3:4b")
    assert (code, err) == (0, "")
    assert "held-out accuracy at update 0: 1.00 [0.76, 1.00]  letter_counting" in out
    assert {body["model"] for _, body, _ in server.asked} == {"qwen3:4b"}
    assert all(body["temperature"] == 0 for _, body, _ in server.asked)
    assert not Path("runs/a/model").exists()
