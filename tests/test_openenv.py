"""The OpenEnv client, against a server that the test starts, one that stops, and none."""

import pytest
from conftest import needs

from environments.adapters.openenv import OpenEnv
from environments.base import EnvFailure, UsageError
from environments.plumbing.registry import make

pytestmark = needs("envs", "openenv")


@pytest.fixture
def start():
    """Starts a server whose action is that of this name."""
    import openenv_server

    servers = []

    def start(action="Text"):
        servers.append(openenv_server.Server(getattr(openenv_server, action)))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_observations_rewards_and_ends_are_the_servers_and_a_stopped_one_is_a_failure(start):
    server = start()
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


def test_a_field_that_the_servers_action_has_not_is_refused_at_once(start):
    server = start("Move")
    for field in ("row column", "column row", "row column note"):
        assert OpenEnv(server.url, field).fields == field.split()
    for field in ("row", "message", "row column message"):
        with pytest.raises(UsageError, match=f"field={field}: .* row column note; .*=row column"):
            OpenEnv(server.url, field)
