"""--overlap: the metrics of --staleness 1 to the bit, with episodes played while updates train."""

import signal
import threading
from pathlib import Path

import pytest
from conftest import metrics_of
from test_server_sampler import RUN, SAMPLE
from test_server_sampler import server as server  # a fixture

from core import distributed
from core.extras.server_sampler import ServerSampler
from core.loop import play
from core.loop.ahead import Ahead
from core.optimizer import MasterAdamW

AGENTS = Path(__file__).parents[1] / "environments" / "agents"
PROGRAM = f"--env agent:run={AGENTS}/plain.py:run,data={AGENTS}/sums.jsonl"
SEVERAL_AGENTS = "--algo ppo --num-minibatches 2 --env tic_tac_toe --max-turns 3"


@pytest.fixture
def flags(server, qwen3_folder):
    return [*RUN, "--save-every", 1, "--model-id", qwen3_folder]


@pytest.mark.parametrize("case", [SEVERAL_AGENTS, PROGRAM])
def test_it_has_the_metrics_and_rollouts_of_staleness_1(command, flags, monkeypatch, case):
    threads, collect = {}, play.collect  # whether the main thread collected, by update

    def collect_rollouts(run, update, *rest):
        threads[update] = threading.current_thread() is threading.main_thread()
        return collect(run, update, *rest)

    monkeypatch.setattr(play, "collect", collect_rollouts)
    for name, flag in (("a", "--staleness=1"), ("b", "--overlap")):
        code, _, err = command(*flags, *case.split(), flag, "--run-name", name)
        assert code == 0, err
    assert threads == {1: True, 2: False, 3: False}
    assert metrics_of("runs/a") == metrics_of("runs/b")
    assert "gap/canary" in metrics_of("runs/b")[-1]
    one, other = (Path(f"runs/{name}/rollouts.jsonl").read_text() for name in "ab")
    assert one == other


@pytest.mark.parametrize("by_signal", [True, False])
def test_what_ends_while_an_update_trains_goes_on_exactly(
    command, flags, server, monkeypatch, by_signal
):
    flags.append("--overlap")
    assert command(*flags, "--run-name", "a")[0] == 0
    step, steps = MasterAdamW.clip_and_step, []

    def end(optimizer, *rest, **given):
        steps.append(rest)
        if len(steps) == 2 and by_signal:  # while the episodes of update 3 are played
            signal.raise_signal(signal.SIGINT)
        elif len(steps) == 2:
            server.instead = lambda path, body: (503, "down")
        return step(optimizer, *rest, **given)

    monkeypatch.setattr(MasterAdamW, "clip_and_step", end)
    code, out, err = command(*flags, "--run-name", "b")
    assert code == (130 if by_signal else 1) and "--resume runs/b" in out + err
    assert [record["update"] for record in metrics_of("runs/b")] == [0, 1, 2]
    monkeypatch.setattr(MasterAdamW, "clip_and_step", step)
    server.instead = lambda path, body: None
    assert command("--resume", "runs/b")[0] == 0
    assert metrics_of("runs/a") == metrics_of("runs/b")


def test_the_server_gets_new_weights_once_no_episode_is_open(command, flags, server, monkeypatch):
    waits, playing, seen = threading.Event(), [], []
    begin, wait, load = Ahead.start, Ahead.wait, ServerSampler._load

    def start(ahead, collect):
        waits.clear()
        playing.append(True)
        begin(ahead, lambda: (collect(), playing.clear())[0])

    def hold(path, body):  # what the thread asks, until the loop waits for it
        assert path != SAMPLE or not playing or waits.wait(60)

    server.instead = hold
    monkeypatch.setattr(Ahead, "start", start)
    monkeypatch.setattr(Ahead, "wait", lambda ahead: waits.set() or wait(ahead))
    monkeypatch.setattr(ServerSampler, "_load", lambda s: seen.append([*playing]) or load(s))
    assert command(*flags, "--overlap", "--run-name", "a")[0] == 0
    assert len(seen) >= 5 and not any(seen)


def test_reward_functions_that_need_the_main_thread_are_refused(command, flags):
    Path("r.py").write_text("def f(completions, **_):\n    return [0.0] * len(completions)")
    Path("a.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}')
    code, _, err = command(*flags, "--overlap", "--env", "rewarded:data=a.jsonl,reward=r.py:f")
    assert code == 2 and "make them async, or remove it" in err and not Path("runs").exists()


def test_an_opponent_is_refused(command, flags):
    code, _, err = command(*flags, "--overlap", "--env", "tic_tac_toe:opponent=older:1")
    assert code == 2 and "--overlap does not go with opponent=older:1" in err


def test_several_processes_are_refused(command, flags, monkeypatch):
    monkeypatch.setattr(distributed, "num_ranks", lambda: 2)
    code, _, err = command(*flags, "--overlap")
    assert code == 2 and "torchrun" in err
