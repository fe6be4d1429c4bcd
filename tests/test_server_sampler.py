"""ServerSampler against what answers as vLLM's server does, and against that (`pytest -m vllm`).

The first draws with a policy of its own, which reads the adapters from their files. vLLM's has two
engines, and must be its build for CPUs.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import sleep

import httpx
import pytest
import torch
from conftest import load_small, metrics_of
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from test_sampler import trainer_gap

from core.extras.server_sampler import LOAD, SAMPLE, ServerSampler
from core.faults import NoServer, UsageError
from core.sampler import SamplingParams, TorchSampler
from core.tiny import PRETRAINED

URL = "http://127.0.0.1:8000"
PROMPTS = [[65, 66, 67]] * 2 + [[70, 71]] * 2
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=5)


class VLLM:
    """Takes the place of HTTP. `instead(path, body)` may answer before."""

    def __init__(self, folder):
        self.policy, self.lock = load_small(folder, lora_rank=4), threading.Lock()
        self.adapters, self.asked, self.instead = {}, [], lambda path, body: None

    def post(self, url, json):
        path = url.removeprefix(URL)
        self.asked.append((path, json))
        status, answer = self.instead(path, json) or (200, self.answer(path, json))
        return httpx.Response(status, json=answer)

    def answer(self, path, body):
        if path == LOAD:
            file = Path(body["lora_path"], "adapter_model.safetensors")
            self.adapters[body["lora_name"]] = load_file(file)
            return "Success"
        wanted = body["sampling_params"]
        params = SamplingParams(wanted["max_tokens"], wanted["temperature"], seed=wanted["seed"])
        with self.lock:
            if adapter := self.adapters.pop(body["model"], None):  # not loaded yet
                set_peft_model_state_dict(self.policy.model, adapter)
            self.policy.stop_ids = wanted["stop_token_ids"]
            [drawn] = TorchSampler(self.policy).sample([body["token_ids"]], params)
        return completion(body["model"], drawn.token_ids, drawn.logprobs)


def completion(name, ids, logprobs, reason="stop"):
    content = [{"logprob": logprob} for logprob in logprobs]
    choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason}
    return {"model": name, "choices": [choice]}


@pytest.fixture
def server(qwen3_folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-7")
    server = VLLM(qwen3_folder)
    monkeypatch.setattr(httpx.Client, "post", server.post)
    return server


@pytest.fixture
def policy(qwen3_folder):
    return learnt(load_small(qwen3_folder, lora_rank=4))


def learnt(policy):
    with torch.no_grad():
        for weight in policy.trainable().values():
            weight += 0.3 * torch.randn_like(weight)
    return policy


def test_each_sync_names_the_adapter_and_only_its_tokens_are_taken(server, policy, tmp_path):
    sampler = ServerSampler(policy, URL + "/v1/", tmp_path / "adapters")
    first, old = sampler.sample(PROMPTS, PARAMS), sampler.name
    assert sampler.sample(PROMPTS, PARAMS) == first  # with the same seeds
    text = first[0].text[2:4]  # what comes after it is not trained on
    [cut] = sampler.sample(PROMPTS[:1], replace(PARAMS, stop=(text,)))
    assert cut.token_ids == first[0].token_ids[: len(cut.token_ids)] and cut.text.endswith(text)
    learnt(policy)
    sampler.sync()
    second = sampler.sample(PROMPTS, PARAMS)
    before, now = (trainer_gap(policy, c, 0.8, PROMPTS).max() for c in (first, second))
    assert now < 1e-5 < 0.1 < before and sampler.sync_seconds is not None
    names = [body["model"] for path, body in server.asked if path == SAMPLE]
    assert names[1:] == [old] * 9 + [sampler.name] * 4 and old != sampler.name
    assert len([*tmp_path.glob("adapters/*")]) == 1  # the present one
    for name, reason in (("base", "stop"), (sampler.name, "abort")):
        answer = completion(name, [5], [-1.0], reason)
        server.instead = lambda path, body, answer=answer: (200, answer)
        with pytest.raises(NoServer, match=f"no whole completion of {sampler.name}"):
            sampler.sample(PROMPTS, PARAMS)
    sampler.close()
    assert not (tmp_path / "adapters").exists()


@pytest.mark.parametrize("path, answer, words", [
    (LOAD, (404, {"detail": "Not Found"}), "--enable-lora"),
    (LOAD, (401, "who is secret-7?"), r"status 401: \"who is \[key\]\?"),
    (SAMPLE, (200, "Sign in"), "no whole completion"),
    ("", (), r"differ by \d.\de.* nats .*--logprobs-mode processed_logprobs"),
])  # fmt: skip
def test_a_server_that_does_not_suit_is_refused(server, policy, tmp_path, path, answer, words):
    server.instead = lambda asked, body: answer if path == asked else None
    server.policy.causal_lm.lm_head.weight.data *= 1 if path else 1.1
    with pytest.raises(UsageError, match=f"^--base-url {URL}: .*{words}"):
        ServerSampler(policy, URL, tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()


@pytest.fixture
def engines():
    """The address of two of vLLM's engines with the weights of tiny."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = f"""--host 127.0.0.1 --port {port} --enable-lora --max-lora-rank 8 --enable-scale-out
        --logprobs-mode processed_logprobs --generation-config vllm --max-model-len 512
        --dtype float32 --data-parallel-size 2 --enforce-eager --gpu-memory-utilization 0.2
        --no-enable-chunked-prefill --max-num-batched-tokens 4096""".split()
    own = """VLLM_ALLOW_RUNTIME_LORA_UPDATING=True VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=1
        VLLM_HOST_IP=127.0.0.1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind"""
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    process = subprocess.Popen(
        [*module, "--model", str(PRETRAINED), *flags], start_new_session=True,
        env=os.environ | dict(pair.split("=") for pair in own.split()),
    )  # fmt: skip
    try:
        url, answers = f"http://127.0.0.1:{port}", False
        while not answers:
            assert process.poll() is None
            sleep(0.5)
            with suppress(httpx.HTTPError):
                answers = httpx.get(f"{url}/health", trust_env=False).is_success
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.vllm
def test_two_engines_of_vllm_behind_one_address_have_the_adapter_of_each_update(engines, command):
    code, _, err = command(
        *"--lora-rank 8 --lr 1e-3 --num-updates 3 --num-prompts 4 --eval-num-tasks 0".split(),
        *"--max-model-len 512 --device cpu --run-name a --sampler server --overlap".split(),
        *("--base-url", engines),
    )
    assert (code, err) == (0, "")
    _, first, *updates = metrics_of("runs/a")
    assert first["gap/logprob_mean"] < 1e-5
    assert abs(updates[-1]["gap/canary"]) < 0.01  # 1: the adapter of the update before
    metrics = httpx.get(f"{engines}/metrics", trust_env=False).text
    counts = re.findall(r'vllm:request_success_total\{engine="(\d)".*\} (\d+)', metrics)
    assert {engine for engine, count in counts if float(count)} == {"0", "1"}
