"""--staleness: which weights sample, and which train; test_train.py resumes such a run."""

import itertools

import torch
from conftest import metrics_of

import train
from core.loop import play

SMALL = """--num-updates 4 --num-prompts 2 --group-size 4 --eval-num-tasks 0
    --save-every 1 --max-tokens 16 --lr 1e-3 --entropy-coef 0.1 --device cpu""".split()


def test_samples_are_of_the_weights_of_some_updates_ago(command, monkeypatch):
    runs, sampling, training = [], [], []  # the weights while each update samples, and trains
    collect, score = play.collect, train.shape_rewards

    def weights():
        trained = runs[-1].policy.trainable().values()
        return torch.cat([w.detach().flatten().clone() for w in trained])

    def collect_rollouts(run, update, *rest):
        runs.append(run)
        sampling.append(weights())
        return collect(run, update, *rest)

    def shape_rewards(cfg, batch):
        training.append(weights())
        return score(cfg, batch)

    monkeypatch.setattr(play, "collect", collect_rollouts)
    monkeypatch.setattr(train, "shape_rewards", shape_rewards)
    staleness, flags = 2, ("--staleness", 2, "--lora-rank", 4)
    code, out, _ = command(*SMALL, *flags, "--run-name", "a")
    assert code == 0 and "sampler_gap" not in out
    assert len(training) == 4
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(training))
    for update in range(4):
        assert torch.equal(sampling[update], training[max(0, update - staleness)]), update
    gaps = [record["gap/logprob_mean"] for record in metrics_of("runs/a")[1:]]
    assert gaps[0] < 1e-5  # the first update has no older weights
    assert all(gap > 1e-5 for gap in gaps[1:])
