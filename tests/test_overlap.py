"""--staleness: which weights sample, and which train. --overlap: the metrics of --staleness 1 to
the bit, with episodes played while updates train."""

import itertools
import signal
import threading
from pathlib import Path

import pytest
import torch
from conftest import metrics_of
from test_server_sampler import URL
from test_server_sampler import server as server  # a fixture

import train
from core import distributed
from core.config import Config
from core.extras.server_sampler import ServerSampler
from core.faults import UsageError
from core.loop import play
from core.loop.players import open_sampler
from core.loop.run import Run
from core.optimizer import MasterAdamW

SMALL = """--num-updates 4 --num-prompts 2 --group-size 2 --eval-num-tasks 0 --save-every 0
    --max-tokens 6 --max-turns 2 --max-model-len 512 --lora-rank 4 --lr 1e-2
    --entropy-coef 0.1 --device cpu""".split()
ON_SERVER = ["--sampler", "server", "--base-url", URL]


def test_samples_are_of_the_weights_of_some_updates_ago(command, qwen3_folder, monkeypatch):
    runs, sampling, training = [], [], []  # the weights while each update samples, and trains
    collect, shape_rewards = play.collect, train.shape_rewards

    def weights():
        trained = runs[-1].policy.trainable().values()
        return torch.cat([w.detach().flatten().clone() for w in trained])

    def while_sampling(run, *rest):
        runs.append(run)
        sampling.append(weights())
        return collect(run, *rest)

    def while_training(cfg, batch):
        training.append(weights())
        return shape_rewards(cfg, batch)

    monkeypatch.setattr(play, "collect", while_sampling)
    monkeypatch.setattr(train, "shape_rewards", while_training)
    flags = ["--model-id", qwen3_folder, *"--staleness 2 --run-name a".split()]
    code, out, _ = command(*SMALL, *flags)
    assert code == 0 and "sampler_gap" not in out
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(training))
    assert all(torch.equal(sampling[n], training[max(0, n - 2)]) for n in range(4))
    gaps = [record["gap/logprob_mean"] for record in metrics_of("runs/a")[1:]]
    assert gaps[0] < 1e-5 < min(gaps[1:])  # the first update has no older weights


def test_overlap_has_the_metrics_of_staleness_1_and_a_run_that_ends_goes_on_exactly(
    command, qwen3_folder, server, monkeypatch
):
    flags = [*SMALL, *ON_SERVER, "--model-id", qwen3_folder]
    flags += "--env tic_tac_toe --algo ppo --num-minibatches 2".split()
    threads, playing, trained = {}, [], threading.Event()
    collect, sync, load = play.collect, Run.sync, ServerSampler._load

    def collect_late(run, update, *rest):
        """Once the loop waits for it."""
        threads[update] = threading.current_thread() is threading.main_thread()
        if not threads[update]:
            playing.append(update)
            assert trained.wait(60)
        found = collect(run, update, *rest)
        playing.clear()
        trained.clear()
        return found

    def load_alone(sampler):
        assert not playing  # its server gets weights while no episode is open
        return load(sampler)

    with monkeypatch.context() as patch:
        patch.setattr(play, "collect", collect_late)
        patch.setattr(Run, "sync", lambda run: trained.set() or sync(run))
        patch.setattr(ServerSampler, "_load", load_alone)
        for name, flag in (("a", "--staleness=1"), ("b", "--overlap")):
            code, _, err = command(*flags, flag, "--run-name", name)
            assert code == 0, err
    assert threads == {1: True, 2: False, 3: False, 4: False}
    whole = metrics_of("runs/a")
    assert metrics_of("runs/b") == whole and "gap/canary" in whole[-1]
    assert whole[1]["gap/logprob_max"] < 1e-5
    one, other = (Path(f"runs/{name}/rollouts.jsonl").read_text() for name in "ab")
    assert one == other
    step, steps = MasterAdamW.clip_and_step, []

    def end(optimizer, *rest, **given):
        steps.append(rest)
        if len(steps) == 4:  # while the episodes of update 3 are played
            signal.raise_signal(signal.SIGINT)
        if len(steps) == 6:  # those of update 4
            server.instead = lambda path, body: (503, "down")
        return step(optimizer, *rest, **given)

    monkeypatch.setattr(MasterAdamW, "clip_and_step", end)
    code, out, _ = command(*flags, "--overlap", "--run-name", "c")
    assert code == 130 and "--resume runs/c" in out
    code, _, err = command("--resume", "runs/c")
    assert code == 1 and "status 503" in err and "--resume runs/c" in err
    assert metrics_of("runs/c") == whole[:4] and not Path("runs/c/adapters").exists()
    server.instead = lambda path, body: None
    assert command("--resume", "runs/c")[0] == 0
    assert metrics_of("runs/c") == whole and len(steps) == 8  # no update was trained twice


def test_several_processes_and_functions_that_are_not_async_are_refused(
    command, qwen3_folder, server, monkeypatch
):
    Path("r.py").write_text("def f(completions, **_):\n    return [0.0] * len(completions)")
    Path("a.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}')
    env = ["--env", "rewarded:data=a.jsonl,reward=r.py:f", "--overlap"]
    code, _, err = command(*SMALL, *ON_SERVER, "--model-id", qwen3_folder, *env)
    assert code == 2 and "make them async, or remove it" in err and not Path("runs").exists()

    monkeypatch.setattr(distributed, "num_ranks", lambda: 2)
    with pytest.raises(UsageError, match="torchrun"):
        open_sampler(Config(overlap=True), None, None, 0, None)
