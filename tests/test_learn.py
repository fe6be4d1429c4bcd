"""One update of learning: what moves, by how much, and what is left alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import train
from algorithms import grpo, ppo
from core.config import Config, resolve
from core.model import load_policy
from core.optimizer import make_optimizer
from core.reference import make_reference
from core.rollouts import RolloutCollector
from core.sampler import SamplingParams, TorchSampler
from core.tasks import train_tasks


def run_of(policy, optimizer):
    """As much of a run as learning needs."""
    return SimpleNamespace(policy=policy, optimizer=optimizer, reference=None, exercises=None)


def gradients(algo, max_tokens_per_micro_batch, folder, rollouts):
    policy = load_policy(str(folder), device="cpu", value_head=algo == "ppo", seed=1)
    if policy.value_head is not None:
        with torch.no_grad():
            policy.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    optimizer = make_optimizer(policy, 1e-3)
    found = []
    optimizer.step = lambda: found.extend(p.grad.clone() for p in optimizer.masters)
    policy.micro_batch_tokens = max_tokens_per_micro_batch
    cfg = train.Config(
        algo=algo, max_grad_norm=0, grpo=grpo.with_loss_type(grpo.Options()),
    )  # fmt: skip
    metrics = train.learn(resolve(cfg), run_of(policy, optimizer), rollouts, 1)
    return found, metrics


@pytest.mark.parametrize("algo", ["reinforce", "grpo", "ppo"])
def test_micro_batch_size_changes_nothing_but_rounding(small_folder, algo):
    policy = load_policy(str(small_folder), device="cpu")
    drawn = train_tasks(["letter_counting"], 0, 1, num_prompts=3, group_size=4)
    params = SamplingParams(max_tokens=20, seed=1)
    rollouts = RolloutCollector(policy, 2).collect(drawn, TorchSampler(policy), params)
    for i, rollout in enumerate(rollouts):  # random weights earn nothing: give them a spread
        rollout.turns[0].reward = float(i % 3)
    one_by_one, metrics_1 = gradients(algo, 1, small_folder, rollouts)
    at_once, metrics_2 = gradients(algo, 10**9, small_folder, rollouts)
    largest = max(g.abs().max() for g in at_once)
    assert largest > 1e-3
    for a, b in zip(one_by_one, at_once, strict=True):
        assert (a - b).abs().max() < 1e-5 * max(1, largest)
    for name, value in metrics_1.items():
        assert value == pytest.approx(metrics_2[name], rel=1e-4, abs=1e-5), name
    assert metrics_1["tokens/trained"] == sum(r.num_tokens for r in rollouts)


def test_ppo_trains_its_value_head(qwen3_folder):
    policy = load_policy(str(qwen3_folder), device="cpu", value_head=True)
    drawn = train_tasks(["letter_counting"], 0, 1, num_prompts=2, group_size=2)
    rollouts = RolloutCollector(policy, 2).collect(
        drawn, TorchSampler(policy), SamplingParams(max_tokens=9)
    )
    rollouts[0].turns[0].reward = 1.0
    optimizer = make_optimizer(policy, 1e-4, value_lr=1e-2)
    cfg = resolve(Config(algo="ppo"))
    train.learn(cfg, run_of(policy, optimizer), rollouts, 1)
    assert policy.value_head.weight.abs().sum() > 0


def played(policy, rewards, num_turns=1, max_tokens=9):
    """Rollouts of one group of letter counting, paid as it suits a test."""
    drawn = train_tasks(["letter_counting"], 0, 1, num_prompts=1, group_size=len(rewards))
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    rollouts = RolloutCollector(policy, num_turns).collect(drawn, TorchSampler(policy), params)
    for rollout, reward in zip(rollouts, rewards, strict=True):
        rollout.turns[0].reward = reward
    return rollouts


def weights_of(policy):
    return {n: p.detach().clone() for n, p in policy.trainable().items()}


def config(**settings_):
    cfg = resolve(Config(max_tokens=9, **settings_))
    return replace(cfg, grpo=grpo.with_loss_type(cfg.grpo))


def test_in_value_warmup_the_head_alone_moves(qwen3_folder):
    policy = load_policy(str(qwen3_folder), device="cpu", value_head=True)
    run = run_of(policy, make_optimizer(policy, 1e-2, value_lr=1e-2))
    cfg = config(algo="ppo", ppo=ppo.Options(value_warmup=1), entropy_coef=0.1)
    rollouts = played(policy, [0.0, 1.0, 2.0])
    for number, moves in ((1, {"value_head.weight", "value_head.bias"}), (2, None)):
        before = weights_of(policy)
        train.learn(cfg, run, rollouts, number)
        moved = {n for n, p in weights_of(policy).items() if not torch.equal(p, before[n])}
        assert moved == (moves or set(before))


def test_target_kl_ends_the_update_before_the_step_that_is_too_far(qwen3_folder):
    steps = {}
    for target in (0.0, 1e-6, 1e3):
        policy = load_policy(str(qwen3_folder), device="cpu", value_head=True)
        run = run_of(policy, make_optimizer(policy, 1e-2))
        cfg = config(algo="ppo", num_epochs=4, ppo=ppo.Options(target_kl=target))
        metrics = train.learn(cfg, run, played(policy, [0.0, 1.0, 2.0]), 1)
        steps[target] = metrics["update/steps"]
    assert steps == {0.0: 4, 1e-6: 1, 1e3: 4}


def test_minibatches_are_steps_of_their_own_against_the_same_old_policy(qwen3_folder):
    policy = load_policy(str(qwen3_folder), device="cpu")
    run = run_of(policy, make_optimizer(policy, 1e-2))
    rollouts = played(policy, [0.0, 1.0, 2.0, 3.0])
    metrics = train.learn(config(num_epochs=2, num_minibatches=2), run, rollouts, 1)
    assert metrics["update/steps"] == 4
    assert metrics["kl/approx"] > 1e-4  # the second epoch is away from where it sampled
    assert metrics["gap/logprob_max"] < 1e-4  # and yet the old log-probs are the sampler's


def test_completions_that_were_cut_off_are_compared_and_not_learnt_from(qwen3_folder):
    policy = load_policy(str(qwen3_folder), device="cpu")
    rollouts = played(policy, [0.0, 1.0, 2.0])
    for rollout, reason in zip(rollouts, ("length", "stop", "stop"), strict=True):
        rollout.turns[0].finish_reason = reason
    run = run_of(policy, make_optimizer(policy, 1e-2))
    metrics = train.learn(config(mask_truncated_completions=True), run, rollouts, 1)
    assert metrics["tokens/trained"] == sum(r.num_tokens for r in rollouts[1:])


def test_kl_pulls_the_policy_back_to_its_reference(qwen3_folder, tmp_path):
    policy = load_policy(str(qwen3_folder), device="cpu")
    reference = make_reference(policy, tmp_path, update=-1)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    optimizer = make_optimizer(policy, 3e-4)
    run = SimpleNamespace(policy=policy, optimizer=optimizer, reference=reference, exercises=None)
    rollouts = played(policy, [1.0] * 8)  # paid alike: the KL is all there is to learn from
    found = [train.learn(config(kl_coef=1.0), run, rollouts, i)["kl/reference"] for i in range(8)]
    assert found[0] > 0.01
    assert found[-1] < 0.6 * found[0]
