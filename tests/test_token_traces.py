"""Token traces hold what the update computed for each token."""

import math
from pathlib import Path

import pytest
import torch
from conftest import metrics_of

from algorithms import ppo
from core.batching import to_tokens
from core.config import Config
from core.files.run_log import read_records
from core.metrics import UpdateStats
from core.report import token_traces
from core.scoring import score_tokens
from core.types import Rollout, Turn

SHORT = """--num-updates 1 --num-prompts 2 --group-size 4 --num-minibatches 2 --eval-num-tasks 0
    --max-tokens 6 --lr 1e-3""".split()
COLUMNS = "sampler trainer after advantage now token_weight weight share".split()


def rollout(group, reward, *turns):
    turns = [Turn([1 + i], ids, [0.0] * len(ids), "stop", 0.0) for i, ids in enumerate(turns)]
    turns[-1].reward = reward
    return Rollout("e", "p", 0, group, turns=turns)


def test_a_run_traces_every_token_and_its_share_of_the_gradient(command):
    assert command(*SHORT, "--run-name", "traced")[0] == 0
    assert {"update/moved", "update/direction"} <= metrics_of("runs/traced")[-1].keys()
    gained, shares, factors = 0.0, 0.0, set()
    for row in read_records(Path("runs/traced/rollouts.jsonl")):
        [trace] = row["token_traces"]
        assert trace.keys() == {"text", *COLUMNS}
        assert {len(column) for column in trace.values()} == {row["tokens"]}
        for columns in zip(*(trace[name] for name in COLUMNS), strict=True):
            sampler, trainer, after, a, now, u, w, share = columns
            assert trainer == pytest.approx(sampler, abs=2e-4) and max(sampler, after, now) <= 0
            assert u > 0 and w == pytest.approx(1.0, abs=1e-3)
            ratio = math.exp(now - trainer)
            is_clipped = ratio > 1.28 if a > 0 else ratio < 0.8
            assert (share == 0) == (is_clipped or a == 0)
            factors.update([round(share / (u * w * ratio * a), 2)] if share else [])
            gained += a * (after - trainer)
            shares += abs(share)
    assert gained > 0 and shares == pytest.approx(2.0, abs=1e-4)  # 1 in each of two steps
    assert len(factors) == 2  # of the steps: within one, shares are as u w ρ A


@pytest.mark.parametrize(("kl", "share", "now"), [
    (0.0, [-0.25, -0.25, 0.75], [-2.0, -1.0, -2.0]),
    (0.2, [0.75, -0.25, 0.0], [-1.0] * 3),  # --ppo.target-kl drops the second step
])  # fmt: skip
def test_the_last_step_that_was_taken_counts_and_the_largest_gradient_is_no_unit(kl, share, now):
    """Three tokens, of which the second step has two."""
    stats = UpdateStats(cfg := Config(algo="ppo", options=ppo.Options(target_kl=0.1)))
    rows = [[0, 1, 2], [-1.0] * 3, [0.5] * 3, [1.0] * 3, [-3.0, 1.0, 0.0]]  # loss scale included
    stats.traces = [(0, torch.tensor(rows).double()), (1, torch.tensor(rows)[:, :2].double() * 2)]
    stats.traces[1][1][0] = torch.tensor([2.0, 0.0])  # their numbers
    stats.pushes, stats.approx_kl = [4.0, 8.0], kl
    found = token_traces.last_step_vectors(cfg, torch.tensor([True, True, True]), stats)
    assert (found["share"].tolist(), found["now"].tolist()) == (share, now)


def test_each_column_has_the_numbers_of_its_own_tokens(policy, monkeypatch):
    """Of three rollouts only the last two, which differ, are within the budget; a turn each has a
    token."""
    rollouts = [rollout(g, r, [5], [6]) for g, r in ((0, 0.0), (1, 0.0), (1, 1.0))]
    batch = to_tokens(rollouts)
    batch.old_logprobs, batch.advantages = torch.arange(6.0) - 9, torch.arange(6.0)
    monkeypatch.setattr(token_traces, "MAX_TOKENS", 4)
    cfg = Config(options=ppo.Options(), temperature=0.5)
    found = token_traces.trace_tokens(policy, cfg, batch, UpdateStats(cfg))
    assert "token_traces" not in rollouts[0].for_log and "update/moved" in found
    after = score_tokens(policy, batch, 0.5)["logprobs"][4:].tolist()
    for i, trace in enumerate(rollouts[2].for_log["token_traces"]):
        assert (trace["trainer"], trace["advantage"]) == ([i - 5.0], [i + 4.0])
        assert trace["after"] == pytest.approx(after[i : i + 1], abs=1e-4)
        assert trace["share"] == [None]


def test_whole_groups_within_the_budget_are_traced_and_at_least_one():
    some = [rollout(g, 0.0, [2] * n) for g, n in ((0, 3), (1, 4), (0, 3), (1, 4), (2, 1))]
    for budget, expected in ((14, {0, 1, 2, 3}), (13, {0, 2}), (1, {0, 2}), (100, {*range(5)})):
        assert token_traces.choose_groups(some, budget) == expected
    some[3].turns[0].reward = 1.0  # its group is the only one with different returns
    assert token_traces.choose_groups(some, 1) == {1, 3}


def test_a_character_of_several_tokens_appears_at_its_last_token(policy):
    ids = policy.tokenizer.encode("aé≠b", add_special_tokens=False)
    assert token_traces.token_texts(policy.tokenizer, ids) == ["a", "", "é", "", "", "≠", "b"]


def test_the_direction_of_an_update_is_the_correlation_within_groups():
    """Over all turns of a rollout; the first has two, whose tokens move by 1 and 3."""
    batch = to_tokens([rollout(0, 1.0, [2], [3]), rollout(0, 0.0, [2]), rollout(1, 1.0, [2]),
                       rollout(1, 0.0, [2])])  # fmt: skip
    batch.old_logprobs = torch.zeros(5)
    for chosen, after, moved, direction in (
        ([0, 1, 2, 3], [1.0, 3.0, 2.0, 9.0, 7.0], 4.4, 1), ([2, 3], [9.0] * 3 + [1.0, 3.0], 2, -1),
    ):  # fmt: skip
        found = token_traces._movement(batch, chosen, torch.tensor(after))
        assert found == pytest.approx({"update/moved": moved, "update/direction": direction})
