"""OpenAISampler: evaluates a model behind an OpenAI-compatible server; it cannot train.

    pip install -e ".[openai]"
    python train.py --sampler openai --base-url http://127.0.0.1:11434/v1 --model-id qwen3:4b \\
        --num-updates 0 --env letter_counting:difficulty=3

The server (Ollama, vLLM, llama.cpp, ...) applies its own chat template and streams text back, so
completions have the token ids of the local tokenizer and log-probs of 0. The API key is in the
environment variable OPENAI_API_KEY; it appears in no file and no message.
"""

import asyncio
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from core.model import Policy
from core.sampler import Sampler, SamplingParams
from core.seeds import derive_seed
from core.types import Completion, Message, UsageError

MAX_CONCURRENT_REQUESTS = 8
MAX_RETRIES = 3  # of a request that the server refuses for now or that does not reach it
TIMEOUT_S = 300.0  # for the connection, and between two pieces of a completion
MAX_CHARACTERS = 1 << 20  # of a completion; the rest is cut off
PROGRESS_INTERVAL_S = 0.05


class OpenAISampler(Sampler):
    """Samples from `model` at `base_url`. Raises UsageError if the package openai is missing."""

    def __init__(self, policy: Policy, base_url: str, model: str):
        if importlib.util.find_spec("openai") is None:
            raise UsageError('--sampler openai: not installed; pip install -e ".[openai]"')
        self.policy, self.base_url, self.model = policy, base_url, model
        policy.max_length = 1 << 30  # only the server knows the model's limit

    def sample(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
        chats: list[list[Message]] | None = None,
    ) -> list[Completion]:
        """As `Sampler.sample`, from `chats`. Raises UsageError if the server gives no answer."""
        if chats is None:
            raise ValueError("a server takes messages, not token ids: pass `chats`")
        return asyncio.run(self._complete_all(chats, params, on_progress))

    async def _complete_all(
        self, chats: list[list[Message]], params: SamplingParams, on_progress: Callable[[], None]
    ) -> list[Completion]:
        import openai

        slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        async with openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=os.environ.get("OPENAI_API_KEY") or "none",  # the client requires one
            timeout=TIMEOUT_S,
            max_retries=MAX_RETRIES,
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),  # to no other host
        ) as client:
            streams = params.streams or range(len(chats))
            requests = [
                self._complete(client, slots, chat, params, derive_seed(params.seed, stream))
                for chat, stream in zip(chats, streams, strict=True)
            ]
            tasks = [asyncio.create_task(request) for request in requests]
            pending = set(tasks)
            try:
                while pending:
                    done, pending = await asyncio.wait(pending, timeout=PROGRESS_INTERVAL_S)
                    on_progress()
                    for task in done:
                        task.result()  # raises the task's exception
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in tasks]

    async def _complete(
        self,
        client: Any,
        slots: asyncio.Semaphore,
        chat: list[Message],
        params: SamplingParams,
        seed: int,
    ) -> Completion:
        import openai

        text, finish_reason = "", "stop"
        try:
            async with slots, await client.chat.completions.create(
                model=self.model, messages=chat, stream=True, seed=seed,
                max_tokens=params.max_tokens, temperature=params.temperature, top_p=params.top_p,
            ) as stream:  # fmt: skip
                async for chunk in stream:
                    for choice in chunk.choices or []:
                        text += choice.delta.content or ""
                        finish_reason = choice.finish_reason or finish_reason
                    self.latest = text[-80:]
                    if len(text) > MAX_CHARACTERS:
                        text, finish_reason = text[:MAX_CHARACTERS], "length"
                        break
        except (openai.OpenAIError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"--base-url {self.base_url}: {_one_line(error)}") from None
        token_ids = self.policy.tokenizer.encode(text, add_special_tokens=False)
        token_ids.append(self.policy.end_of_turn_id)
        return Completion(token_ids, [0.0] * len(token_ids), text,
                          "length" if finish_reason == "length" else "stop")  # fmt: skip


def _one_line(error: Exception) -> str:
    """Says why a request failed, in one line and without the API key that a server may repeat."""
    import openai

    if isinstance(error, openai.APIStatusError):
        reason = f"status {error.status_code}: {error.response.text}"
    else:  # the cause of a connection error says more than the error itself
        reason = str(error.__cause__ or "") or str(error) or type(error).__name__
    if key := os.environ.get("OPENAI_API_KEY"):
        reason = reason.replace(key, "[key]")
    return " ".join(reason.split())[:200]
