"""An environment elsewhere: the same episode, and a broken one costs itself only."""

import sys
import time
from pathlib import Path

import pytest

from core.rollouts import BatchedEnv
from core.sampler import SamplingParams, TorchSampler
from core.selection import without_failed
from core.tasks import Task
from core.types import UsageError
from environments.adapters import remote
from environments.adapters.remote import Remote, RemoteError
from environments.registry import make

# answers the first request as letter_counting would, then does what its name says
SERVER = """
import json, sys, time
print(json.dumps({{"messages": [{{"role": "user", "content": "?"}}]}}), flush=True)
sys.stdin.readline(); sys.stdin.readline()
{misdeed}
"""
MISDEEDS = {
    "hang": "time.sleep(60)",
    "die": "sys.exit(3)",
    "flood": "while True: sys.stdout.write('x' * 65536)",
    "broken": "print('{\"reward\": 1', flush=True); time.sleep(60)",
    "list": "print('[]', flush=True); time.sleep(60)",
    "wrong": 'print(\'{"message": null, "reward": "much", "done": true}\', flush=True)',
    "nan": 'print(\'{"message": null, "reward": NaN, "done": true}\', flush=True)',
    "twice": "print('{}\\n{}', flush=True); time.sleep(60)",
    "error": 'print(\'{"error": "no such door"}\', flush=True); time.sleep(60)',
}
REASONS = {
    "hang": "no answer in time",
    "die": "the process ended",
    "flood": "an answer without end",
    "broken": "no JSON object",
    "list": "no JSON object",
    "wrong": "'reward' is missing or of the wrong kind",
    "nan": "the reward of player is nan",
    "twice": "more than one answer",
    "error": "no such door",
}


def served(tmp_path, misdeed):
    """An environment whose program misbehaves on its first step."""
    program = tmp_path / f"{misdeed}.py"
    program.write_text(SERVER.format(misdeed=MISDEEDS[misdeed]))
    return Remote(command=f"{sys.executable} {program}", timeout=2.0)


def test_the_episode_is_that_of_the_environment_itself():
    here, there = make("letter_counting:difficulty=2"), Remote(env="letter_counting:difficulty=2")
    for seed in (1, 2, 1_600_000_000):
        assert there.reset(seed) == here.reset(seed)
        assert there.demonstrate() == here.demonstrate()
        assert there.demonstrate(hasty=True) == here.demonstrate(hasty=True)
        for text in (here.demonstrate(), "\ud800 half a pair", "{" * 100_000, ""):
            assert there.step(text) == here.step(text)
    there.close()


def test_a_fresh_message_is_fresh_on_this_side_too():
    there = Remote(env="gymnasium:id=CartPole-v1;memory=false")
    there.reset(1)
    assert there.step("left").fresh
    there.close()


@pytest.mark.parametrize("misdeed", sorted(MISDEEDS.keys() - {"nan"}))
def test_a_program_that_misbehaves_is_ended_and_says_why(tmp_path, misdeed):
    env = served(tmp_path, misdeed)
    assert env.reset(1)[0]["content"] == "?"
    process = env.process
    started = time.monotonic()
    with pytest.raises(RemoteError, match=REASONS[misdeed]):
        env.step("go")
    assert time.monotonic() - started < 4
    assert process.poll() is not None
    assert env.process is None
    assert env.reset(2)[0]["content"] == "?"  # a fresh process
    env.close()


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_it_costs_its_own_episode_and_no_other(tmp_path, policy, misdeed, monkeypatch):
    table = BatchedEnv(policy, max_turns=2)
    bad = f"remote:command={sys.executable} {tmp_path / misdeed}.py,timeout=2"
    served(tmp_path, misdeed)
    tasks = [Task("letter_counting", 1, 0), Task(bad, 1, 1), Task("letter_counting", 2, 2)]
    rollouts = table.collect(tasks, TorchSampler(policy), SamplingParams(max_tokens=4))
    assert [bool(r.error) for r in rollouts] == [False, True, False]
    assert REASONS[misdeed] in rollouts[1].error
    kept, told = without_failed(rollouts)
    assert [r.group_id for r in kept] == [0, 2]
    assert told[0].startswith("1 of 3 episodes failed; the first, of remote:command=")
    assert "\n" not in told[0]


def test_more_failures_than_half_stop_the_run_with_the_first_cause(tmp_path, policy):
    served(tmp_path, "die")
    bad = f"remote:command={sys.executable} {tmp_path / 'die'}.py"
    tasks = [Task(bad, 1, 0), Task(bad, 1, 0), Task("letter_counting", 2, 1)]
    rollouts = BatchedEnv(policy, 2).collect(
        tasks, TorchSampler(policy), SamplingParams(max_tokens=4)
    )
    with pytest.raises(UsageError, match=r"2 of 3 episodes failed.*the process ended"):
        without_failed(rollouts)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("remote", "name either env=.. "),
        ("remote:env=letter_counting,command=cat", "name either env=.. "),
        ("remote:env=chess", "unknown environment 'chess'"),
        ("remote:env=letter_counting:difficulty=99", "difficulty is 1 to 10, not 99"),
        ("remote:command=cat,timeout=0", "timeout is more than 0 seconds, not 0"),
    ],
)
def test_wrong_options_are_refused(spec, message):
    with pytest.raises(UsageError, match=message):
        make(spec)


def test_a_program_that_is_not_there_is_the_persons_to_mend():
    with pytest.raises(UsageError, match="can't start 'no-such-program'"):
        make("remote:command=no-such-program --fast").reset(1)


def test_no_shell_reads_the_command(tmp_path):
    env = Remote(command=f"{sys.executable} -c pass ; touch {tmp_path / 'made'}")
    with pytest.raises(RemoteError):
        env.reset(1)
    assert not (tmp_path / "made").exists()


def test_closing_ends_the_process_and_its_children(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        'print(\'{"messages": [{"role": "user", "content": "%d"}]}\' % child.pid, flush=True)\n'
        "sys.stdin.read()\n"
    )
    env = Remote(command=f"{sys.executable} {program}")
    child = int(env.reset(1)[0]["content"])
    env.close()
    for _ in range(50):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child outlived its parent's end")


def test_the_longest_line_is_longer_than_any_honest_answer():
    assert remote.LONGEST_LINE > 1 << 20
