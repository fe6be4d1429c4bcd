"""OpenAISampler against a real HTTP server on loopback."""

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from conftest import loopback

from core.extras import openai_sampler
from core.files.run_log import read_records
from environments.base import EVAL_SEEDS
from environments.plumbing.registry import make

EVALUATE = "--sampler openai --num-updates 0 --run-name a --model-id m --eval-num-tasks 12".split()
KEY = "secret-7"


class Server(BaseHTTPRequestHandler):
    """Counts the letter that the message asks for, unless `server.refuse` has a status for it."""

    def do_POST(self):
        if not (sent := self.rfile.read(int(self.headers["Content-Length"]))):
            return  # the run has ended
        body = json.loads(sent)
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        question = body["messages"][-1]["content"]
        word, letter = question.split('"')[1], question.split()[2]
        status = self.server.refuse(len(self.server.asked), word)
        message = {"content": f"<answer>{word.count(letter)}</answer>"}
        finish = "stop" if status is None else "content_filter"
        answer = json.dumps({"choices": [{"message": message, "finish_reason": finish}]})
        self.send_response(status or 200)
        self.send_header("retry-after-ms", "1")
        self.send_header("Content-Type", "text/html" if status else "application/json")
        self.end_headers()
        self.wfile.write(f"no\nto {KEY}".encode() if status else answer.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with loopback(Server) as server:
        server.url += "/v1"
        server.refuse = lambda number, word: None
        yield server


def test_a_greedy_evaluation_counts_the_episodes_that_fail(server, command):
    questions = [make("letter_counting").reset(seed)[0]["content"] for seed in EVAL_SEEDS[:12]]
    words = [question.split('"')[1] for question in questions]
    busy, failing = {1: 503, 2: 429}, {words[3]: 0, words[5]: 400}  # 0: a filtered answer
    server.refuse = lambda number, word: busy.get(number, failing.get(word))
    code, out, err = command(*EVALUATE, "--base-url", server.url)
    assert (code, err) == (0, "") and "2 of 12 episodes failed" in out
    assert "held-out accuracy before RL (greedy; training samples its answers): 1.00" in out
    rollouts = read_records(Path("runs/a/rollouts.jsonl"))
    assert [i for i, rollout in enumerate(rollouts) if rollout["error"]] == [3, 5]
    assert len(server.asked) == 14
    for path, body, _ in server.asked:
        assert (path, body["model"], body["temperature"]) == ("/v1/chat/completions", "m", 0)


@pytest.mark.parametrize(
    ("status", "advice"), [(401, "OPENAI_API_KEY: status 401: no to [key]"), (404, "--model-id"),
                           (200, "no completion: no to [key]"), (None, "start the server")],
)  # fmt: skip
def test_a_wrong_key_model_or_address_is_one_line(server, command, monkeypatch, status, advice):
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")  # as `$(cat file)` in a .env may leave it
    monkeypatch.setattr(openai_sampler, "MAX_RETRIES", 0)
    server.refuse = lambda number, word: status
    url = server.url if status else "http://127.0.0.1:9/v1"
    code, out, err = command(*EVALUATE, "--base-url", url)
    assert code == 2 and err.count("\n") == 1 and url in err and advice in err
    assert KEY not in out + err and {key for _, _, key in server.asked} <= {f"Bearer {KEY}"}
