"""Which rollouts are trained on: filtering by the spread of returns, and the best so far."""

import json

import pytest

from core.config import Config
from core.metrics import rollout_metrics
from core.selection import (
    as_rollouts,
    check_reward_parts,
    groups_with_spread,
    keep_best,
    with_spread,
)
from core.types import Rollout, Turn, UsageError


def rollout(reward, seed=0, group=0, agent="player", env="e"):
    turn = Turn([1, 2], [5, 6], [-0.5, -0.25], "stop", reward)
    return Rollout(env, agent, seed, group, [{"role": "user", "content": "?"}], [turn])


def played(*rewards, tokens=2, group=0):
    """A rollout with a turn for each reward; all but the last turn have one token."""
    lengths = [1] * (len(rewards) - 1) + [tokens]
    turns = [Turn([k], [5] * n, [-0.5] * n, "stop", float(r))
             for k, (r, n) in enumerate(zip(rewards, lengths, strict=True))]  # fmt: skip
    return Rollout("e", "player", 0, group, [], turns)


@pytest.mark.parametrize(
    ("settings", "rollouts", "differ"),
    [
        ({}, [played(0), played(1)], True),
        ({}, [played(0, 1), played(1, 0)], False),
        ({"gamma": 0.9}, [played(0, 1), played(1, 0)], True),  # 0.9 and 1
        ({"credit": "turn"}, [played(0, 1), played(1, 0)], True),  # turn 1: 1 and 0
        (
            {"credit": "turn", "gamma": 0.9},
            [played(1, 0.1, 1) for _ in "1234567"],
            False,
        ),  # but for rounding
        ({"overlong_buffer": 4, "max_tokens": 8}, [played(1), played(1, tokens=8)], True),
        ({}, [played(0.1, 0.2), played(0.3, 0)], False),  # not the same numbers in float32
        ({}, [played(1, 1e-6), played(1, 0)], True),
        ({"reward_coef": 0.0}, [played(0), played(1)], True),  # a teacher alone trains
        ({"kl_coef": 0.1, "kl_in": "reward"}, [played(1), played(1)], False),  # before the KL
    ],
)
def test_the_spread_is_that_of_the_returns_that_advantages_compare(settings, rollouts, differ):
    cfg = Config(**({"credit": "episode"} | settings))
    assert groups_with_spread(cfg, rollouts) == ({0} if differ else set())
    assert with_spread(cfg, rollouts) == (rollouts if differ else [])
    assert rollout_metrics(cfg, rollouts)["groups/zero_std_fraction"] == 1 - differ


@pytest.mark.parametrize(
    ("parts", "differ"),
    [([(1, 0), (0, 1)], True), ([(1, 0), (1, None)], False), ([(1, 0), (1, 0)], False)],
)
def test_with_gdpo_the_spread_is_that_of_each_reward(parts, differ):
    rollouts = [rollout(1.0), rollout(1.0)]  # the same return
    for one, (right, brief) in zip(rollouts, parts, strict=True):
        one.info = {"reward_right": right, "reward_brief": brief}
    assert groups_with_spread(Config(algo="gdpo"), rollouts) == ({0} if differ else set())
    assert groups_with_spread(Config(algo="grpo"), rollouts) == set()


def test_gdpo_refuses_an_environment_that_reports_no_reward_by_name():
    silent, speaks = rollout(1.0), rollout(1.0, env="f")
    speaks.info = {"reward_right": True}
    check_reward_parts(Config(algo="gdpo"), [speaks, rollout(0.0, env="f")])
    check_reward_parts(Config(algo="grpo"), [silent])
    with pytest.raises(UsageError, match="--algo gdpo: e reports no info"):
        check_reward_parts(Config(algo="gdpo"), [speaks, silent])


def test_in_self_play_a_task_is_kept_if_the_returns_of_one_agent_differ():
    x = [rollout(1.0, agent="X", group=0), rollout(1.0, agent="X", group=0)]
    o = [rollout(0.0, agent="O", group=1), rollout(-1.0, agent="O", group=1)]
    # X and O have different returns, but each agent is compared with itself
    assert len(with_spread(Config(), [x[0], o[0], x[1], o[1]])) == 4
    assert with_spread(Config(), [x[0], o[0], x[1], rollout(0.0, agent="O", group=1)]) == []


def test_the_best_have_the_highest_return_one_per_task_newer_first_among_equals():
    def of(*returns_and_seeds):  # with a failure in each group, which is not kept
        groups = enumerate(returns_and_seeds)
        return [one for group, (r, seed) in groups for one in
                (rollout(r, seed, group), rollout(0.0, seed, group))]  # fmt: skip

    old = keep_best([], of((0.5, 1), (0.2, 2), (0.4, 1)), 2)
    assert [(r["seed"], r["turns"][0]["reward"]) for r in old] == [(1, 0.5), (2, 0.2)]
    new = keep_best(old, of((0.2, 3), (0.9, 2)), 3)
    assert [(r["seed"], r["turns"][0]["reward"]) for r in new] == [(2, 0.9), (1, 0.5), (3, 0.2)]
    again = keep_best(new, of((0.2, 4)), 3)
    assert [r["seed"] for r in again] == [2, 1, 4]


def test_the_best_are_better_than_the_mean_of_their_group():
    failures = [rollout(0.0, seed, group=seed) for seed in (0, 0, 1, 1)]
    assert keep_best([], failures, 8) == []
    partly = [rollout(r, seed=2, group=2) for r in (0.1, 0.1, 0.3, 1.0)]
    assert [r["turns"][0]["reward"] for r in keep_best([], failures + partly, 8)] == [1.0]
    # the mean of three times 0.7 is below it
    assert keep_best([], [rollout(0.7, 3, 3) for _ in range(3)], 8) == []
    alone = [rollout(r, seed, group=seed) for seed, r in enumerate((0.0, 1.0, 0.2))]
    assert [r["turns"][0]["reward"] for r in keep_best([], alone, 8)] == [1.0]  # mean 0.4


def test_the_best_keep_their_tokens_through_json():
    kept = json.loads(json.dumps(keep_best([], [rollout(1.0), rollout(0.0)], 4)))
    (back,) = as_rollouts(kept)
    assert back.turns == rollout(1.0).turns
    assert back.messages == []
