"""OpenAISampler: evaluates a model behind an OpenAI-compatible server; it cannot train.

    python train.py --sampler openai --base-url http://127.0.0.1:11434/v1 --model-id qwen3:4b \\
        --num-updates 0 --env letter_counting:difficulty=3

The server (Ollama, vLLM, llama.cpp, ...) applies its own chat template and returns text, so
completions have the token ids of the local tokenizer and log-probs of 0. The openai client waits
for the server, and repeats a request if the server is busy. A request that still fails ends its
episode or, if no request has succeeded yet, the run: the address, the key or the model is wrong.
"""

from functools import partial
from typing import Any

import openai

from core.calls import Calls
from core.extras.keys import api_key, safe_line
from core.faults import UsageError
from core.policy import Policy
from core.sampler import Request, Sampler
from core.seeds import derive_seed
from core.types import Completion

CONCURRENCY = 8  # requests at once
TIMEOUT_S, MAX_RETRIES = 600.0, 4  # of each attempt; of each request
ADVICE = {
    openai.APIConnectionError: "start the server, or correct the address: ",
    openai.AuthenticationError: "put the server's key into OPENAI_API_KEY: ",
    openai.NotFoundError: "check --model-id, and that the address ends in /v1: ",
}


class OpenAISampler(Sampler):
    """Samples from `model` at `base_url`. Raises UsageError for a key that cannot be sent."""

    alone = True

    def __init__(self, policy: Policy, base_url: str, model: str):
        self.policy, self.base_url, self.model = policy, base_url, model
        self.calls = Calls(CONCURRENCY)
        self.works = False  # whether a request has succeeded
        key = api_key() or "none"  # the client requires one
        self.client: Any = openai.OpenAI(
            base_url=base_url, api_key=key, timeout=TIMEOUT_S, max_retries=MAX_RETRIES
        )
        policy.max_length = 1 << 30  # only the server knows the model's limit

    def add(self, request: Request) -> None:
        self.calls.start(request, partial(self._answer, request))

    def step(self) -> list[tuple[Request, Completion]]:
        """Waits a moment. A request that failed has a Completion with an `error`."""
        outcomes = self.calls.finished(0.01)
        return [(request, self._completion(*outcome)) for request, outcome in outcomes]

    def clear(self) -> None:
        self.calls.clear()

    def close(self) -> None:
        self.calls.clear()
        self.client.close()

    def _answer(self, request: Request) -> Any:
        """Asks the server; runs in a thread."""
        return self.client.chat.completions.create(
            model=self.model,
            messages=request.chat or [],
            seed=derive_seed(request.seed, request.stream),
            max_tokens=request.max_tokens,
            temperature=request.params.temperature,
            top_p=request.params.top_p,
        )

    def _completion(self, answer: Any, error: BaseException | None) -> Completion:
        """The answer, or the reason of its failure. Raises UsageError if no request can succeed."""
        if error is None and not getattr(answer, "choices", None):
            error = openai.OpenAIError(f"the answer is no completion: {answer}")
        if error is not None:
            is_of_prompt = isinstance(error, openai.BadRequestError)  # such as one too long
            if isinstance(error, openai.OpenAIError) and not (self.works or is_of_prompt):
                raise UsageError(f"--base-url {self.base_url}: {_reason(error)}")
            return Completion([], [], _reason(error), "error")
        self.works = True
        choice = answer.choices[0]
        text, finish = choice.message.content or "", choice.finish_reason
        if finish not in ("stop", "length"):
            return Completion([], [], safe_line(f"the answer ended with {finish}"), "error")
        token_ids = self.policy.tokenizer.encode(text, add_special_tokens=False)
        token_ids.append(self.policy.end_of_turn_id)
        return Completion(token_ids, [0.0] * len(token_ids), text, finish)


def _reason(error: BaseException) -> str:
    """One line with the reason why a request failed, and advice."""
    advice = next((text for kind, text in ADVICE.items() if isinstance(error, kind)), "")
    if isinstance(error, openai.APIStatusError):
        return safe_line(f"{advice}status {error.status_code}: {error.response.text}")
    # the cause of a connection error says more than the error itself
    return safe_line(f"{advice}{error.__cause__ or error}")
