"""What is learnt from, judged on the spread of rewards and never on their mean."""

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
        ([0.5, 0.5], False),  # neither: the mean is no judge
        ([0.99, 1.0], True),  # nearly all right, and still something to learn
    ],
)
def test_a_group_is_judged_on_its_spread(returns, kept):
    rollouts = [rollout(r) for r in returns]
    assert with_spread(rollouts) == (rollouts if kept else [])


def test_tasks_of_another_seed_or_environment_are_others():
    rollouts = [rollout(0.0), rollout(0.0, seed=1, group=1), rollout(0.0, env="f", group=2)]
    assert [len(task) for task in by_task(rollouts)] == [1, 1, 1]


def test_in_self_play_a_task_stays_if_one_seat_has_spread():
    x = [rollout(1.0, agent="X", group=0), rollout(1.0, agent="X", group=0)]
    o = [rollout(0.0, agent="O", group=1), rollout(-1.0, agent="O", group=1)]
    # X and O differ from each other, but like is compared with like
    assert len(with_spread([x[0], o[0], x[1], o[1]])) == 4
    assert with_spread([x[0], o[0], x[1], rollout(0.0, agent="O", group=1)]) == []


def test_the_best_are_those_of_highest_return_one_a_task_the_newer_of_equals():
    old = keep_best([], [rollout(0.5, seed=1), rollout(0.2, seed=2), rollout(0.4, seed=1)], 2)
    assert [(r["seed"], r["turns"][0]["reward"]) for r in old] == [(1, 0.5), (2, 0.2)]
    new = keep_best(old, [rollout(0.2, seed=3), rollout(0.9, seed=2)], 3)
    assert [(r["seed"], r["turns"][0]["reward"]) for r in new] == [(2, 0.9), (1, 0.5), (3, 0.2)]
    again = keep_best(new, [rollout(0.2, seed=4)], 3)
    assert [r["seed"] for r in again] == [2, 1, 4]


def test_the_best_survive_a_checkpoint_with_their_tokens():
    kept = json.loads(json.dumps(keep_best([], [rollout(1.0)], 4)))
    (back,) = as_rollouts(kept)
    assert back.turns == rollout(1.0).turns
    assert back.messages == []  # people's, not the trainer's
