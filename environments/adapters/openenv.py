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
server must allow 32 sessions (EnvFailure otherwise).

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
from environments.plumbing.registry import describe_error

HIDDEN_FIELDS = ("done", "reward", "metadata")
CONNECT_TIMEOUT = 10.0  # seconds


class OpenEnv(Env):
    """`url`: address of the server; `field`: the field of its action that takes the text, or the
    fields, separated by spaces. Raises UsageError if the server's schema has others."""

    heavy = waits = True

    def __init__(self, url: str = "http://127.0.0.1:8000", field: str = "message") -> None:
        self.client_class = import_library("openenv.core").GenericEnvClient
        self.url, self.fields = url, field.split()
        self.hint = f"That is no valid {field}."
        if len(self.fields) > 1:
            self.hint = f"Answer with JSON: {json.dumps(dict.fromkeys(self.fields, '..'))}"
        self.client: Any = None
        self._connect()  # raises if there is no server, or no free session
        self.close()  # the session is free until the first episode
        address = f"http{url.rstrip('/').removeprefix('http').removeprefix('ws')}/schema"
        try:
            schema = httpx.get(address, timeout=CONNECT_TIMEOUT).json()["action"]
            known, needed = [*schema["properties"]], schema.get("required", [])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return  # an older server
        if not {*needed} <= {*self.fields} <= {*known}:
            names = " ".join(name for name in known if name not in HIDDEN_FIELDS)
            raise UsageError(f"field={field}: the server's action has the fields {names}; "
                             f"it needs field={' '.join(needed)}")  # fmt: skip

    def reset(self, seed: int) -> list[Message]:
        self.retries = Retries()
        for attempt in (1, 2):  # the server may have closed an idle session
            try:
                if self.client is None:
                    self._connect()
                return [user(as_text(self.client.reset(seed=seed).observation))]
            except Exception as error:
                self.close()
                if attempt == 2 or "CAPACITY_REACHED" in str(error):
                    raise EnvFailure(f"no OpenEnv session at {self.url}: {describe_error(error)}"
                                     ) from None  # fmt: skip
        raise AssertionError

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
            kind = RuntimeError if "(code: " in str(error) else EnvFailure  # it has answered
            raise kind(f"the OpenEnv server at {self.url}: {describe_error(error)}") from None
        reward = float(result.reward or 0.0)
        message = None if result.done else user(as_text(result.observation))
        return Step(message, reward, result.done, {"correct": result.done and reward > 0})

    def close(self) -> None:
        """Ends the session."""
        client, self.client = self.client, None
        with suppress(Exception):  # the connection may be broken
            client.close()

    def _action(self, response: str) -> dict[str, Any] | None:
        if len(self.fields) == 1:
            value = read_action(response, self.fields[0], lambda value: value)
            return {self.fields[0]: response if value is None else value}
        found = (value for value in json_objects(response) if {*self.fields} <= {*value})
        action = next(found, None)
        return action and {field: action[field] for field in self.fields}

    def _connect(self) -> None:
        client = self.client_class(base_url=self.url, connect_timeout_s=CONNECT_TIMEOUT)
        self.client = client.sync()
        self.client.connect()


def as_text(observation: dict[str, Any]) -> str:
    """Returns the fields of an observation that have a value, as text."""
    given = observation.items()
    fields = {k: v for k, v in given if k not in HIDDEN_FIELDS and v not in (None, "")}
    if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
        return text
    lines = [f"{k}: {v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}"
             for k, v in fields.items()]  # fmt: skip
    return "\n".join(lines) or "Your turn."
