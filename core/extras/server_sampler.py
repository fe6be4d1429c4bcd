"""ServerSampler: samples on vLLM's servers, on other GPUs or machines (runs/scale/README.md).

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank 32 \\
        --enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm
    python train.py --model-id MODEL --lora-rank 32 --sampler server \\
        --base-url http://one:8000,http://two:8000 --adapter-folder /shared/adapters

Token ids go to a server; token ids and the log-probs of the distribution that they were drawn from
come back, so a turn is as exact as with the other samplers. `sync` brings the new weights to the
servers: it writes the LoRA adapter into a folder that they see, and lets each of them load it.

An adapter has a name for each version, and each completion comes with the name of what sampled it.
A server that was restarted has lost the adapter: no token of other weights is trained. (One name
for all versions would not do. From the same path, vLLM's prefix cache goes on with keys and values
of the adapter before.)

A server that fails is lost: its requests go to the others, with the same seeds. It is tried again
every few seconds, and has to show again that it has the trainer's model. Without any server the run
waits, then ends. The key of the servers is in the environment variable OPENAI_API_KEY; it appears
in no file and no message.
"""

import shutil
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import filelock
import httpx
import torch

from core import canary, distributed
from core.calls import Calls, TimeLimit
from core.config import server_urls
from core.extras.keys import api_key, safe_line
from core.faults import NoServer, UsageError
from core.nanollm import MAX_GAP
from core.policy import Policy
from core.sampler import Request, Sampler, completion_limit, to_completion
from core.seeds import derive_seed
from core.types import Completion

WAIT_S = 0.01  # for an answer, in one step
TRY_AGAIN_S = 5.0  # between two attempts to reach a lost server
HEALTH_S = 20.0  # between two questions whether a server is alive
QUICK_S = 60.0  # limit of all that is no sampling, such as loading an adapter
# limit of one completion: a fixed part, and seconds per token of the longest one
PATIENCE_S, TOKEN_S = 600.0, 0.1
WITHOUT_SERVER_S = 600.0  # how long a run waits for a server before it ends
PER_SERVER = 256  # requests that are sent to one server at once; it batches them
AHEAD = 32  # open requests that a server may have more than another, for the sake of its cache
PROBE_TOKENS = 16
PROBE_TEMPERATURE = 0.7  # unlike 1, it shows log-probs of another temperature
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LOCK = ".lock"  # in the folder of an adapter: held while its run may need it
SAMPLE = "/inference/v1/generate"  # token ids in, token ids out


class Lost(RuntimeError):
    """A server did not answer, or not as vLLM does."""


@dataclass(eq=False)
class Server:
    """One of vLLM's servers."""

    url: str
    name: str = ""  # of the adapter that it has; "": unknown, or its model has to be compared
    lost: str = "not reached yet"  # why it gets no requests; "": it is well
    failures: int = 0  # in a row
    calls: set["Call"] = field(default_factory=set)  # those that are open
    check_at: float = 0.0  # when to look at it again
    gap: float = 0.0  # |log-prob here - log-prob of the server|, mean, nats
    release: str = ""  # its version of vLLM


@dataclass(eq=False)
class Call:
    """A completion that a server is asked for; without `request`: whether it is well."""

    server: Server
    request: Request | None = None


class ServerSampler(Sampler):
    """Samples on the servers of `base_url`, addresses with commas between them.

    `policy` has LoRA adapters; `adapter_folder` is one that the servers see under the same path.
    Waits for all servers. Raises UsageError if one stays away, or has another model, tokenizer or
    kind of log-probs.
    """

    alone = True

    def __init__(self, policy: Policy, base_url: str, adapter_folder: str):
        key = api_key()
        self.policy, self.folder = policy, Path(adapter_folder).absolute()
        self.copy = policy  # one with the weights that the servers have, also while it trains
        self.servers = [Server(url) for url in server_urls(base_url)]
        # the text after which servers and trainer are compared
        self.text: list[int] = policy.tokenizer.encode(canary.TEXT, add_special_tokens=False)
        self.waiting = deque[Request]()  # for a server
        self.done: list[tuple[Request, Completion]] = []
        # the server that had a prompt or a stream of this round, whose cache knows its beginning
        self.homes: dict[tuple[int, ...] | int, Server] = {}
        self.alone_since: float | None = None  # when the last server was lost
        self.stopped = self.started = False
        self.limit = PATIENCE_S + TOKEN_S * policy.max_length
        # twice as many: a call to a lost server occupies its thread for a while
        self.calls = Calls(2 * PER_SERVER * len(self.servers), self.limit)
        self.client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            trust_env=False,
            follow_redirects=False,  # to no other host
            # vLLM closes connections that are idle for 5 s: shortly before that, use a new one
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
        )
        # no other run, and no restart of this one, has weights of this name
        self.stem = distributed.broadcast_from_rank_0(lambda: f"picorl-{uuid.uuid4().hex[:8]}")
        self.version = 0
        # adapters in the folder, if this is rank 0, with the locks that say that a run needs them
        self.written: dict[str, filelock.BaseFileLock] = {}
        self.at_work: list[str] = []  # the weights of each completion that a server may be at
        try:
            distributed.broadcast_from_rank_0(self._remove_left)
            with canary.noise(policy):  # a new adapter changes nothing, so nothing would show
                self._write()
                self._wait_for_all()
            self.started = True
            self.sync()
        except BaseException:
            self.close()
            raise
        gap, releases = max(s.gap for s in self.servers), {s.release for s in self.servers}
        self.remark = (f"sampling on {len(self.servers)} vLLM server(s), "
                       f"{' and '.join(sorted(releases))}: their log-probs differ by {gap:.1e} "
                       "nats from the trainer's")  # fmt: skip

    @property
    def name(self) -> str:
        """Of the present adapter."""
        return f"{self.stem}-v{self.version}"

    def sync(self) -> None:
        """Gives each server the present adapter. Sets `sync_seconds`."""
        begun = perf_counter()
        self.version, self.copy = self.version + 1, self.policy
        self._write()
        for server in self.servers:
            server.calls = {call for call in server.calls if call.request}  # of the weights before
            server.check_at = 0.0
        self._look()
        while any(not s.lost and s.name != self.name for s in self.servers):
            self._advance()
        self.sync_seconds = perf_counter() - begun

    def add(self, request: Request) -> None:
        completion_limit(self.policy, request)  # raises UsageError
        self.waiting.append(request)

    def step(self) -> list[tuple[Request, Completion]]:
        """As `Sampler.step`. Raises NoServer once it has waited for one for too long."""
        self._advance()
        done, self.done = self.done, []
        return done

    def ahead(self, policy: Policy) -> Sampler:
        self.copy = policy
        return self

    def clear(self) -> None:
        self.calls.clear()
        self.waiting.clear()
        self.done = []
        for server in self.servers:
            server.calls.clear()
            if server.lost:  # a look at it may have been given up
                server.check_at = 0.0

    def stop(self) -> None:
        self.stopped = True

    def __enter__(self) -> "ServerSampler":
        self.homes.clear()
        return self

    def close(self) -> None:
        """Ends all calls; the servers and the folder forget the adapters."""
        self.clear()
        self.calls.close()
        for server in self.servers if distributed.rank() == 0 else []:
            with suppress(Lost, UsageError):
                self._ask(server.url, UNLOAD, {"lora_name": server.name}, timeout=2.0)
        self.client.close()
        self._remove([*self.written])

    # what follows runs in the main thread

    def _write(self) -> None:
        """Writes the adapter, complete before its name can be seen, and removes old ones."""

        def write() -> None:
            part, target = self.folder / f".{self.name}", self.folder / self.name
            lock = self.written[self.name] = filelock.FileLock(target / LOCK, timeout=0)
            try:
                part.mkdir(parents=True)
            except (FileExistsError, NotADirectoryError):
                raise UsageError(f"--adapter-folder {self.folder} is no folder") from None
            # True or "auto" would ask the Hub about the base model, at each update
            self.policy.model.save_pretrained(part, save_embedding_layers=False)
            part.rename(target)
            with suppress(OSError, NotImplementedError):  # a disk without locks
                lock.acquire()
            # a server that hangs still has requests: vLLM ends if it finds no adapter for them
            self._remove([name for name in [*self.written][:-2] if name not in self.at_work])

        distributed.broadcast_from_rank_0(write)

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self.written.pop(name).release()
            for folder in (self.folder / name, self.folder / f".{name}"):
                shutil.rmtree(folder, ignore_errors=True)

    def _remove_left(self) -> None:
        """Removes the adapters of killed runs: the system has released their locks."""
        for folder in self.folder.glob("picorl-*-v*"):
            if (folder / LOCK).exists():
                with (
                    suppress(filelock.Timeout, OSError, NotImplementedError),
                    filelock.FileLock(folder / LOCK, timeout=0),
                ):
                    shutil.rmtree(folder, ignore_errors=True)

    def _wait_for_all(self) -> None:
        until = monotonic() + WITHOUT_SERVER_S
        while lost := [server for server in self.servers if server.lost]:
            self._advance()
            if monotonic() > until:
                raise UsageError(f"--base-url {lost[0].url}: {lost[0].lost}")

    def _advance(self) -> None:
        """Reads answers, looks at the servers where that is due, and sends what waits."""
        for call, (answer, error) in self.calls.ended(WAIT_S):
            if call in call.server.calls:  # if not, another server has the request
                call.server.calls.discard(call)
                self._read(call, answer, error)
        self._look()
        while self.waiting:
            free = [s for s in self.servers if s.name == self.name and len(s.calls) < PER_SERVER]
            if not free:
                break
            self._send(self.waiting.popleft(), free)
        if not all(server.failures > 1 for server in self.servers):
            self.alone_since = None
        elif self.alone_since is None:
            self.alone_since = monotonic()
            self.say(f"no server answers: waiting for one for up to {WITHOUT_SERVER_S / 60:g} min")
        elif self.stopped or monotonic() - self.alone_since > WITHOUT_SERVER_S:
            reasons = "; ".join(f"{server.url}: {server.lost}" for server in self.servers)
            raise NoServer(f"no server answers: {reasons}")

    def _read(self, call: Call, answer: Any, error: BaseException | None) -> None:
        """Takes the outcome of a call. A server that failed is lost."""
        server, request = call.server, call.request
        try:
            if isinstance(error, (Lost, TimeLimit, UsageError)):
                raise error
            if error is not None:  # JSON of another form, or no JSON
                raise Lost(safe_line(f"no answer of vLLM's: {type(error).__name__} {error}"))
            if request:
                self.done.append((request, to_completion(self.policy, *answer)))
            else:
                self._admit(server, answer)
        except (Lost, TimeLimit) as failure:
            self._lose(call, f"{failure}".removesuffix(" (--env-timeout)"))
        except UsageError as refusal:
            if request or not self.started:
                raise UsageError(f"--base-url {server.url}: {refusal}") from None
            self._lose(call, str(refusal))  # it has changed; others may go on

    def _lose(self, call: Call, why: str) -> None:
        """Sends nothing to this server until it is well again; others get its requests.

        It is tried again at once, as it may just have lost the adapter, and then now and then.
        """
        server = call.server
        if why != server.lost:
            self.say(f"{server.url}: {why}")
        calls = [call, *server.calls]
        self.waiting.extendleft(call.request for call in calls if call.request)
        server.lost, server.name, server.calls = why, "", set()
        server.failures += 1
        server.check_at = monotonic() + (TRY_AGAIN_S if server.failures > 1 else 0.0)

    def _look(self) -> None:
        """Begins to look at each server where that is due."""
        for server in self.servers:
            if monotonic() >= server.check_at and all(call.request for call in server.calls):
                call = Call(server)
                server.calls.add(call)
                server.check_at = monotonic() + HEALTH_S
                look = partial(self._check, server.url, server.name, self.name)
                self.calls.start(call, look)

    def _admit(self, server: Server, found: dict[str, Any]) -> None:
        """The server is well. Raises UsageError if its model is another one."""
        if "sampled" in found:
            server.gap = self._compare(found)
            server.release = found["release"]
        if server.lost and self.started:
            self.say(f"{server.url} is back")
        server.lost, server.failures, server.name = "", 0, self.name

    def _compare(self, found: dict[str, Any]) -> float:
        """Mean |log-prob in training - log-prob of the server| of the tokens that it sampled."""
        policy, length = self.copy, found["length"]
        if length < policy.max_length:
            raise UsageError(f"its --max-model-len is {length}, that of this run "
                             f"{policy.max_length}: raise the one or lower the other")  # fmt: skip
        if found["tokens"] not in (None, self.text):
            raise UsageError("it has another tokenizer than --model-id")
        ids, logprobs = found["sampled"]
        if max(ids) >= policy.causal_lm.config.get_text_config().vocab_size:
            raise UsageError("it has another vocabulary than --model-id")
        at, at_1 = (
            (canary.score(policy, self.text, ids, temperature) - torch.tensor(logprobs))
            .abs().mean().item() for temperature in (PROBE_TEMPERATURE, 1.0)
        )  # fmt: skip
        limit = MAX_GAP.get(policy.dtype, MAX_GAP[torch.float32])
        if at <= limit:
            return at
        if at_1 <= limit:
            raise UsageError("its log-probs are those before the temperature: start it with "
                             "--logprobs-mode processed_logprobs")  # fmt: skip
        raise UsageError(
            f"log-probs of {len(ids)} tokens differ by {at:.1e} nats from the trainer's, "
            f"{limit:.0e} is allowed: it has another model than --model-id, or another --dtype "
            f"than {str(policy.dtype).removeprefix('torch.')}"
        )

    def _send(self, request: Request, free: list[Server]) -> None:
        """Sends a request to the server that had its prompt, or has the fewest requests."""
        least = min(free, key=lambda server: len(server.calls))
        prompt = tuple(request.prompt)
        home = self.homes.get(request.stream, self.homes.get(prompt, least))
        if home not in free or len(home.calls) > len(least.calls) + AHEAD:
            home = least
        self.homes[prompt] = self.homes[request.stream] = home
        call = Call(home, request)
        home.calls.add(call)
        seed = derive_seed(request.seed, request.stream) % 2**31
        limit = completion_limit(self.policy, request)
        ask = partial(self._sample, home.url, self.name, request.prompt, limit,
                      request.params.temperature, seed, self.policy.stop_ids)  # fmt: skip
        self.calls.start(call, ask)

    # what follows runs in threads

    def _check(self, url: str, has: str, name: str) -> dict[str, Any]:
        """Whether a server is alive. Loads the adapter `name` unless it `has` that. A server of
        which nothing is known also shows what it is."""
        if has == name:
            self._ask(url, "/health")
            return {}
        found: dict[str, Any] = {}
        if not has:
            found["length"] = self._ask(url, "/v1/models").json()["data"][0]["max_model_len"]
            found["release"] = f"{self._ask(url, '/version').json()['version']:.20}"
        self._load(url, name, has)
        if not has:
            found["tokens"] = None
            with suppress(UsageError, Lost):  # it needs no tokenizer: --skip-tokenizer-init
                body = {"prompt": canary.TEXT, "add_special_tokens": False}
                found["tokens"] = self._ask(url, "/tokenize", body).json()["tokens"]
            found["sampled"] = self._sample(
                url, name, self.text, PROBE_TOKENS, PROBE_TEMPERATURE, 0, []
            )
        return found

    def _load(self, url: str, name: str, has: str) -> None:
        """Lets a server load the adapter `name`, and forget the one that it `has`."""
        try:
            self._ask(url, LOAD, {"lora_name": name, "lora_path": str(self.folder / name)})
        except UsageError as error:
            if "Not Found" in str(error):
                raise UsageError("it loads no adapters: start it with --enable-lora and "
                                 "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True") from None  # fmt: skip
            if "already been loaded" not in str(error):  # by another rank, or before it was lost
                raise
        if has:
            with suppress(UsageError):  # another rank did
                self._ask(url, UNLOAD, {"lora_name": has})

    def _sample(
        self, url: str, name: str, prompt: list[int], limit: int, temperature: float, seed: int,
        stop_ids: list[int],
    ) -> tuple[list[int], list[float]]:  # fmt: skip
        """One completion: its token ids, and their log-probs."""
        body = {
            "model": name, "token_ids": prompt,
            "sampling_params": {
                "max_tokens": limit, "temperature": temperature, "seed": seed, "logprobs": 0,
                "stop_token_ids": stop_ids, "ignore_eos": True, "detokenize": False,
            },
        }  # fmt: skip
        self.at_work.append(name)
        try:
            answer = self._ask(url, SAMPLE, body, self.limit).json()
        finally:
            self.at_work.remove(name)
        [choice] = answer["choices"]
        if answer["model"] != name:
            raise Lost(safe_line(f"it sampled from {answer['model']}, not from {name}"))
        if choice["finish_reason"] not in ("stop", "length"):
            raise Lost(safe_line(f"it ended a completion: {choice['finish_reason']}"))
        ids = [int(i) for i in choice["token_ids"]]
        logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
        if not len(ids) == len(logprobs) > 0 or min(ids) < 0:
            raise Lost("it returned other numbers of token ids and of log-probs")
        if len(ids) != limit and ids[-1] not in stop_ids:
            raise UsageError(f"it ended a completion after {len(ids)} of {limit} tokens: start it "
                             "with --generation-config vllm")  # fmt: skip
        return ids, logprobs

    def _ask(
        self, url: str, path: str, body: dict[str, Any] | None = None, timeout: float = QUICK_S
    ) -> httpx.Response:
        """The answer of a server. Raises Lost, or UsageError for what it refuses."""
        try:
            response = self.client.request(
                "GET" if body is None else "POST", url + path, json=body,
                timeout=httpx.Timeout(timeout, connect=min(timeout, QUICK_S)),
            )  # fmt: skip
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Lost(safe_line(f"{type(error).__name__} {error}")) from None
        if response.status_code == 200:
            return response
        words, of_vllm = response.text, False
        with suppress(ValueError, LookupError, TypeError):
            words, of_vllm = response.json()["error"]["message"], True
        words = safe_line(f"status {response.status_code}: {words}")
        if response.status_code == 404 and path == SAMPLE and of_vllm:
            raise Lost("it has lost the adapter: it was restarted")
        refuses = response.status_code not in (408, 429) and response.status_code < 500
        # a rank that is too high has the status 500; a 404 may be of what stands between
        if (path == LOAD and of_vllm) or (refuses and (of_vllm or not self.started)):
            raise UsageError(words)
        raise Lost(words)
