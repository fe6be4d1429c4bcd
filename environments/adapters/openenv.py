"""A client of a running OpenEnv server: its environment, wherever and in whatever it is written.

The response goes to the server as one field of its action: the value that a JSON object of the
response gives for `field`, else the whole text. What comes back is shown as lines "name: value"; a
single text is shown alone. Observation and reward are the server's, no reward counts as 0.

    an action that the server finds invalid    -0.1, twice; then -1, the end
    the server can't be reached any more       0, the end, with info["error"]

"correct": the episode ended with a positive reward. The seed goes to the server's reset; whether
it decides the episode is up to the server. Each instance is a session of its own, so the server
must allow for as many sessions as there are episodes at a time (UsageError if it doesn't).

>>> describe({"echoed_message": "hi", "message_length": 2, "metadata": {}})
'echoed_message: hi\\nmessage_length: 2'
>>> describe({"prompt": "Name a prime.", "legal": None})
'Name a prime.'
"""

import json
from contextlib import suppress
from typing import Any

from core.types import Message, UsageError
from environments.base import Env, Step
from environments.parsing import Retries, read_action, user

NOT_SHOWN = ("done", "reward", "metadata")
TIMEOUT = 10.0  # seconds to connect
LOST = "The environment's server doesn't answer."


class OpenEnv(Env):
    """`url` of the server, http://..; `field` of its action that takes the text."""

    def __init__(self, url: str = "http://127.0.0.1:8000", field: str = "message"):
        try:
            from openenv.core import GenericEnvClient
        except ImportError:
            raise UsageError('openenv needs openenv: pip install -e ".[envs]"') from None
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise UsageError(f"url is the http address of an OpenEnv server, not {url!r}")
        self.new_client, self.url, self.field = GenericEnvClient, url, field
        self.client: Any = None
        try:
            self._connect()
        except Exception as error:  # refused, no such host, no OpenEnv server, no room
            problem = " ".join(str(error).split())[:200]
            raise UsageError(f"no OpenEnv session at {url}: {problem}") from None
        self._disconnect()  # who is only asked to exist takes no session

    def reset(self, seed: int) -> list[Message]:
        self.retries = Retries()
        for _ in range(2):  # a session may have broken off while it was idle
            try:
                if self.client is None:
                    self._connect()
                result = self.client.reset(seed=seed)
                return [user(describe(result.observation))]
            except Exception as error:
                self._disconnect()
                if "CAPACITY_REACHED" in str(error):
                    raise UsageError(f"the OpenEnv server at {self.url} is full: {error}") from None
        return [user(LOST)]  # the next step ends the episode

    def step(self, response: str) -> Step:
        action = read_action(response, self.field, lambda value: value)
        if action is None:
            action = response
        # not every character of a Python text can be sent
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
        self.client = self.new_client(base_url=self.url, connect_timeout_s=TIMEOUT).sync()
        self.client.connect()

    def _disconnect(self) -> None:
        client, self.client = self.client, None
        with suppress(Exception):  # it may be broken, or never have been
            client.close()


def describe(observation: dict[str, Any]) -> str:
    """What the server shows, as text; names without a value are left out."""
    shown = {k: v for k, v in observation.items() if k not in NOT_SHOWN and v not in (None, "")}
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in shown.items()}
    if len(texts) == 1 and texts == shown:
        return next(iter(texts.values()))
    return "\n".join(f"{key}: {text}" for key, text in texts.items()) or "Your turn."
