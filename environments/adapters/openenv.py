r"""A client for the environment of a running OpenEnv server.

Action: one `field` of the server's action. Its value is the value of `field` in a JSON object in
the response, else the whole response. With several (`field=row column`), the last JSON object in
the response that has them all. Observation: the fields that the server returns, as lines
"name: value", or the text alone if a single text field has a value.

Reward:

    the server's            no reward counts as 0
    -0.1                    the server rejects the action as invalid; at most twice per episode
    -1                      the third invalid action; the episode ends

If the server cannot be reached, the episode fails with EnvFailure; an exception of the environment
on the server fails the episode with RuntimeError.

`info["correct"]`: the episode ended with a positive reward. The seed is sent with the server's
reset; the server decides whether it uses the seed. Each instance opens a session of its own, so the
server must allow --env-instances sessions (EnvFailure otherwise).

>>> as_text({"echoed_message": "hi", "message_length": 2, "metadata": {}})
'echoed_message: hi\nmessage_length: 2'
>>> as_text({"prompt": "Name a prime.", "legal": None})
'Name a prime.'
"""

import json
from contextlib import suppress
from typing import Any

import httpx

from environments.base import Env, EnvFailure, Message, Step, UsageError
from environments.parsing import Retries, json_objects, read_action, user
from environments.plumbing.installed import import_library

HIDDEN_FIELDS = ("done", "reward", "metadata")
CONNECT_TIMEOUT = 10.0  # seconds


class OpenEnv(Env):
    """`url`: address of the server; `field`: the field of its action that takes the text, or the
    fields, separated by spaces. Raises UsageError if the server's schema has others."""

    heavy = waits = True

    def __init__(self, url: str = "http://127.0.0.1:8000", field: str = "message") -> None:
        self.client_class = import_library("openenv.core").GenericEnvClient
        self.url, self.fields = url, field.split()
        if not self.fields:
            raise UsageError("field must name a field of the server's action")
        self.hint = f"That is no valid {self.fields[0]}."
        if len(self.fields) > 1:
            self.hint = f"Answer with JSON: {json.dumps(dict.fromkeys(self.fields, '..'))}"
        self.client: Any = None
        self._connect()  # raises if there is no server, or no free session
        self.close()  # the session is free until the first episode
        self._check_fields()

    def reset(self, seed: int) -> list[Message]:
        self.retries = Retries()
        problem = ""
        for _ in range(2):  # the server may have closed an idle session
            try:
                if self.client is None:
                    self._connect()
                return [user(as_text(self.client.reset(seed=seed).observation))]
            except Exception as error:
                self.close()
                if "CAPACITY_REACHED" in str(error):
                    raise EnvFailure(f"the OpenEnv server at {self.url} is full: {error}") from None
                problem = _text(error)
        raise EnvFailure(f"no OpenEnv session at {self.url}: {problem}")

    def step(self, response: str) -> Step:
        action = self._action(response)
        if action is None:
            return self.retries.refuse(self.hint)
        # lone surrogates cannot be sent: "?" replaces them
        payload = json.loads(json.dumps(action, ensure_ascii=False).encode("utf-8", "replace"))
        try:
            result = self.client.step(payload)
        except Exception as error:
            if "VALIDATION_ERROR" in str(error):
                return self.retries.refuse(self.hint)
            self.close()
            has_answered = "(code: " in str(error)
            kind = RuntimeError if has_answered else EnvFailure
            raise kind(f"the OpenEnv server at {self.url}: {_text(error)}") from None
        reward = float(result.reward or 0.0)
        if result.done:
            self.close()
            return Step(None, reward, True, {"correct": reward > 0})
        return Step(user(as_text(result.observation)), reward, False, {"correct": False})

    def close(self) -> None:
        """Ends the session."""
        client, self.client = self.client, None
        with suppress(Exception):  # the connection may be broken
            client.close()

    def _action(self, response: str) -> dict[str, Any] | None:
        if len(self.fields) == 1:
            value = read_action(response, self.fields[0], lambda value: value)
            return {self.fields[0]: response if value is None else value}
        for found in json_objects(response):
            if {*self.fields} <= {*found}:
                return {field: found[field] for field in self.fields}
        return None

    def _check_fields(self) -> None:
        """Raises UsageError if the server's action has not these fields, or needs others.

        The server says so itself, where it has OpenEnv's address /schema.
        """
        address = f"http{self.url.rstrip('/').removeprefix('http').removeprefix('ws')}/schema"
        try:
            schema = httpx.get(address, timeout=CONNECT_TIMEOUT).json()["action"]
            known, needed = [*schema["properties"]], schema.get("required", [])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return
        unknown = [] if schema.get("additionalProperties") else {*self.fields} - {*known}
        if unknown or not {*needed} <= {*self.fields}:
            names = " ".join(field for field in known if field not in HIDDEN_FIELDS)
            advice = f"the server needs field={' '.join(needed)}" if needed else "choose of these"
            raise UsageError(f"field={' '.join(self.fields)}: the server's action has the fields "
                             f"{names}; {advice}")  # fmt: skip

    def _connect(self) -> None:
        client = self.client_class(base_url=self.url, connect_timeout_s=CONNECT_TIMEOUT)
        self.client = client.sync()
        self.client.connect()


def as_text(observation: dict[str, Any]) -> str:
    """Returns the fields of an observation that have a value, as text."""
    fields = {
        k: v for k, v in observation.items() if k not in HIDDEN_FIELDS and v not in (None, "")
    }
    texts = {
        k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in fields.items()
    }
    if len(texts) == 1 and texts == fields:
        return next(iter(texts.values()))
    return "\n".join(f"{key}: {text}" for key, text in texts.items()) or "Your turn."


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
