"""An OpenAI-compatible server plays: real HTTP against a server of the test's own."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from core import openai_sampler
from core.openai_sampler import OpenAISampler
from core.sampler import SamplingParams
from core.types import UsageError

PARAMS = SamplingParams(max_tokens=32, temperature=0.5, top_p=0.9, seed=7)


def chat(word):
    return [{"role": "user", "content": f'How many r in "{word}"?'}]


class Server(BaseHTTPRequestHandler):
    """Counts the letters of the quoted word, streaming a few characters at a time."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        text = body["messages"][-1]["content"]
        if self.server.failures:
            self.send_response(self.server.failures.pop(0))
            self.end_headers()
            self.wfile.write(b"not now")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        answer = f"<answer>{text.split(chr(34))[1].count(text.split()[2])}</answer>"
        for i in range(0, len(answer), 5):
            piece = {"choices": [{"delta": {"content": answer[i : i + 5]}, "finish_reason": None}]}
            self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
        for line in (": comment", "data: {broken", 'data: {"choices": []}', 'data: {"usage": 1}'):
            self.wfile.write(f"{line}\n\n".encode())
        last = {"choices": [{"delta": {}, "finish_reason": self.server.finish}]}
        self.wfile.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.asked, server.failures, server.finish = [], [], "stop"
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_answers_come_back_in_order_as_text(server, policy):
    words = ["cherry", "pear", "r" * 30, "apple"] * 5
    sampler = OpenAISampler(policy, server.url, "some-model")
    ticks = []
    found = sampler.reply([chat(w) for w in words], [], PARAMS, lambda: ticks.append(1))
    assert [c.text for c in found] == [f"<answer>{w.count('r')}</answer>" for w in words]
    assert all(c.finish_reason == "stop" for c in found)
    assert all(len(c.logprobs) == len(c.token_ids) for c in found)
    assert policy.tokenizer.decode(found[0].token_ids[:-1]) == "<answer>2</answer>"
    assert ticks
    path, body, key = server.asked[0]
    assert (path, key) == ("/v1/chat/completions", None)
    sent = {k: body[k] for k in ("model", "stream", "max_tokens", "temperature", "top_p", "seed")}
    assert sent == {
        "model": "some-model", "stream": True, "max_tokens": 32, "temperature": 0.5, "top_p": 0.9,
        "seed": 7,
    }  # fmt: skip


def test_an_answer_at_the_token_limit_is_cut_off(server, policy):
    server.finish = "length"
    [found] = OpenAISampler(policy, server.url, "m").reply([chat("pear")], [], PARAMS)
    assert found.finish_reason == "length"


def test_a_key_is_sent_and_never_written(server, policy, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-7")
    OpenAISampler(policy, server.url, "m").reply([chat("pear")], [], PARAMS)
    assert server.asked[0][2] == "Bearer secret-7"


def test_a_busy_server_is_asked_again(server, policy, monkeypatch):
    server.failures = [503, 429]
    [found] = OpenAISampler(policy, server.url, "m").reply([chat("pear")], [], PARAMS)
    assert found.text == "<answer>1</answer>"
    assert len(server.asked) == 3


def test_a_server_that_refuses_is_one_line(server, policy):
    server.failures = [404] * 9
    with pytest.raises(UsageError, match="status 404: not now") as error:
        OpenAISampler(policy, server.url, "m").reply([chat("pear")] * 3, [], PARAMS)
    assert "\n" not in str(error.value)


def test_no_server_is_one_line(policy, monkeypatch):
    monkeypatch.setattr(openai_sampler, "TRIES", 1)
    with pytest.raises(UsageError, match=r"--base-url http://127\.0\.0\.1:9/v1/chat/completions: "):
        OpenAISampler(policy, "http://127.0.0.1:9/v1", "m").reply([chat("pear")], [], PARAMS)


def test_what_stops_the_waiting_stops_the_asking(server, policy):
    server.failures = [503] * 1000

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        OpenAISampler(policy, server.url, "m").reply([chat("pear")] * 100, [], PARAMS, stop)
    assert len(server.asked) < 50


def test_the_command_evaluates_a_server(server, command):
    flags = "--sampler openai --num-updates 0 --eval-num-tasks 12 --run-name a".split()
    code, out, err = command(*flags, "--base-url", server.url, "--model-id", "qwen3:4b")
    assert (code, err) == (0, "")
    assert "held-out accuracy at update 0: 1.00 [0.76, 1.00]  letter_counting" in out
    assert {body["model"] for _, body, _ in server.asked} == {"qwen3:4b"}
    assert all(body["temperature"] == 0 for _, body, _ in server.asked)
    assert not Path("runs/a/model").exists()
