"""The probes behind the facts of core/invariants.py give hand-made numbers."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import metrics_of

from core import probes
from core.batching import to_tokens
from core.config import Config, resolve
from core.loading import load_policy
from core.optimizer import make_optimizer
from core.types import Rollout, Turn
from environments import base

TINY = str(Path(__file__).parents[1] / "core/tiny_weights")


def passes(policy, optimizer, weights):
    """A backward pass for each number: that number times the sum of all trained weights."""
    for weight in weights:
        loss = sum(p.float().sum() for p in policy.trainable().values()) * weight
        optimizer.backward(loss)


@pytest.mark.parametrize(
    ("dtype", "lr", "near"), [("float32", 1e-3, 1e-3), ("bfloat16", 1e-6, 0.1)]
)
def test_the_first_step_of_adamw_is_the_learning_rate_and_holds_all_passes(dtype, lr, near):
    """Below float32 the masters are looked at. The change is read off weights of about 1,
    which float32 rounds to 6e-8."""
    cfg = resolve(Config(device="cpu", lr=lr, dtype=dtype))
    policy = load_policy(cfg, TINY)
    optimizer, probe = make_optimizer(policy, lr), probes.WeightProbe(policy)
    probe.begin(optimizer)
    passes(policy, optimizer, [1.0, 2.0])
    norm, stepped = optimizer.clip_and_step(1.0)
    found = probe.metrics(cfg, norm)
    assert stepped and found["update/unchanged"] == 0
    assert found["update/step_size"] == pytest.approx(1.0, rel=near)
    assert found["grad/passes"] == pytest.approx(1.0, rel=0.01)
    assert dtype == "float32" or found["update/masters_apart"] > 0.5
    probe.begin(optimizer)
    passes(policy, optimizer, [1.0])
    optimizer.zero_grad()  # as if it were the end of a step: the pass is lost
    passes(policy, optimizer, [3.0])
    norm, _ = optimizer.clip_and_step(1.0)
    assert probe.metrics(cfg, norm)["grad/passes"] == pytest.approx(0.75, rel=0.01)


def rollouts_of(answers, rewards):
    """Rollouts of one group; the tokens of an answer have log-prob log(1/2)."""
    half = math.log(0.5)
    return [
        Rollout("e", base.PLAYER, 0, 0, turns=[Turn([1], ids, [half] * len(ids), "stop", reward)])
        for ids, reward in zip(answers, rewards, strict=True)
    ]


def test_equal_answers_are_counted_and_expected_by_their_probabilities():
    batch = to_tokens(rollouts_of([[5], [5], [6], [7, 8]], [0.0] * 4))
    batch.old_logprobs = batch.sampler_logprobs
    found = probes._equal_answers(batch, [[0, 1, 2, 3]])
    # (1/2 + 1/2 + 1/2 + 1/4) · 3 / 2
    assert found == {"groups/equal_answers": 1.0, "groups/likely_equal": pytest.approx(2.625)}


def test_equal_answers_that_earn_something_else_are_counted():
    cfg = resolve(Config(env=("letter_counting",)))
    answers, rewards = [[5], [5], [5], [6], [6]], [1.0, 1.0, 0.0, 0.5, 0.5]
    group = [replace(r, env=cfg.env[0].short) for r in rollouts_of(answers, rewards)]
    group[0].messages.append({"role": "assistant", "content": "two"})
    found = probes._unequal_rewards(cfg, [group])
    assert found["reward/unequal"] == pytest.approx(1 / 3)
    assert found["example/reward"] == "'two' earned 1 and 0"
    others = [replace(r, env="another") for r in group]  # of a judge, or unknown
    assert probes._unequal_rewards(cfg, [others]) == {}


def test_the_surprise_of_a_hidden_temperature_shows_and_that_of_the_true_one_does_not():
    """The mean of -log π over draws from π is its entropy; the varentropy is its variance."""
    from algorithms.token_logprobs import token_logprobs

    logits = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0)) * 2

    def z(temperature):
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1,
                                  generator=torch.Generator().manual_seed(1))[:, 0]  # fmt: skip
        nodes = torch.arange(len(logits))
        logprobs, entropy, varentropy = token_logprobs(logits, nodes, drawn, lambda h: h)
        return ((-logprobs - entropy).sum() / varentropy.sum().sqrt()).item()

    assert abs(z(1.0)) < 3 and z(0.7) < -10 and z(1.4) > 10


def test_examples_and_begun_answers_are_not_taken_for_answers(tmp_path, command):
    texts = ("user", "4?"), ("assistant", "9"), ("user", "{} + 1?"), ("assistant", "It is ")
    rows = [{"prompt": [{"role": role, "content": text.format(n)} for role, text in texts]}
            for n in range(40)]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "short.py").write_text(
        "def short(completions, **_):\n    return [-len(c[0]['content']) for c in completions]\n"
    )
    env = "rewarded:data=chats.jsonl,reward=short.py:short"
    small = "--num-updates 1 --num-prompts 2 --group-size 4 --max-tokens 8 --eval-num-tasks 4"
    assert command("--env", env, *small.split(), "--run-name", "a")[0] == 0
    (last,) = [r for r in metrics_of("runs/a") if r["update"] == 1]
    assert last["reward/judged_otherwise"] == 0 and last.get("groups/prompts_differ", 0) == 0
