"""Remote environments: same episodes as locally; a server that fails loses only its episode."""

import sys

import pytest
from conftest import wait_for_the_end_of

from environments.adapters.remote import Remote
from environments.base import EnvFailure
from environments.plumbing.registry import make

# answers the reset with the pid of a child, then misbehaves on the first step
SERVER = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
messages = [{"role": "user", "content": str(child.pid)}]
sys.stdin.readline()
print(json.dumps({"messages": messages}), flush=True)
sys.stdin.readline()
"""


def test_episode_equals_that_of_the_served_environment():
    local, served = make("letter_counting:difficulty=2"), Remote("letter_counting:difficulty=2")
    for seed in (1, 1_600_000_000):
        assert served.reset(seed) == local.reset(seed)
        for hasty in (False, True):
            assert served.demonstrate(hasty) == local.demonstrate(hasty)
        for text in (local.demonstrate(), "\ud800 half a pair", "{" * 100_000, ""):
            assert served.step(text) == local.step(text)
    served.close()


@pytest.mark.parametrize(("misdeed", "failure", "reason"), [
    ("time.sleep(600)", EnvFailure, "no answer within the timeout"),
    ("print('line 1', 'No door 7', sep='\\n', file=sys.stderr); sys.exit(3)", EnvFailure,
     r"the process ended.*: line 1 \| No door 7"),
    ("print('{\"reward\": 1}', flush=True); time.sleep(600)", EnvFailure, "no valid answer"),
    ("print('{\"error\": \"no such door\"}', flush=True); sys.stdin.read()", RuntimeError, "door"),
])  # fmt: skip
def test_misbehaving_server_is_killed_with_its_children_and_the_reason(
    tmp_path, misdeed, failure, reason
):
    (program := tmp_path / "server.py").write_text(SERVER + misdeed)
    env = Remote(command=f"{sys.executable} {program}", timeout=60.0)
    children = [int(env.reset(1)[0]["content"])]
    if reason == "no answer within the timeout":
        env.timeout = 0.1
    with pytest.raises(failure, match=reason):
        env.step("go")
    env.timeout = 60.0
    if failure is RuntimeError:  # of the environment, whose server goes on
        env.close()
    wait_for_the_end_of(children[0])
    children.append(int(env.reset(2)[0]["content"]))  # of a new process
    env.close()
    for child in children:
        wait_for_the_end_of(child)
    assert len({*children}) == 2


def test_a_server_that_ends_after_its_episode_is_started_again(tmp_path):
    (program := tmp_path / "server.py").write_text(SERVER.rpartition("sys.stdin")[0])
    env = Remote(command=f"{sys.executable} {program}")
    children = [int(env.reset(seed)[0]["content"]) for seed in (1, 2, 3)]
    env.close()
    assert len({*children}) == 3
    for child in children:
        wait_for_the_end_of(child)
