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
from core.config import Config, resolve
from core.evaluation import accuracy_metrics, comparisons, wilson
from core.loop.run import Run
from core.metrics import UpdateStats, explained_variance, rollout_metrics
from core.results import mcnemar
from core.sampler import SamplingParams
from core.tasks import Task, eval_tasks
from core.types import Rollout, Turn


def rollout(reward, group=0, tokens=2, reason="stop", **info):
    turn = Turn([1], [5] * tokens, [-0.5] * tokens, reason, reward)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
    return Rollout("e", "player", 0, group, messages, [turn], info=info)


def evaluated(seed, opening, answer, correct, agent="player", env="e", asked="?", later=()):
    """A greedy episode, often of one turn; `opening` and `answer` stand for token ids."""
    turn = Turn([opening], [answer], [0.0], "stop", float(correct or 0))
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "it"}]
    return Rollout(env, agent, seed, seed, messages, [turn, *later], info={"correct": correct})


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
    rollouts[5].info["correct"] = None  # nobody can tell
    metrics = rollout_metrics(Config(), rollouts)
    correct = metrics["reward/correct"], metrics["groups/all_right"]
    assert correct == (4 / 6, 3 / 4) and "groups/openings" not in metrics
    names = {"reward/correct", "groups/all_right", "groups/all_wrong"}
    assert not names & rollout_metrics(Config(), rollouts[5:6]).keys()


def test_the_interval_of_wilson_and_the_p_of_mcnemar_by_hand():
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-5)
    assert wilson(10, 10)[1] == 1.0 and wilson(10, 10)[0] < 0.8
    assert wilson(0, 10)[0] == 0.0 and wilson(0, 10)[1] > 0.2
    for lost, won, p in ((0, 5, 2 / 32), (1, 7, 18 / 256), (3, 3, 1), (0, 0, 1), (7, 1, 18 / 256)):
        assert mcnemar(lost, won) == pytest.approx(p)


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
    batch.advantage_metrics["mine"] = 0.5  # of the algorithm
    stats = UpdateStats(cfg)
    # 3 is above a cap of 2, 0.4 below 1 / 2; later, in two micro-batches of 0.5 and 0.1, only 0.1
    first = Tokens(
        index=torch.arange(3), logprobs=torch.zeros(3), importance_weights=torch.ones(3),
        rollout=torch.zeros(3), entropy=torch.tensor([0.1, 0.2, 0.6]),
        sampler_ratio=torch.tensor([2.0, 0.4, 3.0]), token_weights=torch.tensor([0.2, 0.1, 0.0]),
        in_loss=torch.tensor([True, True, True]), varentropy=torch.tensor([1.0, 1.0, 2.0]),
    )  # fmt: skip
    second = Tokens(
        index=torch.arange(2), importance_weights=torch.ones(2),
        rollout=torch.zeros(2), entropy=torch.tensor([0.3, 0.3]),
        # of the reference, with d = log π - log π_ref = -1 and 0: k3 = e - 2 and 0; ρ = 1/2
        logprobs=torch.tensor([-3.0, -2.0]), ref_logprobs=torch.tensor([-2.0, -2.0]),
        old_logprobs=torch.tensor([-3.0, -2.0]) + math.log(2),
        sampler_ratio=torch.tensor([0.5, 0.1]), token_weights=torch.tensor([0.2, 0.1]),
        in_loss=torch.tensor([True, False]),
    )  # fmt: skip
    first.logprobs.grad, second.logprobs.grad = torch.zeros(3), torch.zeros(2)
    stats.add(first, torch.tensor(7.0), {"kl/approx": 9.0})
    stats.end_minibatch(0)
    assert (stats.loss, stats.approx_kl) == (7.0, 3.0)
    stats.num_steps = 1  # the surprise is that of before it
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
        "update/skipped": 0.0, "gap/surprise": -0.9 / 3, "gap/surprise_z": -0.9 / 2,
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
    # in float32 the mean of ten times 0.1 is not 0.1
    assert explained_variance(torch.full((10,), 0.1), torch.linspace(-1, 1, 10)) == 0
    near = torch.tensor([1e3, 1e3 + 1e-3], dtype=torch.float64)
    assert explained_variance(near, near) == 1


FAILED = [Rollout("e", "player", seed, seed, error="TimeoutError") for seed in (0, 1)]
GAMES = [(evaluated(g, g, 9, g < 3, "X"), evaluated(g, g, 9, g == 3, "O")) for g in range(4)]


@pytest.mark.parametrize(("rollouts", "expected"), [
    # what counts is info["correct"]; returns 0.9 and 0.1: standard deviation 0.4 · √2, over √2
    ([rollout(0.9, correct=False),
      replace(rollout(0.1, correct=True, lenient=True, tool_calls=3), seed=1)],
     {"e/accuracy": 0.5, "e/lenient": 0.5, "e/called": 0.5, "e/return_mean": 0.5,
      "e/return_low": 0.5 - 1.96 * 0.4, "e/return_high": 0.5 + 1.96 * 0.4}),
    ([rollout(0.9, correct=True)], {"e/return_low": math.nan}),  # no spread, no interval
    # five questions, each drawn ten times; the fifth is answered wrongly; returns 1 1 1 1 0
    ([evaluated(seed, seed % 5, 9, seed % 5 < 4) for seed in range(50)],
     {"e/accuracy": 0.8, "e/ci_low": 0.375528, "e/ci_high": 0.963777, "e/return_mean": 0.8,
      "e/return_low": 0.8 - 1.96 * 0.2, "e/tasks": 5, "e/openings": 5}),
    # a failed episode is wrong, and a task of its own
    ([*FAILED, evaluated(2, 1, 9, True), evaluated(3, 1, 9, True)],
     {"e/accuracy": 1 / 3, "e/tasks": 3, "e/failed": 2}),
    # X wins the first three games, O the fourth; one game is one task, with two rollouts
    ([rollout for game in GAMES for rollout in game],
     {"e/X/accuracy": 0.75, "e/O/accuracy": 0.25, "e/accuracy": 0.5, "e/X/tasks": 4,
      "e/O/tasks": 4, "e/tasks": 4, "e/X/ci_low": wilson(3, 4)[0]}),
    # one opening, one answer: each seed is a task if it decides more, such as the verdict
    ([evaluated(seed, 1, 9, seed > 0) for seed in range(4)],
     {"e/accuracy": 0.75, "e/tasks": 4, "e/openings": 1, "e/ci_low": wilson(3, 4)[0]}),
    # .. or rewards, or moves
    ([evaluated(seed, 1, 9, True, later=[Turn([1, 9], [2], [0.0], "stop", reward)])
      for seed, reward in enumerate((0.0, 0.0, 0.0, 0.5))], {"e/tasks": 4}),
    ([evaluated(seed, 1, 9, True, later=[Turn([1, 9, prompt], [2], [0.0], "stop", 0.0)])
      for seed, prompt in enumerate((7, 7, 7, 8))], {"e/tasks": 4}),
    # nobody can tell whether two are right
    ([evaluated(s, s, 9, c) for s, c in enumerate((True, None, False, None))],
     {"e/accuracy": 0.5, "e/tasks": 4, "e/ci_low": wilson(1, 2)[0]}),
    # two answers to one question: two tasks
    ([evaluated(0, 1, 8, True), evaluated(1, 1, 9, False), evaluated(2, 2, 9, True)],
     {"e/accuracy": 0.75, "e/tasks": 2}),
])  # fmt: skip
def test_an_evaluation_is_a_mean_over_tasks(rollouts, expected):
    metrics = accuracy_metrics(rollouts)
    values = {name: metrics[f"eval/{name}"] for name in expected}
    assert values == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert len(evaluation.lines_about(metrics, 0)) == sum(k.endswith("/tasks") for k in metrics)


def compared(progress, rollouts):
    """The metrics of `comparisons` with the first evaluation, and of no other kind."""
    drawn = [Task(r.env, r.seed, r.seed) for r in rollouts]
    found = comparisons(progress, rollouts, drawn, len(drawn), None)
    return {name: value for name, value in found.items() if not name.endswith(("asked", "played"))}


def test_the_paired_test_counts_each_opening_once_and_leaves_out_what_was_not_played_twice():
    """Three questions, two seeds each, all wrong at first. Then question 0 is right, question 1 in
    one of two episodes, question 2 wrong: two won, none lost. Seed 6 failed in the first."""
    progress = {"trivial": {"e": None}}

    def p_value(right, seeds):
        rollouts = [evaluated(s, s // 2, 8 + (s in right), s in right) for s in seeds]
        return compared(progress, rollouts)["eval/e/p_value"]

    assert p_value(right=(), seeds=range(6)) == 1.0
    assert p_value(right=(0, 1, 3, 6), seeds=range(7)) == 0.5
    unjudged = [evaluated(s, s // 2, 8, None) for s in range(6)]
    assert "eval/e/accuracy" not in accuracy_metrics(unjudged)
    assert "eval/e/p_value" not in compared(progress, unjudged)
    earn = [evaluated(s, s, 8, False, later=[Turn([9], [9], [0.0], "stop", reward)])
            for s, reward in enumerate((1.0, -1.0, 0.5, 1e-9, -1e-9))]  # fmt: skip
    found = compared(progress, earn)
    assert (found["eval/e/return_rose"], found["eval/e/return_fell"]) == (2, 1)
    first = progress["first_correct"]["e"]
    first |= {key: int(key.split()[0]) < 4 for key in first}
    assert p_value(right=(2, 4), seeds=range(6)) == 1.0  # two lost, one won


def test_the_paired_test_of_an_environment_is_of_its_own_tasks_that_have_not_changed():
    """Of six wrong answers in "a" and "b", three tasks of "b" get other questions, and those alone
    are right then; so are the answers that are compared with the first ones."""
    progress = {"trivial": {"a": None, "b": 0.0}}

    def found(questions, right=()):
        rollouts = [evaluated(s, s, 9, env == "b" and s in right, env=env,
                              asked=questions[s] if env == "b" else "?")
                    for env in ("a", "b") for s in range(6)]  # fmt: skip
        rollouts[-1].turns[0].completion_ids = [len(right)]
        metrics = compared(progress, rollouts)
        assert metrics.pop("eval/a/p_value") == 1.0 and metrics.pop("eval/b/trivial") == 0.0
        assert metrics.pop("eval/a/same_answers", 1.0) == 1.0
        assert {metrics.pop(f"eval/{env}/seen", 0.0) for env in "ab"} == {0.0}
        return metrics.get("eval/b/p_value"), metrics.get("eval/b/same_answers")

    assert found("abcdef") == (1.0, None)
    assert found("abcdef", range(6)) == (pytest.approx(2 / 2**6), pytest.approx(5 / 6))
    assert found("xyzdef", range(3)) == (1.0, pytest.approx(2 / 3))
    assert found("abxdef", range(3)) == (0.5, pytest.approx(4 / 5))
    assert found("uvwxyz", range(3)) == (None, None)  # nothing is left to compare


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
    display = SimpleNamespace(phase=lambda *args: nullcontext(lambda: None))
    run = SimpleNamespace(
        cfg=resolve(Config(eval_num_tasks=4, max_tokens=9, temperature=0.7)),
        collector=SimpleNamespace(collect=collect, demonstrate=play_trivial), policy=None,
        sampler=nullcontext(), run_log=log, display=display, progress={}, say=print,
    )  # fmt: skip
    found, drawn = Run.evaluate(run, 3), eval_tasks(["letter_counting"], 4)
    assert asked == [(drawn, SamplingParams(9, temperature=0.0))]
    ((kind, update, rollouts),) = logged
    assert (kind, update, len(rollouts)) == ("eval", 3, 4)
    expected = {"accuracy": 1 / 3, "tasks": 3, "failed": 2, "p_value": 1.0, "trivial": 0.5,
                "asked": 4, "played": 4}  # fmt: skip
    assert {k: found[f"eval/letter_counting/{k}"] for k in expected} == pytest.approx(expected)
    assert "eval/letter_counting/seen" not in found  # nothing has looked for these prompts yet
    others = [rollouts[2], evaluated(9, -1, 9, True)]  # without a turn; of no held-out task
    evaluation.note_trained(run.progress, [rollouts[0], *others])
    assert sum(run.progress["openings_seen"].values()) == 1
    assert Run.evaluate(run, 4)["eval/letter_counting/seen"] == pytest.approx(1 / 3)
    run.progress["openings_seen"] = {}  # a resume has changed the tasks
    assert "eval/letter_counting/seen" not in Run.evaluate(run, 5)
