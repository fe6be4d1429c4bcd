"""Metrics of rollouts, evaluations and gradient steps, against numbers computed by hand."""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from algorithms.tokens import Tokens
from core import evaluation, probes
from core.batching import to_tokens
from core.config import Config
from core.loop.evaluator import Evaluator
from core.metrics import (
    UpdateStats,
    distinct_tasks,
    eval_metrics,
    explained_variance,
    mcnemar,
    rollout_metrics,
    wilson,
)
from core.sampler import SamplingParams
from core.tasks import Task, eval_tasks
from core.types import Rollout, Turn


def rollout(reward, group=0, tokens=2, reason="stop", **info):
    turn = Turn([1], [5] * tokens, [-0.5] * tokens, reason, reward)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
    return Rollout("e", "player", 0, group, messages, [turn], info=info)


def evaluated(seed, opening, answer, correct, agent="player", env="e", **info):
    """A greedy episode of one turn; `opening` and `answer` stand for token ids."""
    turn = Turn([opening], [answer], [0.0], "stop", float(correct))
    info = info | {"correct": correct}
    return Rollout(env, agent, seed, seed, [], [turn], info=info)


def metrics_of(rollouts):
    return eval_metrics(rollouts, distinct_tasks(rollouts))


def test_rollout_metrics_by_hand():
    """Groups 0 and 2 are right, 1 is wrong, 3 mixed; the last rollout failed, and counts nowhere
    but in tokens/sampled and episodes/failed."""
    rollouts = [
        rollout(1.0, 0, correct=True, worked=True),
        rollout(1.0, 0, tokens=4, reason="length", correct=True, worked=False),
        rollout(0.0, 1, correct=False, worked=False),
        rollout(0.5, 1, correct=False, note="text"),
        rollout(1.0, 2, correct=True),
        rollout(2.0, 3, correct=False),
        rollout(-1.5, 3, correct=True),
        rollout(9.0, 3, tokens=7, correct=True),
    ]
    rollouts[2].turns *= 2
    rollouts[4].turns[0].prompt_ids, rollouts[5].turns[0].prompt_ids = [2], [3]
    rollouts[3].episode_truncated = True
    rollouts[7].error = "TimeoutError"
    for number, one in enumerate(rollouts):
        one.info["steps"] = number
    metrics = rollout_metrics(Config(), rollouts)
    returns = torch.tensor([1.0, 1.0, 0.0, 0.5, 1.0, 2.0, -1.5])
    expected = {
        "reward/mean": 4 / 7, "reward/min": -1.5, "reward/max": 2.0,
        "reward/std": returns.std(correction=0).item(), "reward/correct": 4 / 7,
        "groups/zero_std_fraction": 2 / 4, "groups/all_right": 2 / 4, "groups/all_wrong": 1 / 4,
        "groups/openings": 5 / 4,
        "length/mean": 18 / 8, "length/hit_token_limit": 1 / 8,
        "info/worked": 1 / 3, "reported/worked": 3, "info/steps": 3.0, "episodes/turns": 8 / 7,
        "episodes/truncated": 1 / 7, "episodes/failed": 1 / 8, "tokens/sampled": 25,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert not {"info/note", "info/correct", "reported/steps"} & metrics.keys()
    assert rollout_metrics(Config(), rollouts[7:]) == {"tokens/sampled": 0}
    rollouts[0].agent = "O"  # another agent may begin
    assert "groups/openings" not in rollout_metrics(Config(), rollouts)


def test_accuracy_counts_info_correct_and_not_the_reward():
    rollouts = [rollout(0.9, correct=False), rollout(0.1, correct=True, lenient=True, tool_calls=3)]
    rollouts[1].seed = 1
    metrics = metrics_of(rollouts)
    half = 1.96 * 0.4  # returns 0.9 and 0.1: standard deviation 0.4 · √2, divided by √2
    expected = {"accuracy": 0.5, "lenient": 0.5, "called": 0.5, "return_mean": 0.5,
                "return_low": 0.5 - half, "return_high": 0.5 + half}  # fmt: skip
    assert {k: metrics[f"eval/e/{k}"] for k in expected} == pytest.approx(expected)
    assert math.isnan(metrics_of(rollouts[:1])["eval/e/return_low"])  # no spread, no interval


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [(0, 5, 2 / 32), (1, 7, 2 * (1 + 8) / 256), (3, 3, 1.0), (0, 0, 1.0), (7, 1, 2 * 9 / 256)],
)
def test_mcnemar_counts_the_tasks_that_changed(lost, won, p):
    assert mcnemar(lost, won) == pytest.approx(p)


def test_wilson_interval_by_hand_and_at_one():
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-5)
    assert wilson(10, 10)[1] == 1.0 and wilson(10, 10)[0] < 0.8
    assert wilson(0, 10)[0] == 0.0 and wilson(0, 10)[1] > 0.2


@pytest.mark.parametrize(
    ("cap", "mode", "capped"),
    [(2.0, "truncate", 1), (2.0, "mask", 2 + 2), (1.5, "mask", 3 + 4), (0.0, "truncate", 0)],
)
def test_update_stats_by_hand(cap, mode, capped):
    """Two epochs; the second has a step on three tokens and one on two, one of them in the loss."""
    cfg = Config(tis_cap=cap, tis_mode=mode)
    rollouts = [rollout(1.0, tokens=3), rollout(1.0, tokens=2, reason="length")]
    batch = to_tokens(rollouts)  # sampler log-probs -0.5
    batch.in_loss = ~batch.hit_token_limit
    # 0, 0.5 and 1 from the sampler's
    batch.old_logprobs = torch.tensor([-0.5, -1.0, -1.5, -0.5, -1.0])
    batch.numbers_to_log["mine"] = 0.5  # of the algorithm
    stats = UpdateStats(cfg)
    # 3 is above a cap of 2, 0.4 below 1 / 2; later, in two micro-batches of 0.5 and 0.1, only 0.1
    first = Tokens(
        number=torch.arange(3), logprobs=torch.zeros(3), importance_weights=torch.ones(3),
        rollout=torch.zeros(3), entropy=torch.tensor([0.1, 0.2, 0.6]),
        sampler_ratio=torch.tensor([2.0, 0.4, 3.0]), token_weights=torch.tensor([0.2, 0.1, 0.0]),
        in_loss=torch.tensor([True, True, True]),
    )  # fmt: skip
    second = Tokens(
        number=torch.arange(2), importance_weights=torch.ones(2),
        rollout=torch.zeros(2), entropy=torch.tensor([0.3, 0.3]),
        # of the reference, with d = log π - log π_ref = -1 and 0: k3 = e - 2 and 0; ρ = 1/2
        logprobs=torch.tensor([-3.0, -2.0]), ref_logprobs=torch.tensor([-2.0, -2.0]),
        old_logprobs=torch.tensor([-3.0, -2.0]) + math.log(2),
        sampler_ratio=torch.tensor([0.5, 0.1]), token_weights=torch.tensor([0.2, 0.1]),
        in_loss=torch.tensor([True, False]),
    )  # fmt: skip
    stats.add(first, torch.tensor(7.0), {"kl/approx": 9.0})
    stats.end_minibatch(0)
    assert (stats.loss, stats.approx_kl) == (7.0, 3.0)
    stats.add(first, torch.tensor(-2.0), {"kl/approx": 0.3})
    stats.end_minibatch(1)
    stats.add(second, torch.tensor(-1.0), {"kl/approx": 0.2})
    second.entropy = torch.zeros(2)
    stats.add(second, torch.tensor(-3.0), {"kl/approx": 0.0})
    stats.end_minibatch(1)
    assert (stats.loss, stats.approx_kl) == (-4.0, pytest.approx(0.2 / 2))
    stats.num_steps, stats.grad_norm = 3, 0.25
    expected = {
        "loss": -4.0, "kl/approx": 0.5 / 5, "policy/entropy": 1.5 / 7, "grad/norm": 0.25,
        "loss/weight": 0.6,
        "gap/logprob_mean": 2.0 / 5, "gap/logprob_max": 1.0, "weights/mean": (5.4 + 2 * 0.6) / 7,
        "kl/reference": 2 * (math.e - 2) / 2 / 7,
        "weights/capped": capped / 7, "tokens/trained": 3, "update/steps": 3,
        "update/skipped": 0.0,
        "mine": 0.5,
    }  # fmt: skip
    means = stats.means(batch)
    assert {name: means[name] for name in expected} == pytest.approx(expected)


def test_values_explain_the_rewards_that_followed_and_not_targets_with_values_in_them():
    """Two rollouts of four tokens, a turn each; their values are of λ = 0 and γ = 1."""
    batch = to_tokens([rollout(0.0, tokens=4)] * 2)
    batch.in_loss, batch.old_logprobs = batch.rollout >= 0, batch.sampler_logprobs
    batch.rewards, batch.discounts = torch.zeros(8), torch.ones(8)
    batch.rewards[3] = 1.0  # so returns of 1 1 1 1 and 0 0 0 0
    for values, explained in (([1.0, -1.0] * 4, 1 - 1.25 / 0.25), ([1.0] * 4 + [0.0] * 4, 1)):
        batch.old_values = batch.value_targets = torch.tensor(values)
        stats = UpdateStats(Config())
        stats.epoch_sums["tokens"] = stats.epoch_sums["in_loss"] = 1
        assert stats.means(batch)["value/explained_variance"] == pytest.approx(explained)
    targets = torch.tensor([0.0, 1.0])
    assert explained_variance(targets, torch.tensor([5.0, 5.0])) == 0
    # in float32 the mean of ten times 0.1 is not 0.1
    assert explained_variance(torch.full((10,), 0.1), torch.linspace(-1, 1, 10)) == 0
    near = torch.tensor([1e3, 1e3 + 1e-3], dtype=torch.float64)
    assert explained_variance(near, near) == 1


def test_seeds_with_the_same_opening_are_one_task():
    """Five questions, each drawn ten times; the fifth is answered wrongly."""
    metrics = metrics_of([evaluated(seed, seed % 5, 9, seed % 5 < 4) for seed in range(50)])
    expected = {"accuracy": 0.8, "ci_low": 0.375528, "ci_high": 0.963777, "return_mean": 0.8,
                "tasks": 5, "openings": 5}  # fmt: skip
    assert {k: metrics[f"eval/e/{k}"] for k in expected} == pytest.approx(expected, abs=1e-5)
    # returns 1 1 1 1 0: variance 0.2, so a standard error of 0.2
    assert metrics["eval/e/return_low"] == pytest.approx(0.8 - 1.96 * 0.2)


def test_which_seeds_are_tasks_of_their_own():
    """One opening, one answer; each seed is a task if it decides more than the opening."""
    games = [[evaluated(seed, 1, 9, correct) for seed in range(4)] for correct in (True, False)]
    verdict, reward = [evaluated(seed, 1, 9, seed > 0) for seed in range(4)], games[1]
    reward[3].turns[0].reward = 0.5
    moves = games[0]
    for r in moves:
        r.turns.append(Turn([1, 9, 7 + (r.seed == 3)], [2], [0.0], "stop", 0.0))
        r.info["correct"] = r.seed != 1
    rounding = [evaluated(0, 1, 8, True), evaluated(1, 1, 9, False), evaluated(2, 2, 9, True)]
    for rollouts, accuracy, tasks in (
        (verdict, 0.75, 4), (moves, 0.75, 4), (reward, 0.0, 4), (rounding, 0.75, 2),
    ):  # fmt: skip
        metrics = metrics_of(rollouts)
        assert (metrics["eval/e/accuracy"], metrics["eval/e/tasks"]) == (accuracy, tasks)
    assert (metrics_of(verdict)["eval/e/ci_low"], metrics_of(verdict)["eval/e/openings"]) == (
        wilson(3, 4)[0], 1,
    )  # fmt: skip


def test_a_failed_episode_is_a_task_of_its_own_and_wrong():
    failed = [Rollout("e", "player", seed, seed, error="TimeoutError") for seed in (0, 1)]
    metrics = metrics_of([*failed, evaluated(2, 1, 9, True), evaluated(3, 1, 9, True)])
    assert metrics["eval/e/accuracy"] == pytest.approx(1 / 3) and metrics["eval/e/tasks"] == 3


def test_each_seat_of_a_game_has_its_own_accuracy_over_games():
    """X wins the first three games, O the fourth; one game is one task, with two rollouts."""
    games = [(evaluated(g, g, 9, g < 3, "X"), evaluated(g, g, 9, g == 3, "O")) for g in range(4)]
    rollouts = [rollout for game in games for rollout in game]
    metrics = metrics_of(rollouts)
    assert len(evaluation.lines_about(rollouts, metrics, 0)) == 3  # four games, not eight
    assert [metrics[f"eval/e{seat}/accuracy"] for seat in ("/X", "/O", "")] == [0.75, 0.25, 0.5]
    assert [metrics[f"eval/e{seat}/tasks"] for seat in ("/X", "/O", "")] == [4, 4, 4]
    assert (metrics["eval/e/X/ci_low"], metrics["eval/e/X/ci_high"]) == wilson(3, 4)


def test_the_paired_test_counts_each_opening_once_and_leaves_out_what_was_not_played_twice():
    """Three questions, two seeds each, all wrong at first. Then question 0 is right, question 1 in
    one of two episodes, question 2 wrong: two won, none lost. Seed 6 failed in the first."""
    progress = {"trivial": {"e": None}}

    def p_value(right, seeds):
        rollouts = [evaluated(s, s // 2, 8 + (s in right), s in right) for s in seeds]
        return evaluation.comparisons(progress, rollouts, [Task("e", s, s) for s in seeds], None)

    assert p_value(right=(), seeds=range(6)) == {"eval/e/p_value": 1.0}
    assert p_value(right=(0, 1, 3, 6), seeds=range(7)) == {"eval/e/p_value": 0.5}
    first = progress["first_correct"]["e"]
    first |= {key: int(key.split()[0]) < 4 for key in first}
    assert p_value(right=(2, 4), seeds=range(6)) == {"eval/e/p_value": 1.0}  # two lost, one won


def test_the_paired_test_of_an_environment_is_of_its_own_tasks_that_have_not_changed():
    """Of six wrong answers in "a" and "b", three tasks of "b" get other questions, and those alone
    are right then."""
    progress = {"trivial": {"a": None, "b": 0.0}}

    def found(questions, right=()):
        rollouts = [evaluated(s, s, 9, env == "b" and s in right, env=env)
                    for env in ("a", "b") for s in range(6)]  # fmt: skip
        for rollout in rollouts:
            asked = questions[rollout.seed] if rollout.env == "b" else "?"
            rollout.messages = [{"role": "user", "content": asked},
                                {"role": "assistant", "content": "it"}]  # fmt: skip
        tasks = [Task(env, s, s) for env in ("a", "b") for s in range(6)]
        metrics = evaluation.comparisons(progress, rollouts, tasks, None)
        assert metrics.pop("eval/a/p_value") == 1.0 and metrics.pop("eval/b/trivial") == 0.0
        return metrics

    assert found("abcdef") == {"eval/b/p_value": 1.0}
    assert found("abcdef", range(6)) == {"eval/b/p_value": pytest.approx(2 / 2**6)}
    assert found("xyzdef", range(3)) == {"eval/b/p_value": 1.0}
    assert found("abxdef", range(3)) == {"eval/b/p_value": 0.5}
    assert found("uvwxyz", range(3)) == {}  # nothing is left to compare


def test_an_evaluation_asks_for_the_held_out_tasks_greedily_and_counts_each_task(monkeypatch):
    """Four tasks: right, wrong, failed, and one whose server did not answer."""
    monkeypatch.setattr(probes, "of_greedy", lambda *_: {})  # these prompts are no text
    asked, logged = [], []

    def collect(drawn, sampler, params, on_progress):
        asked.append((drawn, params))
        rollouts = [evaluated(task.seed, task.seed, 9, i == 0, env=task.env.short)
                    for i, task in enumerate(drawn)]  # fmt: skip
        for one in rollouts[2:]:
            one.turns, one.error, one.env_failure = [], "down", one is rollouts[3]
        return rollouts

    def play_trivial(drawn, trivial):
        """Of the three tasks that were played: right, wrong, and lost."""
        ends = [(True, False), (False, False), (False, True)]
        return [replace(evaluated(t.seed, t.seed, 9, correct, env=t.env.short), env_failure=lost)
                for t, (correct, lost) in zip(drawn, ends, strict=True)]  # fmt: skip

    log = SimpleNamespace(log_rollouts=lambda *args: logged.append(args))
    display = SimpleNamespace(phase=lambda *args: nullcontext(lambda: None), say=print)
    evaluator = Evaluator(
        Config(env=("letter_counting",), eval_num_tasks=4, max_tokens=9, temperature=0.7),
        SimpleNamespace(collect=collect, demonstrate=play_trivial, policy=None),
        sampler=nullcontext(), run_log=log, display=display, progress={},
    )  # fmt: skip
    found, drawn = evaluator.evaluate(3), eval_tasks(["letter_counting"], 4)
    assert asked == [(drawn, SamplingParams(9, temperature=0.0))]
    ((kind, update, rollouts),) = logged
    assert (kind, update, len(rollouts)) == ("eval", 3, 4)
    expected = {"accuracy": 1 / 3, "tasks": 3, "failed": 2, "p_value": 1.0, "trivial": 0.5}
    assert {k: found[f"eval/letter_counting/{k}"] for k in expected} == pytest.approx(expected)
    assert "eval/letter_counting/seen" not in found  # nothing has looked for these prompts yet
    evaluator.note_trained(rollouts[:1])
    assert evaluator.evaluate(4)["eval/letter_counting/seen"] == pytest.approx(1 / 3)
    evaluator.progress["held_out_openings"] = [1]  # of other tasks, before a resume changed them
    assert "eval/letter_counting/seen" not in evaluator.evaluate(5)
