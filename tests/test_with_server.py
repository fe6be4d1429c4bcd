"""runs/scale/with_server.py: the flags of vLLM's server, and its life beside the run."""

import signal
import sys

import httpx
import pytest

from core.config import Config, resolve
from core.faults import UsageError
from core.tiny import PRETRAINED
from environments.plumbing import processes
from runs.scale.with_server import main, second_gpu, server_command, started

SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
print(os.environ["GPU"], os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"], flush=True)
HTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Health).serve_forever()
"""


@pytest.fixture(autouse=True)
def sigterm():
    """Its handler, which `started` sets."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def flags(**settings):
    """The flags of the server, and their values as text."""
    command = " ".join(server_command(resolve(Config(device="cpu", **settings))))
    return dict(text.partition(" ")[::2] for text in command.split(" --")[1:])


def test_the_server_suits_the_run():
    of_adapters = flags(lora_rank=9, max_model_len=300, dtype="bfloat16")
    wanted = {"model": str(PRETRAINED), "max-model-len": "300", "dtype": "bfloat16",
              "logprobs-mode": "processed_logprobs", "generation-config": "vllm",
              "max-lora-rank": "16"}  # fmt: skip
    assert wanted.items() < of_adapters.items()
    assert {"enable-lora", "enable-scale-out"} < of_adapters.keys()
    usual = flags(lora_rank=8, max_model_len=10**9)
    assert usual["dtype"] == "float32" and int(usual["max-model-len"]) < 10**6  # what the model can


def test_all_weights_are_refused_before_a_server_starts(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "start", None)
    assert main(["--device", "cpu", "--num-updates", "1"]) == 2
    assert "add --lora-rank" in capsys.readouterr().err and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("visible, second", [(None, "1"), ("3,5,6", "5"), ("3", None)])
def test_the_server_gets_the_second_gpu(monkeypatch, visible, second):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert second_gpu().get("CUDA_VISIBLE_DEVICES") == second


def test_a_server_lives_as_long_as_its_context(tmp_path, monkeypatch):
    alive, start = [], processes.start
    monkeypatch.setattr(
        processes, "start", lambda *a, **b: alive.append(start(*a, **b)) or alive[0]
    )
    log = tmp_path / "log"
    with started([sys.executable, "-c", SERVER], log, {"GPU": "7"}) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        assert not processes.has_ended(alive[0])
    assert alive[0].returncode is not None and log.read_text().splitlines()[0] == "7 True"


def test_a_server_that_ends_at_once_says_why(tmp_path):
    fails = "raise ValueError('no memory')"
    with (
        pytest.raises(UsageError, match=r"has ended, see .*log: ValueError: no memory$"),
        started([sys.executable, "-c", fails], tmp_path / "log", {}),
    ):
        pass
