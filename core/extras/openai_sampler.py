"""OpenAISampler: evaluates a model behind an OpenAI-compatible server; it cannot train.

    pip install -e ".[openai]"
    python train.py --sampler openai --base-url http://127.0.0.1:11434/v1 --model-id qwen3:4b \\
        --num-updates 0 --env letter_counting:difficulty=3

The server (Ollama, vLLM, llama.cpp, ...) applies its own chat template and streams text back, so
completions have the token ids of the local tokenizer and log-probs of 0. The API key is in the
environment variable OPENAI_API_KEY; it appears in no file and no message.

A request fails alone, as a Completion with an `error`: an HTTP error after its retries, a stream
that is no event stream, breaks or ends without a finish reason, and finish reasons other than
"stop" and "length". The openai client retries and waits as the header Retry-After says.
"""

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

from core.policy import Policy
from core.sampler import Exchange, Sampler, SamplingParams, sample_all
from core.seeds import derive_seed
from core.types import Completion, Message, Stopped, UsageError

MAX_RETRIES = 4  # of a request that the server refuses for now or that does not reach it
MAX_FAILURES = 8  # in a row: then the server counts as gone, and no further request is sent
MAX_CHARACTERS = 1 << 20  # of a completion; the rest is cut off
MAX_STREAM_BYTES, MAX_BODY_BYTES = 1 << 26, 1 << 20  # of an answer: a stream of events, all others
MIN_KEY = 8  # characters of a value of a header that is taken for a key
PROGRESS_INTERVAL_S = 0.05
CONCURRENCY = 8  # requests that are sent at once
TIMEOUT_S = 600.0  # of one request with its retries; then its episode fails
STOPPED = "stopped"


class RequestError(RuntimeError):
    """The server gave no usable completion."""


class OpenAISampler(Sampler):
    """Samples from `model` at `base_url`, with up to `concurrency` requests at once.

    `timeout`: seconds for one request with its retries. Raises UsageError if the package openai is
    missing.
    """

    def __init__(
        self,
        policy: Policy,
        base_url: str,
        model: str,
        concurrency: int = CONCURRENCY,
        timeout: float = TIMEOUT_S,
    ):
        if importlib.util.find_spec("openai") is None:
            raise UsageError('--sampler openai: not installed; pip install -e ".[openai]"')
        if not (_api_key().isascii() and _api_key().isprintable()):
            raise UsageError("OPENAI_API_KEY has characters that no header can hold")
        self.policy, self.base_url, self.model = policy, base_url, model
        self.concurrency, self.timeout = concurrency, timeout
        self.works = False  # whether a request has succeeded
        self.failures = 0  # in a row
        self.closed_because = ""  # why no further request is sent
        policy.max_length = 1 << 30  # only the server knows the model's limit

    def sample(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
        chats: list[list[Message]] | None = None,
    ) -> list[Completion]:
        """As `Sampler.sample`, from `chats`; a request that fails has a Completion with an `error`.

        If `on_progress` raises Stopped, the requests that are not complete fail. Raises UsageError
        if no request has ever succeeded.
        """
        if chats is None:
            raise ValueError("a server takes messages, not token ids: pass `chats`")
        return sample_all(self.stream, [[] for _ in chats], params, on_progress, chats)

    def stream(
        self,
        exchange: Exchange,
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """As `Sampler.stream`; what fails or raises is as in `sample`."""
        asyncio.run(self._stream_all(exchange, params, on_progress))

    async def _stream_all(
        self, exchange: Exchange, params: SamplingParams, on_progress: Callable[[], None]
    ) -> None:
        import openai

        slots = asyncio.Semaphore(self.concurrency)
        keys: dict[asyncio.Task[Completion], Any] = {}  # of the requests that are not complete
        finished: list[tuple[Any, Completion]] = []
        errors: list[str] = []
        http_client = openai.DefaultAsyncHttpxClient(
            follow_redirects=False,  # to no other host
            headers={"Accept-Encoding": "identity"},
            event_hooks={"response": [_limit_size]},
        )
        async with openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=_api_key() or "none",  # the client requires one
            timeout=self.timeout,
            max_retries=MAX_RETRIES,
            http_client=http_client,
        ) as client:
            try:
                while (requests := exchange(finished, not keys)) is not None:
                    for request in requests:
                        seed = derive_seed(request.seed, request.stream)
                        sent = self._complete(client, slots, request.chat or [], params, seed)
                        keys[asyncio.create_task(sent)] = request.key
                    finished = await self._wait(keys, on_progress)
                    errors += [completion.error for _, completion in finished if completion.error]
            finally:
                for task in keys:
                    task.cancel()
                await asyncio.gather(*keys, return_exceptions=True)
        if errors and not self.works and self.closed_because != STOPPED:
            raise UsageError(f"--base-url {self.base_url}: {errors[0]}")

    async def _wait(
        self, keys: dict[asyncio.Task[Completion], Any], on_progress: Callable[[], None]
    ) -> list[tuple[Any, Completion]]:
        """Removes the requests that are complete, and returns their completions."""
        if keys:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait(keys, timeout=PROGRESS_INTERVAL_S, return_when=first)
        try:
            on_progress()
        except Stopped:
            self.closed_because = STOPPED
        if self.closed_because:
            for task in keys:
                task.cancel()
            await asyncio.gather(*keys, return_exceptions=True)
        return [
            (keys.pop(t), _failed(self.closed_because) if t.cancelled() else t.result())
            for t in [task for task in keys if task.done()]
        ]

    async def _complete(
        self,
        client: Any,
        slots: asyncio.Semaphore,
        chat: list[Message],
        params: SamplingParams,
        seed: int,
    ) -> Completion:
        async with slots:
            try:
                async with asyncio.timeout(self.timeout):
                    text, finish_reason = await self._stream(client, chat, params, seed)
                token_ids = self.policy.tokenizer.encode(text, add_special_tokens=False)
            except TimeoutError:
                return self._count_failure(f"not complete in {self.timeout:g} s")
            except Exception as e:  # of openai, of its HTTP library, or an answer of another form
                return self._count_failure(_one_line(e))
        self.failures = 0
        if finish_reason not in ("stop", "length"):
            reason = _without_key(str(finish_reason))
            return _failed(f"the completion ended with the finish reason {reason!r:.200}")
        self.works = True
        token_ids.append(self.policy.end_of_turn_id)
        return Completion(token_ids, [0.0] * len(token_ids), text,
                          "length" if finish_reason == "length" else "stop")  # fmt: skip

    async def _stream(
        self, client: Any, chat: list[Message], params: SamplingParams, seed: int
    ) -> tuple[str, str]:
        """The text and the finish reason of one request."""
        text, finish_reason = "", ""
        async with await client.chat.completions.create(
            model=self.model, messages=chat, stream=True, seed=seed,
            max_tokens=params.max_tokens, temperature=params.temperature, top_p=params.top_p,
        ) as stream:  # fmt: skip
            kind = stream.response.headers.get("content-type", "no content type")
            if "event-stream" not in kind:  # a web page, or an error as JSON with status 200
                body = (await anext(stream.response.aiter_bytes(), b"")).decode(errors="replace")
                raise RequestError(f"the answer is {kind}, not an event stream: {body}")
            async for chunk in stream:
                choices = chunk.choices or []
                if len(choices) > 1 or any(choice.index for choice in choices):
                    raise RequestError("the server sent several choices; one was asked for")
                for choice in choices:
                    text += choice.delta.content or ""
                    finish_reason = choice.finish_reason or finish_reason
                self.latest = _without_key(text)[-80:]
                if len(text) > MAX_CHARACTERS:
                    return _without_key(text[:MAX_CHARACTERS]), "length"
        if not finish_reason:
            raise RequestError(
                f"the stream ended without a finish reason after: {_without_key(text)[-80:]!r}"
            )
        return _without_key(text), finish_reason

    def _count_failure(self, reason: str) -> Completion:
        self.failures += 1
        if self.failures >= MAX_FAILURES:
            self.closed_because = f"not sent: {MAX_FAILURES} requests in a row failed: {reason}"
        return _failed(reason)


async def _limit_size(response: Any) -> None:
    """Lets the reader of `response` fail beyond a size. An answer must not be compressed: a few
    bytes could become gigabytes."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise RequestError("the answer is compressed, which was not asked for")
    is_stream = "event-stream" in response.headers.get("content-type", "")
    limit, read = MAX_STREAM_BYTES if is_stream else MAX_BODY_BYTES, response.aiter_raw

    async def limited(chunk_size: int | None = None) -> AsyncIterator[bytes]:
        size = 0
        async for part in read(chunk_size):
            size += len(part)
            if size > limit:
                raise RequestError(f"the answer has over {limit:,} bytes")
            yield part

    response.aiter_raw = limited


def _api_key() -> str:
    return os.environ.get("OPENAI_API_KEY", "").strip()


def _failed(reason: str) -> Completion:
    return Completion([], [], "", "stop", error=_without_key(reason))


def _without_key(text: str) -> str:
    """`text` without the API key and those in OPENAI_CUSTOM_HEADERS: a server may repeat them."""
    headers = os.environ.get("OPENAI_CUSTOM_HEADERS", "").splitlines()
    own = [word for line in headers for word in line.split()[-1:] if len(word) >= MIN_KEY]
    for key in filter(None, (_api_key(), *own)):
        text = text.replace(key, "[key]")
    return text


def _one_line(error: Exception) -> str:
    """Says why a request failed, in one line and without the API key."""
    import openai

    if isinstance(error, openai.APIStatusError):
        reason = f"status {error.status_code}: {error.response.text}"
    else:  # the cause of a connection error says more than the error itself
        reason = str(error.__cause__ or "") or str(error) or type(error).__name__
    return " ".join(_without_key(reason).split())[:200]
