"""--overlap: the metrics of --staleness 1 to the bit, with episodes played while updates train."""

import shlex
import signal
import threading
from pathlib import Path

import pytest
import torch
from conftest import metrics_of
from safetensors.torch import load_file

import train
from core import distributed
from core.faults import Stopped
from core.files.checkpoint import find_checkpoint
from core.files.run_log import read_records
from core.loop import play
from core.loop.ahead import Ahead, copy_of
from core.sampler import Sampler
from core.terminal.interrupt import Interrupt

SMALL = """--num-updates 3 --num-prompts 2 --group-size 4 --eval-num-tasks 4 --eval-every 2
    --save-every 1 --max-tokens 16 --lr 1e-3 --device cpu""".split()
AGENTS = Path(__file__).parents[1] / "environments" / "agents"
CASES = {
    "grpo, lora": "--lora-rank 4",
    "ppo, all weights": "--algo ppo --num-minibatches 2",
    "several agents": "--env tic_tac_toe --max-turns 3 --filter-groups 1 --sft-steps 1 "
    "--sft-batch-size 4",
    "an agent's program": f"--env agent:run={AGENTS}/plain.py:run,data={AGENTS}/sums.jsonl",
    "async reward functions": f"--env rewarded:data={AGENTS}/sums.jsonl,"
    "prompt=question,reward=judges.py:judge",
}
JUDGES = """
import asyncio, threading

from environments import Env, Step

async def judge(completions, trainer_state, **columns):
    assert threading.current_thread() is not threading.main_thread()
    await asyncio.sleep(0)
    return [(len(text) + trainer_state.global_step) % 3 / 2 for text in completions]

def alone(completions, **columns):
    return [0.0] * len(completions)

class Alarms(Env):
    main_thread = True

    def reset(self, seed):
        return [{"role": "user", "content": str(seed)}]

    def step(self, response):
        return Step(None, 0.0, True)

def make():
    return Alarms()
"""
FAILS = """
import os

from environments import Env, Step

class Fails(Env):
    steps = 0

    def reset(self, seed):
        return [{"role": "user", "content": str(seed)}]

    def step(self, response):
        Fails.steps += 1
        # updates 1 and 2 have 8 each, and those of update 1 are judged again
        if Fails.steps > 24 and not os.path.exists("repaired"):
            raise ValueError("the service is down")
        return Step(None, float(len(response) % 3), True)
"""


@pytest.fixture
def threads(monkeypatch):
    """The names of the threads that collected, by update."""
    seen, collect = {}, play.collect

    def collect_rollouts(run, update, *rest):
        seen[update] = threading.current_thread() is threading.main_thread()
        return collect(run, update, *rest)

    monkeypatch.setattr(play, "collect", collect_rollouts)
    return seen


@pytest.mark.parametrize("case", CASES)
def test_it_has_the_metrics_and_rollouts_of_staleness_1(command, threads, case):
    Path("judges.py").write_text(JUDGES)
    flags = [*SMALL, *CASES[case].split()]
    for name, flag in (("a", "--staleness=1"), ("b", "--overlap")):
        code, _, err = command(*flags, flag, "--run-name", name)
        assert code == 0, err
    assert threads == {1: True, 2: False, 3: False}
    assert metrics_of("runs/a") == metrics_of("runs/b")
    one, other = (Path(f"runs/{name}/rollouts.jsonl").read_text() for name in "ab")
    assert one == other
    records = read_records(Path("runs/b/metrics.jsonl"))
    updates = [record for record in records if record.get("update")]
    assert all(record["time/rollout_s"] >= 0 for record in updates)  # is_sampling needs that


def test_ctrl_c_in_an_update_saves_and_the_resumed_run_goes_on_exactly(command, monkeypatch):
    assert command(*SMALL, "--overlap", "--run-name", "a")[0] == 0
    step = train.take_step

    def interrupted(run, *rest):
        if run.next_update == 2:  # while the episodes of update 3 are played
            signal.raise_signal(signal.SIGINT)
        return step(run, *rest)

    monkeypatch.setattr(train, "take_step", interrupted)
    code, out, _ = command(*SMALL, "--overlap", "--run-name", "b")
    assert code == 130 and "stopped and saved" in out
    assert [record["update"] for record in metrics_of("runs/b")] == [0, 1, 2]
    monkeypatch.setattr(train, "take_step", step)
    assert command("--resume", "runs/b")[0] == 0
    assert metrics_of("runs/a") == metrics_of("runs/b")


@pytest.mark.parametrize("older", ["--overlap", "--staleness=2"])
def test_where_the_next_episodes_fail_the_update_is_saved_first(command, older):
    Path("fails.py").write_text(FAILS)
    flags = ["--env", "fails.py:Fails", "--eval-num-tasks", 0, "--save-every", 0, older]
    code, _, err = command(*SMALL, *flags, "--run-name", "a")
    assert code == 2 and "8 of 8 episodes failed" in err
    assert err.count("resume with: python train.py --resume runs/a") == 1
    assert metrics_of("runs/a")[-1]["update"] == 2
    Path("repaired").touch()
    assert command(*SMALL, *flags, "--num-updates", 2, "--run-name", "two")[0] == 0
    saved, newest = (load_file(find_checkpoint(Path(f"runs/{name}")).folder / "weights.safetensors")
                     for name in ("a", "two"))  # fmt: skip
    assert all(saved[name].equal(weight) for name, weight in newest.items())
    assert command("--resume", "runs/a")[0] == 0
    assert [record["update"] for record in metrics_of("runs/a")] == [0, 1, 2, 3]


def test_the_sampler_gets_new_weights_once_no_episode_is_open(command, monkeypatch):
    waited, playing, seen = threading.Event(), [], []
    collect, wait = play.collect, Ahead.wait

    def collect_rollouts(run, update, *rest):
        if threading.current_thread() is threading.main_thread():
            return collect(run, update, *rest)
        playing.append(update)
        assert waited.wait(60)  # until the loop waits for this thread
        waited.clear()
        collected = collect(run, update, *rest)
        playing.clear()
        return collected

    monkeypatch.setattr(play, "collect", collect_rollouts)
    monkeypatch.setattr(Ahead, "wait", lambda ahead: waited.set() or wait(ahead))
    monkeypatch.setattr(Sampler, "sync", lambda sampler: seen.append([*playing]))
    assert command(*SMALL, "--overlap", "--run-name", "a")[0] == 0
    assert len(seen) >= 3 and not any(seen)


def test_what_was_taken_is_taken_once_and_what_is_closed_ends():
    ahead = Ahead(Interrupt())
    ahead.start(lambda: ([], []))
    assert ahead.started and ahead.take() == ([], [])
    assert not ahead.started and ahead.take() is None
    ahead.check()
    ahead.close()
    with pytest.raises(Stopped):
        ahead.check()
    ahead = Ahead(Interrupt())
    ahead.interrupt.requested = True
    with pytest.raises(Stopped):
        ahead.check()


def test_the_copy_has_trained_weights_of_its_own_and_shares_the_others(policy):
    """Weights begin 4 bytes after a multiple of 64: there kernels may round in another way."""
    for name, weight in policy.model.named_parameters():
        weight.requires_grad_("mlp" in name)
        weight.data = torch.cat([torch.zeros(1), weight.data.flatten()])[1:].view(weight.shape)
    copy = copy_of(policy)
    own = dict(policy.model.named_parameters())
    for name, weight in copy.model.named_parameters():
        assert (weight is own[name]) == ("mlp" not in name)
        assert weight.data_ptr() % 64 == own[name].data_ptr() % 64
        assert torch.equal(weight, own[name])
    assert copy.tokenizer is policy.tokenizer


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--staleness 2", "remove --staleness 2"),
        ("--sampler openai --num-updates 0 --base-url http://127.0.0.1:1", "--overlap does not go"),
        ("--curriculum 0.7", "--overlap does not go with --curriculum"),
        ("--env tic_tac_toe:opponent=guess", "opponents take turns"),
        (
            "--env 'rewarded:data=a.jsonl,reward=judges.py:judge judges.py:alone'",
            "is called in the main thread",
        ),
        ("--env judges.py:Alarms", "is called in the main thread"),
        ("--env judges.py:make", "is called in the main thread"),
    ],
)
def test_what_does_not_go_with_it_is_refused(command, flags, said):
    Path("judges.py").write_text(JUDGES)
    code, _, err = command(*SMALL, "--overlap", *shlex.split(flags))
    assert code == 2 and said in err


def test_several_processes_are_refused(command, monkeypatch):
    monkeypatch.setattr(distributed, "num_ranks", lambda: 2)
    code, _, err = command(*SMALL, "--overlap")
    assert code == 2 and "torchrun" in err
