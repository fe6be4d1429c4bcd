"""OpenEnv: against a server of its own on this machine, one that stops, and none."""

import socket
import sys
import threading
import time

import pytest

pytest.importorskip("openenv")

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from core.types import UsageError
from environments.adapters.openenv import LOST, OpenEnv, describe
from environments.registry import make


class Saying(Action):
    message: str


class Echo(Observation):
    echoed_message: str
    message_length: int = 0


class EchoEnvironment(Environment):
    """Says back what it is told; pays its length in tenths; "bye" ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        return Echo(echoed_message=f"seed {seed}")

    def step(self, action, timeout_s=None, **options):
        if action.message == "fail":
            raise RuntimeError("broken")
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


class Server:
    def __init__(self, sessions=8):
        app = create_fastapi_app(EchoEnvironment, Saying, Echo, max_concurrent_envs=sessions)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        config = uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        until = time.monotonic() + 20
        while not self.server.started and time.monotonic() < until:
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self):
        self.server.should_exit = True
        self.thread.join(timeout=10)


@pytest.fixture(scope="module")
def url():
    server = Server()
    yield server.url
    server.stop()


@pytest.fixture
def env(url):
    env = make(f"openenv:url={url}")
    yield env
    env._disconnect()


def test_text_goes_in_and_text_comes_back(env):
    assert env.reset(7) == [
        {"role": "user", "content": "echoed_message: seed 7\nmessage_length: 0"}
    ]
    step = env.step("hello")
    assert step.message["content"] == "echoed_message: hello\nmessage_length: 5"
    assert (step.reward, step.done) == (0.5, False)
    last = env.step("bye")
    assert (last.reward, last.done, last.message) == (0.3, True, None)
    assert last.info == {"correct": True}
    assert env.reset(8)[0]["content"].startswith("echoed_message: seed 8")  # used again


def test_no_reward_is_zero(env):
    env.reset(0)
    step = env.step("")
    assert step.reward == 0 and step.message["content"] == "message_length: 0"


def test_the_field_may_be_named_in_json_and_the_last_counts(env):
    env.reset(0)
    step = env.step('{"message": "no"} or {"message": "yes"}')
    assert step.message["content"] == "echoed_message: yes\nmessage_length: 3"


def test_an_action_that_the_server_finds_invalid_is_forgiven_twice(env):
    env.reset(0)
    steps = [env.step('{"message": [1]}') for _ in range(3)]
    assert [step.reward for step in steps] == [-0.1, -0.1, -1]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[0].message["content"] == "That is no valid message."
    env.reset(0)
    assert env.step("good").reward == 0.4


def test_instances_are_sessions_of_their_own(url):
    envs = [OpenEnv(url) for _ in range(4)]
    assert [env.reset(i)[0]["content"][:22] for i, env in enumerate(envs)] == [
        f"echoed_message: seed {i}" for i in range(4)
    ]
    assert [env.step(str(i)).message["content"][16] for i, env in enumerate(envs)] == list("0123")
    assert all(env.step("bye").done for env in envs)


def test_an_error_of_the_environment_ends_the_episode_only(env):
    env.reset(0)
    step = env.step("fail")
    assert (step.reward, step.done, step.info) == (0, True, {"correct": False, "error": True})
    assert env.reset(1)[0]["content"].startswith("echoed_message: seed 1")


def test_a_server_that_stops_ends_the_episodes():
    server = Server()
    playing, idle = OpenEnv(server.url), OpenEnv(server.url)
    playing.reset(0)
    server.stop()
    step = playing.step("hello")
    assert (step.reward, step.done, step.info) == (0, True, {"correct": False, "error": True})
    assert idle.reset(0) == [{"role": "user", "content": LOST}]
    assert idle.step("hello").info == {"correct": False, "error": True}


def test_more_episodes_than_sessions_are_one_clear_line():
    server = Server(sessions=1)
    first, second = OpenEnv(server.url), OpenEnv(server.url)
    first.reset(0)
    with pytest.raises(UsageError, match=r"is full: .*1/1 sessions"):
        second.reset(0)
    assert first.step("bye").done  # that gives its session back
    assert second.reset(3)[0]["content"].startswith("echoed_message: seed 3")
    second.step("bye")
    server.stop()


@pytest.mark.parametrize(
    "address, message",
    [
        ("http://127.0.0.1:9", "no OpenEnv session at http://127.0.0.1:9: Failed to connect"),
        ("127.0.0.1", "url is the http address"),
        ("", "url is the http address"),
    ],
)
def test_an_address_without_a_server_is_one_clear_line(address, message):
    with pytest.raises(UsageError, match=message) as error:
        make(f"openenv:url={address}")
    assert "\n" not in str(error.value)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "openenv"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="needs openenv: pip install"):
        make("openenv")


def test_an_observation_is_lines_or_a_text_alone():
    assert describe({"text": "Hello.", "done": False, "reward": 1}) == "Hello."
    assert describe({"board": [[0, 1]], "to_move": "x"}) == "board: [[0, 1]]\nto_move: x"
    assert describe({}) == "Your turn."


@pytest.mark.parametrize(
    "response",
    ["x" * 100_000, "\ud800", "\0", "{" * 100_000, '{"message": NaN}', '{"message": "\\ud800"}',
     '{"message": ' + "[" * 900 + "]" * 900 + "}", '{"message": {"message": {}}}'],
)  # fmt: skip
def test_a_hostile_response_raises_nothing(env, response):
    env.reset(0)
    started = time.perf_counter()
    step = env.step(response)
    assert time.perf_counter() - started < 1
    assert step.info["correct"] is False
    assert env.reset(1)[0]["content"].startswith("echoed_message: seed 1")
