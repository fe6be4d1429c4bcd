"""Remote environments: same episodes as locally; a server that fails loses only its episode."""

import os
import sys

import pytest
from conftest import wait_for_the_end_of

from environments.adapters.remote import Remote, RemoteError
from environments.base import EnvFailure
from environments.plumbing.registry import make

# answers the reset, then misbehaves on the first step
SERVER = """
import json, sys, time
print(json.dumps({{"messages": [{{"role": "user", "content": "?"}}]}}), flush=True)
sys.stdin.readline(); sys.stdin.readline()
{misdeed}
"""


def test_episode_equals_that_of_the_served_environment():
    local, served = make("letter_counting:difficulty=2"), Remote("letter_counting:difficulty=2")
    for seed in (1, 1_600_000_000):
        assert served.reset(seed) == local.reset(seed)
        assert served.demonstrate() == local.demonstrate()
        assert served.demonstrate(hasty=True) == local.demonstrate(hasty=True)
        for text in (local.demonstrate(), "\ud800 half a pair", "{" * 100_000, ""):
            assert served.step(text) == local.step(text)
    served.close()


@pytest.mark.parametrize(("misdeed", "failure", "reason"), [
    ("time.sleep(600)", EnvFailure, "no answer within the timeout"),
    ("print('line 1', 'No door 7', sep='\\n', file=sys.stderr); sys.exit(3)", EnvFailure,
     r"the process ended; last lines of its stderr: line 1 \| No door 7"),
    ("print('{\"reward\": 1', flush=True); time.sleep(600)", EnvFailure, "not a JSON object"),
    ("print('{\"error\": \"no such door\"}', flush=True); time.sleep(600)", RemoteError,
     "no such door"),
])  # fmt: skip
def test_misbehaving_server_is_killed_with_the_reason(tmp_path, misdeed, failure, reason):
    program = tmp_path / "server.py"
    program.write_text(SERVER.format(misdeed=misdeed))
    env = Remote(command=f"{sys.executable} {program}", timeout=60.0)
    assert env.reset(1)[0]["content"] == "?"
    process = env.process
    if reason == "no answer within the timeout":
        env.timeout = 0.1
    with pytest.raises(failure, match=reason):
        env.step("go")
    env.timeout = 60.0
    assert process.poll() is not None and env.process is None
    assert env.reset(2)[0]["content"] == "?"  # a new process
    env.close()


@pytest.mark.parametrize("ends", [False] + [True] * hasattr(os, "waitid"))
def test_the_children_of_a_server_end_with_it(tmp_path, ends):
    """Whether the environment is closed, or the server has ended after its answer."""
    program, last = tmp_path / "parent.py", "" if ends else "sys.stdin.read()\n"
    program.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "sys.stdin.readline()\n"
        'print(\'{"messages": [{"role": "user", "content": "%d"}]}\' % child.pid, flush=True)\n'
        + last
    )
    env = Remote(command=f"{sys.executable} {program}")
    child = int(env.reset(1)[0]["content"])
    if ends:
        wait_for_the_end_of(env.process.pid)
        assert int(env.reset(2)[0]["content"]) != child  # of a new server
    else:
        env.close()
    wait_for_the_end_of(child)
    env.close()
