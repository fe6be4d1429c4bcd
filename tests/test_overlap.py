"""--overlap: the metrics of --staleness 1 to the bit, with episodes played while updates train."""

import signal
import threading
from pathlib import Path

import pytest
from conftest import metrics_of
from test_server_sampler import RUN, SAMPLE
from test_server_sampler import server as server  # a fixture

from core import distributed
from core.config import Config
from core.extras.server_sampler import ServerSampler
from core.faults import UsageError
from core.loop import play
from core.loop.ahead import Ahead
from core.loop.players import open_sampler
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


def test_what_ends_while_an_update_trains_goes_on_exactly(command, flags, server, monkeypatch):
    flags.append("--overlap")
    assert command(*flags, "--run-name", "whole")[0] == 0
    step = MasterAdamW.clip_and_step
    for name in ("signal", "server"):
        steps = []

        def end(optimizer, *rest, name=name, steps=steps, **given):
            steps.append(rest)
            if len(steps) == 2 and name == "signal":  # while the episodes of update 3 are played
                signal.raise_signal(signal.SIGINT)
            elif len(steps) == 2:
                server.instead = lambda path, body: (503, "down")
            return step(optimizer, *rest, **given)

        with monkeypatch.context() as patch:
            patch.setattr(MasterAdamW, "clip_and_step", end)
            code, out, err = command(*flags, "--run-name", name)
        assert code == (130 if name == "signal" else 1) and f"--resume runs/{name}" in out + err
        assert [record["update"] for record in metrics_of(f"runs/{name}")] == [0, 1, 2]
        server.instead = lambda path, body: None
        assert command("--resume", f"runs/{name}")[0] == 0
        assert metrics_of("runs/whole") == metrics_of(f"runs/{name}")


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


@pytest.mark.parametrize("env, words", [
    ("rewarded:data=a.jsonl,reward=r.py:f", "make them async, or remove it"),
    ("tic_tac_toe:opponent=older:1", "--overlap does not go with opponent=older:1"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused(command, flags, env, words):
    Path("r.py").write_text("def f(completions, **_):\n    return [0.0] * len(completions)")
    Path("a.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}')
    code, _, err = command(*flags, "--overlap", "--env", env)
    assert code == 2 and words in err and not Path("runs").exists()


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(distributed, "num_ranks", lambda: 2)
    with pytest.raises(UsageError, match="torchrun"):
        open_sampler(Config(overlap=True), None, None, 0, None)
