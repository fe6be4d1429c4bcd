"""The OpenEnv client, against a server that the test starts, one that stops, and none."""

import socket
import threading
import time

import pytest

pytest.importorskip("openenv", reason="needs picorl[envs]")

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import ConfigDict

from environments.adapters.openenv import OpenEnv
from environments.base import EnvFailure, UsageError
from environments.registry import make


class Text(Action):
    message: str


class Echo(Observation):
    echoed_message: str
    message_length: int = 0


class EchoEnvironment(Environment):
    """Repeats each message; the reward is a tenth of its length; "bye" ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        return Echo(echoed_message=f"seed {seed}")

    def step(self, action, timeout_s=None, **options):
        length = len(action.message)
        return Echo(
            echoed_message=action.message,
            message_length=length,
            reward=None if length == 0 else length / 10,
            done=action.message == "bye",
        )

    @property
    def state(self):
        return State()


class Move(Action):
    row: int
    column: int
    note: str = ""


class Free(Action):
    model_config = ConfigDict(extra="allow")
    message: str = ""


class Server:
    def __init__(self, action=Text):
        app = create_fastapi_app(EchoEnvironment, action, Echo, max_concurrent_envs=8)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 120
        while not self.server.started and time.monotonic() < deadline:
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{port}"

    def stop(self):
        self.server.should_exit = True
        self.thread.join(timeout=60)


def test_observations_rewards_and_ends_are_the_servers_and_a_stopped_one_is_a_failure():
    server = Server()
    env, idle = make(f"openenv:url={server.url}"), OpenEnv(server.url)
    assert env.reset(7) == [
        {"role": "user", "content": "echoed_message: seed 7\nmessage_length: 0"}
    ]
    step = env.step("hello")
    assert step.message["content"] == "echoed_message: hello\nmessage_length: 5"
    assert (step.reward, step.done) == (0.5, False)
    last = env.step("bye")
    assert (last.reward, last.done, last.message) == (0.3, True, None)
    assert last.info == {"correct": True}
    assert env.reset(8)[0]["content"].startswith("echoed_message: seed 8")
    server.stop()
    with pytest.raises(EnvFailure, match=server.url):
        env.step("hello")
    with pytest.raises(EnvFailure, match=f"no OpenEnv session at {server.url}: .*connect"):
        idle.reset(0)


@pytest.mark.parametrize(
    ("action", "right", "wrong"),
    [
        (Text, ["message"], {"text": "has the fields message; the server needs field=message",
                             "message text": "message"}),
        (Move, ["row column", "column row", "row column note"],
         {"row": "has the fields row column note; the server needs field=row column",
          "message": "needs field=row column", "row column message": "row column note"}),
        (Free, ["message", "anything"], {}),
    ],
)  # fmt: skip
def test_a_field_that_the_servers_action_has_not_is_refused_at_the_start(action, right, wrong):
    server = Server(action)
    for field in right:
        assert OpenEnv(server.url, field).fields == field.split()
    for field, said in wrong.items():
        for url in (server.url, server.url.replace("http", "ws") + "/"):
            with pytest.raises(UsageError, match=f"field={field}: the server's action .*{said}"):
                OpenEnv(url, field)
    server.stop()
