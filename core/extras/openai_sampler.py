"""OpenAISampler: evaluates a model behind an OpenAI-compatible server; it cannot train.

    pip install -e ".[openai]"
    python train.py --sampler openai --base-url http://127.0.0.1:11434/v1 --model-id qwen3:4b \\
        --num-updates 0 --env letter_counting:difficulty=3

The server (Ollama, vLLM, llama.cpp, ...) applies its own chat template and returns text, so
completions have the token ids of the local tokenizer and log-probs of 0. The API key is in the
environment variable OPENAI_API_KEY; it appears in no file and no message.

A request fails alone, as a Completion with an `error`: an HTTP error after its retries, an answer
that is broken or has several choices, and finish reasons other than "stop" and "length". The openai
client retries and waits as the header Retry-After says.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from core.calls import Calls, Outcome, TimeLimit
from core.chat_template import content_and_calls
from core.config import is_installed
from core.extras.keys import api_key, safe_line, without_keys
from core.faults import UsageError
from core.policy import Policy
from core.sampler import Request, Sampler
from core.seeds import derive_seed
from core.types import Completion, Message

MAX_RETRIES = 4  # of a request that the server refuses for now or that does not reach it
MAX_FAILURES = 8  # in a row: then the server counts as gone, and no further request is sent
MAX_BYTES = 1 << 24  # of an answer
WAIT_S = 0.01  # for an answer, in one step
CONCURRENCY = 8  # requests that are sent at once
TIMEOUT_S = 600.0  # of one request with its retries; then its episode fails
STOPPED = "stopped"


class RequestError(RuntimeError):
    """The server gave no usable completion."""


class OpenAISampler(Sampler):
    """Samples from `model` at `base_url`.

    Raises UsageError if the package openai is missing, or no header can hold the API key.
    """

    alone = True

    def __init__(self, policy: Policy, base_url: str, model: str):
        if not is_installed("openai"):
            raise UsageError('--sampler openai: not installed; pip install -e ".[openai]"')
        key = api_key()
        import openai

        self.policy, self.base_url, self.model = policy, base_url, model
        # a thread that waits for a server would run no Python code to be interrupted in
        self.calls = Calls(CONCURRENCY, TIMEOUT_S)
        self.client: Any = openai.OpenAI(
            base_url=base_url,
            api_key=key or "none",  # the client requires one
            timeout=TIMEOUT_S,
            max_retries=MAX_RETRIES,
            http_client=openai.DefaultHttpxClient(
                follow_redirects=False,  # to no other host
                headers={"Accept-Encoding": "identity"},
                event_hooks={"response": [_limit_size]},
            ),
        )
        self.open = set[Request]()
        self.works = False  # whether a request has succeeded
        self.num_empty: int | None = 0  # answers without text; None once one had a text
        self.instead = ""  # what the last such answer had in the place of a text
        self.first_error = ""
        self.failures = 0  # in a row
        self.closed_because = ""  # why no further request is sent
        policy.max_length = 1 << 30  # only the server knows the model's limit

    def add(self, request: Request) -> None:
        """Sends `request.chat`, once fewer than CONCURRENCY requests are open."""
        self.open.add(request)
        if not self.closed_because:
            self.calls.start(request, partial(self._answer, request))

    def step(self) -> list[tuple[Request, Completion]]:
        """Waits a moment for answers. A request that failed has a Completion with an `error`.

        Raises UsageError once no request is open if none has ever succeeded.
        """
        outcomes = self.calls.ended(WAIT_S)
        ended = [(r, self._completion(outcome)) for r, outcome in outcomes if r in self.open]
        self.open -= {request for request, _ in ended}
        if self.closed_because:
            ended += [(request, _failed(self.closed_because)) for request in self.open]
            self.clear()
        if self.first_error and not (self.works or self.open or self.closed_because == STOPPED):
            raise UsageError(f"--base-url {self.base_url}: {self.first_error}")
        return ended

    def __exit__(self, *exc_info: object) -> None:
        if self.num_empty:
            self.say(f"all {self.num_empty} answers of {self.base_url} are empty{self.instead}")
            self.num_empty = None  # says it once

    def clear(self) -> None:
        self.calls.clear()
        self.open.clear()

    def stop(self) -> None:
        self.closed_because = STOPPED

    def close(self) -> None:
        self.calls.close()
        self.client.close()

    def _completion(self, outcome: Outcome) -> Completion:
        """The completion of an answer or an error. Counts the failures."""
        answer, error = outcome
        if isinstance(error, TimeLimit):
            return self._count_failure(f"not complete in {TIMEOUT_S:g} s")
        try:
            if error is not None:
                raise error
            text, finish_reason = answer
            token_ids = self.policy.tokenizer.encode(text, add_special_tokens=False)
        except Exception as e:  # of openai, of its HTTP library, or an answer of another form
            return self._count_failure(safe_line(_reason(e)))
        self.failures = 0
        if finish_reason not in ("stop", "length"):
            reason = without_keys(str(finish_reason))
            return self._failure(f"the completion ended with the finish reason {reason!r:.200}")
        self.works = True
        if text.strip():
            self.num_empty = None
        elif self.num_empty is not None:
            self.num_empty += 1
        token_ids.append(self.policy.end_of_turn_id)
        return Completion(token_ids, [0.0] * len(token_ids), text,
                          "length" if finish_reason == "length" else "stop")  # fmt: skip

    def _answer(self, request: Request) -> tuple[str, str]:
        """The text and the finish reason of one request. Runs in a thread."""
        params = request.params
        answer = self.client.chat.completions.create(
            model=self.model, messages=[*map(_for_server, request.chat or [])],
            seed=derive_seed(request.seed, request.stream), max_tokens=request.max_tokens,
            temperature=params.temperature, top_p=params.top_p,
        )  # fmt: skip
        if isinstance(answer, str):  # a web page
            raise RequestError(f"the answer is no JSON: {answer}")
        if len(answer.choices or []) != 1:
            raise RequestError(f"the answer has not the one choice asked for: {answer.to_json()}")
        [choice] = answer.choices
        message = choice.message
        # of vLLM, DeepSeek; of Ollama
        if getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None):
            self.instead = (": it only thinks, in a field of its own; raise --max-tokens, or "
                            "switch its thinking off at the server")  # fmt: skip
        elif message.refusal:
            self.instead = f": it refuses: {safe_line(message.refusal)!r}"
        return without_keys(message.content or ""), choice.finish_reason

    def _count_failure(self, reason: str) -> Completion:
        self.failures += 1
        if self.failures >= MAX_FAILURES:
            self.closed_because = f"not sent: {MAX_FAILURES} requests in a row failed: {reason}"
        return self._failure(reason)

    def _failure(self, reason: str) -> Completion:
        completion = _failed(reason)
        self.first_error = self.first_error or completion.text
        return completion


def _for_server(message: Message) -> dict[str, str]:
    """The message with its calls, or its result of one, as text: servers want ids for others."""
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    return {"role": message["role"], "content": content_and_calls(message)}


def _limit_size(response: Any) -> None:
    """Lets the reader of `response` fail beyond a size. An answer must not be compressed: a few
    bytes could become gigabytes."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise RequestError("the answer is compressed, which was not asked for")
    read = response.iter_raw

    def limited(chunk_size: int | None = None) -> Iterator[bytes]:
        size = 0
        for part in read(chunk_size):
            size += len(part)
            if size > MAX_BYTES:
                raise RequestError(f"the answer has over {MAX_BYTES:,} bytes")
            yield part

    response.iter_raw = limited


def _failed(reason: str) -> Completion:
    return Completion([], [], without_keys(reason), "error")


def _reason(error: Exception) -> str:
    """Says why a request failed."""
    import openai

    if isinstance(error, openai.APIStatusError):
        return f"status {error.status_code}: {error.response.text}"
    # the cause of a connection error says more than the error itself
    return str(error.__cause__ or "") or str(error) or type(error).__name__
