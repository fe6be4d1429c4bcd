"""The probes behind the facts of core/invariants.py give hand-made numbers."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import PROGRAM, metrics_of

import train
from algorithms import ppo
from algorithms.tokens import Tokens
from core import context, optimizer, probes
from core.batching import to_tokens
from core.config import Config, resolve
from core.files.run_log import read_records
from core.loading import load_policy
from core.loop import run
from core.optimizer import make_optimizer
from core.sampler import SamplingParams
from core.types import Rollout, Turn
from environments import base
from environments.plumbing.registry import EnvSpec

ROOT = Path(__file__).parents[1]
TINY, TEMPLATE = str(ROOT / "core/tiny_weights"), ROOT / "environments/template.py"


def passes(policy, optimizer, weights):
    """A backward pass for each number: that number times the sum of all trained weights."""
    for weight in weights:
        loss = sum(p.float().sum() for p in policy.trainable().values()) * weight
        optimizer.backward(loss)


@pytest.mark.parametrize("dtype, lr, near", [("float32", 1e-3, 1e-3), ("bfloat16", 1e-6, 0.1)])
def test_the_first_step_of_adamw_is_the_learning_rate_and_holds_all_passes(dtype, lr, near):
    """Below float32 the masters are looked at. Float32 rounds weights of about 1 to 6e-8."""
    cfg = resolve(Config(device="cpu", lr=lr, dtype=dtype))
    policy = load_policy(cfg, TINY)
    optimizer, probe = make_optimizer(policy, lr), probes.WeightProbe(policy)
    probe.begin(optimizer)
    passes(policy, optimizer, [1.0, 2.0])
    norm, stepped = optimizer.clip_and_step(1.0)
    found = probe.metrics(cfg, norm, lr / 2, steps=1)
    assert found["update/steps_lost"] == 0
    assert stepped and found["update/unchanged"] == 0 and found["update/lr_ratio"] == 2
    assert found["update/step_size"] == pytest.approx(1.0, rel=near)
    assert found["grad/passes"] == pytest.approx(1.0, rel=0.01)
    if dtype == "bfloat16":
        assert found["update/masters_apart"] > 0.5 and found["update/masters_unequal"] == 0
        with torch.no_grad():
            for weight in policy.trainable().values():
                weight.mul_(2)  # by something else than the optimizer
        assert probe.metrics(cfg, norm, lr, 1)["update/masters_unequal"] > 0.9
        optimizer.load_state_dict(optimizer.state_dict())
    probe.begin(optimizer)
    passes(policy, optimizer, [1.0])
    optimizer.zero_grad()  # as if it were the end of a step: the pass is lost
    passes(policy, optimizer, [3.0])
    norm, _ = optimizer.clip_and_step(1.0)
    assert probe.metrics(cfg, norm, lr, 2)["grad/passes"] == pytest.approx(0.75, rel=0.01)


def episode(turns, steps, correct=False):
    """Turns as (prompt, answer, reward), and the (reward, fresh) of the environment's steps."""
    rollout = Rollout("e", base.PLAYER, 0, 0, info={"correct": correct}, steps=steps)
    rollout.turns = [Turn(*ids, [-1.0] * len(ids[1]), "stop", reward) for *ids, reward in turns]
    return rollout


def test_groups_have_equal_answers_by_their_probabilities_and_sums_of_advantages():
    answers = zip(([5], [5], [6], [7, 8]), (0, 0, 1, 1), strict=True)
    rollouts = [replace(episode([([1], ids, 0.0)], []), group_id=g) for ids, g in answers]
    batch = to_tokens(rollouts)
    batch.old_logprobs = batch.sampler_logprobs  # -1 a token
    found = probes._equal_answers(batch, [[0, 1, 2, 3]])
    likely = (3 * math.exp(-1) + math.exp(-2)) * 3 / 2
    assert found == {"groups/equal_answers": 1.0, "groups/likely_equal": pytest.approx(likely)}
    batch.advantages = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5])
    found = probes.of_rollouts(resolve(Config(env=(EnvSpec.read(PROGRAM),))), None, batch)
    assert found == {"groups/advantage_sum": 2.5 / 3.5}


def test_turns_have_the_rewards_of_their_steps_and_begin_with_the_turn_before():
    two = [([1], [2], 0.5), ([1, 2, 3], [4], 1.0)]
    right = episode(two, [(0.5, False), (0.75, False), (0.25, False)], correct=True)  # with a cut
    moved = episode(two, [(1.0, False), (0.5, False)])
    lost = episode([([1, 2], [3], 0.0), ([1, 2, 9], [5, 6], 0.0)], [(0.0, False)] * 2)
    fresh = episode([([1, 2], [3], 0.0), ([7], [5], 0.0)], [(0.0, True), (0.0, False)])
    sampled = [right, moved, lost, fresh]
    batch = to_tokens([right, moved, fresh])
    assert probes.of_episodes(sampled, batch, correct=0.5) == {
        "reward/miscounted": 0.25, "reward/misplaced": 2 / 8, "groups/history_lost": 1 / 3,
        "episodes/left_out": 1, "episodes/left_out_length": 3 / (9 / 4),
    }  # fmt: skip
    moved.agent, moved.info, right.steps, lost.error = "X", {"correct": None}, [], "TimeoutError"
    found = probes.of_episodes(sampled, batch, correct=1 / 2)
    assert found == {"reward/miscounted": 0, "reward/misplaced": 0}


def test_an_environment_with_luck_is_not_judged_again():
    for spec, count in (("letter_counting", 1), (f"{TEMPLATE}:HigherLower", 0)):
        env, tasks = EnvSpec.read(spec), []
        collector = SimpleNamespace(play=lambda chosen, _, tasks=tasks: tasks.extend(chosen) or [])
        rollout = replace(episode([([1], [2], 0.0)], []), env=env.short)
        probes.judged_again(Config(env=(env,)), collector, [rollout])
        assert len(tasks) == count


def test_greedy_answers_are_the_likeliest_tokens_of_the_trainer(policy):
    prompt = policy.tokenizer.encode("1 + 1", add_special_tokens=False)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(3):
            hidden = policy.hidden_states(torch.tensor([ids]))
            likeliest, second = policy.to_logits(hidden)[0, -1].topk(2).indices.tolist()
            ids.append(likeliest)
    found = ids[len(prompt) :]
    for answer, others in ((found, 0.0), ([*found[:2], second], 1 / 3)):
        greedy = probes.of_greedy(policy, [episode([(prompt, answer, 0.0)], [])])
        assert greedy["gap/greedy"] == pytest.approx(others)


def test_a_gae_across_rollouts_and_an_optimizer_that_forgets_are_named(command, monkeypatch):
    def gae_of_one(tokens, gae_lambda):
        return gae(Tokens(**tokens.vectors() | {"rollout": torch.zeros(len(tokens))}), gae_lambda)

    gae = ppo.gae
    monkeypatch.setattr(ppo, "gae", gae_of_one)
    monkeypatch.setattr(optimizer.MasterAdamW, "load_state_dict", lambda *_: None)
    small = """--algo ppo --num-updates 2 --num-prompts 4 --group-size 2 --eval-num-tasks 0
        --max-tokens 8 --device cpu --run-name a"""
    assert command(*small.split())[0] == 0
    assert command("--resume", "runs/a", "--num-updates", 3)[0] == 0
    warnings = [r.get("warnings", {}) for r in read_records(Path("runs/a/metrics.jsonl"))]
    assert "value_targets" in warnings[1] and "steps_lost" not in warnings[2]
    assert "counted 2 steps fewer" in warnings[3]["steps_lost"]


def test_small_faults_of_the_loop_break_the_exact_facts(command, monkeypatch):
    """Rewards are others on the way to a turn, each time, contexts are cut, the rate is doubled,
    the longest rollout is dropped, a metric is made up, and evaluations draw."""
    rewards = itertools.count(2.0)
    read, add = context.Agent.read, context.Agent.add
    make, play, count = optimizer.make_optimizer, train.play, run.rollout_metrics

    def add_cut(agent, answer):
        text = add(agent, answer)
        agent.context_ids = agent.context_ids[1:]
        return text

    def play_some(*args):
        sampled, trained = play(*args)
        return sampled, sorted(trained, key=lambda r: r.num_tokens)[:-1]

    for module, name, value in (
        (context.Agent, "read", lambda own, step: read(own, replace(step, reward=next(rewards)))),
        (context.Agent, "add", add_cut),
        (optimizer, "make_optimizer", lambda own, lr, *args, **kw: make(own, 2 * lr, *args, **kw)),
        (train, "play", play_some),
        (run, "rollout_metrics", lambda *args: count(*args) | {"reward/correct": 2.0}),
        (run, "SamplingParams", lambda *args, **kw: SamplingParams(
            *args, **kw | {"temperature": 1.0})),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    flags = "--env tic_tac_toe --max-turns 2 --max-tokens 6 --num-updates 2 --run-name a"
    flags += " --num-prompts 2 --group-size 4 --eval-num-tasks 8"
    assert command(*flags.split())[0] == 0
    found = {name for r in metrics_of("runs/a") for name in r.get("warnings", {})}
    assert found >= {
        "reward_misplaced", "reward_differs", "history_lost", "learning_rate",
        "rollouts_left_out", "correct_miscounted", "not_greedy",
    }  # fmt: skip


def test_examples_and_begun_answers_are_not_taken_for_answers(tmp_path, command):
    texts = ("user", "4?"), ("assistant", "9"), ("user", "{0} + 1?"), ("assistant", "{1}")
    rows = [{"prompt": [{"role": role, "content": text.format(n, begun)} for role, text in texts]}
            for n in range(20) for begun in ("It is ", "\n\n ")]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "short.py").write_text(
        "def short(completions, **_):\n    return [-len(c[0]['content']) for c in completions]\n"
    )
    env = "rewarded:data=chats.jsonl,reward=short.py:short"
    small = "--num-updates 1 --num-prompts 2 --group-size 4 --max-tokens 8 --eval-num-tasks 4"
    assert command("--env", env, *small.split(), "--run-name", "a")[0] == 0
    (last,) = [r for r in metrics_of("runs/a") if r["update"] == 1]
    assert last["reward/judged_otherwise"] == 0 and last.get("groups/prompts_differ", 0) == 0
