"""ServerSampler: samples on vLLM's server, on another GPU or machine (runs/scale/README.md).

The server gets token ids, and answers with token ids and the log-probs of the distribution that it
drew them from, so a turn is as exact as with the other samplers. `sync` writes the LoRA adapter
into a folder of the run, which the server sees, and makes the server load it: vLLM gives it to all
engines behind the address. Each version has a name of its own, and each completion names the
version that sampled it, so no token of other weights is trained. (With one name for all, vLLM's
prefix cache would reuse keys and values of the adapter before.) A server that fails ends the run.
"""

import shutil
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from core import canary, distributed
from core.calls import Calls
from core.extras.keys import api_key, safe_line
from core.faults import NoServer, UsageError
from core.policy import Policy
from core.sampler import Request, Sampler, SamplingParams, completion_limit, to_completion
from core.seeds import derive_seed
from core.types import Completion

LIMIT = httpx.Timeout(3600.0, connect=60.0)  # seconds for an answer
CONCURRENCY = 1024  # requests that are sent at once; the server batches them
LOAD = "/v1/load_lora_adapter"
SAMPLE = "/inference/v1/generate"  # token ids in, token ids out
ENABLE_LORA = "start it with --enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True; "
PROBE = SamplingParams(max_tokens=16, temperature=0.7)  # unlike 1, it shows other log-probs


class ServerSampler(Sampler):
    """Samples on the server at `base_url`, which sees `folder`, for adapters, at the same path.

    Raises UsageError if it does not answer, or has another model than `policy`.
    """

    alone = True

    def __init__(self, policy: Policy, base_url: str, folder: Path):
        self.policy = policy
        self.folder = folder.absolute()
        self.url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if (key := api_key()) else {}
        # vLLM closes connections that are idle for 5 s: shortly before that, use a new one
        pool = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        self.client = httpx.Client(headers=headers, timeout=LIMIT, limits=pool, trust_env=False)
        self.calls = Calls(CONCURRENCY)
        dtype = str(policy.dtype).removeprefix("torch.")
        advice = f"start it with this model, --dtype {dtype}, --logprobs-mode processed_logprobs"
        prompts = [policy.tokenizer.encode(canary.TEXT, add_special_tokens=False)]
        try:
            with canary.noise(policy):  # a new adapter changes nothing: it would hide mistakes
                self.sync()
                subject = f"--base-url {self.url}"
                gap = canary.check_gap(policy, self, prompts, PROBE, subject, advice)
            self.sync()
        except BaseException as error:
            self.close()
            if isinstance(error, NoServer):
                raise UsageError(str(error)) from None
            raise
        self.remark = f"vLLM's server samples; its log-probs differ by {gap:.1e} nats from ours"

    def sync(self) -> None:
        """Gives the server the present adapter, and sets `sync_seconds`.

        If that fails, the next request raises NoServer: by then the update can be saved.
        """
        started = perf_counter()
        self.name, self.failure = distributed.broadcast_from_rank_0(self._load)
        self.sync_seconds = perf_counter() - started

    def _load(self) -> tuple[str, NoServer | None]:
        """Writes the adapter under a new name; the server loads it. Returns the name, an error."""
        path = self.folder / f"picorl-{uuid.uuid4().hex}"
        shutil.rmtree(self.folder, ignore_errors=True)  # the adapter before
        # True or "auto" would ask the Hub about the base model, at each update
        self.policy.model.save_pretrained(path, save_embedding_layers=False)
        try:
            self._ask(LOAD, {"lora_name": path.name, "lora_path": str(path)})
        except NoServer as failure:
            return path.name, failure
        return path.name, None

    def add(self, request: Request) -> None:
        """As `Sampler.add`. Raises NoServer if the server has not loaded the present adapter."""
        if self.failure:
            raise self.failure
        params = {
            "max_tokens": completion_limit(self.policy, request),
            "temperature": request.params.temperature,
            "seed": derive_seed(request.seed, request.stream) % 2**31,
            "logprobs": 0,  # those of the sampled tokens
            "stop_token_ids": self.policy.stop_ids,
            "ignore_eos": True,
            "detokenize": False,
        }
        body = {"model": self.name, "token_ids": request.prompt, "sampling_params": params}
        self.calls.start(request, partial(self._completion, body, request.params.stop))

    def step(self) -> list[tuple[Request, Completion]]:
        """As `Sampler.step`. Raises NoServer if the server fails."""
        outcomes = self.calls.finished(0.01)  # waits that many seconds for an answer
        for _, (_, error) in outcomes:
            if error is not None:
                raise error
        return [(request, completion) for request, (completion, _) in outcomes]

    def _completion(self, body: dict[str, Any], stop: tuple[str, ...]) -> Completion:
        """A completion of the adapter that `body` names; runs in a thread. Raises NoServer."""
        response = self._ask(SAMPLE, body)
        with suppress(ValueError, LookupError, TypeError):  # of an answer that is not vLLM's
            answer = response.json()
            [choice] = answer["choices"]
            ids = choice["token_ids"]
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            is_whole = choice["finish_reason"] in ("stop", "length") and len(logprobs) == len(ids)
            if answer["model"] == body["model"] and is_whole:
                return to_completion(self.policy, ids, logprobs, stop=stop)
        raise self._failure(f"no whole completion of {body['model']}: {response.text}")

    def _ask(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The answer of the server; runs in threads, too. Raises NoServer."""
        try:
            response = self.client.post(self.url + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._failure(f"{type(error).__name__} {error}") from None
        if response.status_code != 200:
            hint = ENABLE_LORA if response.status_code == 404 else ""
            raise self._failure(f"{hint}status {response.status_code}: {response.text}")
        return response

    def _failure(self, reason: str) -> NoServer:
        return NoServer(f"--base-url {self.url}: {safe_line(reason)}")

    def clear(self) -> None:
        self.calls.clear()

    def close(self) -> None:
        """Removes the adapters."""
        self.client.close()
        if distributed.rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
