"""OpenAISampler: an OpenAI-compatible server plays, for evaluation only.

    python train.py --sampler openai --base-url http://127.0.0.1:11434/v1 --model-id qwen3:4b \\
        --num-updates 0 --env letter_counting:difficulty=3

Ollama, vLLM, llama.cpp and others speak this protocol. The chats go there as messages and the
answers come back as a stream of text; the server applies its own template and returns neither ids
nor log-probs that training could rely on, so there is nothing to train. A key, where one is needed,
is read from the environment variable OPENAI_API_KEY and written nowhere; an address with a password
or a query in it is refused, since config.yaml would keep it.
"""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

from core.model import Policy
from core.sampler import Sampler, SamplingParams
from core.types import Completion, Message, UsageError

AT_ONCE = 8  # requests under way
TRIES = 4  # of a request; the waits between are 0.5, 1 and 2 seconds
TIMEOUT = 300.0  # seconds without a piece of the answer
LONGEST = 1 << 20  # characters of an answer


class OpenAISampler(Sampler):
    """Asks `model` at `base_url`; ids in its completions are those of the policy's tokenizer."""

    def __init__(self, policy: Policy, base_url: str, model: str):
        self.policy, self.model = policy, model
        policy.max_length = 1 << 30  # the server has a limit of its own
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.stopped = Event()

    def sample(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        raise RuntimeError("a server takes messages, not ids: use `reply`")

    def reply(
        self,
        chats: list[list[Message]],
        prompts: list[list[int]],
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        """One completion for each chat, in order; UsageError if the server can't be had."""
        self.stopped.clear()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            asked = [pool.submit(self._ask, chat, params) for chat in chats]
            try:
                _wait(asked, on_progress)
            except BaseException:
                self.stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
        return [self._completion(*future.result()) for future in asked]

    def _ask(self, chat: list[Message], params: SamplingParams) -> tuple[str, str]:
        """The server's answer and its finish reason."""
        import httpx

        body: dict[str, Any] = {
            "model": self.model, "messages": chat, "stream": True, "seed": params.seed,
            "max_tokens": params.max_tokens, "temperature": params.temperature,
            "top_p": params.top_p,
        }  # fmt: skip
        key = os.environ.get("OPENAI_API_KEY", "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for attempt in range(TRIES):
            try:
                with httpx.stream(
                    "POST", self.url, json=body, headers=headers, timeout=TIMEOUT
                ) as answer:
                    if answer.status_code == 200:
                        return self._read(answer.iter_lines())
                    answer.read()
                    told = answer.text.replace(key, "[key]") if key else answer.text
                    reason = f"status {answer.status_code}: {told[:200]}"
                    if answer.status_code not in (408, 429) and answer.status_code < 500:
                        break  # asking again would bring the same
            except httpx.HTTPError as error:
                reason = str(error) or type(error).__name__
            if attempt + 1 < TRIES and self.stopped.wait(0.5 * 2**attempt):
                break
        raise UsageError(f"--base-url {self.url}: {' '.join(reason.split())}")

    def _read(self, lines: Any) -> tuple[str, str]:
        """Put a stream of server-sent events together; malformed ones are passed by."""
        text, finish = "", "stop"
        for line in lines:
            if self.stopped.is_set() or not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                break
            try:
                [choice, *_] = json.loads(data)["choices"]
                text += choice["delta"].get("content") or ""
                finish = choice.get("finish_reason") or finish
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            self.latest = text[-80:]
            if len(text) > LONGEST:
                return text[:LONGEST], "length"
        return text, finish

    def _completion(self, text: str, finish: str) -> Completion:
        ids = self.policy.tokenizer.encode(text, add_special_tokens=False)
        ids.append(self.policy.end_of_turn_id)
        return Completion(ids, [0.0] * len(ids), text, "length" if finish == "length" else "stop")


def _wait(asked: list[Future], on_progress: Callable[[], None]) -> None:
    """Until all are answered, or one of them failed, whose error is raised."""
    while not all(future.done() for future in asked):
        on_progress()
        for future in asked:
            if future.done() and future.exception() is not None:
                raise future.exception()  # type: ignore[misc]
        time.sleep(0.02)
