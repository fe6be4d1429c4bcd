"""Which rollouts are trained on: filtering by the spread of returns, and the best so far."""

import json

import pytest

from core.selection import as_rollouts, by_task, keep_best, with_spread
from core.types import Rollout, Turn


def rollout(reward, seed=0, group=0, agent="player", env="e"):
    turn = Turn([1, 2], [5, 6], [-0.5, -0.25], "stop", reward)
    return Rollout(env, agent, seed, group, [{"role": "user", "content": "?"}], [turn])


@pytest.mark.parametrize(
    ("returns", "kept"),
    [
        ([0.0, 1.0], True),
        ([0.0, 0.0], False),  # all wrong
        ([1.0, 1.0], False),  # all right
        ([0.5, 0.5], False),  # partial credit, without spread
        ([0.99, 1.0], True),  # nearly all right, with spread
    ],
)
def test_groups_are_filtered_by_the_spread_of_their_returns(returns, kept):
    rollouts = [rollout(r) for r in returns]
    assert with_spread(rollouts) == (rollouts if kept else [])


def test_a_task_is_an_environment_and_a_seed():
    rollouts = [rollout(0.0), rollout(0.0, seed=1, group=1), rollout(0.0, env="f", group=2)]
    assert [len(task) for task in by_task(rollouts)] == [1, 1, 1]


def test_in_self_play_a_task_is_kept_if_the_returns_of_one_agent_differ():
    x = [rollout(1.0, agent="X", group=0), rollout(1.0, agent="X", group=0)]
    o = [rollout(0.0, agent="O", group=1), rollout(-1.0, agent="O", group=1)]
    # X and O have different returns, but each agent is compared with itself
    assert len(with_spread([x[0], o[0], x[1], o[1]])) == 4
    assert with_spread([x[0], o[0], x[1], rollout(0.0, agent="O", group=1)]) == []


def test_the_best_have_the_highest_return_one_per_task_newer_first_among_equals():
    old = keep_best([], [rollout(0.5, seed=1), rollout(0.2, seed=2), rollout(0.4, seed=1)], 2)
    assert [(r["seed"], r["turns"][0]["reward"]) for r in old] == [(1, 0.5), (2, 0.2)]
    new = keep_best(old, [rollout(0.2, seed=3), rollout(0.9, seed=2)], 3)
    assert [(r["seed"], r["turns"][0]["reward"]) for r in new] == [(2, 0.9), (1, 0.5), (3, 0.2)]
    again = keep_best(new, [rollout(0.2, seed=4)], 3)
    assert [r["seed"] for r in again] == [2, 1, 4]


def test_the_best_keep_their_tokens_through_json():
    kept = json.loads(json.dumps(keep_best([], [rollout(1.0)], 4)))
    (back,) = as_rollouts(kept)
    assert back.turns == rollout(1.0).turns
    assert back.messages == []
