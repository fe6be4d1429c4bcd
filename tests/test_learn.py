"""The training loop: which weights an update changes, its rollouts, the warm start."""

import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from conftest import load_small, rollouts_of
from single_update import gradients_of_update, single_update

import train
from algorithms import grpo, ppo, reinforce
from core import canary
from core.config import Config
from core.episodes import RolloutCollector
from core.loop import before as warm_start
from core.metrics import UpdateStats
from core.optimizer import make_optimizer
from core.sampler import SamplingParams, TorchSampler
from core.tasks import train_tasks
from core.types import Completion


def played(policy, rewards):
    """Rollouts of one group of letter counting, paid as it suits a test."""
    drawn = train_tasks(["letter_counting"], 0, 1, num_prompts=1, group_size=len(rewards))
    params = SamplingParams(max_tokens=9, seed=1)
    rollouts = RolloutCollector(policy, max_turns=1).collect(drawn, TorchSampler(policy), params)
    for rollout, reward in zip(rollouts, rewards, strict=True):
        rollout.turns[0].reward = reward
    return rollouts


def weights_of(policy):
    return {n: p.detach().clone() for n, p in policy.trainable().items()}


def test_the_value_head_has_a_warmup_and_a_learning_rate_of_its_own(qwen3_folder):
    policy = load_small(qwen3_folder, value_head=True)
    optimizer = make_optimizer(policy, 1e-2, value_lr=1e-2)
    cfg = Config(algo="ppo", options=ppo.Options(value_warmup=1), entropy_coef=0.1)
    rollouts = played(policy, [0.0, 1.0, 2.0])
    for number, moves in ((1, {"value_head.weight", "value_head.bias"}), (2, None)):
        before = weights_of(policy)
        single_update(cfg, policy, optimizer, rollouts, update=number)
        moved = {n for n, p in weights_of(policy).items() if not torch.equal(p, before[n])}
        assert moved == (moves or set(before))
    for rate, expected in ((0.0, [1e-2, 1e-2]), (1e-3, [1e-2, 1e-3])):
        groups = make_optimizer(policy, 1e-2, value_lr=rate).adamw.param_groups
        assert [group["lr"] for group in groups] == expected


def test_target_kl_ends_the_update_before_the_step_that_is_too_far(qwen3_folder):
    def steps(target, num_epochs):
        policy = load_small(qwen3_folder, value_head=True)
        cfg = Config(algo="ppo", num_epochs=num_epochs, options=ppo.Options(target_kl=target))
        end = UpdateStats.end_minibatch
        with patch.object(UpdateStats, "end_minibatch", autospec=True, side_effect=end) as tried:
            optimizer, rollouts = make_optimizer(policy, 1e-2), played(policy, [0.0, 1.0, 2.0])
            metrics = single_update(cfg, policy, optimizer, rollouts)
        left = [p.grad for p in policy.trainable().values() if p.grad is not None]
        assert not any(gradient.any() for gradient in left)  # nothing for the next update
        return metrics["update/steps"], tried.call_count, metrics["kl/approx"]

    *unlimited, kl = steps(0.0, 2)  # the KL after the first step
    assert unlimited == [2, 2]
    assert steps(0.7 * kl, 3)[:2] == (1, 2) and steps(1.4 * kl, 2)[:2] == (2, 2)


def test_each_gradient_step_is_that_of_its_own_rollouts(qwen3_folder):
    """Without a baseline the other rollouts have no part in it, nor are they computed."""
    policy, rollouts = load_small(qwen3_folder), rollouts_of(4, 1, prompt=5)
    for i, rollout in enumerate(rollouts):
        rollout.turns[0].reward = float(1 + i)
    options = reinforce.Options(baseline="none")
    cfg = Config(algo="reinforce", options=options, num_minibatches=2, max_grad_norm=0)
    drawn = [*train.minibatches(cfg, 4, 1)]
    with patch.object(train, "micro_batches", wraps=train.micro_batches) as cut:
        steps, _ = gradients_of_update(cfg, policy, rollouts)
    assert [call.args[2] for call in cut.call_args_list] == [rows for _, rows in drawn]
    for gradient, (_, rows) in zip(steps, drawn, strict=True):
        own = [rollouts[i] for i in rows]
        [alone], _ = gradients_of_update(replace(cfg, num_minibatches=1), policy, own)
        assert (gradient - alone).abs().max() < 1e-5 * alone.abs().max()


def test_a_loss_that_is_not_finite_is_no_step_though_its_gradient_is_finite(policy):
    rollouts, compute_loss = played(policy, [0.0, 1.0]), grpo.compute_loss

    def infinite(tokens, options):
        loss, metrics = compute_loss(tokens, options)
        return loss + math.inf, metrics

    with patch.object(grpo, "compute_loss", infinite):
        metrics = single_update(Config(), policy, make_optimizer(policy, 1e-2), rollouts)
    assert metrics["update/skipped"] == 1 and 0 < metrics["grad/norm"] < math.inf


def nll(policy, rollouts):
    """The mean negative log-prob of the sampled tokens, turn by turn."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    drawn = [Completion(turn.completion_ids, [], "", "") for turn in turns]
    logprobs = canary.score(policy, [turn.prompt_ids for turn in turns], drawn)
    return -torch.tensor([x for of_turn in logprobs for x in of_turn]).mean().item()


def test_a_supervised_step_lowers_the_mean_loss_of_the_demonstrations(policy):
    policy.micro_batch_tokens = 30  # several micro-batches
    rollouts = rollouts_of(2, 2, prompt=5)
    run = SimpleNamespace(policy=policy, optimizer=make_optimizer(policy, 1e-3), progress={})
    cfg = Config(temperature=0.5, max_grad_norm=0.25)  # the temperature is that of sampling
    before, clip_and_step = nll(policy, rollouts), run.optimizer.clip_and_step
    with patch.object(run.optimizer, "clip_and_step", wraps=clip_and_step) as stepped:
        assert warm_start.sft_step(cfg, run, rollouts) == pytest.approx(before, rel=1e-5)
    stepped.assert_called_once_with(0.25, True)
    assert nll(policy, rollouts) < before - 0.01
