r"""A client for the environment of a running OpenEnv server.

Action: one `field` of the server's action. Its value is the value of `field` in a JSON object in
the response, else the whole response. Observation: the fields that the server returns, as lines
"name: value", or the text alone if a single text field has a value.

Reward:

    the server's            no reward counts as 0
    -0.1                    the server rejects the action as invalid, at most twice per episode
    -1                      the third invalid action; the episode ends
    0                       the server fails; the episode ends with info["error"]

`info["correct"]`: the episode ended with a positive reward. The seed is sent with the server's
reset; the server decides whether it uses the seed. Each instance opens a session of its own, so the
server must allow as many sessions as episodes run at the same time (UsageError otherwise).

>>> describe({"echoed_message": "hi", "message_length": 2, "metadata": {}})
'echoed_message: hi\nmessage_length: 2'
>>> describe({"prompt": "Name a prime.", "legal": None})
'Name a prime.'
"""

import json
from contextlib import suppress
from typing import Any

from core.types import Message, UsageError
from environments.adapters import import_library
from environments.base import Env, Step
from environments.parsing import Retries, read_action, user

HIDDEN_FIELDS = ("done", "reward", "metadata")
CONNECT_TIMEOUT = 10.0  # seconds
UNREACHABLE = "The environment's server doesn't answer."


class OpenEnv(Env):
    """`url`: address of the server; `field`: the field of its action that takes the text."""

    def __init__(self, url: str = "http://127.0.0.1:8000", field: str = "message") -> None:
        self.client_class = import_library("openenv.core").GenericEnvClient
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise UsageError(f"url must be the http address of an OpenEnv server, not {url!r}")
        self.url, self.field = url, field
        self.client: Any = None
        try:
            self._connect()
        except Exception as error:  # refused, unknown host, not an OpenEnv server, no free session
            problem = " ".join(str(error).split())[:200]
            raise UsageError(f"no OpenEnv session at {url}: {problem}") from None
        self._disconnect()  # the session is free until the first episode

    def reset(self, seed: int) -> list[Message]:
        self.retries = Retries()
        for _ in range(2):  # the server may have closed an idle session
            try:
                if self.client is None:
                    self._connect()
                return [user(describe(self.client.reset(seed=seed).observation))]
            except Exception as error:
                self._disconnect()
                if "CAPACITY_REACHED" in str(error):
                    raise UsageError(f"the OpenEnv server at {self.url} is full: {error}") from None
        return [user(UNREACHABLE)]  # the next step ends the episode

    def step(self, response: str) -> Step:
        action = read_action(response, self.field, lambda value: value)
        if action is None:
            action = response
        # lone surrogates cannot be sent: "?" replaces them
        payload = json.loads(json.dumps(action, ensure_ascii=False).encode("utf-8", "replace"))
        try:
            result = self.client.step({self.field: payload})
        except Exception as error:
            if "VALIDATION_ERROR" in str(error):
                return self.retries.refuse(f"That is no valid {self.field}.")
            self._disconnect()
            return Step(None, 0.0, True, {"correct": False, "error": True})
        reward = float(result.reward or 0.0)
        if result.done:
            self._disconnect()
            return Step(None, reward, True, {"correct": reward > 0})
        return Step(user(describe(result.observation)), reward, False, {"correct": False})

    def _connect(self) -> None:
        client = self.client_class(base_url=self.url, connect_timeout_s=CONNECT_TIMEOUT)
        self.client = client.sync()
        self.client.connect()

    def _disconnect(self) -> None:
        client, self.client = self.client, None
        with suppress(Exception):  # the connection may be broken
            client.close()


def describe(observation: dict[str, Any]) -> str:
    """Returns the fields of an observation that have a value, as text."""
    fields = {
        k: v for k, v in observation.items() if k not in HIDDEN_FIELDS and v not in (None, "")
    }
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in fields.items()}
    if len(texts) == 1 and texts == fields:
        return next(iter(texts.values()))
    return "\n".join(f"{key}: {text}" for key, text in texts.items()) or "Your turn."
