"""What every correct loop does: each fact has two sides, and the probes give hand-made numbers."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_diagnostics import run_of

from core import invariants, probes
from core.batching import to_tokens
from core.config import Config, resolve
from core.loading import load_policy
from core.optimizer import make_optimizer
from core.types import Rollout, Turn
from environments import base

TINY = str(Path(__file__).parents[1] / "core/tiny_weights")
ALIVE = {
    "groups__zero_std_fraction": 0.5, "tokens__trained": 99, "update__steps": 1, "grad__norm": 0.2,
    "update__skipped": 0, "update__moved": 0.01,
}  # fmt: skip
STEP = {"update__steps": 1}
SEVERAL = ALIVE | {"update__steps": 4}


def wavy(excess):
    """100 in the mean of two updates, and `excess` more."""
    return lambda update: 100 + excess + 5 * (-1) ** update


def broken(records, **settings):
    return {*invariants.broken_facts(records, resolve(Config(**{"lr": 5e-5} | settings)))}


@pytest.mark.parametrize(
    ("name", "fine", "wrong"),
    [
        ("prompts_differ", {"groups__prompts_differ": 0.0}, {"groups__prompts_differ": 0.1}),
        ("reward_differs", {"reward__unequal": 0.0}, {"reward__unequal": 0.02}),
        ("reward_differs", {"reward__judged_otherwise": 0}, {"reward__judged_otherwise": 0.1}),
        ("demonstrations_wrong", {"demonstrations__right": 1}, {"demonstrations__right": 0.9}),
        ("mixed_groups", {"groups__openings": 1}, {"groups__openings": 1.2}),
        ("no_end_token", {"length__no_end": 0.0}, {"length__no_end": 0.1}),
        ("advantages_uneven", {"groups__advantage_sum": 3e-8}, {"groups__advantage_sum": 0.01}),
        ("values_differ", {"value__spread": 1e-5}, {"value__spread": 0.11}),
        ("loss_weight", {"loss__weight": 0.0}, {"loss__weight": 0.5}),
        ("loss_weight", {"loss__weight": 1.0005}, {"loss__weight": 1.01}),
        ("wrong_direction", ALIVE | {"update__direction": 0.2, "gap__logprob_mean": 1e-7},
         ALIVE | {"update__direction": 0.05, "gap__logprob_mean": 1e-7}),
        ("passes_lost", STEP | {"grad__passes": 1.01}, STEP | {"grad__passes": 0.5}),
        ("passes_lost", STEP | {"grad__passes": 0.99}, STEP | {"grad__passes": 2.0}),
        ("no_movement", ALIVE, ALIVE | {"update__moved": 0.0}),
        ("no_movement", ALIVE | {"update__unchanged": 0}, ALIVE | {"update__unchanged": 1}),
        ("no_movement", ALIVE | {"groups__zero_std_fraction": 1, "grad__norm": 0.0, "update__moved":
         0.0}, ALIVE | {"grad__norm": 0.0, "update__skipped": 1} | STEP | {"update__steps": 0}),
        ("weights_unchanged", ALIVE | {"update__unchanged": 0}, ALIVE | {"update__unchanged": 0.1}),
        ("step_size", ALIVE | {"update__step_size": 0.1}, ALIVE | {"update__step_size": 0.02}),
        ("step_size", ALIVE | {"update__step_size": 3.0}, ALIVE | {"update__step_size": 5.0}),
        ("step_size", SEVERAL | {"update__step_size": 5.0}, SEVERAL | {"update__step_size": 17.0}),
        ("step_size", ALIVE | {"update__masters_apart": 0.1}, ALIVE | {"update__masters_apart": 0}),
        ("ratio_stays_one", SEVERAL | {"kl__approx": 2e-5}, SEVERAL | {"kl__approx": 0.0}),
        ("ratio_stays_one", ALIVE | {"kl__approx": 0.0}, SEVERAL | {"kl__approx": 0.0}),
        ("reference_differs", {"kl__reference": 1e-7}, {"kl__reference": 1e-3}),
        ("equal_answers", {"groups__equal_answers": 105, "groups__likely_equal": 100},
         {"groups__equal_answers": 300, "groups__likely_equal": 100}),
        ("equal_answers", {"groups__equal_answers": 95, "groups__likely_equal": 100},
         {"groups__equal_answers": 0, "groups__likely_equal": 100}),
        ("equal_answers", {"groups__equal_answers": wavy(0), "groups__likely_equal": 100},
         {"groups__equal_answers": wavy(20), "groups__likely_equal": 100}),
        ("draws_otherwise", {"gap__surprise": 0.1, "gap__surprise_z": 1.0, "policy__entropy": 0.5,
         "gap__logprob_mean": 0}, {"gap__surprise": 0.1, "gap__surprise_z": 4.0,
         "policy__entropy": 0.5, "gap__logprob_mean": 0}),
        ("draws_otherwise", {"gap__surprise": 0.005, "gap__surprise_z": 9.0,
         "policy__entropy": 0.5, "gap__logprob_mean": 0}, {"gap__surprise": -0.02,
         "gap__surprise_z": -9.0, "policy__entropy": 0.5, "gap__logprob_mean": 0}),
    ],
)  # fmt: skip
def test_each_fact_has_two_sides(name, fine, wrong):
    assert broken(run_of(8, **fine)) == set()
    assert broken(run_of(8, **wrong)) == {name}


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"lr": 0.0}, ALIVE | {"update__moved": 0.0}),
        ({"kl_coef": 0.1, "num_epochs": 2}, {"kl__reference": 0.01}),
        ({"staleness": 1}, {"gap__surprise": 0.1, "gap__surprise_z": 9.0, "policy__entropy": 1.0,
                            "gap__logprob_mean": 0}),
        ({"filter_groups": 2}, {"gap__surprise": 0.1, "gap__surprise_z": 9.0,
                                "policy__entropy": 1.0, "gap__logprob_mean": 0}),
        ({"gamma": 0.9}, ALIVE | {"update__direction": -0.5, "gap__logprob_mean": 1e-7}),
        ({"reward_coef": 0.0}, ALIVE | {"update__direction": -0.5, "gap__logprob_mean": 1e-7}),
        ({"kl_coef": 1.0}, ALIVE | {"update__direction": -0.5, "gap__logprob_mean": 1e-7}),
        ({"lr_schedule": "linear"}, ALIVE | {"update__step_size": 0.0, "update__lr": 0.0}),
        ({"warmup_updates": 99}, ALIVE | {"update__step_size": 0.01, "update__lr": 5e-7}),
    ],
)  # fmt: skip
def test_a_fact_is_not_judged_where_it_need_not_hold(settings, wrong):
    assert broken(run_of(6, **wrong), **settings) == set()


def test_two_updates_in_a_row_have_to_agree():
    for name, bad, good in (("grad__passes", 0.5, 1.0), ("groups__advantage_sum", 0.5, 0.0)):

        def wavy(update, bad=bad, good=good):
            return bad if update % 2 else good

        assert broken(run_of(5, **STEP | {name: wavy})) == set()


def test_facts_of_evaluations():
    def run(moved, **metrics):
        records = run_of(6, {0: 0.4, 6: 0.4}, update__moved=moved, groups__different=1.0)
        records[-1] |= {
            f"eval/e:k=1/{k}": v for k, v in ({"tasks": 64, "tokens_mean": 9} | metrics).items()
        }
        return records

    assert broken(run(0.01, same_answers=0.9)) == set()
    assert broken(run(0.001, same_answers=1.0)) == set()  # it has hardly moved
    assert broken(run(0.01, same_answers=1.0)) == {"answers_unchanged"}
    assert broken(run(0.01, same_answers=1.0, tokens_mean=2)) == set()  # hardly an answer
    assert broken(run(0.01, asked=64, played=64)) == set()
    assert broken(run(0.01, asked=64, played=32)) == {"tasks_missing"}
    assert broken(run(0.01, asked=64, played=64, tasks=16)) == {"tasks_missing"}


def policy_and_optimizer(**settings):
    cfg = resolve(Config(device="cpu", lr=1e-3, **settings))
    policy = load_policy(cfg, TINY)
    return cfg, policy, make_optimizer(policy, cfg.lr)


def passes(policy, optimizer, weights):
    """A backward pass for each number: that number times the sum of all trained weights."""
    for weight in weights:
        loss = sum(p.float().sum() for p in policy.trainable().values()) * weight
        optimizer.backward(loss)


def test_the_first_step_of_adamw_is_the_learning_rate_and_holds_all_passes():
    cfg, policy, optimizer = policy_and_optimizer(dtype="float32")
    probe = probes.WeightProbe(policy)
    probe.begin(optimizer)
    passes(policy, optimizer, [1.0, 2.0])
    norm, stepped = optimizer.clip_and_step(1.0)
    found = probe.metrics(cfg, norm)
    assert stepped and found["update/unchanged"] == 0
    # the change is read off weights of about 1, which float32 rounds to 6e-8
    assert found["update/step_size"] == pytest.approx(1.0, rel=1e-3)
    assert found["grad/passes"] == pytest.approx(1.0, rel=1e-4)
    probe.begin(optimizer)
    passes(policy, optimizer, [1.0])
    optimizer.zero_grad()  # as if it were the end of a step: the pass is lost
    passes(policy, optimizer, [3.0])
    norm, _ = optimizer.clip_and_step(1.0)
    assert probe.metrics(cfg, norm)["grad/passes"] == pytest.approx(0.75, rel=1e-4)


def test_below_float32_the_masters_are_looked_at():
    cfg, policy, optimizer = policy_and_optimizer(dtype="bfloat16")
    cfg = replace(cfg, lr=1e-6)
    optimizer.set_lr(1e-6)
    probe = probes.WeightProbe(policy)
    probe.begin(optimizer)
    passes(policy, optimizer, [1.0])
    norm, _ = optimizer.clip_and_step(1.0)
    found = probe.metrics(cfg, norm)
    assert found["update/step_size"] == pytest.approx(1.0, rel=0.1)
    assert found["update/masters_apart"] > 0.5 and found["update/unchanged"] == 0
    assert found["grad/passes"] == pytest.approx(1.0, rel=1e-2)


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
