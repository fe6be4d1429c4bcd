"""The training loop: which weights an update changes, its rollouts, the warm start."""

import math
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from conftest import load_small, rollouts_of
from single_update import gradients_of_update, single_update

import train
from algorithms import grpo, ppo, reinforce
from core import canary, settings
from core.config import Config
from core.episodes import RolloutCollector
from core.loop import before as warm_start
from core.loop import play
from core.metrics import UpdateStats
from core.optimizer import make_optimizer
from core.sampler import SamplingParams, TorchSampler
from core.seeds import SAMPLING, derive_seed
from core.tasks import train_tasks
from core.types import Completion, Rollout, Turn


def gradients(max_tokens_per_micro_batch, folder, rollouts):
    policy = load_small(folder, value_head=True)
    with torch.no_grad():
        policy.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    policy.micro_batch_tokens = max_tokens_per_micro_batch
    return gradients_of_update(Config(algo="ppo", max_grad_norm=0), policy, rollouts)


def test_micro_batch_size_changes_nothing_but_rounding(qwen3_folder):
    rollouts = rollouts_of(3, 4, prompt=9)
    for i, rollout in enumerate(rollouts):
        rollout.turns[0].reward = float(i % 3)
    [one_by_one], metrics_1 = gradients(1, qwen3_folder, rollouts)
    [at_once], metrics_2 = gradients(10**9, qwen3_folder, rollouts)
    largest = at_once.abs().max()
    assert largest > 1e-3
    assert (one_by_one - at_once).abs().max() < 1e-5 * max(1, largest)
    for name, value in metrics_1.items():
        assert value == pytest.approx(metrics_2[name], rel=1e-4, abs=1e-5), name
    assert metrics_1["tokens/trained"] == sum(r.num_tokens for r in rollouts)


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


def config(**settings_):
    return Config(max_tokens=9, **settings_)


def test_in_value_warmup_the_head_alone_moves(qwen3_folder):
    policy = load_small(qwen3_folder, value_head=True)
    optimizer = make_optimizer(policy, 1e-2, value_lr=1e-2)
    cfg = config(algo="ppo", options=ppo.Options(value_warmup=1), entropy_coef=0.1)
    rollouts = played(policy, [0.0, 1.0, 2.0])
    for number, moves in ((1, {"value_head.weight", "value_head.bias"}), (2, None)):
        before = weights_of(policy)
        single_update(cfg, policy, optimizer, rollouts, update=number)
        moved = {n for n, p in weights_of(policy).items() if not torch.equal(p, before[n])}
        assert moved == (moves or set(before))


def test_a_learning_rate_of_0_for_the_value_head_is_that_of_the_policy(qwen3_folder, capsys):
    policy = load_small(qwen3_folder, value_head=True)
    rates = [
        [group["lr"] for group in make_optimizer(policy, 1e-2, value_lr=rate).adamw.param_groups]
        for rate in (0.0, 1e-3)
    ]
    assert rates == [[1e-2, 1e-2], [1e-2, 1e-3]]
    with pytest.raises(SystemExit):
        settings.parse(["--algo", "ppo", "--help"])
    assert "Learning rate of the value head; 0: --lr." in " ".join(capsys.readouterr().out.split())


def test_target_kl_ends_the_update_before_the_step_that_is_too_far(qwen3_folder):
    def steps(target, num_epochs):
        policy = load_small(qwen3_folder, value_head=True)
        cfg = config(algo="ppo", num_epochs=num_epochs, options=ppo.Options(target_kl=target))
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


def test_minibatches_are_steps_of_their_own_against_the_same_old_policy(qwen3_folder):
    policy = load_small(qwen3_folder)
    optimizer = make_optimizer(policy, 2e-3)
    rollouts = played(policy, [0.0, 1.0, 2.0, 3.0])
    cfg = config(num_epochs=2, num_minibatches=2, seed=5)
    with (
        patch.object(train, "minibatches", wraps=train.minibatches) as drawn,
        patch.object(train, "micro_batches", wraps=train.micro_batches) as cut,
    ):
        metrics = single_update(cfg, policy, optimizer, rollouts, update=7)
    assert drawn.call_args.args[1:] == (4, 7)
    computed = [call.args[2] for call in cut.call_args_list]  # no other rollout, of weight 0
    assert computed == [minibatch.rollouts for minibatch in train.minibatches(cfg, 4, 7)]
    assert metrics["update/steps"] == 4
    assert metrics["kl/approx"] > 1e-4  # the second epoch is away from where it sampled
    assert metrics["gap/logprob_max"] < 1e-4  # and yet the old log-probs are the sampler's


def test_each_gradient_step_is_that_of_its_own_rollouts(qwen3_folder):
    """Without a baseline the other rollouts have no part in it."""
    policy, rollouts = load_small(qwen3_folder), rollouts_of(4, 1, prompt=5)
    for i, rollout in enumerate(rollouts):
        rollout.turns[0].reward = float(1 + i)
    options = reinforce.Options(baseline="none")
    cfg = config(algo="reinforce", options=options, num_minibatches=2, max_grad_norm=0)
    steps, _ = gradients_of_update(cfg, policy, rollouts)
    for gradient, minibatch in zip(steps, train.minibatches(cfg, 4, 1), strict=True):
        own = [rollouts[i] for i in minibatch.rollouts]
        [alone], _ = gradients_of_update(replace(cfg, num_minibatches=1), policy, own)
        assert (gradient - alone).abs().max() < 1e-5 * alone.abs().max()


def test_a_loss_that_is_not_finite_is_no_step_though_its_gradient_is_finite(policy):
    rollouts, compute_loss = played(policy, [0.0, 1.0]), grpo.compute_loss

    def infinite(tokens, options):
        loss, metrics = compute_loss(tokens, options)
        return loss + math.inf, metrics

    with patch.object(grpo, "compute_loss", infinite):
        metrics = single_update(config(), policy, make_optimizer(policy, 1e-2), rollouts)
    assert metrics["update/skipped"] == 1 and 0 < metrics["grad/norm"] < math.inf


def test_the_next_level_is_that_of_the_episodes_that_did_not_fail():
    """Right in one of two episodes, which is the target; and one failed."""
    run = SimpleNamespace(cfg=Config(curriculum=0.5), progress={"level": 1})
    sampled = [Rollout("e", "p", 0, 0, info={"correct": right}) for right in (True, False, False)]
    assert play._next_level(run, sampled) == 1
    sampled[2].error = "TimeoutError"
    assert play._next_level(run, sampled) == 2


@pytest.mark.parametrize(
    ("rounds", "asked", "num_kept"),
    [  # the returns of each group, of two rollouts, in each round; how many tasks were drawn
        ([[(0, 1), (1, 0), (0, 2)]], [3], 6),  # no second round
        ([[(0, 0), (1, None), (0, 1)], [(1, 0), (0, 0)], [(0, 0)]], [3, 2, 1], 4),  # one failed
    ],
)
def test_filtered_groups_are_replaced_by_other_tasks(rounds, asked, num_kept, monkeypatch):
    calls = []

    def collect(drawn, sampler, params, on_progress):
        returns = [x for group in rounds[len(calls)] for x in group]
        calls.append((drawn, params))
        return [
            Rollout(task.env.short, "player", task.seed, task.group_id, error="e" * (x is None),
                    turns=[Turn([1], [2], [0.0], "stop", x or 0.0)])
            for task, x in zip(drawn, returns, strict=True)
        ]  # fmt: skip

    said, phase = [], SimpleNamespace(tick_and=lambda check: check)
    run = SimpleNamespace(
        progress={"level": 1}, collector=SimpleNamespace(collect=collect), sampler=nullcontext(),
        say=said.append, display=SimpleNamespace(phase=lambda *_, **options: nullcontext(phase)),
        canary=({}, {"drawn": [7]}), ahead=SimpleNamespace(take=lambda: None, playing=None),
        policy=SimpleNamespace(tokenizer=None), first_update=1, older=deque(maxlen=0),
        interrupt=SimpleNamespace(check_alone=None),
    )  # fmt: skip
    compared = []
    monkeypatch.setattr(play.canary, "compare", lambda *given: compared.append(given) or ({}, {}))
    cfg = Config(
        num_prompts=3, group_size=2, filter_groups=2, seed=5, max_tokens=9, train_difficulty=2,
        temperature=0.5, top_p=0.9, top_k=7,
    )  # fmt: skip
    run.cfg = cfg
    sampled, kept = play.play(run, 4)
    assert compared == [(run.policy, run.sampler, {"drawn": [7]}, None)]
    envs = ["letter_counting:difficulty=3"]  # a level above 2
    for attempt, (drawn, params) in enumerate(calls):
        assert drawn == train_tasks(envs, 5, 4, asked[attempt], 2, attempt)
        seed = derive_seed(5, SAMPLING, 4, attempt)
        assert params == SamplingParams(9, 0.5, 0.9, 7, seed)
    assert len(calls) == len(asked) and len(sampled) == 2 * sum(asked)
    groups = [rollout.group_id for rollout in sampled]
    assert groups[::2] == groups[1::2] and len(set(groups)) == sum(asked)
    returns = {r.group_id: set() for r in sampled}
    for rollout in sampled:
        if not rollout.error:
            returns[rollout.group_id].add(rollout.episode_return)
    assert kept == [r for r in sampled if len(returns[r.group_id]) > 1]
    assert len(kept) == num_kept and len(said) == sum(bool(r.error) for r in sampled)


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
