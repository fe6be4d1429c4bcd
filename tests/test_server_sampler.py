"""ServerSampler against small servers that answer as vLLM does, and against vLLM's own.

The small ones draw with a policy of their own, which reads the adapters from their files. vLLM's
(`pytest -m vllm`) must have its build for CPUs.
"""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from copy import deepcopy
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torch
from conftest import load_small, loopback, metrics_of
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from test_sampler import check_first_tokens, trainer_gap

from core import canary
from core.config import Config, resolve
from core.extras import server_sampler
from core.extras.server_sampler import SAMPLE, ServerSampler
from core.faults import UsageError
from core.files.checkpoint import find_checkpoint
from core.files.run_log import read_records
from core.loading import load_policy
from core.loop import play
from core.sampler import Request, SamplingParams, TorchSampler
from core.seeds import derive_seed
from core.tiny import PRETRAINED
from environments.plumbing import processes
from runs.scale.with_server import free_port, server_command

PROMPTS = [[65, 66, 67]] * 4 + [[70, 71]] * 4
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=5)


class VLLM(BaseHTTPRequestHandler):
    """The paths that ServerSampler asks for. `server.instead(path, body)` may answer before them,
    with (status, text); "gone" ends the connection without an answer."""

    def do_POST(self):
        server, path = self.server, self.path
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        server.asked.append((path, body))
        server.keys.add(self.headers.get("Authorization"))
        answer = server.instead(path, body)
        if answer == "gone":
            return
        if answer is None:
            with server.lock:
                answer = self.answer(path, body)
        status, text = answer
        text = text if isinstance(text, str) else json.dumps(text)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST

    def answer(self, path, body):
        server, name = self.server, body.get("lora_name", body.get("model"))
        if path == "/v1/models":
            return 200, {"data": [{"id": "base", "max_model_len": server.length}]}
        if path == "/tokenize":
            ids = server.policy.tokenizer.encode(body["prompt"], add_special_tokens=False)
            return 200, {"tokens": ids}
        if path == "/v1/load_lora_adapter":
            server.adapters[name] = load_file(Path(body["lora_path"], "adapter_model.safetensors"))
        if path == "/v1/unload_lora_adapter":
            del server.adapters[name]
        if path != SAMPLE:
            return 200, {"version": "0.32.0"}
        if name not in server.adapters and not server.takes_any_name:
            return 404, {"error": {"message": "The model does not exist."}}
        weights = server.adapters.get(name)
        zeros = {n: torch.zeros_like(w) for n, w in (weights or server.zeros).items()}
        set_peft_model_state_dict(server.policy.model, weights or zeros)
        server.zeros = zeros
        wanted, prompt = body["sampling_params"], body["token_ids"]
        server.policy.stop_ids = wanted["stop_token_ids"]
        params = SamplingParams(wanted["max_tokens"], wanted["temperature"], seed=wanted["seed"])
        [drawn] = TorchSampler(server.policy).sample([prompt], params)
        logprobs, ids = drawn.logprobs[: server.most], drawn.token_ids[: server.most]
        if server.raw:
            logprobs = canary.score(server.policy, prompt, ids).tolist()
        choice = {
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": logprob} for logprob in logprobs]},
            "finish_reason": "stop" if ids[-1] in wanted["stop_token_ids"] else "length",
        }
        return 200, {"model": name if weights else "base", "choices": [choice]}

    def log_message(self, *args):
        pass


@pytest.fixture
def servers(qwen3_folder, monkeypatch):
    """Two servers. Lost ones are tried again at once."""
    monkeypatch.setattr(server_sampler, "TRY_AGAIN_S", 0.0)
    with loopback(VLLM) as one, loopback(VLLM) as two:
        for server in (one, two):
            server.policy, server.lock = load_small(qwen3_folder, lora_rank=4), threading.Lock()
            server.adapters, server.length, server.keys = {}, 512, set()
            server.raw, server.takes_any_name, server.most = False, False, None
            server.instead = lambda path, body: None
        yield [one, two]


@pytest.fixture
def start(servers, qwen3_folder, tmp_path):
    """Starts a sampler for a policy with adapters that are not 0; the test's end closes it."""
    with ExitStack() as closes:

        def start_one(count=2):
            policy = load_small(qwen3_folder, lora_rank=4)
            learn(policy)
            urls = ",".join(server.url for server in servers[:count])
            sampler = ServerSampler(policy, urls, str(tmp_path / "adapters"))
            closes.callback(lambda: sampler.client.is_closed or sampler.close())
            sampler.lines = []
            sampler.say = sampler.lines.append
            return sampler

        yield start_one


def learn(policy, step=0.3):
    with torch.no_grad():
        for name, weight in policy.trainable().items():
            if "lora_B" in name:
                weight += step * torch.randn_like(weight)


def gap(sampler, completions):
    return trainer_gap(sampler.policy, completions, PARAMS.temperature, PROMPTS).max()


def asked(server, path=SAMPLE):
    return [body for found, body in server.asked if found == path]


def test_each_sync_gives_the_adapter_a_new_name_and_the_draws_its_weights(start, servers, tmp_path):
    sampler = start()
    first = sampler.sample(PROMPTS, PARAMS)
    old = sampler.name
    for _ in range(2):
        learn(sampler.policy)
        sampler.sync()
    new = sampler.sample(PROMPTS, PARAMS)
    assert gap(sampler, new) < 1e-5 < 0.1 < gap(sampler, first)
    stem = old.removesuffix("-v1")
    assert sampler.name == f"{stem}-v3" and sampler.sync_seconds is not None
    folder = tmp_path / "adapters"
    assert {path.name for path in folder.iterdir()} == {f"{stem}-v2", f"{stem}-v3"}
    for server in servers:
        assert [*server.adapters] == [sampler.name]
        bodies = asked(server)[1:]  # without the one that compares the models
        assert [body["model"] for body in bodies] == [old] * 4 + [sampler.name] * 4
        for body in bodies:
            assert body["sampling_params"]["stop_token_ids"] == sampler.policy.stop_ids != []
    seeds = [body["sampling_params"]["seed"] for server in servers for body in asked(server)[1:]]
    assert Counter(seeds) == Counter([derive_seed(5, i) % 2**31 for i in range(8)] * 2)
    assert "2 vLLM server(s), 0.32.0" in sampler.remark
    sampler.close()
    assert not [*folder.iterdir()] and not servers[0].adapters


def test_a_prompt_goes_to_the_server_that_had_it_and_a_new_one_to_the_idle_one(start, servers):
    sampler = start()
    with sampler:
        sampler.sample(PROMPTS * 2, PARAMS)
    prompts = [{tuple(body["token_ids"]) for body in asked(server)[1:]} for server in servers]
    assert sorted(map(len, prompts)) == [1, 1] and prompts[0] != prompts[1]
    home = prompts.index({(65, 66, 67)})
    sampler.add(Request([65, 66, 67, 68, 69], PARAMS, 5, 0))  # the next turn of the first
    while not sampler.step():
        pass
    assert asked(servers[home])[-1]["token_ids"] == [65, 66, 67, 68, 69]


def test_a_prompt_with_many_requests_goes_to_other_servers_too(start, servers, monkeypatch):
    monkeypatch.setattr(server_sampler, "AHEAD", 2)
    start().sample([[65, 66, 67]] * 8, PARAMS)
    assert min(len(asked(server)[1:]) for server in servers) >= 2


@pytest.mark.parametrize("takes_any_name", [False, True])
def test_a_restarted_server_gets_the_adapter_again_before_a_token_counts(
    start, servers, takes_any_name
):
    sampler = start(1)
    [server, _] = servers
    server.takes_any_name = takes_any_name  # VLLM_SKIP_MODEL_NAME_VALIDATION=1
    server.adapters.clear()
    assert gap(sampler, sampler.sample(PROMPTS, PARAMS)) < 1e-5
    assert len(asked(server, "/v1/models")) == 2  # it was compared again
    why = "it sampled from base" if takes_any_name else "it has lost the adapter"
    assert sampler.lines[0].startswith(f"{server.url}: {why}")
    assert sampler.lines[1:] == [f"{server.url} is back"]


def test_what_a_lost_server_had_goes_to_the_other_with_the_same_seeds(start, servers):
    sampler = start()
    one, two = servers
    expected = sampler.sample(PROMPTS, PARAMS)
    busy = 429, {"error": {"message": "busy"}}
    for failure in (
        "gone",
        (503, "busy"),
        busy,
        (404, "none"),
        (200, "<h1>Sign in</h1>"),
        (200, {}),
    ):
        one.asked.clear(), two.asked.clear(), sampler.lines.clear()

        def fail(path, body, failure=failure):
            if path != SAMPLE or len(asked(one)) > 1:
                return failure

        one.instead = fail
        with sampler:
            assert sampler.sample(PROMPTS, PARAMS) == expected
        assert f"{one.url}: " in sampler.lines[0] and len(asked(two)) >= 7, failure
        one.instead = lambda path, body: None
        while sampler.lines[-1] != f"{one.url} is back":
            sampler.step()
    one.asked.clear()
    with sampler:
        assert sampler.sample(PROMPTS, PARAMS) == expected and asked(one)


def test_an_adapter_that_another_rank_has_loaded_is_used(start, servers):
    [server, _] = servers

    def loaded(path, body):
        if path == "/v1/load_lora_adapter":
            file = Path(body["lora_path"], "adapter_model.safetensors")
            server.adapters[body["lora_name"]] = load_file(file)
            return 400, {"error": {"message": "The lora adapter 'a' has already been loaded."}}

    server.instead = loaded
    sampler = start(1)
    assert gap(sampler, sampler.sample(PROMPTS, PARAMS)) < 1e-5


def test_a_request_that_a_server_refuses_is_sent_to_no_other(start, servers, monkeypatch):
    sampler = start(1)
    monkeypatch.setattr(server_sampler, "WITHOUT_SERVER_S", 0.0)
    refusal = 400, {"error": {"message": "no"}}
    servers[0].instead = lambda path, body: refusal if path == SAMPLE else None
    with pytest.raises(UsageError, match=f"^--base-url {servers[0].url}: status 400: no"):
        sampler.sample(PROMPTS, PARAMS)


def test_a_request_that_hangs_is_answered_elsewhere(start, servers):
    sampler, release = start(), threading.Event()
    one, two = servers
    one.instead = lambda path, body: release.wait() and None
    for number in range(2):
        sampler.add(Request([65 + number], PARAMS, 5, number))
    ended = []
    while not (asked(one)[1:] and ended):
        ended += sampler.step()
    sampler.calls.limit = 0.0  # what is open now has been open for too long
    sampler._advance()
    sampler.calls.limit = 1e9
    while len(ended) < 2:
        ended += sampler.step()
    assert any("no answer in" in line for line in sampler.lines)
    seeds = {body["sampling_params"]["seed"] for body in asked(two)}
    assert seeds >= {derive_seed(5, i) % 2**31 for i in range(2)}
    release.set()


def test_a_server_that_comes_back_is_compared_with_the_weights_that_it_gets(
    start, servers, monkeypatch
):
    monkeypatch.setattr(server_sampler, "WITHOUT_SERVER_S", 1.0)
    sampler = start(1)
    copy = deepcopy(sampler.policy)
    assert sampler.ahead(copy) is sampler
    learn(sampler.policy)  # a step of training, while the next update's episodes are played
    servers[0].adapters.clear()
    drawn = sampler.sample(PROMPTS, PARAMS)
    assert sampler.lines[-1] == f"{servers[0].url} is back"
    assert trainer_gap(copy, drawn, PARAMS.temperature, PROMPTS).max() < 1e-5
    sampler.sync()  # from now on with the trainer's
    servers[0].adapters.clear()
    assert gap(sampler, sampler.sample(PROMPTS, PARAMS)) < 1e-5


def test_an_adapter_stays_while_a_server_may_be_at_a_request_with_it(start, servers, tmp_path):
    sampler, release = start(1), threading.Event()
    servers[0].instead = lambda path, body: release.wait() and None if path == SAMPLE else None
    sampler.add(Request([65], PARAMS, 5, 0))
    while not asked(servers[0])[1:]:
        sampler.step()
    old, folder = tmp_path / "adapters" / sampler.name, tmp_path / "adapters"
    for _ in range(3):
        sampler.sync()
    assert old.is_dir() and len([*folder.iterdir()]) == 3
    release.set()
    while not sampler.step():
        pass
    sampler.sync()
    assert not old.exists() and len([*folder.iterdir()]) == 2


def test_adapters_of_a_killed_run_are_removed_and_those_of_another_run_stay(start, tmp_path):
    """The killed process held the lock of its adapter; folders of other names are not ours."""
    folder = tmp_path / "adapters"
    killed = folder / "picorl-00000000-v3"
    killed.mkdir(parents=True)
    (folder / "picorl-own").mkdir()
    program = f"""import os, filelock
lock = filelock.FileLock({str(killed / server_sampler.LOCK)!r})
lock.acquire()
os._exit(9)"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    one, two = start(), start()
    kept = {path.name for path in folder.iterdir()}
    assert kept == {"picorl-own", f"{one.stem}-v0", one.name, f"{two.stem}-v0", two.name}
    two.close()
    one.close()
    assert [path.name for path in folder.iterdir()] == ["picorl-own"]


def test_a_program_that_changes_the_folder_loses_no_server(start, servers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sampler = start(1)
    servers[0].instead = lambda path, body: os.chdir("/")
    assert gap(sampler, sampler.sample(PROMPTS, PARAMS)) < 1e-5 and not sampler.lines


def test_the_adapter_folder_has_to_be_one(start, tmp_path):
    (tmp_path / "adapters").touch()
    with pytest.raises(UsageError, match=r"--adapter-folder .*adapters is no folder"):
        start()


REFUSED = [
    ({"raw": True}, None, "--logprobs-mode processed_logprobs"),
    ({"length": 300}, None, "its --max-model-len is 300, that of this run 512"),
    ({}, ("/tokenize", (200, {"tokens": [5, 6]})), "another tokenizer"),
    ({}, ("/v1/load_lora_adapter", (404, {"detail": "Not Found"})), "--enable-lora"),
    ({}, ("/v1/load_lora_adapter", (500, {"error": {"message": "rank 4"}})), "500: rank 4"),
    ({}, ("/v1/models", (401, "who is secret-7?")), r"status 401: who is \[key\]\?"),
    ({}, ("/v1/models", (307, "elsewhere")), "status 307"),
    ({"most": 3}, None, "after 3 of 16 tokens: start it with --generation-config vllm"),
    ({"scale": 1.1}, None, r"16 tokens differ by \d.\de.* nats .*, 1e-04 is allowed"),
]


@pytest.mark.parametrize("state, instead, words", REFUSED)
def test_a_server_that_does_not_suit_is_refused_in_one_line(
    start, servers, state, instead, words, monkeypatch, tmp_path
):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-7")
    vars(servers[1]).update(state)
    servers[1].policy.causal_lm.lm_head.weight.data *= state.get("scale", 1.0)
    if instead:
        servers[1].instead = lambda path, body: instead[1] if path == instead[0] else None
    with pytest.raises(UsageError, match=f"^--base-url {servers[1].url}: .*{words}"):
        start()
    assert servers[1].keys == {"Bearer secret-7"} and not [*(tmp_path / "adapters").iterdir()]


RUN = """--lora-rank 4 --num-updates 3 --num-prompts 2 --group-size 4 --eval-num-tasks 4
    --save-every 0 --eval-every 0 --max-tokens 16 --lr 1e-2 --entropy-coef 0.1
    --max-model-len 512 --device cpu --sampler server --adapter-folder adapters""".split()


def test_a_run_without_servers_is_saved_and_goes_on_to_the_same_metrics(
    command, servers, qwen3_folder, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-7")
    urls = ",".join(server.url for server in servers)
    flags = [*RUN, "--model-id", qwen3_folder, "--base-url", urls]
    code, out, err = command(*flags, "--run-name", "whole")
    assert (code, err) == (0, "")
    whole = metrics_of("runs/whole")
    assert all(record["gap/logprob_max"] < 1e-5 for record in whole[1:])

    def end(path, body):  # in the middle of the last update
        if sum("v3" in body["model"] for s in servers for body in asked(s)) > 3:
            samplers[0].stop()  # as if it had waited for long enough
            return "gone"

    samplers, enter = [], ServerSampler.__enter__
    monkeypatch.setattr(ServerSampler, "__enter__", lambda s: samplers.append(s) or enter(s))
    for server in servers:
        server.asked.clear()
        server.instead = end
    code, out, err = command(*flags, "--run-name", "a")
    assert code == 1 and "no server answers: waiting for one" in out
    assert all(f"{server.url}: " in err for server in servers) and "--resume runs/a" in err
    assert find_checkpoint(Path("runs/a")).progress["update"] == 2  # not only update 1
    for server in servers:
        server.instead = lambda path, body: None
    code, _, err = command("--resume", "runs/a")
    assert code == 0, err
    assert metrics_of("runs/a") == whole
    assert all(server.keys == {"Bearer secret-7"} for server in servers)
    files = [path for path in Path().rglob("*") if path.is_file()]
    assert len(files) > 9 and not any(b"secret-7" in path.read_bytes() for path in files)
    assert "secret-7" not in out + err


class Engine:
    """vLLM's own server with the weights of tiny, in a process group of its own."""

    def __init__(self):
        port, cfg = free_port(), Config(lora_rank=8, device="cpu", max_model_len=512)
        own = """VLLM_ALLOW_RUNTIME_LORA_UPDATING=True VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=1
            VLLM_HOST_IP=127.0.0.1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind"""
        address = ["--host", "127.0.0.1", "--port", str(port)]
        self.command = [*server_command(resolve(cfg)), *address]
        self.environment = dict(pair.split("=") for pair in own.split())
        self.url = f"http://127.0.0.1:{port}"
        self.start()

    def start(self):
        self.process = processes.start(self.command, env=os.environ | self.environment)

    def kill(self):
        processes.kill(self.process)


@pytest.fixture(scope="module")
def engines():
    started = [Engine() for _ in range(2)]
    yield started
    for engine in started:
        engine.kill()


@pytest.mark.vllm
def test_draws_of_vllm_have_the_probabilities_of_the_policy(engines, tmp_path):
    policy = load_policy(Config(device="cpu", max_model_len=512, lora_rank=8), str(PRETRAINED))
    learn(policy, 0.02)
    prompt, params = [65, 66, 67], SamplingParams(max_tokens=1, temperature=2.0, seed=3)
    sampler = ServerSampler(policy, ",".join(e.url for e in engines), str(tmp_path / "adapters"))
    drawn = Counter(c.token_ids[0] for c in sampler.sample([prompt] * 2000, params))
    sampler.close()
    check_first_tokens(policy, prompt, params.temperature, drawn)


@pytest.mark.vllm
def test_a_run_learns_on_vllms_servers_while_one_is_killed_and_comes_back(
    engines, command, monkeypatch
):
    monkeypatch.setattr(server_sampler, "TRY_AGAIN_S", 0.2)
    send, collect, now = ServerSampler._send, play.collect, Counter()

    def kill_in_update_2(sampler, *arguments):
        now["sent"] += 1
        send(sampler, *arguments)
        if now["update"] == 2 and now["sent"] == 100:
            engines[1].kill()
            engines[1].start()

    def wait_in_update_5(run, update, *others):
        now.update(update=1, sent=-now["sent"])
        while update == 5 and any(server.lost for server in run.sampler.servers):
            run.sampler.step()
        return collect(run, update, *others)

    monkeypatch.setattr(ServerSampler, "_send", kill_in_update_2)
    monkeypatch.setattr(play, "collect", wait_in_update_5)
    code, out, err = command(
        *"--lora-rank 8 --lr 1e-3 --num-updates 6 --eval-every 0 --eval-num-tasks 64".split(),
        *"--max-model-len 512 --device cpu --run-name a --sampler server".split(),
        *("--adapter-folder", "adapters", "--base-url", ",".join(e.url for e in engines)),
    )
    assert (code, err) == (0, "")
    assert f"{engines[1].url}: " in out and f"{engines[1].url} is back" in out
    first, *updates = metrics_of("runs/a")
    assert [r["update"] for r in updates] == [*range(1, 7)]
    assert all(r["gap/logprob_mean"] < 1e-5 for r in updates)
    assert not any(r["error"] for r in read_records(Path("runs/a/rollouts.jsonl")))
    name = "eval/letter_counting/accuracy"
    assert updates[-1][name] > first[name] + 0.2
